//! Planning rows that need nothing but what they keep, and filling the arrays with them.

use std::ops::Range;

use super::{Ahead, Arrays, Batch, Counts, PLACEHOLDER, Pending, Plan, Planned, Row};

/// How far the flat arrays are filled.
#[derive(Clone, Copy, Default, Debug)]
pub struct Cursor {
    /// Positions written.
    pub position: usize,
    /// Tokens used, of those that were given.
    pub token: usize,
}

/// Plans the rows from the last planned one up to `stop`. Each has room for its positions in its block, or in that and
/// what is left of the one before.
pub fn plan_rows(
    batch: &mut Batch,
    plan: &mut Plan,
    counts: Counts<'_>,
    ahead: Ahead<'_>,
    stop: usize,
    cursor: &mut Cursor,
    arrays: &mut Arrays<'_>,
) {
    let range = plan.rows.len()..stop;
    if range.is_empty() {
        return;
    }
    match (counts, ahead) {
        (Counts::All(1), Ahead::Unknown) => plan_ones(batch, plan, range, cursor, arrays),
        (_, Ahead::Given(tokens)) => plan_each(batch, plan, range, |row| counts.of(row), Some(tokens), cursor, arrays),
        _ => plan_each(batch, plan, range, |row| counts.of(row), None, cursor, arrays),
    }
}

/// The usual step: one position of each row.
fn plan_ones(batch: &mut Batch, plan: &mut Plan, range: Range<usize>, cursor: &mut Cursor, arrays: &mut Arrays<'_>) {
    let block_size = batch.block_size;
    let mut at = cursor.position;
    cursor.position += range.len();
    let Arrays { positions, slot_mapping, .. } = arrays;
    let lens = arrays.seq_lens[range.clone()].iter_mut();
    let starts = arrays.query_start_loc[range.start + 1..=range.end].iter_mut();
    let rows = batch.rows[range.clone()].iter_mut().zip(&mut batch.pending[range.clone()]);
    let Plan { rows: planned_rows, suspects, .. } = plan;
    planned_rows.extend(range.zip(rows.zip(lens.zip(starts))).map(|(nth, ((row, pending), (len, start)))| {
        let first = row.planned;
        positions[at] = first.cast_signed();
        slot_mapping[at] = row.slot_base(block_size) + i64::from(first);
        at += 1;
        row.planned = first + 1;
        let has_placeholder = row.planned > row.len;
        if has_placeholder {
            add_token(row, pending, PLACEHOLDER);
        }
        if row.planned >= row.publish_at {
            suspects.push(nth as u32);
        }
        *len = row.planned.cast_signed();
        *start = at as i32;
        Planned { end: row.planned, num: 1, drafts: 0, has_placeholder, is_named: true }
    }));
}

/// Any other one.
fn plan_each(
    batch: &mut Batch,
    plan: &mut Plan,
    range: Range<usize>,
    count: impl Fn(usize) -> u32,
    tokens: Option<&[i32]>,
    cursor: &mut Cursor,
    arrays: &mut Arrays<'_>,
) {
    let block_size = batch.block_size;
    let Cursor { mut position, mut token } = *cursor;
    let Plan { rows: planned_rows, crossings, suspects, .. } = plan;
    let mut crossings = crossings.iter();
    let lens = arrays.seq_lens[range.clone()].iter_mut();
    let starts = arrays.query_start_loc[range.start + 1..=range.end].iter_mut();
    let rows = batch.rows[range.clone()].iter_mut().zip(&mut batch.pending[range.clone()]).zip(lens.zip(starts));
    planned_rows.extend(range.zip(rows).map(|(at, ((row, pending), (len, start)))| {
        let (num, first) = (count(at), row.planned);
        let places = position..position + num as usize;
        position = places.end;
        let slots = &mut arrays.slot_mapping[places.clone()];
        write_positions(first, row.slot_base(block_size), &mut arrays.positions[places], slots);
        if first < row.block_start && num > 0 {
            // What precedes the row's block lies in the one before.
            let (_, block) = crossings.find(|crossing| crossing.0 as usize == at).copied().unwrap_or_default();
            let before = Row { block, block_start: row.block_start - block_size, ..*row };
            let slots = &mut slots[..(row.block_start - first) as usize];
            for (slot, position) in slots.iter_mut().zip(first..) {
                *slot = before.slot_base(block_size) + i64::from(position);
            }
        }
        row.planned = first + num;
        let mut planned = Planned { end: row.planned, num, drafts: 0, has_placeholder: false, is_named: num > 0 };
        let added = row.planned.saturating_sub(row.len);
        if added > 0 {
            match tokens {
                None => add_token(row, pending, PLACEHOLDER),
                Some(tokens) => {
                    let own = &tokens[token..token + added as usize];
                    token += own.len();
                    let waiting = (row.len - row.flushed) as usize;
                    pending.0[waiting..waiting + own.len()].copy_from_slice(bytemuck::cast_slice(own));
                    row.len += added;
                }
            }
            planned.has_placeholder = tokens.is_none_or(|tokens| tokens[token - added as usize] == -1);
            planned.drafts = added - u32::from(planned.has_placeholder);
        }
        if row.planned >= row.publish_at {
            suspects.push(at as u32);
        }
        *len = row.planned.cast_signed();
        *start = position as i32;
        planned
    }));
    *cursor = Cursor { position, token };
}

/// Consecutive positions, four at a time: most rows have few of them.
fn write_positions(first: u32, slot_base: i64, positions: &mut [i32], slots: &mut [i64]) {
    let ((positions, last_positions), (slots, last_slots)) = (positions.as_chunks_mut(), slots.as_chunks_mut());
    let mut at = first;
    for (positions, slots) in positions.iter_mut().zip(slots) {
        let four = [at, at + 1, at + 2, at + 3];
        *positions = four.map(u32::cast_signed);
        *slots = four.map(|at| slot_base + i64::from(at));
        at += 4;
    }
    for ((position, slot), at) in last_positions.iter_mut().zip(last_slots).zip(at..) {
        *position = at.cast_signed();
        *slot = slot_base + i64::from(at);
    }
}

/// A row has room for the tokens of the positions that it plans here.
fn add_token(row: &mut Row, pending: &mut Pending, token: u32) {
    pending.0[(row.len - row.flushed) as usize] = token;
    row.len += 1;
}

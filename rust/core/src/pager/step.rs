//! Steps of a batch.
//!
//! A step looks at each row twice. The first pass (`survey.rs`) finds the rows that the usual path does not cover (`Slow`),
//! decides whether all of them can have what they need, and changes nothing that shows. The second, here, cannot fail: it
//! takes the blocks, plans the positions and fills the arrays. Rows that need no more than the next block get that first;
//! then all rows that need nothing but what they keep are planned in one loop (`plan_rows`).

use super::Pager;
use super::rows::{append_reserved, flush};
use crate::batch::{
    Ahead, Arrays, Batch, Change, Counts, Cursor, Growth, LentCopy, NO_ROW, Plan, Planned, Seat, Slow, plan_rows,
};
use crate::error::{Error, Result};
use crate::ids::{BlockId, Handle};
use crate::sequence::Sequence;

impl Pager {
    /// Plans positions of each row and fills the arrays of the step's buffer. Answers the step's number.
    ///
    /// # Errors
    /// `Step` if all buffers hold open steps; `Value`, `Token` for bad arguments; `OutOfBlocks` with the rows that do
    /// not fit; `Memory`.
    pub fn step(
        &mut self,
        handle: Handle,
        counts: Counts<'_>,
        tokens: Option<&[i32]>,
        arrays: &mut Arrays<'_>,
    ) -> Result<u64> {
        let ahead = tokens.map_or(Ahead::Unknown, Ahead::Given);
        self.with_batch(handle, |pager, batch| {
            check_open(batch)?;
            let (needed, num_tokens) = pager.survey(batch, counts, ahead)?;
            pager.check_rows(batch, needed)?;
            pager.make_room(batch, needed)?;
            let buffer = batch.buffer_of(batch.next);
            batch.plans[buffer].begin(counts.each(), num_tokens);
            batch.plans[buffer].copies.try_reserve(pager.copies.len() + needed)?;
            pager.plan_step(batch, counts, ahead, needed, num_tokens, arrays);
            Ok(batch.next - 1)
        })
    }

    /// Is there a buffer for another step?
    ///
    /// # Errors
    /// `Step` if there is none.
    pub fn check_buffers(&mut self, handle: Handle) -> Result<()> {
        self.with_batch(handle, |_, batch| check_open(batch))
    }

    /// Blocks that a step would take.
    ///
    /// # Errors
    /// As `step`, but for `OutOfBlocks`.
    pub fn blocks_needed(&mut self, handle: Handle, counts: Counts<'_>, tokens: Option<&[i32]>) -> Result<usize> {
        let ahead = tokens.map_or(Ahead::Unknown, Ahead::Given);
        self.with_batch(handle, |pager, batch| {
            check_open(batch)?;
            pager.survey(batch, counts, ahead).map(|(needed, _)| needed)
        })
    }

    /// Puts writable blocks for the next positions of each row into the tables, and plans nothing.
    ///
    /// # Errors
    /// As `step`, but for `Step`.
    pub fn reserve(&mut self, handle: Handle, counts: Counts<'_>) -> Result<()> {
        self.with_batch(handle, |pager, batch| {
            let (needed, _) = pager.survey(batch, counts, Ahead::Blocks)?;
            pager.check_rows(batch, needed)?;
            pager.make_room(batch, needed)?;
            let (slow, mut taken) = (std::mem::take(&mut batch.slow), std::mem::take(&mut batch.taken));
            taken.clear();
            pager.take(needed, &mut taken);
            let mut next = 0;
            for row in slow.iter().filter(|row| row.needed > 0) {
                pager.with_row(batch, row.row as usize, |pager, batch, sequence| {
                    let (start, blocks) = (batch.rows[row.row as usize].planned as usize, &taken[next..]);
                    next += pager.give(batch, row, start, sequence, blocks);
                    flush(batch, row.row as usize, sequence, pager.config.block_size);
                    // Without memory the row stays cold, and the next step looks at it again.
                    let _ = pager.refresh(batch, row.row as usize, sequence);
                });
            }
            batch.own_copies.clear();
            (batch.slow, batch.taken) = (slow, taken);
            Ok(())
        })
    }

    fn plan_step(
        &mut self,
        batch: &mut Batch,
        counts: Counts<'_>,
        ahead: Ahead<'_>,
        needed: usize,
        num_tokens: usize,
        arrays: &mut Arrays<'_>,
    ) {
        let buffer = batch.buffer_of(batch.next);
        let (slow, mut taken) = (std::mem::take(&mut batch.slow), std::mem::take(&mut batch.taken));
        let mut plan = std::mem::replace(&mut batch.plans[buffer], Plan::none());
        self.take(needed, &mut taken);

        let (mut next_block, mut cursor) = (0, Cursor::default());
        arrays.query_start_loc[0] = 0;
        for row in &slow {
            let (at, state) = (row.row as usize, batch.rows[row.row as usize]);
            if state.grows(row.num, batch.block_size) {
                self.grow_row(batch, &mut plan, row, taken[next_block]);
                next_block += 1;
            } else if row.num == 0 || !state.fits(row.num) {
                // All others need nothing but their rows.
                plan_rows(batch, &mut plan, counts, ahead, at, &mut cursor, arrays);
                let planned = if row.num == 0 {
                    Planned { end: self.planned_in_row(batch, at), ..Planned::NOTHING }
                } else {
                    self.with_row(batch, at, |pager, batch, sequence| {
                        let blocks = &taken[next_block..];
                        let (planned, used) = pager.plan_slow(batch, &mut plan, row, ahead, sequence, blocks);
                        next_block += used;
                        pager.write_positions(sequence, &planned, cursor.position, arrays);
                        planned
                    })
                };
                let is_empty = batch.sequences[at].is_none();
                arrays.seq_lens[at] = if is_empty { batch.shape.pad_seq_len } else { planned.end.cast_signed() };
                cursor.position += planned.num as usize;
                cursor.token += row.added as usize;
                if planned.end >= batch.rows[at].publish_at {
                    plan.suspects.push(row.row);
                }
                arrays.query_start_loc[at + 1] = cursor.position as i32;
                plan.rows.push(planned);
            }
        }
        plan_rows(batch, &mut plan, counts, ahead, batch.rows.len(), &mut cursor, arrays);
        debug_assert_eq!((next_block, cursor.position), (needed, num_tokens));
        plan.num_chills = batch.num_chills;
        self.lend_copies(batch, &mut plan);
        self.num_launches += 1;
        plan.launch = self.num_launches;
        plan.fence = self.fences.open();
        batch.plans[buffer] = plan;
        (batch.slow, batch.taken) = (slow, taken);
        for (at, plan_row) in batch.plan_rows[buffer].iter_mut().enumerate() {
            *plan_row = at as u32;
        }
        for &left in &batch.left {
            if let Some(sequence) = self.sequences.get_mut(left)
                && let Seat::Left { plan_rows, .. } = &mut sequence.seat
            {
                plan_rows[buffer] = NO_ROW;
            }
        }
        batch.next += 1;
        arrays.pad(&batch.shape, &mut batch.written[buffer], batch.rows.len(), num_tokens);
        self.write_tables(batch, buffer, arrays);
    }

    /// Appends a block to the table of a row that needs no more (`Row::grows`); the table has room for it.
    fn grow_row(&mut self, batch: &mut Batch, plan: &mut Plan, slow: &Slow, block: BlockId) {
        let row = &mut batch.rows[slow.row as usize];
        if row.planned < row.table_end {
            plan.crossings.push((slow.row, row.block));
        }
        let growth = row.grow(slow.row, block, batch.block_size);
        plan.growths.push(growth);
        batch.patch_block(slow.row, growth.before, block);
        if let Some(sequence) = batch.sequences[slow.row as usize].and_then(|handle| self.sequences.get_mut(handle)) {
            sequence.table.push(block);
        }
    }

    /// Positions given to steps, of a row's sequence; 0 for an empty row.
    fn planned_in_row(&self, batch: &Batch, at: usize) -> u32 {
        if !batch.rows[at].is_cold() {
            return batch.rows[at].planned;
        }
        let Some(sequence) = batch.sequences[at].and_then(|handle| self.sequences.get(handle)) else { return 0 };
        batch.num_planned(sequence.seat, sequence.num_committed) as u32
    }

    /// The step takes over the queue: what single calls had asked for, then its own.
    fn lend_copies(&mut self, batch: &mut Batch, plan: &mut Plan) {
        let mut own = batch.own_copies.drain(..).peekable();
        while let Some((ticket, source, target)) = self.copies.lend() {
            let (_, row, column) = own.next_if(|own| own.0 == ticket).unwrap_or((ticket, NO_ROW, 0));
            plan.copies.push(LentCopy { source, target, ticket, row, column });
        }
    }

    /// Plans a row that the usual path does not cover; answers the row, and how many blocks it took.
    fn plan_slow(
        &mut self,
        batch: &mut Batch,
        plan: &mut Plan,
        slow: &Slow,
        ahead: Ahead<'_>,
        sequence: &mut Sequence,
        blocks: &[BlockId],
    ) -> (Planned, usize) {
        let at = slow.row as usize;
        let start = batch.rows[at].planned;
        let (before, len) = (sequence.table.len(), batch.rows[at].len);
        let used = self.give(batch, slow, start as usize, sequence, blocks);
        if sequence.table.len() > before {
            let (before, after) = (before as u32, sequence.table.len() as u32);
            plan.growths.push(Growth { row: slow.row, before, after, len });
        }
        let mut planned =
            Planned { end: start + slow.num, num: slow.num, drafts: 0, has_placeholder: false, is_named: true };
        if slow.added > 0 {
            let tokens = ahead.tokens(slow);
            planned.has_placeholder = tokens[0] == -1;
            planned.drafts = slow.added - u32::from(planned.has_placeholder);
            if !batch.rows[at].push(&mut batch.pending[at], tokens) {
                // The row is cold then, and looked at again below.
                flush(batch, at, sequence, self.config.block_size);
                for token in tokens {
                    append_reserved(sequence, &[token.cast_unsigned()], self.config.block_size);
                }
            }
        }
        let row = &mut batch.rows[at];
        row.planned = planned.end;
        if row.planned > row.limit {
            // Blocks that were appended are the row's own.
            if !row.is_cold() && used == sequence.table.len() - before {
                self.set_limit(batch, at, sequence, used > 0);
            }
            let row = &batch.rows[at];
            if row.is_cold() || (row.limit <= row.planned && row.planned < row.table_end) {
                flush(batch, at, sequence, self.config.block_size);
                // Without memory the row stays cold, and the next step looks at it again.
                let _ = self.refresh_at(batch, at, sequence, planned.end as usize);
            }
        }
        (planned, used)
    }

    /// Makes the row's positions writable with the first of the blocks, its `needed` or (as the last holder of a shared
    /// one) fewer; answers how many. Copies are queued, and noted in `own_copies`.
    fn give(
        &mut self,
        batch: &mut Batch,
        slow: &Slow,
        start: usize,
        sequence: &mut Sequence,
        blocks: &[BlockId],
    ) -> usize {
        if slow.needed == 0 {
            return 0;
        }
        let block_size = self.config.block_size;
        let stop = start + slow.num as usize;
        let (mut used, mut first) = (0, sequence.table.len());
        for at in start / block_size..stop.div_ceil(block_size).min(sequence.table.len()) {
            if self.is_writable(sequence.table[at]) {
                continue;
            }
            let block = blocks[used];
            used += 1;
            first = first.min(at);
            if let Some(source) = self.replace(sequence, at, start, block) {
                let ticket = self.copies.push(source, block);
                batch.own_copies.push((ticket, slow.row, at as u32));
            }
        }
        let missing = stop.div_ceil(block_size).saturating_sub(sequence.table.len());
        sequence.table.extend_from_slice(&blocks[used..used + missing]);
        batch.patch(slow.row, first);
        used + missing
    }

    fn write_positions(&self, sequence: &Sequence, planned: &Planned, at: usize, arrays: &mut Arrays<'_>) {
        let block_size = self.config.block_size;
        let (start, end) = ((planned.end - planned.num) as usize, planned.end as usize);
        let places = &mut arrays.positions[at..at + planned.num as usize];
        for (place, position) in places.iter_mut().zip(start as i32..) {
            *place = position;
        }
        let mut slots = &mut arrays.slot_mapping[at..at + planned.num as usize];
        for place in start / block_size..end.div_ceil(block_size) {
            let first = (place * block_size).max(start);
            let (now, later) = slots.split_at_mut(end.min((place + 1) * block_size) - first);
            let slot = i64::from(sequence.table[place]) * block_size as i64 + (first - place * block_size) as i64;
            for (out, slot) in now.iter_mut().zip(slot..) {
                *out = slot;
            }
            slots = later;
        }
    }

    /// Brings the buffer's tables up to date, and notes what changed since the last step.
    fn write_tables(&mut self, batch: &mut Batch, buffer: usize, arrays: &mut Arrays<'_>) {
        let columns = batch.shape.max_blocks;
        let mut changes = std::mem::take(&mut batch.changes[buffer]);
        for change in changes.drain() {
            let Change { row, column, .. } = change;
            let (at, from) = (row as usize, column as usize);
            let out = &mut arrays.block_tables[at * columns..(at + 1) * columns];
            let written = &mut batch.written[buffer].columns[at];
            if let Some(block) = change.block() {
                out[from] = block.cast_signed();
                *written = (*written).max(column + 1);
                continue;
            }
            // A row that has gone needs its columns blank only if another one comes, which patches it again.
            let handle = batch.sequences.get(at).copied().flatten();
            let table =
                handle.and_then(|handle| self.sequences.get(handle)).map_or(&[][..], |sequence| &sequence.table);
            let len = table.len().min(columns);
            let from = from.min(len);
            out[from..len].copy_from_slice(bytemuck::cast_slice(&table[from..len]));
            if len < *written as usize {
                out[len..*written as usize].fill(batch.shape.pad_block);
            }
            *written = len as u32;
        }
        batch.changes[buffer] = changes;

        if let Some(changes) = batch.changes.last_mut() {
            for Change { row, column, .. } in changes.drain() {
                let len = batch.written[buffer].columns[row as usize];
                if column < len {
                    batch.plans[buffer].updates.push((row, column, len));
                }
            }
        }
    }

    /// Runs `call` with the sequence of a row, which is in use, out of the slab.
    pub(super) fn with_row<R>(
        &mut self,
        batch: &mut Batch,
        at: usize,
        call: impl FnOnce(&mut Self, &mut Batch, &mut Sequence) -> R,
    ) -> R {
        let taken = batch.sequences[at].and_then(|handle| Some((handle, self.sequences.take(handle)?)));
        let Some((handle, mut sequence)) = taken else {
            unreachable!("row {at} holds a running sequence");
        };
        let result = call(self, batch, &mut sequence);
        self.sequences.put_back(handle, sequence);
        result
    }
}

fn check_open(batch: &Batch) -> Result<()> {
    if batch.num_open() < batch.shape.buffers {
        return Ok(());
    }
    Err(Error::Step(format!(
        "all {} buffers hold open steps: commit step {}, the oldest, or cancel the newest",
        batch.shape.buffers, batch.oldest
    )))
}

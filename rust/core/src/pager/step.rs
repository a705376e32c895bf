//! Steps of a batch: what they need, and planning them.
//!
//! A step looks at each row twice. The first pass finds the rows that the usual path does not cover (`Slow`), decides
//! whether all of them can have what they need, and changes nothing that shows. The second cannot fail: it takes the
//! blocks, plans the positions and fills the arrays.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Pager;
use super::rows::{append_reserved, flush};
use crate::batch::{
    Arrays, Batch, Growth, LentCopy, NO_ROW, PENDING_MAX, PLACEHOLDER, Plan, Planned, Row, Seat, Slow, compact,
};
use crate::blocks::State as BlockState;
use crate::error::{Error, Result};
use crate::ids::{BlockId, Handle};
use crate::sequence::Sequence;

/// How many positions a step plans.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same number for each sequence.
    All(u32),
    /// A number for each row.
    Each(&'a [i32]),
}

impl Counts<'_> {
    fn of(self, row: usize) -> u32 {
        match self {
            Self::All(count) => count,
            Self::Each(counts) => counts[row].cast_unsigned(),
        }
    }

    fn check(self, rows: usize) -> Result<()> {
        let Self::Each(counts) = self else { return Ok(()) };
        if counts.len() != rows {
            return Err(Error::Value(format!(
                "num_tokens has {} numbers; the batch has {rows} rows: one for each, 0 for an empty row",
                counts.len()
            )));
        }
        if let Some(row) = counts.iter().position(|&count| count < 0) {
            return Err(Error::Value(format!("num_tokens[{row}] is {}: it must be 0 or more", counts[row])));
        }
        Ok(())
    }
}

/// The tokens of positions beyond a sequence's own.
#[derive(Clone, Copy, Debug)]
pub enum Ahead<'a> {
    /// Not known yet: placeholders.
    Unknown,
    /// One for each such position, rows in order; -1 is a placeholder.
    Given(&'a [i32]),
    /// Only blocks are asked for.
    Blocks,
}

impl<'a> Ahead<'a> {
    /// The tokens that a row adds.
    fn tokens(self, row: &Slow) -> &'a [i32] {
        match self {
            Self::Given(tokens) => &tokens[row.tokens_at as usize..][..row.added as usize],
            _ => &[-1][..row.added as usize],
        }
    }
}

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
            batch.plans[buffer].begin(num_tokens);
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

    // ---- first pass ------------------------------------------------------------------------------------------------

    /// Checks the arguments, and finds the rows that need a closer look. Answers blocks needed and positions planned.
    fn survey(&mut self, batch: &mut Batch, counts: Counts<'_>, ahead: Ahead<'_>) -> Result<(usize, usize)> {
        counts.check(batch.rows.len())?;
        batch.slow.clear();
        let is_unknown = matches!(ahead, Ahead::Unknown);
        let mut num_tokens = 0;
        for (at, row) in batch.rows.iter().enumerate() {
            let num = counts.of(at);
            let end = row.planned.saturating_add(num);
            num_tokens += num as usize;
            let is_usual = end <= row.limit && (end <= row.len || (is_unknown && takes_placeholder(row, num)));
            if !is_usual || row.is_cold() {
                batch.slow.push(Slow { row: at as u32, num, added: 0, tokens_at: 0, needed: 0 });
            }
        }
        if batch.slow.is_empty() {
            if let Ahead::Given(tokens) = ahead {
                check_all_used(tokens, 0)?;
            }
            if !matches!(ahead, Ahead::Blocks) {
                check_total(batch, num_tokens)?;
            }
            return Ok((0, num_tokens));
        }
        let mut slow = std::mem::take(&mut batch.slow);
        let result = self.survey_slow(batch, &mut slow, counts, ahead, num_tokens);
        batch.slow = slow;
        result
    }

    fn survey_slow(
        &mut self,
        batch: &mut Batch,
        slow: &mut [Slow],
        counts: Counts<'_>,
        ahead: Ahead<'_>,
        mut num_tokens: usize,
    ) -> Result<(usize, usize)> {
        let block_size = self.config.block_size;
        // Empty rows, and those that were used on their own since.
        for row in &mut *slow {
            let at = row.row as usize;
            if batch.sequences[at].is_none() {
                if matches!(counts, Counts::Each(_)) && row.num > 0 {
                    return Err(Error::Value(format!("num_tokens[{at}] is {}: row {at} is empty", row.num)));
                }
                num_tokens -= row.num as usize;
                row.num = 0;
            } else if batch.rows[at].is_cold() && row.num > 0 {
                self.with_row(batch, at, |pager, batch, sequence| pager.refresh(batch, at, sequence))?;
            }
        }
        Self::check_ahead(batch, slow, ahead)?;
        if !matches!(ahead, Ahead::Blocks) {
            check_total(batch, num_tokens)?;
        }
        for row in slow.iter().filter(|row| row.num > 0) {
            let end = batch.rows[row.row as usize].planned as usize + row.num as usize;
            if end.div_ceil(block_size) > batch.shape.max_blocks {
                return Err(Error::Value(format!(
                    "row {}: {end} tokens need {} blocks; a row has room for max_blocks {}",
                    row.row,
                    end.div_ceil(block_size),
                    batch.shape.max_blocks
                )));
            }
        }

        batch.shared.clear();
        let mut needed = 0;
        for row in slow {
            let state = &batch.rows[row.row as usize];
            let (start, stop) = (state.planned as usize, (state.planned + row.num) as usize);
            if fits(state, row.num) || row.num == 0 {
                continue;
            }
            if state.planned == state.table_end {
                // All of it lies behind the table: no need to look at that.
                row.needed = ((stop - start).div_ceil(block_size)) as u32;
                needed += row.needed as usize;
                continue;
            }
            let Some(sequence) = batch.sequences[row.row as usize].and_then(|handle| self.sequences.get(handle)) else {
                continue;
            };
            row.needed = stop.div_ceil(block_size).saturating_sub(sequence.table.len()) as u32;
            for at in self.shared_in(sequence, start, stop) {
                row.needed += 1;
                if !self.blocks.is_indexed(sequence.table[at]) {
                    batch.shared.push(sequence.table[at]);
                }
            }
            needed += row.needed as usize;
        }
        // Where all holders of a block write, the last one keeps it.
        batch.shared.sort_unstable();
        for writers in batch.shared.chunk_by(|a, b| a == b) {
            needed -= usize::from(self.num_holders(writers[0]) as usize == writers.len());
        }
        Ok((needed, num_tokens))
    }

    /// Positions beyond the sequences' tokens: are there tokens, or may there be placeholders?
    fn check_ahead(batch: &Batch, slow: &mut [Slow], ahead: Ahead<'_>) -> Result<()> {
        if let Ahead::Blocks = ahead {
            return Ok(());
        }
        let mut used = 0;
        for Slow { row: at, num, added, tokens_at, .. } in slow {
            let row = &batch.rows[*at as usize];
            *added = (row.planned + *num).saturating_sub(row.len).min(*num);
            *tokens_at = used as u32;
            if *added == 0 {
                continue;
            }
            let Ahead::Given(tokens) = ahead else {
                if takes_placeholder(row, *num) {
                    continue;
                }
                return Err(Error::Value(format!(
                    "row {at}: the token at position {} is not known. Give it to the commit of the step before, or in tokens{}",
                    row.len.max(row.planned),
                    if row.planned > row.committed { "; only one position may wait for it" } else { "" }
                )));
            };
            let Some(own) = tokens.get(used..used + *added as usize) else {
                return Err(Error::Value(format!(
                    "tokens has {} values; row {at} needs values {used} to {}",
                    tokens.len(),
                    used + *added as usize - 1
                )));
            };
            for (nth, &token) in own.iter().enumerate() {
                let may_wait = nth == 0 && row.planned == row.len && row.planned > row.committed;
                if token >= 0 || (token == -1 && may_wait) {
                    continue;
                }
                if token == -1 {
                    return Err(Error::Value(format!(
                        "tokens[{}] is -1, but row {at} has no open step whose token this could be",
                        used + nth
                    )));
                }
                return Err(Error::Token { position: used + nth, value: token.cast_unsigned() });
            }
            used += *added as usize;
        }
        if let Ahead::Given(tokens) = ahead {
            check_all_used(tokens, used)?;
        }
        Ok(())
    }

    /// Who can write to a private block, or could: those that hold it but for copies.
    fn num_holders(&self, block: BlockId) -> u32 {
        match self.blocks.state(block) {
            BlockState::Private(holders) => holders - self.copies.readers(block),
            BlockState::Indexed | BlockState::Free => 0,
        }
    }

    /// Is there room? If not, the refusal names the rows that do not fit.
    fn check_rows(&mut self, batch: &Batch, needed: usize) -> Result<()> {
        let Err(mut error) = self.check_room(needed) else { return Ok(()) };
        if let Error::OutOfBlocks { free, evictable, rows, .. } = &mut error {
            *rows = self.unfit_rows(batch, *free + *evictable);
        }
        Err(error)
    }

    fn unfit_rows(&self, batch: &Batch, mut room: usize) -> Box<[u32]> {
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        let mut unfit = Vec::new();
        for row in &batch.slow {
            let Some(sequence) = batch.sequences[row.row as usize].and_then(|handle| self.sequences.get(handle)) else {
                continue;
            };
            let start = batch.rows[row.row as usize].planned as usize;
            let shared = self.shared_in(sequence, start, start + row.num as usize).map(|at| sequence.table[at]);
            let shared: Vec<BlockId> = shared.filter(|&block| !self.blocks.is_indexed(block)).collect();
            for &block in &shared {
                holders.entry(block).or_insert_with(|| self.num_holders(block));
            }
            let kept = shared.iter().filter(|block| holders[*block] == 1).count();
            let needed = row.needed as usize - kept;
            if needed > room {
                unfit.push(row.row);
                continue;
            }
            room -= needed;
            for block in shared {
                if let Some(left) = holders.get_mut(&block).filter(|left| **left > 1) {
                    *left -= 1;
                }
            }
        }
        unfit.into_boxed_slice()
    }

    /// Asks for the memory that the second pass uses.
    fn make_room(&mut self, batch: &mut Batch, needed: usize) -> Result<()> {
        let block_size = self.config.block_size;
        batch.taken.clear();
        batch.taken.try_reserve(needed)?;
        batch.own_copies.try_reserve(needed)?;
        for row in &batch.slow {
            if fits(&batch.rows[row.row as usize], row.num) {
                continue;
            }
            let Some(sequence) = batch.sequences[row.row as usize].and_then(|handle| self.sequences.get_mut(handle))
            else {
                continue;
            };
            sequence.table.try_reserve(row.needed as usize)?;
            if row.added > 0 {
                sequence.tail.reserve(PENDING_MAX + row.added as usize, block_size)?;
            }
        }
        Ok(())
    }

    // ---- second pass -----------------------------------------------------------------------------------------------

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

        let (mut at, mut next_block, mut at_token) = (0, 0, 0);
        arrays.query_start_loc[0] = 0;
        for row in &slow {
            let stop = row.row as usize;
            at_token = plan_usual(batch, &mut plan, counts, at..stop, at_token, arrays);
            let planned = if row.num == 0 {
                Planned { end: self.planned_in_row(batch, stop), ..Planned::NOTHING }
            } else if fits(&batch.rows[stop], row.num) {
                plan_within(batch, row, ahead, at_token, arrays)
            } else {
                self.with_row(batch, stop, |pager, batch, sequence| {
                    let blocks = &taken[next_block..];
                    let (planned, used) = pager.plan_slow(batch, &mut plan, row, ahead, sequence, blocks);
                    next_block += used;
                    pager.write_positions(sequence, &planned, at_token, arrays);
                    planned
                })
            };
            let is_empty = batch.sequences[stop].is_none();
            arrays.seq_lens[stop] = if is_empty { batch.shape.pad_seq_len } else { planned.end.cast_signed() };
            at_token += planned.num as usize;
            arrays.query_start_loc[stop + 1] = at_token as i32;
            plan.rows.push(planned);
            at = stop + 1;
        }
        at_token = plan_usual(batch, &mut plan, counts, at..batch.rows.len(), at_token, arrays);
        debug_assert_eq!((next_block, at_token), (needed, num_tokens));
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
            if !push_pending(batch, at, tokens) {
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
            if row.is_cold() || (row.limit == row.planned && row.planned < row.table_end) {
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
        let mut patches = std::mem::take(&mut batch.patches[buffer]);
        for &(at, from) in &patches {
            // A row that has gone needs its columns blank only if another one comes, which patches it again.
            let (row, from) = (at as usize, from as usize);
            let out = &mut arrays.block_tables[row * columns..(row + 1) * columns];
            let handle = batch.sequences.get(row).copied().flatten();
            let table =
                handle.and_then(|handle| self.sequences.get(handle)).map_or(&[][..], |sequence| &sequence.table);
            let len = table.len().min(columns);
            for (place, &block) in out[..len].iter_mut().zip(&table[..len]).skip(from) {
                *place = block.cast_signed();
            }
            let written = &mut batch.written[buffer].columns[row];
            if len < *written as usize {
                out[len..*written as usize].fill(batch.shape.pad_block);
            }
            *written = len as u32;
        }
        patches.clear();
        batch.patches[buffer] = patches;

        let last = batch.patches.len() - 1;
        let mut changed = std::mem::take(&mut batch.patches[last]);
        compact(&mut changed);
        for &(at, from) in &changed {
            let len = batch.written[buffer].columns[at as usize];
            if from < len {
                batch.plans[buffer].updates.push((at, from, len));
            }
        }
        changed.clear();
        batch.patches[last] = changed;
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

/// Do a warm row's next positions lie in the block that it may write as it is?
const fn fits(row: &Row, num: u32) -> bool {
    !row.is_cold() && row.planned + num <= row.limit
}

/// Plans a row that takes tokens which the sequence did not have, and no block: they wait in the row.
fn plan_within(batch: &mut Batch, slow: &Slow, ahead: Ahead<'_>, at_token: usize, arrays: &mut Arrays<'_>) -> Planned {
    let at = slow.row as usize;
    let row = &mut batch.rows[at];
    for nth in 0..slow.num {
        let (place, position) = (at_token + nth as usize, row.planned + nth);
        arrays.positions[place] = position.cast_signed();
        arrays.slot_mapping[place] = row.slot_base + i64::from(position);
    }
    row.planned += slow.num;
    let end = row.planned;
    let tokens = ahead.tokens(slow);
    let is_pushed = push_pending(batch, at, tokens);
    debug_assert!(is_pushed, "positions below a row's limit have room for their tokens");
    let has_placeholder = tokens.first() == Some(&-1);
    let drafts = slow.added - u32::from(has_placeholder);
    Planned { end, num: slow.num, drafts, has_placeholder, is_named: true }
}

/// Adds tokens to what waits in a warm row, if there is room for them and for the one that a commit may add.
fn push_pending(batch: &mut Batch, at: usize, tokens: &[i32]) -> bool {
    let row = &mut batch.rows[at];
    let waiting = (row.len - row.flushed) as usize;
    if row.is_cold() || waiting + tokens.len() >= PENDING_MAX {
        return false;
    }
    for (place, token) in batch.pending[at * PENDING_MAX + waiting..].iter_mut().zip(tokens) {
        *place = token.cast_unsigned();
    }
    row.len += tokens.len() as u32;
    true
}

/// Plans rows of the usual path; answers where the next row's positions start.
fn plan_usual(
    batch: &mut Batch,
    plan: &mut Plan,
    counts: Counts<'_>,
    range: Range<usize>,
    at_token: usize,
    arrays: &mut Arrays<'_>,
) -> usize {
    match counts {
        Counts::All(1) => plan_each(batch, plan, range, |_| 1, at_token, arrays),
        _ => plan_each(batch, plan, range, |row| counts.of(row), at_token, arrays),
    }
}

/// `plan_usual`, compiled for what `count` is.
fn plan_each(
    batch: &mut Batch,
    plan: &mut Plan,
    range: Range<usize>,
    count: impl Fn(usize) -> u32,
    mut at_token: usize,
    arrays: &mut Arrays<'_>,
) -> usize {
    let Arrays { positions, slot_mapping, .. } = arrays;
    let lens = arrays.seq_lens[range.clone()].iter_mut();
    let starts = arrays.query_start_loc[range.start + 1..=range.end].iter_mut();
    let pending = batch.pending[range.start * PENDING_MAX..range.end * PENDING_MAX].chunks_exact_mut(PENDING_MAX);
    let rows = batch.rows[range.clone()].iter_mut().zip(pending).zip(lens.zip(starts));
    plan.rows.extend(range.zip(rows).map(|(at, ((row, pending), (len, start)))| {
        let num = count(at);
        let first = row.planned;
        let stop = at_token + num as usize;
        let places = positions[at_token..stop].iter_mut().zip(&mut slot_mapping[at_token..stop]);
        for (position, (place, slot)) in (first..).zip(places) {
            *place = position.cast_signed();
            *slot = row.slot_base + i64::from(position);
        }
        at_token = stop;
        row.planned = first + num;
        let has_placeholder = row.planned > row.len;
        if has_placeholder {
            pending[(row.len - row.flushed) as usize] = PLACEHOLDER;
            row.len += 1;
        }
        *len = row.planned.cast_signed();
        *start = stop as i32;
        Planned { end: row.planned, num, drafts: 0, has_placeholder, is_named: num > 0 }
    }));
    at_token
}

/// Would its next position be a placeholder, and may it?
const fn takes_placeholder(row: &Row, num: u32) -> bool {
    num == 1 && row.planned == row.len && row.planned > row.committed
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

fn check_total(batch: &Batch, num_tokens: usize) -> Result<()> {
    if num_tokens <= batch.shape.max_tokens {
        return Ok(());
    }
    Err(Error::Value(format!("the step has {num_tokens} tokens; max_tokens is {}", batch.shape.max_tokens)))
}

fn check_all_used(tokens: &[i32], used: usize) -> Result<()> {
    if tokens.len() == used {
        return Ok(());
    }
    Err(Error::Value(format!(
        "tokens has {} values; {used} positions of this step are behind their sequences' tokens",
        tokens.len()
    )))
}

//! The first pass of a step over its rows: what they need, and whether they can have it. It changes nothing that shows.

use std::collections::BTreeMap;

use super::Pager;
use crate::batch::{Ahead, Batch, Counts, PENDING_MAX, Slow};
use crate::blocks::State as BlockState;
use crate::error::{Error, Result};
use crate::ids::BlockId;

impl Pager {
    /// Checks the arguments, and finds the rows that need a closer look. Answers blocks needed and positions planned.
    pub(super) fn survey(&mut self, batch: &mut Batch, counts: Counts<'_>, ahead: Ahead<'_>) -> Result<(usize, usize)> {
        counts.check(batch.rows.len())?;
        let plain = match counts {
            Counts::All(1) => survey_plain(batch, |_| 1, ahead),
            _ => survey_plain(batch, |row| counts.of(row), ahead),
        };
        if let Some(found) = plain {
            return Ok(found);
        }
        let mut slow = std::mem::take(&mut batch.slow);
        slow.clear();
        let mut num_tokens = 0;
        for (at, row) in batch.rows.iter().enumerate() {
            let num = counts.of(at);
            num_tokens += num as usize;
            if row.is_cold() || !row.is_usual(num, ahead) {
                slow.push(Slow { row: at as u32, num, added: 0, tokens_at: 0, needed: 0 });
            }
        }
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
        let room = batch.shape.max_blocks * block_size;
        for row in slow.iter().filter(|row| row.num > 0) {
            let end = batch.rows[row.row as usize].planned as usize + row.num as usize;
            if end > room {
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
            if state.fits(row.num) || row.num == 0 {
                continue;
            }
            if state.grows(row.num, block_size as u32) {
                row.needed = 1;
                needed += 1;
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
                if row.takes_placeholder(*num) {
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
            used += own.len();
            if own.iter().all(|&token| token >= 0) {
                continue;
            }
            let first = used - own.len();
            for (nth, &token) in own.iter().enumerate() {
                let may_wait = nth == 0 && row.planned == row.len && row.planned > row.committed;
                if token >= 0 || (token == -1 && may_wait) {
                    continue;
                }
                if token == -1 {
                    return Err(Error::Value(format!(
                        "tokens[{}] is -1, but row {at} has no open step whose token this could be",
                        first + nth
                    )));
                }
                return Err(Error::Token { position: first + nth, value: token.cast_unsigned() });
            }
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
    pub(super) fn check_rows(&mut self, batch: &Batch, needed: usize) -> Result<()> {
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
    pub(super) fn make_room(&mut self, batch: &mut Batch, needed: usize) -> Result<()> {
        let block_size = self.config.block_size;
        batch.taken.clear();
        batch.taken.try_reserve(needed)?;
        batch.own_copies.try_reserve(needed)?;
        for row in &batch.slow {
            let state = &batch.rows[row.row as usize];
            if state.fits(row.num) {
                continue;
            }
            let Some(sequence) = batch.sequences[row.row as usize].and_then(|handle| self.sequences.get_mut(handle))
            else {
                continue;
            };
            sequence.table.try_reserve(row.needed as usize)?;
            if row.added > 0 && !state.grows(row.num, batch.block_size) {
                sequence.tail.reserve(PENDING_MAX + row.added as usize, block_size)?;
            }
        }
        Ok(())
    }
}

/// The whole first pass, where each row's positions lie in the block that it writes to and the one behind it, and nothing
/// is wrong: otherwise there is no answer, and the rows are looked at one thing after the other, in the order of checks.
fn survey_plain(batch: &mut Batch, count: impl Fn(usize) -> u32, ahead: Ahead<'_>) -> Option<(usize, usize)> {
    let (block_size, room) = (batch.block_size, batch.shape.max_blocks * batch.block_size as usize);
    let (mut needed, mut num_tokens, mut used) = (0, 0, 0);
    batch.slow.clear();
    for (at, row) in batch.rows.iter().enumerate() {
        let num = count(at);
        num_tokens += num as usize;
        if row.is_usual(num, ahead) && !row.is_cold() {
            continue;
        }
        let (end, tokens_at) = (row.planned.saturating_add(num), used);
        let grows = row.grows(num, block_size);
        if !(grows || row.fits(num)) || end as usize > room {
            return None;
        }
        let added = match ahead {
            Ahead::Blocks => 0,
            _ => end.saturating_sub(row.len).min(num),
        };
        used += added as usize;
        if added > 0 && !matches!(ahead, Ahead::Given(_)) && !row.takes_placeholder(num) {
            return None;
        }
        if grows {
            needed += 1;
            batch.slow.push(Slow { row: at as u32, num, added, tokens_at: tokens_at as u32, needed: 1 });
        }
    }
    let is_right = match ahead {
        Ahead::Blocks => true,
        Ahead::Given(tokens) => {
            // The signs of all at once: a loop without a way out.
            let signs = tokens.iter().fold(0, |signs, token| signs | token);
            used == tokens.len() && signs >= 0 && num_tokens <= batch.shape.max_tokens
        }
        Ahead::Unknown => num_tokens <= batch.shape.max_tokens,
    };
    is_right.then_some((needed, num_tokens))
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

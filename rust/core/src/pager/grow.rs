//! Growth: append, extend, slots. Each makes the positions it gives out writable, by copy-on-write where a block is
//! shared.

use super::Pager;
use super::admit::check_tokens;
use crate::error::{Error, Result};
use crate::evict::{Context, Departure};
use crate::ids::{BlockId, CONTENT_START, Handle, TOKEN_END, Token};
use crate::memory::with_capacity;
use crate::sequence::Sequence;

/// Most tokens of a sequence: positions fit an i32.
const MAX_LEN: usize = TOKEN_END as usize - 1;

impl Pager {
    /// Adds one token; answers its slot, `block id * block size + offset`.
    ///
    /// # Errors
    /// `Stale`, `Token`, `OutOfBlocks`, `Memory`.
    pub fn append(&mut self, handle: Handle, token: Token) -> Result<i64> {
        self.with_running(handle, "append", |pager, sequence| {
            let block_size = pager.config.block_size;
            let last = sequence.table[sequence.table.len() - 1];
            // Wraps, and so is large, where the table goes beyond the last token's block.
            let offset = sequence.len.wrapping_sub((sequence.table.len() - 1) * block_size);
            // The usual decode step: room in a block of the sequence's own. Without a division, since this is called
            // for each token.
            if offset < block_size && token < TOKEN_END && pager.blocks.is_sole(last) && sequence.len < MAX_LEN {
                sequence.tail.push(token, block_size)?;
                sequence.has_content |= token >= CONTENT_START;
                sequence.len += 1;
                return Ok(i64::from(last) * block_size as i64 + offset as i64);
            }
            pager.grow(sequence, &[token])?;
            Ok(pager.slot(sequence, sequence.len - 1))
        })
    }

    /// Adds tokens; answers their slots.
    ///
    /// # Errors
    /// `Stale`, `Token`, `OutOfBlocks`, `Memory`.
    pub fn extend(&mut self, handle: Handle, tokens: &[Token]) -> Result<Vec<i64>> {
        self.with_running(handle, "extend", |pager, sequence| {
            let mut slots = with_capacity(tokens.len())?;
            pager.grow(sequence, tokens)?;
            pager.push_slots(sequence, sequence.len - tokens.len(), sequence.len, &mut slots);
            Ok(slots)
        })
    }

    /// Makes positions `start..stop` writable; answers their slots.
    ///
    /// # Errors
    /// `Stale`; `Value` unless `num_committed <= start <= stop <= len`; `OutOfBlocks`, `Memory`.
    pub fn slots(&mut self, handle: Handle, start: usize, stop: usize) -> Result<Vec<i64>> {
        self.with_running(handle, "slots", |pager, sequence| {
            let planned = pager.num_planned(sequence);
            if !(planned <= start && start <= stop && stop <= sequence.len) {
                return Err(Error::Value(format!(
                    "start is {start} and stop is {stop}; it must hold that {planned} (num_planned) <= start <= stop <= {} (len): what is committed, or given to a step, is not given again",
                    sequence.len
                )));
            }
            let mut slots = with_capacity(stop - start)?;
            if start == stop {
                return Ok(slots);
            }
            let needed = pager.blocks_for(sequence, start, stop);
            pager.check_room(needed)?;
            sequence.table.try_reserve(needed)?;
            pager.prepare(sequence, start, stop, planned, needed);
            pager.push_slots(sequence, start, stop, &mut slots);
            Ok(slots)
        })
    }

    /// The copies that calls on single sequences asked for, (source, target) each, in the order of asking. The queue
    /// is empty then.
    ///
    /// # Errors
    /// `Memory`; the queue is as it was then.
    pub fn take_copies(&mut self) -> Result<Vec<[BlockId; 2]>> {
        let mut taken = with_capacity(self.copies.len())?;
        while let Some((source, target)) = self.copies.pop() {
            taken.push([source, target]);
            self.let_go_of_block(source, Context::COPY);
        }
        self.counters.copies += taken.len() as u64;
        self.num_launches += u64::from(!taken.is_empty());
        Ok(taken)
    }

    fn grow(&mut self, sequence: &mut Sequence, tokens: &[Token]) -> Result<()> {
        let block_size = self.config.block_size;
        check_tokens(tokens, 0)?;
        let len = sequence.len + tokens.len();
        if len > MAX_LEN {
            return Err(Error::Value(format!("the sequence would have {len} tokens; it has fewer than 2147483648")));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let (start, planned) = (sequence.len, self.num_planned(sequence));
        let needed = self.blocks_for(sequence, start, len);
        if needed > 0 {
            self.check_room(needed)?;
            sequence.table.try_reserve(needed)?;
        }
        let bits = sequence.tail.extend(tokens, block_size)?;
        sequence.has_content |= bits >= CONTENT_START;
        sequence.len = len;
        self.prepare(sequence, start, len, planned, needed);
        Ok(())
    }

    /// Blocks to take before positions `start..stop` can be written: one for each that the table lacks up to there,
    /// and one in the place of each that others hold, too.
    pub(super) fn blocks_for(&self, sequence: &Sequence, start: usize, stop: usize) -> usize {
        let missing = stop.div_ceil(self.config.block_size).saturating_sub(sequence.table.len());
        missing + self.shared_in(sequence, start, stop).count()
    }

    /// Table positions of `start..stop` whose blocks others hold, too.
    pub(super) fn shared_in(&self, sequence: &Sequence, start: usize, stop: usize) -> impl Iterator<Item = usize> {
        let block_size = self.config.block_size;
        let last = if start < stop { stop.div_ceil(block_size).min(sequence.table.len()) } else { 0 };
        (start / block_size..last).filter(|&at| !self.is_writable(sequence.table[at]))
    }

    /// Takes the `needed` blocks that make positions `start..stop` writable, into a table that has room for them.
    fn prepare(&mut self, sequence: &mut Sequence, start: usize, stop: usize, planned: usize, needed: usize) {
        if needed == 0 {
            return;
        }
        let block_size = self.config.block_size;
        let end = sequence.table.len();
        self.take(needed, &mut sequence.table);
        // What was taken first replaces what is shared; the rest is where it belongs.
        let (mut next, mut first) = (end, end);
        for at in start / block_size..stop.div_ceil(block_size).min(end) {
            if self.is_writable(sequence.table[at]) {
                continue;
            }
            let block = sequence.table[next];
            if let Some(source) = self.replace(sequence, at, planned, block) {
                self.copies.push(source, block);
            }
            first = first.min(at);
            next += 1;
        }
        sequence.table.drain(end..next);
        self.patch(sequence, first);
    }

    /// Puts a block of the sequence's own in the place of one that it may not write. Answers what must be copied into
    /// it, if anything, and holds that for the copy.
    pub(super) fn replace(
        &mut self,
        sequence: &mut Sequence,
        at: usize,
        planned: usize,
        block: BlockId,
    ) -> Option<BlockId> {
        let old = std::mem::replace(&mut sequence.table[at], block);
        let mut source = None;
        if at * self.config.block_size < planned {
            let origin = self.copies.origin(old);
            self.hold_block(origin, 1);
            source = Some(origin);
        }
        self.let_go_of_block(old, Self::context(sequence, Departure::Moved));
        source
    }

    fn slot(&self, sequence: &Sequence, position: usize) -> i64 {
        let block_size = self.config.block_size;
        i64::from(sequence.table[position / block_size]) * block_size as i64 + (position % block_size) as i64
    }

    fn push_slots(&self, sequence: &Sequence, start: usize, stop: usize, slots: &mut Vec<i64>) {
        let block_size = self.config.block_size;
        let mut position = start;
        while position < stop {
            let end = stop.min((position / block_size + 1) * block_size);
            let first = self.slot(sequence, position);
            slots.extend(first..first + (end - position) as i64);
            position = end;
        }
    }
}

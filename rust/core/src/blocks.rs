//! The block pool: the state of each block, and the stack of free ones.
//!
//! A byte of state and a stack word per block, so that a pool of cached blocks stays within its memory budget, and
//! the states of 100,000 blocks within a core's own cache: most of what a cold admission does is one write here for
//! each block.
//!
//! ```text
//! 0          never handed out: free, below everything on the stack
//! 1 ..= 252  private, with that many holders
//! 253        private, with more holders: `crowds` has the number
//! 254        indexed: the tree knows who holds it
//! 255        free, on the stack
//! ```
//!
//! At construction the lowest id is on top of the stack. Nothing is written for that: ids from `fresh` on have never
//! been handed out and lie below the stack in ascending order, so a pool of any size is built in no time. (Tried
//! before: the stack as a list threaded through 4-byte states. As small, but each pop waits for the one before it, 4
//! ns a block and half of a cold admission.)

use std::collections::BTreeMap;

use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::{with_capacity, zeroed};

const FRESH: u8 = 0;
const HOLDERS_IN_PLACE: u8 = 252;
const CROWD: u8 = 253;
const INDEXED: u8 = 254;
const FREE: u8 = 255;

/// Most holders that a private block can have.
pub const HOLDERS_MAX: u32 = 1 << 30;

/// What a block is, as far as the pool knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// On the free stack, or never handed out.
    Free,
    /// In tables only, held this many times.
    Private(u32),
    /// In a run of the tree, or was when its holders got it.
    Indexed,
}

/// The pool's blocks.
#[derive(Debug)]
pub struct Blocks {
    states: Vec<u8>,
    stack: Vec<BlockId>,
    fresh: usize,
    crowds: BTreeMap<BlockId, u32>,
}

impl Blocks {
    /// A pool of free blocks; with `null_block` block 0 is never handed out.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(num_blocks: usize, null_block: bool) -> Result<Self> {
        Ok(Self {
            states: zeroed(num_blocks)?,
            stack: with_capacity(num_blocks)?,
            fresh: usize::from(null_block),
            crowds: BTreeMap::new(),
        })
    }

    /// Free blocks.
    #[must_use]
    pub const fn num_free(&self) -> usize {
        self.stack.len() + self.states.len() - self.fresh
    }

    /// Takes up to `count` blocks off the stack's top; their new owner is their only holder.
    pub fn pop(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let start = out.len();
        let keep = self.stack.len().saturating_sub(count);
        out.extend(self.stack.drain(keep..).rev());
        let rest = (count - (out.len() - start)).min(self.states.len() - self.fresh);
        out.extend(self.fresh as BlockId..(self.fresh + rest) as BlockId);
        self.fresh += rest;
        for &block in &out[start..] {
            self.states[block as usize] = 1;
        }
    }

    /// The same, passing over blocks that `may_take` refuses: they stay where they are.
    pub fn pop_where(&mut self, count: usize, may_take: impl Fn(BlockId) -> bool, out: &mut Vec<BlockId>) {
        let wanted = out.len() + count;
        let mut at = self.stack.len();
        while at > 0 && out.len() < wanted {
            at -= 1;
            let block = self.stack[at];
            if may_take(block) {
                self.states[block as usize] = 1;
                out.push(block);
            }
        }
        // All that may be taken from there on is taken; the rest closes up.
        let mut kept = at;
        for position in at..self.stack.len() {
            let block = self.stack[position];
            if !may_take(block) {
                self.stack[kept] = block;
                kept += 1;
            }
        }
        self.stack.truncate(kept);
        // What was never handed out was never let go of, either.
        let rest = (wanted - out.len()).min(self.states.len() - self.fresh);
        let fresh = self.fresh as BlockId..(self.fresh + rest) as BlockId;
        self.fresh += rest;
        for block in fresh {
            self.states[block as usize] = 1;
            out.push(block);
        }
    }

    /// Puts a block on top of the stack.
    pub fn push(&mut self, block: BlockId) {
        debug_assert!(self.state(block) != State::Free, "I2: block {block} is freed twice");
        self.states[block as usize] = FREE;
        self.stack.push(block);
    }

    /// What the block is.
    #[must_use]
    pub fn state(&self, block: BlockId) -> State {
        match self.states[block as usize] {
            FRESH | FREE => State::Free,
            INDEXED => State::Indexed,
            CROWD => State::Private(self.crowds.get(&block).copied().unwrap_or(0)),
            holders => State::Private(u32::from(holders)),
        }
    }

    /// Is it private with exactly one holder? (The usual question of a decode step.)
    #[must_use]
    pub fn is_sole(&self, block: BlockId) -> bool {
        self.states[block as usize] == 1
    }

    /// Is it in the index?
    #[must_use]
    pub fn is_indexed(&self, block: BlockId) -> bool {
        self.states[block as usize] == INDEXED
    }

    /// Adds holders to a private block.
    pub fn hold(&mut self, block: BlockId, more: u32) {
        let State::Private(holders) = self.state(block) else { unreachable!("I2: block {block} is not private") };
        self.set_holders(block, holders + more);
    }

    /// Takes one holder from a private block; answers whether that was the last. The caller then frees it.
    pub fn let_go(&mut self, block: BlockId) -> bool {
        if self.is_sole(block) {
            return true;
        }
        let State::Private(holders) = self.state(block) else { unreachable!("I2: block {block} is not private") };
        self.set_holders(block, holders - 1);
        false
    }

    fn set_holders(&mut self, block: BlockId, holders: u32) {
        let state = &mut self.states[block as usize];
        if holders > u32::from(HOLDERS_IN_PLACE) {
            *state = CROWD;
            self.crowds.insert(block, holders);
        } else {
            if *state == CROWD {
                self.crowds.remove(&block);
            }
            *state = holders as u8;
        }
    }

    /// The leading blocks that have one holder each are in the index from now on; answers how many those are. One
    /// pass: at 128k tokens a second one costs as much as a third of copying the tokens.
    pub fn index_sole(&mut self, blocks: &[BlockId]) -> usize {
        for (nth, &block) in blocks.iter().enumerate() {
            let state = &mut self.states[block as usize];
            if *state != 1 {
                return nth;
            }
            *state = INDEXED;
        }
        blocks.len()
    }

    /// A private block is in the index from now on.
    pub fn set_indexed(&mut self, block: BlockId) {
        if self.states[block as usize] == CROWD {
            self.crowds.remove(&block);
        }
        self.states[block as usize] = INDEXED;
    }

    /// An indexed block left the index for one new owner.
    pub fn set_private(&mut self, block: BlockId) {
        self.states[block as usize] = 1;
    }

    /// The free blocks in the order in which they would be handed out.
    pub fn iter_free(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.stack.iter().rev().copied().chain(self.fresh as BlockId..self.states.len() as BlockId)
    }

    /// Lets a test of the checker break a state.
    #[cfg(test)]
    pub(crate) fn break_state(&mut self, block: BlockId, state: u8) {
        self.states[block as usize] = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_id_is_on_top_and_what_was_freed_last_comes_first() {
        let mut blocks = Blocks::new(5, true).unwrap();
        let mut taken = Vec::new();
        blocks.pop(3, &mut taken);
        assert_eq!(taken, [1, 2, 3]);
        blocks.push(3);
        blocks.push(1);
        blocks.pop(9, &mut taken);
        assert_eq!(taken, [1, 2, 3, 1, 3, 4]);
        assert_eq!(blocks.num_free(), 0);
    }

    #[test]
    fn what_is_passed_over_stays_in_its_order() {
        let mut blocks = Blocks::new(8, false).unwrap();
        let mut taken = Vec::new();
        blocks.pop(6, &mut taken);
        for block in [5, 0, 4, 1, 3, 2] {
            blocks.push(block);
        }
        taken.clear();
        blocks.pop_where(2, |block| block % 2 == 1, &mut taken);
        assert_eq!(taken, [3, 1]);
        assert_eq!(blocks.iter_free().collect::<Vec<_>>(), [2, 4, 0, 5, 6, 7]);
        blocks.pop_where(3, |block| block % 2 == 1, &mut taken);
        assert_eq!(taken, [3, 1, 5, 6, 7], "what was never handed out is not asked about");
        assert_eq!(blocks.iter_free().collect::<Vec<_>>(), [2, 4, 0]);
    }

    #[test]
    fn a_crowd_of_holders_is_counted_exactly() {
        let mut blocks = Blocks::new(1, false).unwrap();
        blocks.pop(1, &mut Vec::new());
        blocks.hold(0, 1000);
        assert_eq!(blocks.state(0), State::Private(1001));
        for left in (1..=1000).rev() {
            assert!(!blocks.let_go(0));
            assert_eq!(blocks.state(0), State::Private(left));
        }
        assert!(blocks.is_sole(0) && blocks.let_go(0) && blocks.crowds.is_empty());
    }
}

//! The block pool: the state of each block, and the stack of free ones.
//!
//! One word a block (4 bytes), so that a pool of cached blocks stays within its memory budget:
//!
//! ```text
//! 0                         never handed out: free, below everything on the stack
//! 1 ..= 2^30-1              private, with that many holders
//! 2^30                      indexed: the tree knows who holds it
//! 2^31 | next               free; next is the block below it on the stack (all ones: none)
//! ```
//!
//! At construction the lowest id is on top of the stack. Nothing is written for that: ids from `fresh` on have never been handed
//! out and lie below the stack in ascending order, so a pool of any size is built in no time.

use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::zeroed_words;

const INDEXED: u32 = 1 << 30;
const FREE: u32 = 1 << 31;
const STACK_END: u32 = FREE - 1;

/// Most holders that a private block can have.
pub const HOLDERS_MAX: u32 = INDEXED - 1;

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
    words: Vec<u32>,
    top: u32,
    stack_len: usize,
    fresh: u32,
}

impl Blocks {
    /// A pool of free blocks; with `null_block` block 0 is never handed out.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(num_blocks: usize, null_block: bool) -> Result<Self> {
        Ok(Self { words: zeroed_words(num_blocks)?, top: STACK_END, stack_len: 0, fresh: u32::from(null_block) })
    }

    /// Free blocks.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.stack_len + self.words.len() - self.fresh as usize
    }

    /// Takes the top of the stack; its new owner is its only holder.
    pub fn pop(&mut self) -> Option<BlockId> {
        let block = if self.top != STACK_END {
            let block = self.top;
            self.top = self.words[block as usize] & !FREE;
            self.stack_len -= 1;
            block
        } else if (self.fresh as usize) < self.words.len() {
            self.fresh += 1;
            self.fresh - 1
        } else {
            return None;
        };
        self.words[block as usize] = 1;
        Some(block)
    }

    /// Puts a block on top of the stack.
    pub fn push(&mut self, block: BlockId) {
        debug_assert!(self.state(block) != State::Free, "I2: block {block} is freed twice");
        self.words[block as usize] = FREE | self.top;
        self.top = block;
        self.stack_len += 1;
    }

    /// What the block is.
    #[must_use]
    pub fn state(&self, block: BlockId) -> State {
        match self.words[block as usize] {
            0 => State::Free,
            word if word & FREE != 0 => State::Free,
            INDEXED => State::Indexed,
            holders => State::Private(holders),
        }
    }

    /// Is it private with exactly one holder? (The usual question of a decode step.)
    #[must_use]
    pub fn is_sole(&self, block: BlockId) -> bool {
        self.words[block as usize] == 1
    }

    /// Is it in the index?
    #[must_use]
    pub fn is_indexed(&self, block: BlockId) -> bool {
        self.words[block as usize] == INDEXED
    }

    /// Adds holders to a private block.
    pub fn hold(&mut self, block: BlockId, holders: u32) {
        debug_assert!(matches!(self.state(block), State::Private(_)));
        self.words[block as usize] += holders;
    }

    /// Takes one holder from a private block; answers whether that was the last. The caller then frees it.
    pub fn let_go(&mut self, block: BlockId) -> bool {
        debug_assert!(matches!(self.state(block), State::Private(_)));
        if self.words[block as usize] == 1 {
            return true;
        }
        self.words[block as usize] -= 1;
        false
    }

    /// The block is in the index from now on.
    pub fn set_indexed(&mut self, block: BlockId) {
        self.words[block as usize] = INDEXED;
    }

    /// The block left the index for one new owner.
    pub fn set_private(&mut self, block: BlockId) {
        self.words[block as usize] = 1;
    }

    /// The free blocks in the order in which they would be handed out. Stops after as many as there can be, also if the stack is broken.
    pub fn iter_free(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut next = self.top;
        let stack = std::iter::from_fn(move || {
            let block = next;
            let word = *self.words.get(block as usize)?;
            next = word & !FREE;
            Some(block)
        });
        stack.take(self.words.len()).chain(self.fresh..self.words.len() as u32)
    }

    /// Lets a test of the checker break a word.
    #[cfg(test)]
    pub fn break_word(&mut self, block: BlockId, word: u32) {
        self.words[block as usize] = word;
    }
}

//! A run: consecutive full blocks of one path, their tokens and their ids, in one allocation.
//!
//! ```text
//! words: | tokens of block 0 | tokens of block 1 | ... spare ... | id 0 | id 1 | ... spare |
//!        0                                      capacity * bs                 capacity * (bs + 1)
//! ```
//!
//! Tokens lie together, so that a match is one slice compare. One allocation instead of two halves the cost of a run
//! of one block, and lets the buffer that `admit` fills become the tree's own when it is committed. `block_size` is
//! passed in: every run of a pager has the same, and a node stays within one cache line.

use std::ops::Range;

use crate::error::Result;
use crate::ids::{BlockId, Token};
use crate::memory::with_capacity;

/// A run holds at most this many tokens (or one block), so that splitting one copies little.
pub const RUN_TOKENS_MAX: usize = 8192;

/// Most blocks of a run.
#[must_use]
pub const fn run_blocks_max(block_size: usize) -> usize {
    if block_size >= RUN_TOKENS_MAX { 1 } else { RUN_TOKENS_MAX / block_size }
}

/// Tokens and ids of `len` blocks, with room for more.
#[derive(Debug, Default)]
pub struct Run {
    words: Box<[u32]>,
    len: u32,
    /// Kept beside its definition, `words.len() / (block_size + 1)`: a division for each node of a released path
    /// would show.
    capacity: u32,
}

impl Run {
    /// An empty run with room for `capacity` blocks whose first tokens are given.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn with_tokens(tokens: &[Token], capacity: usize, block_size: usize) -> Result<Self> {
        let mut words = with_capacity(capacity * (block_size + 1))?;
        words.extend_from_slice(tokens);
        words.resize(capacity * (block_size + 1), 0);
        Ok(Self { words: words.into_boxed_slice(), len: 0, capacity: capacity as u32 })
    }

    /// A copy of some blocks of this run, with room for `capacity`.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn copy_of(&self, blocks: Range<usize>, capacity: usize, block_size: usize) -> Result<Self> {
        let tokens = &self.words[blocks.start * block_size..blocks.end * block_size];
        let mut run = Self::with_tokens(tokens, capacity, block_size)?;
        run.set_blocks(&self.blocks(block_size)[blocks], block_size);
        Ok(run)
    }

    /// Blocks of the run.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Has it no block?
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Blocks that fit without a new allocation.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Tokens of the run's blocks.
    #[must_use]
    pub fn tokens(&self, block_size: usize) -> &[Token] {
        &self.words[..self.len() * block_size]
    }

    /// Ids of the run's blocks.
    #[must_use]
    pub fn blocks(&self, block_size: usize) -> &[BlockId] {
        let start = self.capacity() * block_size;
        &self.words[start..start + self.len()]
    }

    /// The whole token area, filled or not.
    #[must_use]
    pub fn token_area(&self, block_size: usize) -> &[Token] {
        &self.words[..self.capacity() * block_size]
    }

    /// The whole token area, to be filled before its blocks are named.
    pub fn token_area_mut(&mut self, block_size: usize) -> &mut [Token] {
        let end = self.capacity() * block_size;
        &mut self.words[..end]
    }

    /// Names the blocks of the tokens that are there already; they are the run from now on.
    pub fn set_blocks(&mut self, blocks: &[BlockId], block_size: usize) {
        let start = self.capacity() * block_size;
        self.words[start..start + blocks.len()].copy_from_slice(blocks);
        self.len = blocks.len() as u32;
    }

    /// Appends one block; there must be room.
    pub fn push(&mut self, tokens: &[Token], block: BlockId, block_size: usize) {
        let at = self.len();
        let ids = self.capacity() * block_size;
        self.words[at * block_size..(at + 1) * block_size].copy_from_slice(tokens);
        self.words[ids + at] = block;
        self.len += 1;
    }

    /// Drops all blocks from `len` on. Their ids stay readable until then: read them first.
    pub fn truncate(&mut self, len: usize) {
        debug_assert!(len <= self.len());
        self.len = len as u32;
    }

    /// Gives spare memory back where it is more than a quarter of what is used and the allocator can help.
    pub fn shrink(&mut self, block_size: usize) {
        if self.capacity() > self.len() + self.len() / 4
            && let Ok(exact) = self.copy_of(0..self.len(), self.len(), block_size)
        {
            *self = exact;
        }
    }

    /// How many leading blocks agree with `tokens` (whole blocks of them only).
    #[must_use]
    pub fn common_blocks(&self, tokens: &[Token], block_size: usize) -> usize {
        let limit = self.len().min(tokens.len() / block_size);
        let (ours, theirs) = (&self.words[..limit * block_size], &tokens[..limit * block_size]);
        // One compare of everything is the usual case and runs at memory speed; only a mismatch is looked for in
        // detail.
        if ours == theirs {
            return limit;
        }
        let mut common = 0;
        let stride = 16 * block_size;
        while ours[common..(common + stride).min(ours.len())] == theirs[common..(common + stride).min(ours.len())] {
            common += stride;
        }
        common /= block_size;
        while ours[common * block_size..(common + 1) * block_size]
            == theirs[common * block_size..(common + 1) * block_size]
        {
            common += 1;
        }
        common
    }

    /// Lets a test of the checker break the length.
    #[cfg(test)]
    pub(crate) fn break_len(&mut self, len: usize) {
        self.len = len as u32;
    }
}

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
        Self::with_tokens_and_bits(tokens, capacity, block_size).map(|(run, _)| run)
    }

    /// The same, and the bits that any of the tokens has. They are gathered while copying: a loop of its own costs
    /// half of the copy.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn with_tokens_and_bits(tokens: &[Token], capacity: usize, block_size: usize) -> Result<(Self, Token)> {
        let mut words = with_capacity(capacity * (block_size + 1))?;
        let mut bits = 0;
        words.extend(tokens.iter().map(|&token| {
            bits |= token;
            token
        }));
        words.resize(capacity * (block_size + 1), 0);
        Ok((Self { words: words.into_boxed_slice(), len: 0, capacity: capacity as u32 }, bits))
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A run of blocks whose tokens and ids follow from their position.
    fn run(blocks: usize, capacity: usize, block_size: usize) -> Run {
        let mut run = Run::with_tokens(&[], capacity, block_size).unwrap();
        for block in 0..blocks {
            run.push(&tokens(block..block + 1, block_size), 100 + block as BlockId, block_size);
        }
        run
    }

    fn tokens(blocks: Range<usize>, block_size: usize) -> Vec<Token> {
        (blocks.start * block_size..blocks.end * block_size).map(|at| at as Token).collect()
    }

    fn ids(blocks: Range<usize>) -> Vec<BlockId> {
        blocks.map(|block| 100 + block as BlockId).collect()
    }

    #[test]
    fn a_run_holds_8192_tokens_and_one_block_at_least() {
        assert_eq!([1, 16, 1000, 1024].map(run_blocks_max), [8192, 512, 8, 8]);
        assert_eq!([8192, 8193, 1 << 20].map(run_blocks_max), [1, 1, 1]);
    }

    #[test]
    fn tokens_given_at_first_become_blocks_when_they_are_named() {
        let mut run = Run::with_tokens(&[1, 2, 3, 4, 5], 4, 2).unwrap();
        assert!(run.is_empty() && run.tokens(2).is_empty());
        assert_eq!(run.token_area(2), [1, 2, 3, 4, 5, 0, 0, 0]);
        run.token_area_mut(2)[5] = 6;
        run.set_blocks(&[7, 8], 2);
        assert_eq!((run.tokens(2), run.blocks(2)), (&[1, 2, 3, 4][..], &[7, 8][..]));
        run.push(&[5, 6], 9, 2);
        assert_eq!((run.tokens(2), run.blocks(2)), (&[1, 2, 3, 4, 5, 6][..], &[7, 8, 9][..]));
    }

    #[test]
    fn spare_memory_is_given_back_where_it_is_more_than_a_quarter() {
        for (len, capacity, kept) in [(8, 10, 10), (8, 11, 8), (1, 1, 1), (1, 2, 1), (100, 125, 125), (100, 126, 100)] {
            let mut run = run(len, capacity, 3);
            run.shrink(3);
            assert_eq!(run.capacity(), kept, "{len} blocks in room for {capacity}");
            assert_eq!((run.tokens(3), run.blocks(3)), (&tokens(0..len, 3)[..], &ids(0..len)[..]));
        }
    }

    proptest! {
        #[test]
        fn a_copy_has_its_own_blocks_and_room(
            block_size in 1..9_usize, len in 1..20_usize, spare in 0..5_usize, cut in 0..20_usize, more in 0..5_usize,
        ) {
            let (run, cut) = (run(len, len + spare, block_size), cut % len);
            for part in [0..cut, cut..len] {
                let copy = run.copy_of(part.clone(), part.len() + more, block_size).unwrap();
                prop_assert_eq!(copy.capacity(), part.len() + more);
                prop_assert_eq!(copy.tokens(block_size), tokens(part.clone(), block_size));
                prop_assert_eq!(copy.blocks(block_size), ids(part));
            }
        }

        /// Far from the first mismatch, near it, and behind the end of either: block by block is the definition.
        #[test]
        fn common_blocks_are_those_that_agree_one_by_one(
            block_size in 1..20_usize, len in 0..70_usize, given in 0..1500_usize, changed in proptest::option::of(0..1500_usize),
        ) {
            let run = run(len, len + 3, block_size);
            let mut list = tokens(0..given.div_ceil(block_size), block_size);
            list.truncate(given);
            if let Some(token) = changed.and_then(|at| list.get_mut(at)) {
                *token ^= 1;
            }
            let common = list.chunks_exact(block_size).zip(run.tokens(block_size).chunks_exact(block_size));
            prop_assert_eq!(run.common_blocks(&list, block_size), common.take_while(|(a, b)| a == b).count());
        }

        #[test]
        fn what_is_cut_off_is_gone(block_size in 1..9_usize, len in 1..20_usize, keep in 0..20_usize) {
            let (mut run, keep) = (run(len, len, block_size), keep % (len + 1));
            run.truncate(keep);
            prop_assert_eq!(run.len(), keep);
            prop_assert_eq!((run.tokens(block_size), run.blocks(block_size)), (&tokens(0..keep, block_size)[..], &ids(0..keep)[..]));
        }
    }
}

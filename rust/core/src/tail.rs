//! The tokens that a sequence has not published: a queue of buffers, each of which can become a run of the tree as it
//! is.
//!
//! Buffers ("pieces") start at block boundaries of the sequence. All but the last are full runs, so a position is
//! found by division. `admit` copies the prompt in here once; `commit` moves whole pieces into the tree, which spares
//! the second copy.

use std::collections::VecDeque;

use crate::error::Result;
use crate::ids::Token;
use crate::run::{Run, run_blocks_max};

/// A short run gets room for this many blocks, so that decoding grows it in place.
pub const GROWTH_BLOCKS: usize = 32;
/// Room for a tail of less than a block: it and the next.
const SMALL_BLOCKS: usize = 2;

/// Tokens after the published part of a sequence.
#[derive(Debug, Default)]
pub struct Tail {
    pieces: VecDeque<Run>,
    /// Blocks of the first piece that are published.
    skip: usize,
    /// Tokens, those skipped excluded.
    len: usize,
}

impl Tail {
    /// A tail that holds a copy of `tokens`, and the bits that any of them has: validation costs no second pass.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn from_tokens(tokens: &[Token], block_size: usize) -> Result<(Self, Token)> {
        let mut tail = Self::default();
        let bits = tail.extend(tokens, block_size)?;
        Ok((tail, bits))
    }

    /// Tokens in the tail.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Is there no token?
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn piece_tokens(block_size: usize) -> usize {
        run_blocks_max(block_size) * block_size
    }

    /// Makes room for `more` tokens, so that adding them cannot fail.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self, more: usize, block_size: usize) -> Result<()> {
        let full = run_blocks_max(block_size);
        let end = self.skip * block_size + self.len + more;
        let last_capacity = self.pieces.back().map_or(0, Run::capacity);
        let room = self.pieces.len().saturating_sub(1) * full + last_capacity;
        let needed = end.div_ceil(block_size);
        if needed <= room {
            return Ok(());
        }
        let pieces_needed = needed.div_ceil(full);
        self.pieces.try_reserve(pieces_needed - self.pieces.len())?;
        if let Some(last) = self.pieces.back()
            && last_capacity < full
        {
            // The last piece grows, at least to twice its size, so that appending is O(1) amortised.
            let index = self.pieces.len() - 1;
            let used = (end - more).saturating_sub(index * Self::piece_tokens(block_size));
            let capacity = (needed - index * full).max(2 * last_capacity).min(full);
            let grown = Run::with_tokens(&last.token_area(block_size)[..used], capacity, block_size)?;
            self.pieces[index] = grown;
        }
        let pieces = self.pieces.len();
        while self.pieces.len() < pieces_needed {
            let blocks = (needed - self.pieces.len() * full).min(full);
            let capacity = if blocks < GROWTH_BLOCKS { GROWTH_BLOCKS.min(full) } else { blocks };
            match Run::with_tokens(&[], capacity, block_size) {
                Ok(piece) => self.pieces.push_back(piece),
                Err(error) => {
                    // No piece may stay unused: `take_run` would leave a short one in front of it.
                    self.pieces.truncate(pieces);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Adds tokens; answers the bits that any of them has.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses; nothing has been added then.
    pub fn extend(&mut self, tokens: &[Token], block_size: usize) -> Result<Token> {
        if self.pieces.is_empty() && !tokens.is_empty() {
            return self.fill_empty(tokens, block_size);
        }
        self.reserve(tokens.len(), block_size)?;
        let mut rest = tokens;
        let mut bits = 0;
        while !rest.is_empty() {
            let end = self.skip * block_size + self.len;
            let (piece, at) = (end / Self::piece_tokens(block_size), end % Self::piece_tokens(block_size));
            let area = &mut self.pieces[piece].token_area_mut(block_size)[at..];
            let (now, later) = rest.split_at(rest.len().min(area.len()));
            area[..now.len()].copy_from_slice(now);
            bits |= union_of_bits(now);
            self.len += now.len();
            rest = later;
        }
        Ok(bits)
    }

    /// As `extend`, into no piece yet: buffers are created with their content instead of being cleared first.
    fn fill_empty(&mut self, tokens: &[Token], block_size: usize) -> Result<Token> {
        let full = run_blocks_max(block_size);
        let mut pieces = VecDeque::new();
        pieces.try_reserve_exact(tokens.len().div_ceil(full * block_size))?;
        let mut bits = 0;
        for piece in tokens.chunks(full * block_size) {
            let blocks = piece.len().div_ceil(block_size);
            let capacity = if blocks < GROWTH_BLOCKS { GROWTH_BLOCKS.min(full) } else { blocks };
            let (run, more) = Run::with_tokens_and_bits(piece, capacity, block_size)?;
            pieces.push_back(run);
            bits |= more;
        }
        *self = Self { pieces, skip: 0, len: tokens.len() };
        Ok(bits)
    }

    /// Adds one token.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn push(&mut self, token: Token, block_size: usize) -> Result<()> {
        if self.pieces.len() == 1 {
            let end = self.skip * block_size + self.len;
            if let Some(place) = self.pieces[0].token_area_mut(block_size).get_mut(end) {
                *place = token;
                self.len += 1;
                return Ok(());
            }
        }
        self.extend(&[token], block_size).map(|_| ())
    }

    /// The token at an offset from the tail's start.
    #[must_use]
    pub fn get(&self, offset: usize, block_size: usize) -> Token {
        debug_assert!(offset < self.len);
        let at = self.skip * block_size + offset;
        self.pieces[at / Self::piece_tokens(block_size)].token_area(block_size)[at % Self::piece_tokens(block_size)]
    }

    /// Copies the tokens from an offset on, as many as `out` has room for.
    pub fn copy_from(&self, offset: usize, mut out: &mut [Token], block_size: usize) {
        debug_assert!(offset + out.len() <= self.len);
        let mut at = self.skip * block_size + offset;
        while !out.is_empty() {
            let piece = &self.pieces[at / Self::piece_tokens(block_size)].token_area(block_size);
            let rest = &piece[at % Self::piece_tokens(block_size)..];
            let (now, later) = out.split_at_mut(out.len().min(rest.len()));
            now.copy_from_slice(&rest[..now.len()]);
            at += now.len();
            out = later;
        }
    }

    /// Replaces the token at an offset from the tail's start.
    pub fn set(&mut self, offset: usize, token: Token, block_size: usize) {
        debug_assert!(offset < self.len);
        let at = self.skip * block_size + offset;
        let piece = &mut self.pieces[at / Self::piece_tokens(block_size)];
        piece.token_area_mut(block_size)[at % Self::piece_tokens(block_size)] = token;
    }

    /// The tokens, in slices.
    pub fn slices(&self, block_size: usize) -> impl Iterator<Item = &[Token]> {
        self.slices_from(0, block_size)
    }

    /// The tokens from a block on, in slices.
    fn slices_from(&self, block: usize, block_size: usize) -> impl Iterator<Item = &[Token]> {
        let start = (self.skip + block) * block_size;
        let (mut skip, mut left) = (start % Self::piece_tokens(block_size), self.len - block * block_size);
        self.pieces.iter().skip(start / Self::piece_tokens(block_size)).map(move |piece| {
            let area = piece.token_area(block_size);
            let slice = &area[skip..area.len().min(skip + left)];
            skip = 0;
            left -= slice.len();
            slice
        })
    }

    /// The tokens that the first piece holds.
    #[must_use]
    pub fn first(&self, block_size: usize) -> &[Token] {
        self.slices(block_size).next().unwrap_or_default()
    }

    /// The tokens of a block.
    #[must_use]
    pub fn block(&self, block: usize, block_size: usize) -> &[Token] {
        &self.slices_from(block, block_size).next().unwrap_or_default()[..block_size]
    }

    /// How many leading blocks of a run agree with this tail's, `limit` at most.
    #[must_use]
    pub fn common_blocks(&self, run: &Run, limit: usize, block_size: usize) -> usize {
        self.common_blocks_from(0, run, limit, block_size)
    }

    /// The same for what comes after the tail's first blocks.
    #[must_use]
    pub fn common_blocks_from(&self, from: usize, run: &Run, limit: usize, block_size: usize) -> usize {
        let theirs = run.tokens(block_size);
        let theirs = &theirs[..theirs.len().min(limit * block_size)];
        let mut done = 0;
        for ours in self.slices_from(from, block_size) {
            let n = ours.len().min(theirs.len() - done) / block_size * block_size;
            if ours[..n] != theirs[done..done + n] {
                let same = ours[..n]
                    .chunks_exact(block_size)
                    .zip(theirs[done..].chunks_exact(block_size))
                    .take_while(|(a, b)| a == b);
                return done / block_size + same.count();
            }
            done += n;
            if done == theirs.len() {
                break;
            }
        }
        done / block_size
    }

    /// How many leading tokens agree with these.
    #[must_use]
    pub fn common_tokens(&self, tokens: &[Token], block_size: usize) -> usize {
        let mut done = 0;
        for ours in self.slices(block_size) {
            let theirs = &tokens[done..];
            let common = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            done += common;
            if common < ours.len() {
                break;
            }
        }
        done
    }

    /// Drops the first `blocks` blocks: they are published.
    pub fn advance(&mut self, blocks: usize, block_size: usize) {
        debug_assert!(blocks * block_size <= self.len);
        self.skip += blocks;
        self.len -= blocks * block_size;
        let full = run_blocks_max(block_size);
        while self.skip >= full && self.pieces.len() > 1 {
            self.pieces.pop_front();
            self.skip -= full;
        }
        if self.pieces.len() == 1 && self.len < block_size && self.skip > 0 {
            let (from, to) = (self.skip * block_size, self.skip * block_size + self.len);
            self.pieces[0].token_area_mut(block_size).copy_within(from..to, 0);
            self.skip = 0;
        }
    }

    /// Takes the first `blocks` blocks out, as a run without ids. They lie in the first piece; where they are nearly
    /// all of it the piece itself becomes the run, else they are copied. Either has room for growth if it is short.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses; the tail is unchanged then.
    pub fn take_run(&mut self, blocks: usize, block_size: usize) -> Result<Run> {
        let first = self.first(block_size).len();
        let rest = first - blocks * block_size;
        let growth = GROWTH_BLOCKS.min(run_blocks_max(block_size));
        if self.skip == 0 && rest < block_size && self.pieces[0].capacity() >= growth {
            // What is left of the piece (less than a block) moves to a new one, unless a full piece leaves nothing
            // behind.
            let leftover = if rest > 0 || self.pieces.len() == 1 {
                let area = &self.pieces[0].token_area(block_size)[blocks * block_size..first];
                Some(Run::with_tokens(area, SMALL_BLOCKS.min(run_blocks_max(block_size)), block_size)?)
            } else {
                None
            };
            self.len -= blocks * block_size;
            let taken = match leftover {
                Some(leftover) => std::mem::replace(&mut self.pieces[0], leftover),
                None => self.pieces.pop_front().unwrap_or_default(),
            };
            return Ok(taken);
        }
        let run = Run::with_tokens(&self.first(block_size)[..blocks * block_size], blocks.max(growth), block_size)?;
        self.advance(blocks, block_size);
        Ok(run)
    }

    /// Tokens for which there is room once all are dropped.
    #[must_use]
    pub fn room_when_cleared(&self, block_size: usize) -> usize {
        let short = self.pieces.front().filter(|piece| piece.capacity() <= GROWTH_BLOCKS);
        short.map_or(0, |piece| piece.capacity() * block_size)
    }

    /// Drops all tokens. A short buffer stays, for those that come.
    pub fn clear(&mut self) {
        self.pieces.truncate(1);
        if self.pieces.front().is_some_and(|piece| piece.capacity() > GROWTH_BLOCKS) {
            self.pieces.clear();
        }
        (self.skip, self.len) = (0, 0);
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize, block_size: usize) {
        debug_assert!(len <= self.len);
        self.len = len;
        let pieces = (self.skip * block_size + len).div_ceil(Self::piece_tokens(block_size)).max(1);
        self.pieces.truncate(pieces);
    }
}

/// All bits that any of the tokens has. (A loop that vectorises: checking ranges costs a sixth of copying.)
#[must_use]
pub fn union_of_bits(tokens: &[Token]) -> Token {
    tokens.iter().fold(0, |bits, token| bits | token)
}

#[cfg(test)]
mod tests;

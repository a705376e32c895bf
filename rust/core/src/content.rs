//! Content tokens: values of 2^30 and above that stand for an image, a sound, a document, a few bits of its digest
//! each.
//!
//! A run of them means something only as a whole: two images may agree in their first few tokens. So no hit ends
//! inside a run, and a run is published whole or not at all (`docs/design/rules.md` 9).

use crate::ids::{CONTENT_START, Token};

/// Is there a run of content tokens across the boundary between these two?
#[must_use]
pub const fn spans(before: Token, after: Token) -> bool {
    before >= CONTENT_START && after >= CONTENT_START
}

/// The most blocks, at most `blocks`, whose end lies inside no run of content tokens. The list has `len` tokens.
pub fn cut_back(len: usize, token: impl Fn(usize) -> Token, mut blocks: usize, block_size: usize) -> usize {
    while blocks > 0 {
        let end = blocks * block_size;
        if end >= len || !spans(token(end - 1), token(end)) {
            break;
        }
        let run = (0..end).rev().take_while(|&at| token(at) >= CONTENT_START).count();
        blocks = (end - run) / block_size;
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::CONTENT_START;
    use crate::ids::Token;

    const C: Token = CONTENT_START;

    fn cut_back(tokens: &[Token], blocks: usize, block_size: usize) -> usize {
        super::cut_back(tokens.len(), |at| tokens[at], blocks, block_size)
    }

    #[test]
    fn a_boundary_inside_a_run_moves_before_the_block_that_holds_its_start() {
        let tokens = [1, 2, 3, C, C, C, C, C, 9, 9];
        assert_eq!(cut_back(&tokens, 1, 2), 1);
        assert_eq!(cut_back(&tokens, 2, 2), 1);
        assert_eq!(cut_back(&tokens, 3, 2), 1);
        assert_eq!(cut_back(&tokens, 4, 2), 4);
        assert_eq!(cut_back(&tokens, 5, 2), 5);
    }

    #[test]
    fn cutting_back_may_land_in_an_earlier_run() {
        let tokens = [1, C, C, 5, C, C];
        assert_eq!(cut_back(&tokens, 5, 1), 4);
        assert_eq!(cut_back(&[1, 2, C, C, 5, C, C, C, C], 2, 3), 0);
    }
}

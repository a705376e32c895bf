//! The tail against a plain list.

use proptest::prelude::*;

use super::*;
use crate::run::RUN_TOKENS_MAX;

/// What the tail does, on a plain list.
#[derive(Clone, Debug)]
enum Step {
    /// Adds this many tokens.
    Extend(usize),
    Push,
    /// Drops, takes out, keeps: in thousandths of what is there.
    Advance(usize),
    TakeRun(usize),
    Truncate(usize),
    /// A run of the first blocks, changed at one place.
    Common(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let many = prop_oneof![0..40_usize, 0..600_usize, RUN_TOKENS_MAX - 20..RUN_TOKENS_MAX + 20, 0..3 * RUN_TOKENS_MAX];
    let part = prop_oneof![Just(1000), Just(0), 0..=1000_usize, 950..=1000_usize];
    let step = prop_oneof![
        3 => many.prop_map(Step::Extend),
        2 => Just(Step::Push),
        2 => part.clone().prop_map(Step::Advance),
        3 => part.clone().prop_map(Step::TakeRun),
        1 => part.clone().prop_map(Step::Truncate),
        1 => (part.clone(), part).prop_map(|(blocks, at)| Step::Common(blocks, at)),
    ];
    proptest::collection::vec(step, 1..30)
}

/// Each token differs from its neighbours, and from those that were there before.
struct Pair {
    tail: Tail,
    list: Vec<Token>,
    block_size: usize,
    next: Token,
}

impl Pair {
    fn tokens(&mut self, count: usize) -> Vec<Token> {
        let start = self.next;
        self.next += count as Token;
        (start..self.next).collect()
    }

    /// Whole blocks, in thousandths of those that there are.
    fn blocks(&self, part: usize) -> usize {
        self.list.len() / self.block_size * part / 1000
    }

    fn step(&mut self, step: &Step) {
        let block_size = self.block_size;
        match *step {
            Step::Extend(count) => {
                let tokens = self.tokens(count);
                let bits = self.tail.extend(&tokens, block_size).unwrap();
                assert_eq!(bits, union_of_bits(&tokens));
                self.list.extend(tokens);
            }
            Step::Push => {
                let token = self.tokens(1)[0];
                self.tail.push(token, block_size).unwrap();
                self.list.push(token);
            }
            Step::Advance(part) => {
                let blocks = self.blocks(part);
                self.tail.advance(blocks, block_size);
                self.list.drain(..blocks * block_size);
            }
            Step::TakeRun(part) => {
                // The pager takes blocks of the first piece only.
                let blocks = self.tail.first(block_size).len() / block_size * part / 1000;
                if blocks > 0 {
                    let mut run = self.tail.take_run(blocks, block_size).unwrap();
                    let ids: Vec<u32> = (0..blocks as u32).collect();
                    run.set_blocks(&ids, block_size);
                    let taken: Vec<Token> = self.list.drain(..blocks * block_size).collect();
                    assert_eq!(run.tokens(block_size), taken);
                    assert!(blocks == run_blocks_max(block_size) || run.capacity() > blocks || blocks >= GROWTH_BLOCKS);
                }
            }
            Step::Truncate(part) => {
                let len = self.list.len() * part / 1000;
                self.tail.truncate(len, block_size);
                self.list.truncate(len);
            }
            Step::Common(part, at) => self.compare(part, at),
        }
    }

    /// Runs that agree with the tail from one of its blocks on, up to one place.
    fn compare(&self, part: usize, at: usize) {
        let block_size = self.block_size;
        for from in [0, self.blocks(part) / 3] {
            let blocks = (self.blocks(part) - from).min(run_blocks_max(block_size));
            let mut tokens = self.list[from * block_size..(from + blocks) * block_size].to_vec();
            let changed = tokens.len() * at / 1000;
            if let Some(token) = tokens.get_mut(changed) {
                *token ^= 1 << 30;
            }
            let mut run = Run::with_tokens(&tokens, blocks, block_size).unwrap();
            run.set_blocks(&vec![0; blocks], block_size);
            for limit in [0, blocks / 2, blocks, blocks + 9] {
                let expected = blocks.min(limit).min(changed / block_size);
                assert_eq!(self.tail.common_blocks_from(from, &run, limit, block_size), expected);
                if from == 0 {
                    assert_eq!(self.tail.common_blocks(&run, limit, block_size), expected);
                }
            }
            if blocks > 0 {
                let block = &self.list[from * block_size..(from + 1) * block_size];
                assert_eq!(self.tail.block(from, block_size), block);
            }
        }
    }

    fn assert_equal(&self) {
        assert_eq!(self.tail.len(), self.list.len());
        assert_eq!(self.tail.is_empty(), self.list.is_empty());
        let tokens: Vec<Token> = self.tail.slices(self.block_size).flatten().copied().collect();
        assert_eq!(tokens, self.list);
        for offset in [0, self.list.len() / 2, self.list.len().saturating_sub(1)] {
            if let Some(&token) = self.list.get(offset) {
                assert_eq!(self.tail.get(offset, self.block_size), token);
            }
        }
        // Callers rely on it: a piece but the last is a full run.
        let full = run_blocks_max(self.block_size);
        let short = self.tail.pieces.iter().rev().skip(1).filter(|piece| piece.capacity() != full).count();
        assert_eq!(short, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn a_tail_is_a_queue_of_tokens(
        block_size in prop_oneof![1..5_usize, Just(16), Just(300), Just(1000), Just(1024)], steps in steps(),
    ) {
        let mut pair = Pair { tail: Tail::default(), list: Vec::new(), block_size, next: 0 };
        for step in steps {
            pair.step(&step);
            pair.assert_equal();
        }
    }
}

#[test]
fn a_prompt_is_copied_once_and_its_buffer_becomes_the_run() {
    let tokens: Vec<Token> = (0..40 * 16 + 3).collect();
    let (mut tail, bits) = Tail::from_tokens(&tokens, 16).unwrap();
    assert_eq!(bits, 1023);
    let buffer = tail.first(16).as_ptr();
    let run = tail.take_run(40, 16).unwrap();
    assert_eq!(run.token_area(16).as_ptr(), buffer);
    assert_eq!(tail.first(16), &tokens[640..]);
}

#[test]
fn tokens_are_copied_across_pieces() {
    let tokens: Vec<Token> = (0..2 * RUN_TOKENS_MAX as Token + 9).collect();
    let (mut tail, _) = Tail::from_tokens(&tokens, 16).unwrap();
    tail.advance(1, 16);
    for (offset, count) in [(0, 3), (RUN_TOKENS_MAX - 20, 9), (RUN_TOKENS_MAX - 16, 2 + RUN_TOKENS_MAX), (5, 0)] {
        let mut out = vec![0; count];
        tail.copy_from(offset, &mut out, 16);
        assert_eq!(out, tokens[16 + offset..][..count]);
    }
}

#[test]
fn what_is_cleared_keeps_a_short_buffer_and_no_long_one() {
    for (tokens, is_kept) in [(GROWTH_BLOCKS * 4, true), (GROWTH_BLOCKS * 4 + 1, false), (3 * RUN_TOKENS_MAX, false)] {
        let tokens: Vec<Token> = (0..tokens as Token).collect();
        let (mut tail, _) = Tail::from_tokens(&tokens, 4).unwrap();
        let buffer = tail.first(4).as_ptr();
        tail.clear();
        assert!(tail.is_empty() && tail.slices(4).all(<[Token]>::is_empty));
        tail.extend(&[7, 8, 9], 4).unwrap();
        assert_eq!(tail.first(4), [7, 8, 9]);
        assert!(!is_kept || tail.first(4).as_ptr() == buffer);
    }
}

#[test]
fn a_short_prompt_has_room_to_grow() {
    let (mut tail, _) = Tail::from_tokens(&[1, 2, 3], 1).unwrap();
    assert_eq!(tail.take_run(3, 1).unwrap().capacity(), GROWTH_BLOCKS);
}

#[test]
fn the_bits_of_all_pieces_are_united() {
    let mut tokens = vec![0; 2 * RUN_TOKENS_MAX + 1];
    (tokens[5], tokens[RUN_TOKENS_MAX], tokens[2 * RUN_TOKENS_MAX]) = (1, 2, 1 << 31);
    assert_eq!(Tail::from_tokens(&tokens, 16).unwrap().1, 3 | 1 << 31);
    let (mut tail, _) = Tail::from_tokens(&[8], 16).unwrap();
    assert_eq!(tail.extend(&tokens, 16).unwrap(), 3 | 1 << 31);
}

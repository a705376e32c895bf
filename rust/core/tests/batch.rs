//! The batch in the core alone: what a steady step allocates, what a step costs, and that a step which is refused memory changes nothing.

mod support;

use std::time::{Duration, Instant};

use kvpager_core::batch::{Arrays, Shape};
use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::ids::{Handle, Token};
use kvpager_core::pager::{Counts, Outcome};
use kvpager_core::{Error, Pager, Result};
use support::allocator::{Allocator, measure, refuse_nth};
use support::{A, assert_sound, pager};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const BLOCK_SIZE: usize = 16;

/// A batch and the arrays of one buffer; steps are committed before the next one.
struct Loop {
    pager: Pager,
    batch: Handle,
    shape: Shape,
    sequences: Vec<Handle>,
    block_tables: Vec<i32>,
    seq_lens: Vec<i32>,
    slot_mapping: Vec<i64>,
    positions: Vec<i32>,
    query_start_loc: Vec<i32>,
    next_tokens: Vec<i32>,
    applied: Vec<bool>,
}

impl Loop {
    /// So many rows, each with a prompt of its own that is computed but for the last token.
    fn new(rows: usize, prompt_tokens: usize, num_blocks: usize, max_blocks: usize) -> Self {
        let (max_tokens, buffers) = (4 * rows, 1);
        let shape =
            Shape { max_seqs: rows, max_blocks, max_tokens, buffers, pad_block: 0, pad_slot: -1, pad_seq_len: 0 };
        let mut pager = pager(num_blocks, BLOCK_SIZE);
        let batch = pager.batch(shape).unwrap();
        let mut this = Self {
            batch,
            shape,
            sequences: Vec::new(),
            block_tables: vec![0; rows * max_blocks],
            seq_lens: vec![0; rows],
            slot_mapping: vec![0; max_tokens],
            positions: vec![0; max_tokens],
            query_start_loc: vec![0; rows + 1],
            next_tokens: vec![1; rows],
            applied: vec![false; rows],
            pager,
        };
        for row in 0..rows {
            let prompt: Vec<Token> =
                (0..prompt_tokens).map(|at| (row * 1_000_003 + at + 2) as Token % 1_000_000_000).collect();
            let sequence = this.pager.admit(&prompt, A, false).unwrap();
            this.pager.commit(sequence, Some(prompt_tokens - 1)).unwrap();
            this.pager.add_row(batch, sequence).unwrap();
            this.sequences.push(sequence);
        }
        this
    }

    fn step(&mut self, counts: Counts<'_>, tokens: Option<&[i32]>) -> Result<u64> {
        let mut arrays = Arrays {
            block_tables: &mut self.block_tables,
            seq_lens: &mut self.seq_lens,
            slot_mapping: &mut self.slot_mapping,
            positions: &mut self.positions,
            query_start_loc: &mut self.query_start_loc,
        };
        self.pager.step(self.batch, counts, tokens, &mut arrays)
    }

    fn commit(&mut self, step: u64, num_accepted: Option<&[i32]>) -> Result<()> {
        let outcome = Outcome { next_tokens: Some(&self.next_tokens), num_accepted };
        self.pager.commit_step(self.batch, step, outcome, &mut self.applied)
    }

    fn advance(&mut self) {
        let step = self.step(Counts::All(1), None).unwrap();
        self.commit(step, None).unwrap();
    }

    fn drawn(&mut self) -> String {
        self.pager.flush_rows();
        assert_sound(&self.pager);
        dump(&self.pager, true).unwrap()
    }
}

#[test]
fn a_steady_step_and_its_commit_allocate_nothing() {
    let mut decode = Loop::new(64, 40, 4000, 64);
    // The first boundary makes each path's growing node.
    for _ in 0..2 * BLOCK_SIZE {
        decode.advance();
    }
    let mut calls = Vec::new();
    for _ in 0..4 * BLOCK_SIZE {
        calls.push(measure(|| decode.advance()).1.calls);
    }
    // A step in which all rows cross a boundary may make a table or a node longer; the others allocate nothing at all.
    calls.sort_unstable();
    assert_eq!(calls[..4 * BLOCK_SIZE - 4], [0; 4 * BLOCK_SIZE - 4], "{calls:?}");
    assert!(calls.last().is_some_and(|&most| most <= 2 * 64), "{calls:?}");
    decode.drawn();
}

#[test]
fn drafts_allocate_nothing_either() {
    let mut decode = Loop::new(64, 40, 4000, 64);
    let drafts = [3; 2 * 64];
    let mut busy = 0;
    for round in 0..100 {
        let accepted = [round % 3; 64];
        let ((), measured) = measure(|| {
            let step = decode.step(Counts::All(3), Some(&drafts)).unwrap();
            decode.commit(step, Some(&accepted)).unwrap();
        });
        busy += usize::from(measured.calls > 0);
    }
    assert!(busy <= 40, "{busy} of 100 steps allocated: no more than those that cross a boundary");
    decode.drawn();
}

#[test]
fn a_step_or_commit_that_is_refused_memory_changes_nothing() {
    for crossing in 0..BLOCK_SIZE {
        let mut refusals = 0;
        for nth in 0.. {
            let mut decode = Loop::new(3, 40, 100, 16);
            for _ in 0..crossing {
                decode.advance();
            }
            let before = decode.drawn();
            let (step, was_refused) = refuse_nth(nth, || decode.step(Counts::All(1), None));
            if step == Err(Error::Memory) {
                assert_eq!(decode.drawn(), before, "I7: step {crossing}, request {nth}");
                refusals += 1;
            } else {
                let step = step.unwrap();
                let planned = decode.drawn();
                let (done, was_refused) = refuse_nth(nth, || decode.commit(step, None));
                if done == Err(Error::Memory) {
                    assert_eq!(decode.drawn(), planned, "I7: commit {crossing}, request {nth}");
                    assert!(was_refused);
                    decode.commit(step, None).unwrap();
                } else {
                    done.unwrap();
                }
                decode.drawn();
            }
            if !was_refused {
                break;
            }
        }
        assert!(refusals > 0 || crossing != 9, "a step that crosses a boundary asks for memory");
    }
}

fn fastest(times: usize, mut work: impl FnMut()) -> Duration {
    (0..times)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .min()
        .unwrap()
}

#[test]
fn i13_a_step_costs_the_same_whatever_its_sequences_and_the_pool_are() {
    let mut small = Loop::new(16, 20, 1000, 16);
    let mut large = Loop::new(16, 40_000, 1_000_000, 8192);
    for decode in [&mut small, &mut large] {
        for _ in 0..BLOCK_SIZE {
            decode.advance();
        }
    }
    let cost = [&mut small, &mut large].map(|decode| fastest(200, || decode.advance()));
    assert!(cost[1] < cost[0] * 20 + Duration::from_micros(50), "{cost:?}");
}

#[test]
fn a_batch_whose_sequences_are_gone_holds_nothing() {
    let mut decode = Loop::new(8, 40, 100, 16);
    let step = decode.step(Counts::All(1), None).unwrap();
    for sequence in decode.sequences.clone() {
        decode.pager.release(sequence, Departure::Aborted);
    }
    decode.commit(step, None).unwrap();
    assert_eq!(decode.applied, [false; 8]);
    assert_eq!(decode.pager.get_batch(decode.batch).unwrap().rows.len(), 0);
    assert_eq!((decode.pager.stats().active_blocks, decode.shape.buffers), (0, 1));
    decode.drawn();
}

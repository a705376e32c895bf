//! Traces: 64 bits for a block and all above it, kept for each node's last block where ghosts are wanted.
//!
//! The trace of a path is `t * M + h` over its blocks, `h` being a block's own. It can be taken back block by block, as `M`
//! is odd: so a node needs only that of its end, when blocks are evicted off its tail as well as when it grows.

use super::Index;
use crate::error::Result;
use crate::ids::{NodeId, Token};
use crate::memory::with_capacity;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const STEP_BACK: u64 = inverse(STEP);

/// `odd * inverse(odd) == 1` modulo 2^64: each round doubles the bits that are right.
const fn inverse(odd: u64) -> u64 {
    let (mut found, mut rounds) = (odd, 0);
    while rounds < 5 {
        found = found.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(found)));
        rounds += 1;
    }
    found
}

/// A block's own part.
fn own(tokens: &[Token]) -> u64 {
    tokens.iter().fold(0x243f_6a88_85a3_08d3, |mixed, &token| {
        let mixed = (mixed ^ u64::from(token)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 32)
    })
}

/// The trace of a path that goes on with a block.
#[must_use]
pub fn after(trace: u64, tokens: &[Token]) -> u64 {
    trace.wrapping_mul(STEP).wrapping_add(own(tokens))
}

fn before(trace: u64, tokens: &[Token]) -> u64 {
    trace.wrapping_sub(own(tokens)).wrapping_mul(STEP_BACK)
}

impl Index {
    /// Keeps traces from now on, while it is empty.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn keep_traces(&mut self, num_blocks: usize) -> Result<()> {
        self.traces = Some(with_capacity(num_blocks)?);
        Ok(())
    }

    /// The trace of the path that ends with a node, or of a namespace; 0 where none are kept.
    #[must_use]
    pub fn trace(&self, id: NodeId) -> u64 {
        let Some(traces) = &self.traces else { return 0 };
        if !id.is_root() {
            return traces[id.index()];
        }
        let root = self.root(id);
        let start = own(&[root.epoch, root.name.len() as Token]);
        root.name.iter().fold(start, |trace, &byte| after(trace, &[Token::from(byte)]))
    }

    /// A new node, or one that is another from now on, has this trace.
    fn set_trace(&mut self, id: NodeId, trace: u64) {
        let Some(traces) = &mut self.traces else { return };
        if id.index() == traces.len() {
            traces.push(trace);
        } else {
            traces[id.index()] = trace;
        }
    }

    /// A node came into being below its parent.
    pub(super) fn start_trace(&mut self, id: NodeId) {
        if self.traces.is_some() {
            let blocks = self[id].run.tokens(self.block_size).chunks_exact(self.block_size);
            let trace = blocks.fold(self.trace(self[id].parent), after);
            self.set_trace(id, trace);
        }
    }

    /// A node is split: `upper` ends above all blocks of `lower`.
    pub(super) fn split_trace(&mut self, lower: NodeId, upper: NodeId) {
        if self.traces.is_some() {
            let blocks = self[lower].run.tokens(self.block_size).rchunks_exact(self.block_size);
            let trace = blocks.fold(self.trace(lower), before);
            self.set_trace(upper, trace);
        }
    }

    /// A node has grown by a block.
    pub(super) fn grow_trace(&mut self, id: NodeId, tokens: &[Token]) {
        if self.traces.is_some() {
            self.set_trace(id, after(self.trace(id), tokens));
        }
    }

    /// A node is about to lose the last `count` of its blocks: names the trace of each, deepest first.
    pub fn cut_trace(&mut self, id: NodeId, count: usize, mut name: impl FnMut(u64)) {
        if self.traces.is_some() {
            let blocks = self[id].run.tokens(self.block_size).rchunks_exact(self.block_size).take(count);
            let trace = blocks.fold(self.trace(id), |trace, tokens| {
                name(trace);
                before(trace, tokens)
            });
            self.set_trace(id, trace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_taken_back_block_by_block() {
        let (a, b, c) = ([1, 2, 3], [4, 5, 6], [0, 0, 0]);
        let trace = [a, b, c].iter().fold(7, |trace, block| after(trace, block));
        let back = before(before(trace, &c), &b);
        assert_eq!((back, before(back, &a)), (after(7, &a), 7));
        assert_ne!(after(after(7, &a), &b), after(after(7, &b), &a));
        assert_eq!(STEP.wrapping_mul(STEP_BACK), 1);
    }
}

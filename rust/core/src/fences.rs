//! Fences: device blocks that a running kernel may still read or write although nobody holds them any more.
//!
//! A later step may have such a block, since it runs behind the kernel; a transfer may not, since copies run beside it
//! (`docs/design/rules.md` 16.1). What is let go of while steps are open is noted with the newest of them, and is
//! fenced as long as a step that is not newer is open. Only what was let go of since the oldest open step is here.

use std::collections::BTreeMap;

use crate::ids::{BlockId, NodeId};

/// Which free blocks and cached nodes are fenced.
#[derive(Debug, Default)]
pub struct Fences {
    /// Without transfers there is nothing to fence.
    is_on: bool,
    next_step: u64,
    /// Open steps of all batches, in the order in which they were planned.
    open: Vec<u64>,
    blocks: BTreeMap<BlockId, u64>,
    nodes: BTreeMap<NodeId, u64>,
}

impl Fences {
    /// Nothing is fenced; nothing ever will be unless `is_on`.
    #[must_use]
    pub fn new(is_on: bool) -> Self {
        Self { is_on, ..Self::default() }
    }

    /// A step was planned; answers its number here.
    pub fn open(&mut self) -> u64 {
        let step = self.next_step;
        if self.is_on {
            self.next_step += 1;
            self.open.push(step);
        }
        step
    }

    /// A step is committed or cancelled.
    pub fn close(&mut self, step: u64) {
        if !self.is_on {
            return;
        }
        let oldest_before = self.open.first().copied();
        self.open.retain(|&open| open != step);
        if self.open.first().copied() == oldest_before {
            return;
        }
        // Fenced as long as a step is open that was when the block was let go of, or is older.
        let oldest = self.open.first().copied().unwrap_or(u64::MAX);
        self.blocks.retain(|_, &mut fence| fence >= oldest);
        self.nodes.retain(|_, &mut fence| fence >= oldest);
    }

    /// A block became free.
    pub fn note_block(&mut self, block: BlockId) {
        if let Some(&newest) = self.open.last() {
            self.blocks.insert(block, newest);
        }
    }

    /// A node became idle.
    pub fn note_node(&mut self, node: NodeId) {
        if let Some(&newest) = self.open.last() {
            self.nodes.insert(node, newest);
        }
    }

    /// A block was handed out.
    pub fn clear_block(&mut self, block: BlockId) {
        if !self.blocks.is_empty() {
            self.blocks.remove(&block);
        }
    }

    /// A node is held again, or gone.
    pub fn clear_node(&mut self, node: NodeId) {
        if !self.nodes.is_empty() {
            self.nodes.remove(&node);
        }
    }

    /// A node was split.
    pub fn split(&mut self, lower: NodeId, upper: NodeId) {
        if let Some(&fence) = self.nodes.get(&lower) {
            self.nodes.insert(upper, fence);
        }
    }

    /// Is a free block fenced?
    #[must_use]
    pub fn has_block(&self, block: BlockId) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Is an idle node fenced?
    #[must_use]
    pub fn has_node(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Fenced free blocks, ascending.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.keys().copied()
    }

    /// Fenced idle nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.keys().copied()
    }

    /// Are there neither?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.nodes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_fenced_until_the_steps_of_its_time_are_over() {
        let mut fences = Fences::new(true);
        fences.note_block(1);
        let (a, b) = (fences.open(), fences.open());
        fences.note_block(2);
        let c = fences.open();
        fences.note_node(NodeId::node(3));
        fences.close(b);
        assert_eq!(fences.blocks().collect::<Vec<_>>(), [2], "a is open, and was open when 2 was let go of");
        fences.close(a);
        assert!(!fences.has_block(2) && fences.has_node(NodeId::node(3)));
        fences.close(c);
        assert!(fences.is_empty());
    }

    #[test]
    fn without_transfers_nothing_is_noted() {
        let mut fences = Fences::new(false);
        let step = fences.open();
        fences.note_block(1);
        assert!(fences.is_empty());
        fences.close(step);
    }
}

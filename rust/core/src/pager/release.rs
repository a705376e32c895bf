//! What some sequences would free if they let go of their blocks (`docs/design/rules.md` 18.1). Nothing changes: the holds
//! that would be lost are counted beside those that there are.

use super::Pager;
use crate::blocks::State as BlockState;
use crate::error::Result;
use crate::ids::{BlockId, NodeId};
use crate::memory::Table;
use crate::sequence::Sequence;

/// Holds that would be lost.
#[derive(Debug, Default)]
pub(super) struct Release {
    nodes: Table<NodeId, u32>,
    blocks: Table<BlockId, u32>,
}

/// A sequence as its row in a batch knows it, which may be ahead of the sequence itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub sequence: &'a Sequence,
    pub path_blocks: usize,
    pub num_committed: usize,
    pub len: usize,
}

impl Release {
    /// One more sequence lets go; answers how many blocks become free or evictable by it. Cost: its nodes, and those of its
    /// blocks that are not published.
    ///
    /// # Errors
    /// `Memory`: what is counted is of no use then.
    pub fn add(&mut self, pager: &Pager, seen: Seen<'_>) -> Result<usize> {
        let mut freed = 0;
        for block in pager.loose_blocks(seen) {
            freed += self.lose_block(pager, block)?;
        }
        Ok(freed + self.lose_node(pager, seen.sequence.end)?)
    }

    fn lose_block(&mut self, pager: &Pager, block: BlockId) -> Result<usize> {
        if let Some(extra) = pager.extra_holds.get(&block) {
            return self.lose_node(pager, extra.node);
        }
        let BlockState::Private(holders) = pager.blocks.state(block) else { return Ok(0) };
        self.blocks.try_reserve(1)?;
        let lost = self.blocks.entry(block).or_insert(0);
        *lost += 1;
        if *lost < holders {
            return Ok(0);
        }
        Ok(1 + self.withdraw(pager, block)?)
    }

    /// A block would be free: a queued copy into it lets go of its source. (No source is the target of a queued copy, so
    /// this goes no deeper.)
    fn withdraw(&mut self, pager: &Pager, target: BlockId) -> Result<usize> {
        let source = pager.copies.origin(target);
        if source == target { Ok(0) } else { self.lose_block(pager, source) }
    }

    fn lose_node(&mut self, pager: &Pager, end: NodeId) -> Result<usize> {
        let (mut node, mut freed) = (end, 0);
        while !node.is_root() {
            self.nodes.try_reserve(1)?;
            *self.nodes.entry(node).or_insert(0) += 1;
            if !self.is_idle(pager, node) {
                break;
            }
            if self.is_room(pager, node) {
                let run = &pager.index[node].run;
                freed += run.len();
                if pager.copies.has_targets() && !pager.index.is_live(node) {
                    for &block in run.blocks(pager.config.block_size) {
                        freed += self.withdraw(pager, block)?;
                    }
                }
            }
            node = pager.index[node].parent;
        }
        Ok(freed)
    }

    /// Would nobody hold it any more?
    fn is_idle(&self, pager: &Pager, node: NodeId) -> bool {
        let held = &pager.index[node];
        self.nodes.get(&node).is_some_and(|&lost| lost == held.pins + held.held_children)
    }

    /// Would its blocks be free or evictable? (What an offload reads is not, as long as it does.)
    fn is_room(&self, pager: &Pager, node: NodeId) -> bool {
        self.is_idle(pager, node) && !pager.evict.slot(node).is_in_transit()
    }

    /// Does a sequence hold a block that would be free or evictable?
    pub fn frees(&self, pager: &Pager, seen: Seen<'_>) -> bool {
        let is_free = |block: BlockId| match (pager.extra_holds.get(&block), pager.blocks.state(block)) {
            (Some(extra), _) => self.is_room(pager, extra.node),
            (None, BlockState::Private(holders)) => self.blocks.get(&block) == Some(&holders),
            (None, _) => false,
        };
        let mut node = seen.sequence.end;
        // Where a node stays held, so do those above it.
        while !node.is_root() && self.is_idle(pager, node) {
            if self.is_room(pager, node) {
                return true;
            }
            node = pager.index[node].parent;
        }
        pager.loose_blocks(seen).any(is_free)
    }

    /// Tokens that a sequence would have to compute again: those below which nobody else holds its path.
    pub fn tokens(&self, pager: &Pager, seen: Seen<'_>) -> usize {
        let block_size = pager.config.block_size;
        let (mut node, mut kept) = (seen.sequence.end, seen.path_blocks);
        while !node.is_root() && (self.is_idle(pager, node) || !pager.index.is_live(node)) {
            kept -= pager.index[node].run.len();
            node = pager.index[node].parent;
        }
        seen.num_committed - kept.min((seen.len - 1) / block_size) * block_size
    }
}

impl Pager {
    /// A sequence with what its row has committed and published, without bringing that home: the row stays warm.
    pub(super) fn seen<'a>(&self, sequence: &'a Sequence) -> Seen<'a> {
        let Sequence { path_blocks, num_committed, len, .. } = *sequence;
        match self.row_seen(sequence) {
            Some(row) => Seen {
                sequence,
                path_blocks: path_blocks + (row.flushed as usize - len) / self.config.block_size,
                num_committed: row.committed as usize,
                len: row.len as usize,
            },
            None => Seen { sequence, path_blocks, num_committed, len },
        }
    }

    /// Table entries that are not the path's.
    fn loose_blocks<'a>(&'a self, seen: Seen<'a>) -> impl Iterator<Item = BlockId> + 'a {
        let Seen { sequence, path_blocks, .. } = seen;
        let behind = sequence.table.get(path_blocks..).unwrap_or_default().iter().copied();
        let (mut node, mut end) = (sequence.end, path_blocks);
        let nodes = std::iter::from_fn(move || {
            // Above the first duplicate there is none.
            if end <= sequence.first_duplicate || node.is_root() {
                return None;
            }
            let run = &self.index[node].run;
            let start = end - run.len();
            let own = sequence.table.get(start..end).unwrap_or_default();
            let blocks = run.blocks(self.config.block_size);
            (node, end) = (self.index[node].parent, start);
            Some(own.iter().zip(blocks).filter(|(own, block)| own != block).map(|(&own, _)| own))
        });
        behind.chain(nodes.flatten())
    }
}

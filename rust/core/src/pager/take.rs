//! Taking blocks: free ones, then what a reset left, then the exact shortfall by eviction (I8).

use super::Pager;
use crate::error::{Error, Result};
use crate::ids::{BlockId, NodeId};
use crate::transfers::Tier;

impl Pager {
    /// Free blocks, those of before a reset included.
    #[must_use]
    pub fn num_free_blocks(&self) -> usize {
        self.blocks.num_free() + self.evict.num_stale()
    }

    /// Free and evictable blocks that no transfer can have yet (`docs/design/rules.md` 16.1).
    #[must_use]
    pub fn num_fenced(&self) -> (usize, usize) {
        let mut fenced = (self.fences.blocks().count(), 0);
        for node in self.fences.nodes() {
            let (slot, blocks) = (self.evict.slot(node), self.index[node].run.len());
            if !self.index.is_live(node) {
                fenced.0 += blocks;
            } else if slot.is_queued() && !slot.is_in_transit() {
                fenced.1 += blocks;
            }
        }
        fenced
    }

    /// Cached blocks that a call could evict: all of them.
    #[must_use]
    pub fn num_evictable_blocks(&self) -> usize {
        self.evict.evictable()
    }

    /// Can `needed` blocks be taken? If not, the refusal is counted.
    pub(super) fn check_room(&mut self, needed: usize) -> Result<()> {
        let (free, evictable) = (self.num_free_blocks(), self.num_evictable_blocks());
        if needed <= free + evictable {
            return Ok(());
        }
        let total = self.config.num_blocks;
        let (rows, tier) = (Box::default(), Tier::Device);
        self.counted(Err(Error::OutOfBlocks { needed, free, evictable, total, rows, reserve: 0, tier }))
    }

    /// Takes `count` blocks, which `check_room` has found: free ones, then what a reset left, then the exact rest by
    /// eviction (I8). They are private, held once.
    pub(super) fn take(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let wanted = out.len() + count;
        while out.len() < wanted {
            let before = out.len();
            self.blocks.pop(wanted - before, out);
            for &block in &out[before..] {
                self.fences.clear_block(block);
            }
            if out.len() == wanted {
                return;
            }
            let stale = self.evict.stalest();
            let Some(node) = stale.or_else(|| self.evict.victim()) else {
                unreachable!("I8: the room for {count} blocks was checked");
            };
            if let Some(next) = self.evict.after(node) {
                self.index.touch(next);
            }
            self.take_tail(node, stale.is_some(), wanted - out.len(), out);
        }
    }

    /// The same for a transfer, which passes over what is fenced; there is room for that, too.
    pub(super) fn take_unfenced(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let wanted = out.len() + count;
        while out.len() < wanted {
            self.blocks.pop_where(wanted - out.len(), |block| !self.fences.has_block(block), out);
            if out.len() == wanted {
                return;
            }
            let is_free_to_go = |&node: &NodeId| !self.fences.has_node(node) && !self.evict.slot(node).is_in_transit();
            let stale = self.evict.iter(self.evict.stale()).find(|&node| !self.fences.has_node(node));
            let Some(node) = stale.or_else(|| self.evict.in_eviction_order().find(is_free_to_go)) else {
                unreachable!("I9: the room for {count} blocks was checked");
            };
            self.take_tail(node, stale.is_some(), wanted - out.len(), out);
        }
    }

    /// Takes up to `most` blocks off the tail of a node that nobody holds.
    fn take_tail(&mut self, node: NodeId, is_stale: bool, most: usize, out: &mut Vec<BlockId>) {
        let before = out.len();
        // Usually all at once. While copies are queued, block by block: an evicted target withdraws its copy at that
        // moment.
        let most = if self.copies.has_targets() { 1 } else { most };
        if !is_stale {
            let (ghosts, mut number) = (&mut self.ghosts, self.counters.evicted_blocks);
            self.index.cut_trace(node, most, |trace| {
                ghosts.add(trace, number);
                number += 1;
            });
        }
        let blocks = &mut self.blocks;
        let taken = self.index.pop_tail(node, most, |block| {
            blocks.set_private(block);
            out.push(block);
        });
        let is_empty = self.index[node].run.is_empty();
        if is_stale {
            self.evict.take_stale(node, taken, is_empty);
        } else {
            let slot = self.evict.slot(node);
            self.counters.evicted_blocks += taken as u64;
            self.counters.evicted_idle_ticks += taken as u64 * (self.counters.clock_ticks - slot.idle_since());
            self.counters.evicted_hits += taken as u64 * u64::from(slot.hits());
            self.evict.evict(node, taken);
            if is_empty {
                self.evict.dequeue(node, 0);
            }
        }
        if is_empty {
            self.fences.clear_node(node);
            self.index.remove(node);
        }
        for &block in &out[before..] {
            self.withdraw_copy_into(block);
        }
    }
}

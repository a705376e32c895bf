//! I1, I2, I6: each block is in one place; queues hold what is idle, children before parents.

use std::collections::{BTreeMap, BTreeSet};

use super::Checker;
use crate::blocks::State as BlockState;
use crate::ids::{BlockId, NodeId};

impl Checker<'_> {
    pub(super) fn check_queues(&mut self) {
        let pager = self.pager;
        let mut place: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (name, queue) in pager.evict.iter_queues() {
            let mut blocks = 0;
            for id in pager.evict.iter(queue) {
                let nth = place.len();
                let is_idle = pager.index[id].in_use() && pager.index.is_live(id) && !pager.index[id].is_held();
                self.expect(is_idle, || format!("I2: {id:?} waits in queue {name} but is not idle"));
                self.expect(place.insert(id, nth).is_none(), || format!("I2: {id:?} waits twice"));
                blocks += pager.index[id].run.len();
            }
            self.expect(blocks == queue.blocks(), || {
                format!("I1: queue {name} counts {} blocks and has {blocks}", queue.blocks())
            });
        }
        for (id, node) in pager.index.nodes() {
            if !pager.index.is_live(id) || node.is_held() {
                continue;
            }
            let Some(nth) = place.get(&id) else {
                self.violations.push(format!("I2: {id:?} is idle and waits in no queue"));
                continue;
            };
            if let Some(above) = place.get(&node.parent) {
                self.expect(nth < above, || format!("I6: {:?} would be evicted before its child {id:?}", node.parent));
            }
        }
    }

    /// I1 and I2: the states partition the pool.
    pub(super) fn check_conservation(&mut self) {
        let pager = self.pager;
        let block_size = pager.config().block_size;
        let mut seen: BTreeSet<BlockId> = BTreeSet::new();
        let mut twice: Vec<BlockId> = Vec::new();
        let mut note = |block: BlockId| {
            if !seen.insert(block) {
                twice.push(block);
            }
        };

        let (mut free, mut stale, mut cached, mut active) = (0, 0, 0, 0);
        for block in pager.blocks.iter_free() {
            free += 1;
            note(block);
        }
        for id in pager.evict.iter(pager.evict.stale()) {
            stale += pager.index[id].run.len();
        }
        for (id, node) in pager.index.nodes() {
            node.run.blocks(block_size).iter().copied().for_each(&mut note);
            if node.is_held() {
                active += node.run.len();
            } else if pager.index.is_live(id) {
                cached += node.run.len();
            }
        }
        for &block in self.private.keys() {
            active += 1;
            note(block);
        }
        for block in twice {
            self.violations.push(format!("I2: block {block} is in two places"));
        }
        let wrong: Vec<BlockId> =
            pager.blocks.iter_free().filter(|&block| pager.blocks.state(block) != BlockState::Free).collect();
        self.expect(wrong.is_empty(), || format!("I2: blocks {wrong:?} are on the free stack and not free"));
        for (id, node) in pager.index.nodes() {
            let wrong = node.run.blocks(block_size).iter().filter(|&&block| !pager.blocks.is_indexed(block)).count();
            self.expect(wrong == 0, || format!("I2: {wrong} blocks of {id:?} do not know that they are indexed"));
        }

        let stats = pager.stats();
        let counted = (stats.free_blocks, stats.cached_blocks, stats.active_blocks);
        let found = (free + stale, cached, active);
        self.expect(counted == found, || format!("I1: free, cached and active count {counted:?} and are {found:?}"));
        let total = free + stale + cached + active + stats.reserved_blocks;
        self.expect(total == stats.total_blocks, || {
            format!("I1: {total} blocks are accounted for, of {}", stats.total_blocks)
        });
    }
}

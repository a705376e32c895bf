//! I1, I2, I6: each block is in one place; queues hold what is idle, children before parents.

use super::Checker;
use crate::blocks::State as BlockState;
use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::zeroed;

impl Checker<'_> {
    pub(super) fn check_queues(&mut self) -> Result<()> {
        let pager = self.pager;
        // By the node's index, counted from 1; 0 is in no queue.
        let mut place = zeroed(pager.index.num_node_slots())?;
        let (mut nth, mut in_transit) = (0, 0);
        for (name, queue) in pager.evict.iter_queues() {
            let mut blocks = 0;
            for id in pager.evict.iter(queue) {
                nth += 1;
                let is_idle = pager.index[id].in_use() && pager.index.is_live(id) && !pager.index[id].is_held();
                let slot = pager.evict.slot(id);
                in_transit += if slot.is_in_transit() { pager.index[id].run.len() } else { 0 };
                self.expect(is_idle, || format!("I2: {id:?} waits in queue {name} but is not idle"));
                let before = std::mem::replace(&mut place[id.index()], nth);
                self.expect(before == 0, || format!("I2: {id:?} waits twice"));
                blocks += pager.index[id].run.len();
            }
            self.expect(blocks == queue.blocks(), || {
                format!("I1: queue {name} counts {} blocks and has {blocks}", queue.blocks())
            });
        }
        let queued: usize = pager.evict.iter_queues().map(|(_, queue)| queue.blocks()).sum();
        let evictable = pager.evict.evictable();
        self.expect(evictable + in_transit == queued, || {
            format!("I9: {evictable} blocks are evictable, of {queued} that are idle, {in_transit} of these in transit")
        });
        for (id, node) in pager.index.nodes() {
            if !pager.index.is_live(id) || node.is_held() {
                continue;
            }
            let nth = place[id.index()];
            self.expect(nth > 0, || format!("I2: {id:?} is idle and waits in no queue"));
            let above = if node.parent.is_root() { 0 } else { place[node.parent.index()] };
            self.expect(above == 0 || nth < above, || {
                format!("I6: {:?} would be evicted before its child {id:?}", node.parent)
            });
        }
        Ok(())
    }

    /// I1 and I2: the states partition the pool.
    pub(super) fn check_conservation(&mut self) -> Result<()> {
        let pager = self.pager;
        let block_size = pager.config().block_size;
        let stats = pager.stats();
        // How often each block has been found.
        let mut seen: Vec<u8> = zeroed(pager.config().num_blocks)?;
        let mut note = |block: BlockId| seen[block as usize] = seen[block as usize].saturating_add(1);

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
            if node.is_held() || pager.evict.slot(id).is_in_transit() {
                active += node.run.len();
            } else if pager.index.is_live(id) {
                cached += node.run.len();
            }
        }
        for blocks in self.private.chunk_by(|a, b| a == b) {
            active += 1;
            note(blocks[0]);
        }
        let moving = stats.writing_blocks + stats.quarantined_blocks;
        active -= moving.min(active);
        for (block, _) in seen.iter().enumerate().filter(|&(_, &times)| times > 1) {
            self.violations.push(format!("I2: block {block} is in two places"));
        }
        let wrong: Vec<BlockId> =
            pager.blocks.iter_free().filter(|&block| pager.blocks.state(block) != BlockState::Free).collect();
        self.expect(wrong.is_empty(), || format!("I2: blocks {wrong:?} are on the free stack and not free"));
        for (id, node) in pager.index.nodes() {
            let wrong = node.run.blocks(block_size).iter().filter(|&&block| !pager.blocks.is_indexed(block)).count();
            self.expect(wrong == 0, || format!("I2: {wrong} blocks of {id:?} do not know that they are indexed"));
        }

        let counted = (stats.free_blocks, stats.cached_blocks, stats.active_blocks);
        let found = (free + stale, cached, active);
        self.expect(counted == found, || format!("I1: free, cached and active count {counted:?} and are {found:?}"));
        let total = free + stale + cached + active + moving + stats.reserved_blocks;
        self.expect(total == stats.total_blocks, || {
            format!("I1: {total} blocks are accounted for, of {}", stats.total_blocks)
        });
        Ok(())
    }
}

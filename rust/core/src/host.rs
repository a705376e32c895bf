//! The host tier: blocks of its own, a prefix index of its own, and an LRU queue.
//!
//! It has its own tree rather than a mark at each node of the device's: what is on the host and what is on the device
//! are two prefix-closed sets, and neither contains the other. Each tree stays as simple, and each path in it as exact,
//! as if it were alone; the price is a second copy of the tokens (`docs/design/tiers.md`).
//!
//! Blocks that are not in the index belong to plans or swapped sequences, once each.

use std::ops::Range;

use crate::blocks::Blocks;
use crate::config::PolicyKind;
use crate::content;
use crate::error::Result;
use crate::evict::{Context, Eviction};
use crate::hash::Key;
use crate::ids::{BlockId, NodeId, Token};
use crate::index::{Found, Index};
use crate::memory::with_capacity;
use crate::preemptions::Why;
use crate::run::{Run, run_blocks_max};
use crate::stored::Stored;
use crate::transit::Transit;

/// What a swapped sequence has on the host.
#[derive(Debug)]
pub struct Away {
    /// The node at the end of its path there, which it holds; none for an empty path.
    pub end: Option<NodeId>,
    /// Blocks of that path.
    pub path_blocks: usize,
    /// Blocks of its own, for the positions behind.
    pub own: Vec<BlockId>,
    /// While it comes back: the node at the end of its path on the device, which it holds, and the blocks of that path.
    pub back: Option<(NodeId, usize)>,
    /// Why it went.
    pub why: Why,
}

/// A second tier.
#[derive(Debug)]
pub struct Host {
    /// Its blocks.
    pub blocks: Blocks,
    /// What is in them.
    pub index: Index,
    /// How it ages.
    pub evict: Eviction,
    /// What saves read.
    pub in_transit: Transit,
    /// What a store has.
    pub stored: Stored,
    /// Blocks that eviction has freed.
    pub num_evicted: u64,
    num_blocks: usize,
    block_size: usize,
}

impl Host {
    /// A tier of free blocks.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(num_blocks: usize, block_size: usize, key: Key) -> Result<Self> {
        Ok(Self {
            blocks: Blocks::new(num_blocks, false)?,
            index: Index::new(num_blocks, block_size, key)?,
            evict: Eviction::new(PolicyKind::Lru, num_blocks)?,
            in_transit: Transit::default(),
            stored: Stored::default(),
            num_evicted: 0,
            num_blocks,
            block_size,
        })
    }

    /// Blocks of the tier.
    #[must_use]
    pub const fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Free blocks, those of before a reset included.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.blocks.num_free() + self.evict.num_stale()
    }

    /// Blocks that can be taken.
    #[must_use]
    pub fn room(&self) -> usize {
        self.num_free() + self.evict.evictable()
    }

    // ---- find ------------------------------------------------------------------------------------------------------

    /// The longest prefix of a list of tokens that is here, at most `limit` blocks; it never ends inside a run of content
    /// tokens.
    #[must_use]
    pub fn find(&self, name: &[u8], tokens: &[Token], limit: usize) -> Option<Found> {
        let found = self.index.find(self.index.find_root(name)?, tokens, limit);
        (found.blocks > 0).then_some(found)
    }

    /// Blocks of a found path that are cached now and would be held.
    #[must_use]
    pub fn idle_blocks(&self, found: Found) -> usize {
        self.index.idle_blocks(found, |node| !self.evict.slot(node).is_in_transit())
    }

    // ---- hold and let go -------------------------------------------------------------------------------------------

    /// The node that ends exactly where a found path ends.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses to split a node.
    pub fn end_at(&mut self, found: Found) -> Result<NodeId> {
        if found.node.is_root() || found.within == self.index[found.node].run.len() {
            return Ok(found.node);
        }
        let upper = self.index.split(found.node, found.within)?;
        self.evict.split(found.node, upper);
        if self.evict.slot(found.node).is_in_transit() {
            self.in_transit.split(upper);
        }
        Ok(upper)
    }

    /// Holds a node, and with it all above.
    pub fn hold(&mut self, end: NodeId) {
        let mut node = end;
        let mut was_idle = self.index.pin(node, 1);
        while was_idle {
            self.evict.dequeue(node, self.index[node].run.len());
            let parent = self.index[node].parent;
            if parent.is_root() {
                break;
            }
            was_idle = self.index.add_held_child(parent);
            node = parent;
        }
    }

    /// Lets go of a node. What nobody holds any more becomes cached, or free if it was forgotten, deepest first.
    pub fn let_go(&mut self, end: NodeId, clock: u64) {
        let mut node = end;
        let mut is_idle = self.index.unpin(node);
        while is_idle {
            let parent = self.index[node].parent;
            if self.index.is_live(node) {
                self.index[node].run.shrink(self.block_size);
                self.evict.enqueue(node, self.index[node].run.len(), clock, Context::COPY);
            } else if !self.evict.slot(node).is_in_transit() {
                self.free_node(node);
            }
            if parent.is_root() {
                break;
            }
            is_idle = self.index.remove_held_child(parent);
            node = parent;
        }
    }

    /// A save reads a path up to the end of a node.
    pub fn hold_for_plan(&mut self, end: NodeId) {
        self.in_transit.hold(end, &self.index, &mut self.evict);
    }

    /// The save has read it. What was forgotten meanwhile, and nobody else holds, becomes free, deepest first.
    pub fn let_go_for_plan(&mut self, end: NodeId) {
        let mut node = end;
        while !node.is_root() && self.in_transit.leave(node, &self.index, &mut self.evict) {
            let parent = self.index[node].parent;
            if !self.index[node].is_held() && !self.index.is_live(node) {
                self.free_node(node);
            }
            node = parent;
        }
    }

    /// The store may have lost what it had of a path, but for its last `count` blocks.
    pub fn doubt_above(&mut self, end: NodeId, count: usize) {
        let (mut node, mut skipped) = (end, count);
        while !node.is_root() {
            let run = &self.index[node].run;
            let above = run.len().saturating_sub(skipped);
            for &block in &run.blocks(self.block_size)[..above] {
                self.stored.doubt(block);
            }
            skipped -= run.len() - above;
            node = self.index[node].parent;
        }
    }

    /// Nothing indexed so far can be found again.
    ///
    /// # Errors
    /// `Value` after 2^32 - 2 of them.
    pub fn reset(&mut self) -> Result<()> {
        self.index.start_epoch()?;
        // What a save reads does not become free yet.
        for node in self.in_transit.nodes() {
            self.evict.dequeue(node, self.index[node].run.len());
        }
        self.evict.retire();
        Ok(())
    }

    /// Frees the blocks of a dead node, deepest first, and the node.
    pub fn free_node(&mut self, node: NodeId) {
        let run = std::mem::take(&mut self.index[node].run);
        self.free(run.blocks(self.block_size));
        self.index.remove(node);
    }

    /// Pushes blocks, the last first.
    pub fn free(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.blocks.push(block);
        }
    }

    /// Makes the last block of a path the first of a node, which keeps its id.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn cut_above(&mut self, found: Found) -> Result<()> {
        if found.within > 1 {
            self.end_at(Found { within: found.within - 1, ..found })?;
        }
        Ok(())
    }

    /// Takes a node and all below it out of the index, children before parents; answers how many blocks those were.
    /// What nobody holds is free.
    pub fn drop_subtree(&mut self, top: NodeId) -> usize {
        let mut dropped = 0;
        self.index.unlink_sibling(top);
        let mut next = Some(self.index.deepest_first(top));
        while let Some(node) = next {
            next = self.index.next_in_subtree(node, top);
            let blocks = self.index[node].run.len();
            dropped += blocks;
            self.index.forget(node);
            if !self.index[node].is_held() {
                self.evict.dequeue(node, blocks);
                if !self.evict.slot(node).is_in_transit() {
                    self.free_node(node);
                }
            }
        }
        dropped
    }

    /// A swapped sequence does not need its blocks here any more.
    pub fn give_back(&mut self, away: &Away, clock: u64) {
        self.free(&away.own);
        if let Some(end) = away.end {
            self.let_go(end, clock);
        }
    }

    // ---- take and index --------------------------------------------------------------------------------------------

    /// Takes `count` blocks, for which there is room: free ones, then what a reset left, then the exact rest by
    /// eviction.
    pub fn take(&mut self, count: usize, out: &mut Vec<BlockId>) {
        let before = out.len();
        let wanted = before + count;
        self.blocks.pop(count, out);
        while out.len() < wanted {
            let stale = self.evict.stalest();
            let Some(node) = stale.or_else(|| self.evict.victim()) else {
                unreachable!("I8: the room for {count} host blocks was checked");
            };
            let blocks = &mut self.blocks;
            let taken = self.index.pop_tail(node, wanted - out.len(), |block| {
                blocks.set_private(block);
                out.push(block);
            });
            let is_empty = self.index[node].run.is_empty();
            if stale.is_some() {
                self.evict.take_stale(node, taken, is_empty);
            } else {
                self.num_evicted += taken as u64;
                self.evict.evict(node, taken);
                if is_empty {
                    self.evict.dequeue(node, 0);
                }
            }
            if is_empty {
                self.index.remove(node);
            }
        }
        for &block in &out[before..] {
            self.stored.clear(block);
        }
    }

    /// Indexes blocks that have arrived: `blocks` are those of `tokens` from block `start` on, and the blocks above must be
    /// here. What is here already stays as it is, and what was brought for it comes to nothing; so does what would go on
    /// behind a part of somebody else's run of content tokens, or end inside a run.
    ///
    /// None, if nothing from `start` on is here now. (Also where the allocator refuses: a block that is not kept is no
    /// harm.)
    pub fn adopt(&mut self, name: &[u8], tokens: &[Token], start: usize, blocks: &[BlockId]) -> Option<Adopted> {
        let block_size = self.block_size;
        let safe = |blocks| content::cut_back(tokens.len(), |at| tokens[at], blocks, block_size);
        let stop = safe(start + blocks.len());
        if stop <= start {
            return None;
        }
        let root = self.index.find_or_make_root(name).ok()?;
        let adopted = self.adopt_below(root, tokens, start..stop, blocks, safe);
        self.index.drop_root_if_unused(root);
        adopted
    }

    fn adopt_below(
        &mut self,
        root: NodeId,
        tokens: &[Token],
        range: Range<usize>,
        blocks: &[BlockId],
        safe: impl Fn(usize) -> usize,
    ) -> Option<Adopted> {
        let Range { start, end: stop } = range;
        let place = self.index.walk(root, tokens, stop);
        let here = place.blocks;
        if here < start {
            return None;
        }
        let is_safe = safe(here) == here;
        let kept = if is_safe { here } else { safe(here).max(start) };
        let new = if is_safe { here..stop } else { kept..kept };
        if new.is_empty() && kept == start {
            return None;
        }
        let runs = self.runs(tokens, new.start, &blocks[new.start - start..new.end - start]).ok()?;
        let mut end = self.end_at(self.index.locate(place, kept)).ok()?;
        for run in runs {
            for &block in run.blocks(self.block_size) {
                self.blocks.set_indexed(block);
            }
            end = self.index.insert(end, run);
            self.evict.start(end);
        }
        self.hold(end);
        Some(Adopted { end, new })
    }

    /// Runs of blocks whose tokens start with block `first` of a list.
    fn runs(&self, tokens: &[Token], first: usize, blocks: &[BlockId]) -> Result<Vec<Run>> {
        let (block_size, most) = (self.block_size, run_blocks_max(self.block_size));
        let mut runs = with_capacity(blocks.len().div_ceil(most))?;
        for (nth, ids) in blocks.chunks(most).enumerate() {
            let first = first + nth * most;
            let tokens = &tokens[first * block_size..(first + ids.len()) * block_size];
            let mut run = Run::with_tokens(tokens, ids.len(), block_size)?;
            run.set_blocks(ids, block_size);
            runs.push(run);
        }
        Ok(runs)
    }
}

/// What became of blocks that arrived.
#[derive(Clone, Debug)]
pub struct Adopted {
    /// The node that ends with the last block that is here now. The caller holds it.
    pub end: NodeId,
    /// Blocks of the path that were indexed. Those before were here already; none is here behind them.
    pub new: Range<usize>,
}

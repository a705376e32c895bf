//! Commit, and publishing what has become full and computed (I4, I5).

use super::{ExtraHold, Pager};
use crate::blocks::State as BlockState;
use crate::content;
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{BlockId, CONTENT_START, Handle, NodeId, Token};
use crate::sequence::{Sequence, State};
use crate::tail::union_of_bits;

impl Pager {
    /// The KV of all positions below `end` (all, if none is given) is written. Full blocks become findable.
    ///
    /// # Errors
    /// `Stale`; `Value` past the sequence's end.
    pub fn commit(&mut self, handle: Handle, end: Option<usize>) -> Result<()> {
        self.with_running(handle, "commit", |pager, sequence| {
            let end = end.unwrap_or(sequence.len);
            if end > sequence.len {
                return Err(Error::Value(format!(
                    "end is {end}; it must be a position, {} at most: the sequence's length",
                    sequence.len
                )));
            }
            if pager.is_named(sequence) {
                return Err(Error::Step(format!(
                    "commit: an open step names sequence {}; commit the step, or cancel it first",
                    handle.serial
                )));
            }
            if end > sequence.table.len() * pager.config.block_size {
                return Err(Error::Value(format!(
                    "commit({end}): the last token has no block yet, so its KV cannot be written: commit({})",
                    sequence.len - 1
                )));
            }
            if end > sequence.num_committed {
                pager.counters.computed_tokens += (end - sequence.num_committed) as u64;
                pager.commit_to(sequence, end);
            }
            Ok(())
        })
    }

    /// Positions below `end` are written.
    pub(super) fn commit_to(&mut self, sequence: &mut Sequence, end: usize) {
        // Looked at only when a block has become full: a run of content tokens that cannot be published now would
        // otherwise be compared again at each token.
        let full_before = sequence.num_committed / self.config.block_size;
        sequence.num_committed = end;
        if end / self.config.block_size > full_before {
            self.withdraw(sequence);
            self.publish(sequence);
            self.announce(sequence);
        }
    }

    /// Publishes the full committed blocks below the path. Where the allocator refuses, the rest waits for the next
    /// commit.
    fn publish(&mut self, sequence: &mut Sequence) {
        if !self.config.prefix_cache || !self.may_publish(sequence) {
            return;
        }
        let start = sequence.path_blocks;
        let mut end = sequence.num_committed / self.config.block_size;
        if sequence.has_content {
            end = start + self.whole_runs(sequence, end - start);
        }
        while sequence.path_blocks < end {
            let limit = end - sequence.path_blocks;
            let first_block = &sequence.tail.first(self.config.block_size)[..self.config.block_size];
            // Where there is no child at all, none need be looked for.
            let child = self.index.first_child(sequence.end).some();
            let done = match child.and_then(|_| self.index.find_child(sequence.end, first_block)) {
                Some(child) => self.follow(sequence, child, limit),
                None => self.add(sequence, limit),
            };
            if !done {
                break;
            }
        }
        self.evict.policy().on_commit(Self::context(sequence, Departure::Moved), sequence.path_blocks - start);
    }

    /// Publishes the block behind a path, if that only makes the path's last node longer. (The usual commit of a full
    /// block, with as few looks into memory as it takes.)
    pub(super) fn publish_block(&mut self, end: NodeId, tokens: &[Token], block: BlockId) -> bool {
        let is_plain =
            union_of_bits(tokens) < CONTENT_START && self.index.is_live(end) && self.room_to_grow(end).is_some();
        if !is_plain || self.blocks.index_sole(&[block]) == 0 {
            return false;
        }
        self.index.push_block(end, tokens, block);
        true
    }

    /// Has nothing of its path been forgotten, and the pager not been reset, since it was admitted?
    pub(crate) fn may_publish(&self, sequence: &Sequence) -> bool {
        let is_forgotten = match sequence.state {
            State::Fetching => self.is_fetch_forgotten(sequence),
            State::SwappingIn => self.is_forgotten(sequence),
            _ => false,
        };
        let end = sequence.away.as_ref().and_then(|away| away.back).map_or(sequence.end, |(end, _)| end);
        !sequence.is_silent && self.index.is_live(end) && !is_forgotten
    }

    /// How many of the next `limit` blocks may be published so that no run of content tokens is published in part,
    /// and none continues below blocks of the index that agree with only a part of it.
    fn whole_runs(&self, sequence: &Sequence, limit: usize) -> usize {
        let block_size = self.config.block_size;
        let tail = &sequence.tail;
        let cut = |blocks| content::cut_back(tail.len(), |at| tail.get(at, block_size), blocks, block_size);
        let limit = cut(limit);
        let indexed = self.indexed_blocks(sequence, limit);
        let whole = cut(indexed);
        if whole < indexed {
            return whole;
        }
        // A block that was forgotten is not indexed twice, and keeps the run around it from being indexed.
        let own = &sequence.table[sequence.path_blocks..];
        (indexed..limit).find(|&at| self.blocks.is_indexed(own[at])).map_or(limit, cut)
    }

    /// How many of the next `limit` blocks the index has below the sequence's path.
    fn indexed_blocks(&self, sequence: &Sequence, limit: usize) -> usize {
        let (tail, block_size) = (&sequence.tail, self.config.block_size);
        let (mut node, mut blocks) = (sequence.end, 0);
        while blocks < limit {
            let Some(child) = self.index.find_child(node, tail.block(blocks, block_size)) else {
                break;
            };
            let run = &self.index[child].run;
            let common = tail.common_blocks_from(blocks, run, limit - blocks, block_size);
            (node, blocks) = (child, blocks + common);
            if common < run.len() {
                break;
            }
        }
        blocks
    }

    /// The next blocks are indexed already: the child joins the path. Where the table names other blocks, it keeps
    /// them: duplicates.
    fn follow(&mut self, sequence: &mut Sequence, child: NodeId, limit: usize) -> bool {
        let block_size = self.config.block_size;
        let common = sequence.tail.common_blocks(&self.index[child].run, limit, block_size);
        let mut node = child;
        if common < self.index[child].run.len() {
            let Ok(upper) = self.split(child, common) else {
                return false;
            };
            node = upper;
        }
        self.hold(node, 1);
        self.let_go(sequence.end, Self::context(sequence, Departure::Moved));
        for offset in 0..common {
            let position = sequence.path_blocks + offset;
            let block = sequence.table[position];
            if block == self.index[node].run.blocks(block_size)[offset] {
                // A fork's parent published the block that both have. The path holds it from now on.
                self.let_go_of_block(block, Self::context(sequence, Departure::Moved));
            } else {
                sequence.first_duplicate = sequence.first_duplicate.min(position);
            }
        }
        sequence.end = node;
        sequence.path_blocks += common;
        sequence.tail.advance(common, block_size);
        true
    }

    /// The next blocks are new to the index.
    fn add(&mut self, sequence: &mut Sequence, limit: usize) -> bool {
        let block_size = self.config.block_size;
        let start = sequence.path_blocks;
        let limit = limit.min(sequence.tail.first(block_size).len() / block_size);
        let room = self.room_to_grow(sequence.end);
        let limit = room.map_or(limit, |room| limit.min(room));
        let count = self.blocks.index_sole(&sequence.table[start..start + limit]);
        if count == 0 {
            return self.add_shared(sequence);
        }
        if room.is_some() {
            for position in start..start + count {
                let tokens = &sequence.tail.first(block_size)[(position - start) * block_size..][..block_size];
                self.index.push_block(sequence.end, tokens, sequence.table[position]);
            }
            sequence.tail.advance(count, block_size);
            sequence.path_blocks += count;
            return true;
        }
        if self.add_node(sequence, count).is_none() {
            for &block in &sequence.table[start..start + count] {
                self.blocks.set_private(block);
            }
            return false;
        }
        true
    }

    /// Room in a node that can grow in place: nobody else would see the new blocks as part of what they hold or hit.
    fn room_to_grow(&self, end: NodeId) -> Option<usize> {
        if end.is_root() {
            return None;
        }
        let node = &self.index[end];
        // Held children may be dead ones, which hang below the node's present end.
        let is_own_leaf = node.pins == 1 && node.held_children == 0 && node.first_child.is_none() && {
            // What a plan reads is what it said that it reads.
            let slot = self.evict.slot(end);
            slot.hits() == 0 && !slot.is_in_transit()
        };
        let room = node.run.capacity() - node.run.len();
        (is_own_leaf && room > 0).then_some(room)
    }

    /// A block that others hold, too, gets a node of its own, and each of their holds becomes a pin of it.
    fn add_shared(&mut self, sequence: &mut Sequence) -> bool {
        let block = sequence.table[sequence.path_blocks];
        let BlockState::Private(holders) = self.blocks.state(block) else {
            // It has been indexed before and was forgotten: it waits until it is freed.
            return false;
        };
        if self.extra_holds.try_reserve(1).is_err() {
            return false;
        }
        let Some(node) = self.add_node(sequence, 1) else {
            return false;
        };
        self.blocks.set_indexed(block);
        self.index.pin(node, holders - 1);
        self.extra_holds.insert(block, ExtraHold { node, holds: holders - 1 });
        true
    }

    fn add_node(&mut self, sequence: &mut Sequence, count: usize) -> Option<NodeId> {
        let block_size = self.config.block_size;
        let mut run = sequence.tail.take_run(count, block_size).ok()?;
        run.set_blocks(&sequence.table[sequence.path_blocks..sequence.path_blocks + count], block_size);
        let node = self.index.insert(sequence.end, run);
        self.evict.start(node);
        self.hold(node, 1);
        self.let_go(sequence.end, Self::context(sequence, Departure::Moved));
        sequence.end = node;
        sequence.path_blocks += count;
        Some(node)
    }
}

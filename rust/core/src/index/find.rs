//! Finding: a child by its first block, the longest cached prefix of a prompt, the place of a position on a path.

use super::{Index, Node};
use crate::content;
use crate::ids::{BlockId, NodeId, Token};

/// How far a prompt is cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// The deepest node that agrees, or the root.
    pub node: NodeId,
    /// How many of its blocks agree; 0 for a root.
    pub within: usize,
    /// Blocks that agree in all.
    pub blocks: usize,
}

impl Index {
    pub(crate) fn hash(&self, parent: NodeId, first_block: &[Token]) -> u32 {
        self.key.hash_tokens(parent, first_block)
    }

    /// The live child of `parent` that starts with these tokens (one block).
    #[must_use]
    pub fn find_child(&self, parent: NodeId, first_block: &[Token]) -> Option<NodeId> {
        debug_assert_eq!(first_block.len(), self.block_size);
        let hash = self.hash(parent, first_block);
        let mut next = self.buckets.first(hash);
        while let Some(id) = next.some() {
            let node = &self[id];
            if node.hash == hash
                && node.parent == parent
                && node.epoch == self.epoch
                && node.run.tokens(self.block_size)[..self.block_size] == *first_block
            {
                return Some(id);
            }
            next = node.next_in_bucket;
        }
        None
    }

    /// How far the tree agrees with `tokens` below a node or root, at most `limit` blocks.
    #[must_use]
    pub fn walk(&self, from: NodeId, tokens: &[Token], limit: usize) -> Found {
        let block_size = self.block_size;
        let mut found = Found { node: from, within: 0, blocks: 0 };
        while found.blocks < limit {
            let rest = &tokens[found.blocks * block_size..limit * block_size];
            let Some(child) = self.find_child(found.node, &rest[..block_size]) else {
                break;
            };
            let run = &self[child].run;
            let common = run.common_blocks(rest, block_size);
            found = Found { node: child, within: common, blocks: found.blocks + common };
            if common < run.len() {
                break;
            }
        }
        found
    }

    /// The place of a path of `blocks` blocks, if all of it is indexed.
    #[must_use]
    pub fn find_path(&self, name: &[u8], tokens: &[Token], blocks: usize) -> Option<Found> {
        let found = self.walk(self.find_root(name)?, tokens, blocks);
        (found.blocks == blocks).then_some(found)
    }

    /// The tokens of a path that ends with this node, appended to `out`, which has room for them; answers the root.
    pub fn push_path_tokens(&self, end: NodeId, blocks: usize, out: &mut Vec<Token>) -> NodeId {
        let start = out.len();
        out.resize(start + blocks * self.block_size, 0);
        let (mut node, mut stop) = (end, out.len());
        while !node.is_root() {
            let tokens = self[node].run.tokens(self.block_size);
            let from = stop - tokens.len();
            out[from..stop].copy_from_slice(tokens);
            (node, stop) = (self[node].parent, from);
        }
        node
    }

    /// The ids of a path's blocks from `start` on, appended to `out`, which has room for them.
    pub fn push_path_blocks(&self, end: NodeId, blocks: usize, start: usize, out: &mut Vec<BlockId>) {
        let at = out.len();
        out.resize(at + blocks.saturating_sub(start), 0);
        let (mut node, mut stop) = (end, blocks);
        while stop > start {
            let ids = self[node].run.blocks(self.block_size);
            let first = stop - ids.len();
            let from = first.max(start);
            out[at + from - start..at + stop - start].copy_from_slice(&ids[from - first..]);
            (node, stop) = (self[node].parent, first);
        }
    }

    /// The last `count` blocks of a path: their tokens and ids, appended to `tokens` and `blocks`, which have room for
    /// them. Costs what they are, however long the path is.
    pub fn push_last(&self, end: NodeId, count: usize, tokens: &mut Vec<Token>, blocks: &mut Vec<BlockId>) {
        let block_size = self.block_size;
        let (first_token, first_block) = (tokens.len(), blocks.len());
        tokens.resize(first_token + count * block_size, 0);
        blocks.resize(first_block + count, 0);
        let (mut node, mut stop) = (end, count);
        while stop > 0 {
            let run = &self[node].run;
            let len = run.len().min(stop);
            let (from, skipped) = (stop - len, run.len() - len);
            blocks[first_block + from..first_block + stop].copy_from_slice(&run.blocks(block_size)[skipped..]);
            tokens[first_token + from * block_size..first_token + stop * block_size]
                .copy_from_slice(&run.tokens(block_size)[skipped * block_size..]);
            (node, stop) = (self[node].parent, from);
        }
    }

    /// The place above the last `count` blocks of a path that is longer. (Its depth is not told.)
    #[must_use]
    pub fn above_last(&self, end: NodeId, count: usize) -> Found {
        let (mut node, mut skipped) = (end, count);
        while skipped >= self[node].run.len() {
            skipped -= self[node].run.len();
            node = self[node].parent;
        }
        Found { node, within: self[node].run.len() - skipped, blocks: 0 }
    }

    /// Blocks of a found path that nobody holds and a new holder would: of those nodes that `counts` says.
    #[must_use]
    pub fn idle_blocks(&self, found: Found, counts: impl Fn(NodeId) -> bool) -> usize {
        let (mut node, mut count, mut blocks) = (found.node, found.within, 0);
        while !node.is_root() && !self[node].is_held() {
            blocks += if counts(node) { count } else { 0 };
            node = self[node].parent;
            count = if node.is_root() { 0 } else { self[node].run.len() };
        }
        blocks
    }

    /// Blocks of the path that ends with this node.
    #[must_use]
    pub fn depth(&self, end: NodeId) -> usize {
        let (mut node, mut blocks) = (end, 0);
        while !node.is_root() {
            blocks += self[node].run.len();
            node = self[node].parent;
        }
        blocks
    }

    /// The part of a path down to its first dead block: the place where that ends.
    #[must_use]
    pub fn live_part(&self, end: NodeId, blocks: usize) -> Found {
        let (mut node, mut blocks) = (end, blocks);
        while !node.is_root() && !self.is_live(node) {
            blocks -= self[node].run.len();
            node = self[node].parent;
        }
        let within = if node.is_root() { 0 } else { self[node].run.len() };
        Found { node, within, blocks }
    }

    /// The longest cached prefix of a prompt, at most `limit` blocks; it never ends inside a run of content tokens.
    #[must_use]
    pub fn find(&self, root: NodeId, tokens: &[Token], limit: usize) -> Found {
        let found = self.walk(root, tokens, limit);
        let kept = content::cut_back(tokens.len(), |at| tokens[at], found.blocks, self.block_size);
        if kept < found.blocks { self.locate(found, kept) } else { found }
    }

    /// The place of the first `blocks` blocks of a path that ends at `end`.
    #[must_use]
    pub fn locate(&self, end: Found, blocks: usize) -> Found {
        let mut place = end;
        while place.blocks > blocks {
            let above = place.blocks - place.within;
            if above < blocks {
                return Found { node: place.node, within: blocks - above, blocks };
            }
            let node = self[place.node].parent;
            let within = if node.is_root() { 0 } else { self[node].run.len() };
            place = Found { node, within, blocks: above };
        }
        place
    }

    /// The root at the top of a path.
    #[must_use]
    pub fn root_of(&self, mut id: NodeId) -> NodeId {
        while !id.is_root() {
            id = self[id].parent;
        }
        id
    }

    pub(super) fn link_bucket(&mut self, id: NodeId) {
        let hash = self[id].hash;
        self[id].next_in_bucket = self.buckets.first(hash);
        self.buckets.set_first(hash, id);
    }

    pub(super) fn unlink_bucket(&mut self, id: NodeId) {
        let Node { hash, next_in_bucket: after, .. } = self[id];
        let mut before = self.buckets.first(hash);
        if before == id {
            self.buckets.set_first(hash, after);
            return;
        }
        while self[before].next_in_bucket != id {
            before = self[before].next_in_bucket;
        }
        self[before].next_in_bucket = after;
    }
}

//! The prefix index: a path-compressed radix tree over runs of blocks, one root a namespace.
//!
//! - A node is a run of blocks on one edge. Children are found in one table keyed by (parent, keyed hash of the first
//!   block's tokens); the hash finds a candidate, the tokens decide (I3).
//! - Pins are counted per node. A node is *held* if it is pinned or has a held child; that goes upward only on the 0
//!   -> 1 and 1 -> 0 edges, so pinning a hot shared prefix costs O(1).
//! - `epoch` says whether a node is *live*. `reset` raises the current epoch, which makes every node dead at once;
//!   `forget` sets it to 0. Dead nodes can never be found. A held one stays until its last holder leaves, an idle one
//!   waits in the stale queue for its frames to be needed. Dead nodes' sibling links are not kept up, and an idle
//!   dead node's parent may be gone: neither is ever followed.
//!
//! Numbers at construction: one slot for each block of the pool, so that no node can be refused later and the nodes'
//! table is never rehashed (I13).

mod find;
mod node;
mod split;
pub mod trace;

pub use find::Found;
pub use node::{Node, Root};

use std::ops::{Index as At, IndexMut as AtMut};

use crate::error::{Error, Result};
use crate::hash::{Buckets, Key};
use crate::ids::{BlockId, NodeId, Token};
use crate::memory::with_capacity;
use crate::run::Run;

/// The epoch of forgotten nodes. The first live epoch is 1.
const FORGOTTEN: u32 = 0;

/// Mean length of a chain of the children's table if each block were a node of its own. Usual runs are far longer, so
/// that the usual chain has at most one element, and the table stays small beside what it indexes.
const NODES_PER_BUCKET: usize = 2;
/// The same for the roots' table, if each block had a namespace of its own.
const ROOTS_PER_BUCKET: usize = 16;

/// The tree and its roots.
#[derive(Debug)]
pub struct Index {
    nodes: Vec<Node>,
    free_nodes: NodeId,
    buckets: Buckets,
    roots: Vec<Root>,
    free_roots: Vec<u32>,
    root_buckets: Buckets,
    epoch: u32,
    key: Key,
    block_size: usize,
    /// Of each node's last block, where ghosts are wanted.
    traces: Option<Vec<u64>>,
}

impl At<NodeId> for Index {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        debug_assert!(!id.is_root());
        &self.nodes[id.index()]
    }
}

impl AtMut<NodeId> for Index {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        debug_assert!(!id.is_root());
        &mut self.nodes[id.index()]
    }
}

impl Index {
    /// An empty index for a pool.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(num_blocks: usize, block_size: usize, key: Key) -> Result<Self> {
        Ok(Self {
            nodes: with_capacity(num_blocks)?,
            free_nodes: NodeId::NONE,
            buckets: Buckets::new(num_blocks / NODES_PER_BUCKET)?,
            roots: Vec::new(),
            free_roots: Vec::new(),
            root_buckets: Buckets::new(num_blocks / ROOTS_PER_BUCKET)?,
            epoch: 1,
            key,
            block_size,
            traces: None,
        })
    }

    /// Tokens of a block.
    #[must_use]
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// Can it be found? For a root: does it belong to the present epoch?
    #[must_use]
    pub fn is_live(&self, id: NodeId) -> bool {
        let epoch = if id.is_root() { self.root(id).epoch } else { self[id].epoch };
        epoch == self.epoch
    }

    /// The root at this id.
    #[must_use]
    pub fn root(&self, id: NodeId) -> &Root {
        debug_assert!(id.is_root());
        &self.roots[id.index()]
    }

    pub(crate) fn root_mut(&mut self, id: NodeId) -> &mut Root {
        debug_assert!(id.is_root());
        &mut self.roots[id.index()]
    }

    /// The first child of a node or root.
    #[must_use]
    pub fn first_child(&self, id: NodeId) -> NodeId {
        if id.is_root() { self.root(id).first_child } else { self[id].first_child }
    }

    /// Nothing that is indexed now can be found again. Costs nothing.
    ///
    /// # Errors
    /// `Value` after 2^32 - 2 of them: an epoch is never used twice.
    pub fn start_epoch(&mut self) -> Result<()> {
        self.epoch = self.epoch.checked_add(1).ok_or_else(|| {
            Error::Value("this pager has been reset 2^32 - 2 times, which is all it can: build a new one".to_owned())
        })?;
        Ok(())
    }

    /// Marks a node as forgotten: it can never be found again, and lives until its last holder leaves. It leaves its
    /// bucket, or those who forget and publish the same prompt again and again would make its chain long.
    pub fn forget(&mut self, id: NodeId) {
        self.unlink_bucket(id);
        self[id].epoch = FORGOTTEN;
    }

    /// Has it been forgotten? (A node of an earlier epoch has not: it waits in its bucket until it is removed.)
    fn is_forgotten(&self, id: NodeId) -> bool {
        self[id].epoch == FORGOTTEN
    }

    // ---- pins ------------------------------------------------------------------------------------------------------

    /// Adds pins; answers whether the node was idle before.
    pub fn pin(&mut self, id: NodeId, pins: u32) -> bool {
        let node = &mut self[id];
        let was_held = node.is_held();
        node.pins += pins;
        !was_held
    }

    /// Removes a pin; answers whether the node is idle now.
    pub fn unpin(&mut self, id: NodeId) -> bool {
        let node = &mut self[id];
        debug_assert!(node.pins > 0, "I2: unpinned a node without pins");
        node.pins -= 1;
        !node.is_held()
    }

    /// A child became held; answers whether the node was idle before.
    pub fn add_held_child(&mut self, id: NodeId) -> bool {
        let node = &mut self[id];
        let was_held = node.is_held();
        node.held_children += 1;
        !was_held
    }

    /// A child became idle; answers whether the node is idle now.
    pub fn remove_held_child(&mut self, id: NodeId) -> bool {
        let node = &mut self[id];
        debug_assert!(node.held_children > 0, "I2: more idle children than held ones");
        node.held_children -= 1;
        !node.is_held()
    }

    // ---- nodes -----------------------------------------------------------------------------------------------------

    /// Adds a child with this run, as the youngest.
    pub fn insert(&mut self, parent: NodeId, run: Run) -> NodeId {
        let hash = self.hash(parent, &run.tokens(self.block_size)[..self.block_size]);
        let id = self.take_slot(Node::new(run, parent, hash, self.epoch));
        let older = self.last_child(parent);
        self[id].older = older;
        match older.some() {
            Some(older) => self[older].younger = id,
            None => self.set_first_child(parent, id),
        }
        self.set_last_child(parent, id);
        if parent.is_root() {
            self.root_mut(parent).children += 1;
        }
        self.link_bucket(id);
        self.start_trace(id);
        id
    }

    /// Adds a block at the end of a node that has room for it.
    pub fn push_block(&mut self, id: NodeId, tokens: &[Token], block: BlockId) {
        let block_size = self.block_size;
        self[id].run.push(tokens, block, block_size);
        self.grow_trace(id, tokens);
    }

    /// Removes a node: a live one without children, or a dead one. A root goes with its last node.
    pub fn remove(&mut self, id: NodeId) {
        debug_assert!(!self.is_live(id) || self[id].first_child.is_none(), "I6: removed a node that has children");
        if !self.is_forgotten(id) {
            self.unlink_bucket(id);
        }
        if self.is_live(id) {
            self.unlink_sibling(id);
        }
        let parent = self[id].parent;
        self[id] = Node::free(self.free_nodes);
        self.free_nodes = id;
        if parent.is_root() {
            self.root_mut(parent).children -= 1;
            self.drop_root_if_unused(parent);
        }
    }

    /// Takes a live node out of its parent's children, so that nobody walks into it.
    pub fn unlink_sibling(&mut self, id: NodeId) {
        let Node { parent, older, younger, .. } = self[id];
        match older.some() {
            Some(older) => self[older].younger = younger,
            None => self.set_first_child(parent, younger),
        }
        match younger.some() {
            Some(younger) => self[younger].older = older,
            None => self.set_last_child(parent, older),
        }
    }

    /// Drops up to `count` blocks off a node's tail and hands them to `take`, deepest first. Answers how many those
    /// were.
    pub fn pop_tail(&mut self, id: NodeId, count: usize, mut take: impl FnMut(BlockId)) -> usize {
        let block_size = self.block_size;
        let run = &mut self[id].run;
        let count = count.min(run.len());
        let keep = run.len() - count;
        for &block in run.blocks(block_size)[keep..].iter().rev() {
            take(block);
        }
        run.truncate(keep);
        if keep > 0 && keep * 2 < run.capacity() {
            run.shrink(block_size);
        }
        count
    }

    /// Brings what removing this node will read into the cache, while the caller still works on another: leaves that
    /// are evicted one after the other lie anywhere in memory, and waiting for each of their lines in turn would be
    /// most of the cost.
    pub fn touch(&self, id: NodeId) {
        let node = &self[id];
        let older = node.older.some().map_or(0, |id| self[id].hash);
        let younger = node.younger.some().map_or(0, |id| self[id].hash);
        let id = node.run.blocks(self.block_size).last();
        std::hint::black_box((self.buckets.first(node.hash), older, younger, id));
    }

    fn take_slot(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.free_nodes.some() {
            self.free_nodes = self[id].parent;
            self[id] = node;
            return id;
        }
        debug_assert!(self.nodes.len() < self.nodes.capacity(), "I13: more nodes than blocks");
        self.nodes.push(node);
        NodeId::node(self.nodes.len() as u32 - 1)
    }

    /// The last child of a node or root.
    #[must_use]
    pub fn last_child(&self, id: NodeId) -> NodeId {
        if id.is_root() { self.root(id).last_child } else { self[id].last_child }
    }

    fn set_first_child(&mut self, id: NodeId, child: NodeId) {
        if id.is_root() { self.root_mut(id).first_child = child } else { self[id].first_child = child }
    }

    fn set_last_child(&mut self, id: NodeId, child: NodeId) {
        if id.is_root() { self.root_mut(id).last_child = child } else { self[id].last_child = child }
    }

    // ---- subtrees --------------------------------------------------------------------------------------------------

    /// The node after this one of the subtree below `top`, children before parents, siblings by creation.
    #[must_use]
    pub fn next_in_subtree(&self, node: NodeId, top: NodeId) -> Option<NodeId> {
        if node == top {
            return None;
        }
        let Node { parent, younger, .. } = self[node];
        Some(younger.some().map_or(parent, |younger| self.deepest_first(younger)))
    }

    /// The first node of that order below one.
    #[must_use]
    pub fn deepest_first(&self, mut node: NodeId) -> NodeId {
        while let Some(child) = self[node].first_child.some() {
            node = child;
        }
        node
    }

    // ---- roots -----------------------------------------------------------------------------------------------------

    /// The epoch takes part, so that the roots that resets leave behind do not pile up in one chain.
    fn root_hash(&self, name: &[u8]) -> u32 {
        self.key.hash_bytes(name) ^ self.epoch.wrapping_mul(0x9e37_79b9)
    }

    /// The live root of a namespace, if it has one.
    #[must_use]
    pub fn find_root(&self, name: &[u8]) -> Option<NodeId> {
        let hash = self.root_hash(name);
        let mut next = self.root_buckets.first(hash);
        while let Some(id) = next.some() {
            let root = self.root(id);
            if root.hash == hash && root.epoch == self.epoch && *root.name == *name {
                return Some(id);
            }
            next = root.next_in_bucket;
        }
        None
    }

    /// The live root of a namespace, made if need be. An unused one must be given to `drop_root_if_unused`.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn find_or_make_root(&mut self, name: &[u8]) -> Result<NodeId> {
        if let Some(id) = self.find_root(name) {
            return Ok(id);
        }
        let mut owned = with_capacity(name.len())?;
        owned.extend_from_slice(name);
        self.grow_root_table();
        let hash = self.root_hash(name);
        let next_in_bucket = self.root_buckets.first(hash);
        let root = Root::new(owned.into_boxed_slice(), hash, next_in_bucket, self.epoch);
        let id = if let Some(index) = self.free_roots.pop() {
            self.roots[index as usize] = root;
            NodeId::root(index)
        } else {
            self.roots.try_reserve(1)?;
            self.free_roots.try_reserve(self.roots.len() + 1)?;
            self.roots.push(root);
            NodeId::root(self.roots.len() as u32 - 1)
        };
        self.root_buckets.set_first(hash, id);
        Ok(id)
    }

    /// Keeps chains short. Roots that hold blocks are fewer than blocks and need no more table than there is; but
    /// those of preempted sequences hold none, and nothing bounds their number. Doubling costs O(1) amortised;
    /// without memory for it chains grow instead.
    fn grow_root_table(&mut self) {
        if self.roots.len() - self.free_roots.len() < ROOTS_PER_BUCKET * self.root_buckets.len() {
            return;
        }
        let Ok(larger) = Buckets::new(2 * self.root_buckets.len()) else {
            return;
        };
        self.root_buckets = larger;
        for index in 0..self.roots.len() {
            let root = &self.roots[index];
            if root.in_use() {
                let (hash, id) = (root.hash, NodeId::root(index as u32));
                self.roots[index].next_in_bucket = self.root_buckets.first(hash);
                self.root_buckets.set_first(hash, id);
            }
        }
    }

    /// A namespace's memory returns when its last block and its last sequence are gone (L14).
    pub fn drop_root_if_unused(&mut self, id: NodeId) {
        let root = self.root(id);
        if root.in_use() {
            return;
        }
        let (hash, after) = (root.hash, root.next_in_bucket);
        let first = self.root_buckets.first(hash);
        if first == id {
            self.root_buckets.set_first(hash, after);
        } else {
            let mut before = first;
            while self.root(before).next_in_bucket != id {
                before = self.root(before).next_in_bucket;
            }
            self.root_mut(before).next_in_bucket = after;
        }
        *self.root_mut(id) = Root::default();
        self.free_roots.push(id.index() as u32);
    }

    /// All roots in use, dead ones included, in no order that means anything.
    pub fn roots(&self) -> impl Iterator<Item = (NodeId, &Root)> {
        self.roots
            .iter()
            .enumerate()
            .filter(|(_, root)| root.in_use())
            .map(|(index, root)| (NodeId::root(index as u32), root))
    }

    /// Slots that any node has had: indices of nodes are below this.
    #[must_use]
    pub const fn num_node_slots(&self) -> usize {
        self.nodes.len()
    }

    /// All nodes in use, dead ones included, in no order that means anything.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.in_use())
            .map(|(index, node)| (NodeId::node(index as u32), node))
    }
}

#[cfg(test)]
mod tests;

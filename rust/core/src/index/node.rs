//! What the tree is made of.

use crate::ids::NodeId;
use crate::run::Run;

/// A run of blocks on one edge of the tree. One cache line, so that a walk costs one miss a node.
#[derive(Debug)]
#[repr(align(64))]
pub struct Node {
    /// The run's blocks and tokens.
    pub run: Run,
    /// The node above, or the namespace's root. Of a free slot: the next free one.
    pub parent: NodeId,
    /// Sequences whose path ends here, table entries and queued copies that hold the run's last block.
    pub pins: u32,
    /// Children that are held.
    pub held_children: u32,
    /// Oldest child.
    pub first_child: NodeId,
    /// Youngest child.
    pub last_child: NodeId,
    /// The sibling created before this one.
    pub older: NodeId,
    /// The sibling created after this one.
    pub younger: NodeId,
    /// Next in the same bucket of the children's table.
    pub next_in_bucket: NodeId,
    /// Keyed hash of (parent, first block).
    pub hash: u32,
    /// Live if this is the index's epoch.
    pub epoch: u32,
}

impl Node {
    /// A node without children, siblings or pins.
    #[must_use]
    pub const fn new(run: Run, parent: NodeId, hash: u32, epoch: u32) -> Self {
        Self {
            run,
            parent,
            pins: 0,
            held_children: 0,
            first_child: NodeId::NONE,
            last_child: NodeId::NONE,
            older: NodeId::NONE,
            younger: NodeId::NONE,
            next_in_bucket: NodeId::NONE,
            hash,
            epoch,
        }
    }

    /// A slot that waits for its next node.
    #[must_use]
    pub fn free(next_free: NodeId) -> Self {
        Self::new(Run::default(), next_free, 0, 0)
    }

    /// Does anybody hold it or something below it?
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.pins > 0 || self.held_children > 0
    }

    /// Is it a node and no free slot? (A node has a block.)
    #[must_use]
    pub const fn in_use(&self) -> bool {
        !self.run.is_empty()
    }
}

/// A namespace.
#[derive(Debug)]
pub struct Root {
    /// Its encoded name (`docs/design/rules.md` 13).
    pub name: Box<[u8]>,
    /// Keyed hash of the name.
    pub hash: u32,
    /// Next in the same bucket of the roots' table.
    pub next_in_bucket: NodeId,
    /// Live if this is the index's epoch.
    pub epoch: u32,
    /// Oldest top-level node.
    pub first_child: NodeId,
    /// Youngest top-level node.
    pub last_child: NodeId,
    /// Top-level nodes, dead ones included.
    pub children: u32,
    /// Sequences of this namespace.
    pub pins: u32,
}

impl Root {
    /// A root without children or sequences.
    #[must_use]
    pub const fn new(name: Box<[u8]>, hash: u32, next_in_bucket: NodeId, epoch: u32) -> Self {
        Self {
            name,
            hash,
            next_in_bucket,
            epoch,
            first_child: NodeId::NONE,
            last_child: NodeId::NONE,
            children: 0,
            pins: 0,
        }
    }

    /// Is it a namespace and no free slot?
    #[must_use]
    pub const fn in_use(&self) -> bool {
        self.children > 0 || self.pins > 0
    }
}

impl Default for Root {
    fn default() -> Self {
        Self::new(Box::default(), 0, NodeId::NONE, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Node;

    #[test]
    fn a_node_is_one_cache_line() {
        assert_eq!(size_of::<Node>(), 64);
    }
}

//! What transfers read of cached blocks: it keeps its place in the policy's order, and eviction passes over it (I9).

use std::collections::BTreeMap;

use crate::evict::Eviction;
use crate::ids::NodeId;
use crate::index::Index;

/// Nodes that plans read, or that have such a child: plans that read the node's end, and children.
#[derive(Debug, Default)]
pub struct Transit(BTreeMap<NodeId, u32>);

impl Transit {
    /// A plan reads a path up to the end of a node: all of it stays, and keeps its place in the policy's queues.
    pub fn hold(&mut self, end: NodeId, index: &Index, evict: &mut Eviction) {
        let mut node = end;
        while !node.is_root() {
            let holds = self.0.entry(node).or_insert(0);
            *holds += 1;
            if *holds > 1 {
                return;
            }
            evict.set_in_transit(node, index[node].run.len(), true);
            node = index[node].parent;
        }
    }

    /// One plan or child fewer reads a node. Was it the last? Then the caller settles the node and goes on with its parent.
    pub fn leave(&mut self, node: NodeId, index: &Index, evict: &mut Eviction) -> bool {
        let Some(holds) = self.0.get_mut(&node) else { unreachable!("I9: {node:?} is not in transit") };
        *holds -= 1;
        if *holds > 0 {
            return false;
        }
        self.0.remove(&node);
        evict.set_in_transit(node, index[node].run.len(), false);
        true
    }

    /// A node that is in transit was split: its upper half is, through it.
    pub fn split(&mut self, upper: NodeId) {
        self.0.insert(upper, 1);
    }

    /// The nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.0.keys().copied()
    }

    /// Plans that read a node's end, and children that are in transit.
    #[must_use]
    pub fn holds(&self, node: NodeId) -> u32 {
        self.0.get(&node).copied().unwrap_or(0)
    }

    /// How many nodes those are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Is nothing read?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

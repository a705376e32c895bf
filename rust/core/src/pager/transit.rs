//! What offloads read: it stays where it is in the policy's order, and is passed over by eviction (I9).

use super::Pager;
use crate::ids::NodeId;

impl Pager {
    /// A plan reads a path up to the end of a node: all of it stays, and keeps its place in the policy's queues.
    pub(super) fn hold_for_plan(&mut self, end: NodeId) {
        let mut node = end;
        while !node.is_root() {
            let holds = self.in_transit.entry(node).or_insert(0);
            *holds += 1;
            if *holds > 1 {
                return;
            }
            self.evict.set_in_transit(node, self.index[node].run.len(), true);
            node = self.index[node].parent;
        }
    }

    /// The plan has read it. What was forgotten meanwhile, and nobody else holds, becomes free, deepest first.
    pub(super) fn let_go_for_plan(&mut self, end: NodeId) {
        let mut node = end;
        while !node.is_root() {
            let Some(holds) = self.in_transit.get_mut(&node) else { unreachable!("I9: {node:?} is not in transit") };
            *holds -= 1;
            if *holds > 0 {
                return;
            }
            self.in_transit.remove(&node);
            self.evict.set_in_transit(node, self.index[node].run.len(), false);
            if self.evict.slot(node).is_queued() {
                self.fences.note_node(node);
            }
            let parent = self.index[node].parent;
            if !self.index[node].is_held() && !self.index.is_live(node) {
                self.free_node(node);
            }
            node = parent;
        }
    }
}

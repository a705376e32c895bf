//! What offloads read: it stays where it is in the policy's order, and is passed over by eviction (I9).

use super::Pager;
use crate::ids::NodeId;

impl Pager {
    /// A plan reads a path up to the end of a node.
    pub(super) fn hold_for_plan(&mut self, end: NodeId) {
        self.in_transit.hold(end, &self.index, &mut self.evict);
    }

    /// The plan has read it. What was forgotten meanwhile, and nobody else holds, becomes free, deepest first.
    pub(super) fn let_go_for_plan(&mut self, end: NodeId) {
        let mut node = end;
        while !node.is_root() && self.in_transit.leave(node, &self.index, &mut self.evict) {
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

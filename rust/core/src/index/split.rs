//! Splitting a node in two.
//!
//! The path `1 2 3 4 5 6` with children A and B is split behind `2`. The *lower* half keeps the id: whoever is pinned
//! to the node or has it as a parent goes on as before, and only the new upper half has to be introduced.
//!
//! ```text
//! before               after                    step
//! parent               parent
//! └─ N: 1 2 3 4 5 6    └─ U: 1 2                1  both runs are copied (the only step that can be refused)
//!    ├─ A                 └─ N: 3 4 5 6         2  U takes N's place in its bucket and among its siblings
//!    └─ B                    ├─ A               3  N becomes U's only child, found by its new first block
//!                            └─ B               4  U is held if N is; nothing changes above
//! ```

use super::{Index, Node};
use crate::error::Result;
use crate::ids::NodeId;

impl Index {
    /// Splits a node behind its first `at` blocks; answers the upper half.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses; nothing has changed then.
    pub fn split(&mut self, id: NodeId, at: usize) -> Result<NodeId> {
        let block_size = self.block_size;
        let run = &self[id].run;
        debug_assert!(0 < at && at < run.len());
        let upper_run = run.copy_of(0..at, at, block_size)?;
        let lower_run = run.copy_of(at..run.len(), run.capacity() - at, block_size)?;

        // A forgotten node is in no bucket, and its halves are not either.
        let is_findable = !self.is_forgotten(id);
        if is_findable {
            self.unlink_bucket(id);
        }
        let Node { parent, hash, epoch, older, younger, .. } = self[id];
        let mut upper = Node::new(upper_run, parent, hash, epoch);
        upper.held_children = u32::from(self[id].is_held());
        (upper.first_child, upper.last_child) = (id, id);
        (upper.older, upper.younger) = (older, younger);
        let upper = self.take_slot(upper);
        if self.is_live(id) {
            match older.some() {
                Some(older) => self[older].younger = upper,
                None => self.set_first_child(parent, upper),
            }
            match younger.some() {
                Some(younger) => self[younger].older = upper,
                None => self.set_last_child(parent, upper),
            }
        }
        if is_findable {
            self.link_bucket(upper);
        }

        let hash = self.hash(upper, &lower_run.tokens(block_size)[..block_size]);
        let lower = &mut self[id];
        (lower.run, lower.parent, lower.hash) = (lower_run, upper, hash);
        (lower.older, lower.younger) = (NodeId::NONE, NodeId::NONE);
        if is_findable {
            self.link_bucket(id);
        }
        self.split_trace(id, upper);
        Ok(upper)
    }
}

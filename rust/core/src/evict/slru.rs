//! Segmented LRU: a scan of one-off prompts flushes probation, and leaves alone what has been hit.
//!
//! A child is never in protected while its parent is in probation: whoever hits the child hits the parent, and the
//! parent, idle no earlier, is warmer and so demoted later. So the front of each queue is a leaf here, too.

use super::{Context, Excess, Policy, Queue, Slot};

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// Two segments; protected may hold half of the pool.
#[derive(Debug)]
pub struct Slru {
    protected_max: usize,
}

impl Slru {
    /// For a pool of this size.
    pub const fn new(num_blocks: usize) -> Self {
        Self { protected_max: num_blocks / 2 }
    }
}

impl Policy for Slru {
    fn queues(&self) -> &'static [&'static str] {
        &["probation", "protected"]
    }

    fn on_idle(&mut self, slot: &Slot, _context: Context) -> usize {
        if slot.is_marked() { PROTECTED } else { PROBATION }
    }

    fn on_hit(&mut self, _slot: &Slot) -> bool {
        true
    }

    fn excess(&self, queues: &[Queue]) -> Option<Excess> {
        let blocks = queues[PROTECTED].blocks().checked_sub(self.protected_max + 1)? + 1;
        Some(Excess { from: PROTECTED, to: PROBATION, blocks })
    }
}

//! Least recently used: one queue.

use super::{Context, Policy, Slot};

/// Evicts what has been idle longest.
#[derive(Debug)]
pub struct Lru;

impl Policy for Lru {
    fn queues(&self) -> &'static [&'static str] {
        &["lru"]
    }

    fn on_idle(&mut self, _slot: &Slot, _context: Context) -> usize {
        0
    }
}

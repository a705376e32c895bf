//! The checker: recounts everything from the ground up and reports each promise that does not hold, by its id
//! (`docs/design` and DESIGN's I1-I14). It shares no shortcut with the code it checks, and is slow on purpose.

mod batches;
mod pool;
mod sequences;
mod transfers;
mod tree;

#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::zeroed;
use crate::pager::Pager;

/// All violations, worst never hidden by the first. Empty if every promise holds.
///
/// # Errors
/// `Memory` if the allocator refuses what the recount needs: a few words for each block and node.
pub fn check(pager: &Pager) -> Result<Vec<String>> {
    let pins = zeroed(pager.index.num_node_slots())?;
    let mut checker = Checker { pager, violations: Vec::new(), pins, private: Vec::new(), extra: Vec::new() };
    checker.check_tree()?;
    if checker.violations.is_empty() {
        // What hangs in a broken tree cannot be recounted.
        checker.check_sequences()?;
        checker.check_batches();
        checker.check_copies()?;
        checker.check_plans()?;
        checker.check_holds()?;
        checker.check_queues()?;
        checker.check_conservation()?;
        checker.check_host()?;
    }
    Ok(checker.violations)
}

/// What has been recounted so far.
struct Checker<'a> {
    pager: &'a Pager,
    violations: Vec<String>,
    /// Pins that each node should have, by its index.
    pins: Vec<u32>,
    /// Private blocks, once for each holder they should have.
    private: Vec<BlockId>,
    /// Indexed blocks, once for each hold beside paths they should have.
    extra: Vec<BlockId>,
}

impl Checker<'_> {
    fn expect(&mut self, holds: bool, violation: impl FnOnce() -> String) {
        if !holds {
            self.violations.push(violation());
        }
    }
}

//! The checker: recounts everything from the ground up and reports each promise that does not hold, by its id
//! (`docs/design` and DESIGN's I1-I14). It shares no shortcut with the code it checks, and is slow on purpose.

mod batches;
mod pool;
mod sequences;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::ids::{BlockId, NodeId};
use crate::pager::Pager;

/// All violations, worst never hidden by the first. Empty if every promise holds.
#[must_use]
pub fn check(pager: &Pager) -> Vec<String> {
    let mut checker = Checker {
        pager,
        violations: Vec::new(),
        pins: BTreeMap::new(),
        private: BTreeMap::new(),
        extra: BTreeMap::new(),
    };
    checker.check_tree();
    if checker.violations.is_empty() {
        // What hangs in a broken tree cannot be recounted.
        checker.check_sequences();
        checker.check_batches();
        checker.check_copies();
        checker.check_holds();
        checker.check_queues();
        checker.check_conservation();
    }
    checker.violations
}

/// What has been recounted so far.
struct Checker<'a> {
    pager: &'a Pager,
    violations: Vec<String>,
    /// Pins that each node should have.
    pins: BTreeMap<NodeId, u32>,
    /// Holders that each private block should have.
    private: BTreeMap<BlockId, u32>,
    /// Holds beside paths that each indexed block should have.
    extra: BTreeMap<BlockId, u32>,
}

impl Checker<'_> {
    fn expect(&mut self, holds: bool, violation: impl FnOnce() -> String) {
        if !holds {
            self.violations.push(violation());
        }
    }
}

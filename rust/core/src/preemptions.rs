//! Who was preempted, and why: the last of it, for people.

use std::borrow::Cow;
use std::collections::VecDeque;

/// Preemptions that the log keeps.
pub const LOG_MAX: usize = 256;
/// Characters that a reason may have.
pub const REASON_MAX: usize = 200;

/// What the caller says of a preemption.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Why {
    /// In words.
    pub reason: Cow<'static, str>,
    /// What bringing the sequence back is to cost, in a unit of the caller's.
    pub cost: f64,
}

/// How a sequence gives its blocks back, or does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// It is preempted.
    Recompute,
    /// It goes to the host.
    Swap,
    /// It sits out, and keeps its blocks.
    Stall,
}

impl Action {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Swap => "swap",
            Self::Stall => "stall",
        }
    }
}

/// One preemption.
#[derive(Clone, PartialEq, Debug)]
pub struct Preemption {
    /// Its number, from 0.
    pub number: u64,
    /// The clock.
    pub tick: u64,
    /// The sequence's number.
    pub sequence: u64,
    /// How it went.
    pub action: Action,
    /// What free and evictable blocks grew by.
    pub blocks: usize,
    /// Tokens that were committed.
    pub tokens: usize,
    /// What the caller says of it.
    pub why: Why,
}

/// The last preemptions, oldest first.
#[derive(Default, Debug)]
pub struct Log {
    entries: VecDeque<Preemption>,
    next: u64,
}

impl Log {
    /// Adds one, whose number it gives. Where the allocator refuses, it is missing from the log, and its number tells.
    pub fn add(&mut self, mut preemption: Preemption) {
        preemption.number = self.next;
        self.next += 1;
        if self.entries.len() == LOG_MAX {
            self.entries.pop_front();
        }
        if self.entries.try_reserve(1).is_ok() {
            self.entries.push_back(preemption);
        }
    }

    /// All that it has.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Preemption> {
        self.entries.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded_and_its_numbers_tell_what_it_has_forgotten() {
        let mut log = Log::default();
        for sequence in 0..1000 {
            let why = Why { reason: "full".into(), cost: 1.5 };
            let action = Action::Recompute;
            log.add(Preemption { number: 0, tick: 0, sequence, action, blocks: 1, tokens: 16, why });
        }
        assert_eq!(log.iter().len(), LOG_MAX);
        assert!(log.iter().all(|entry| entry.number == entry.sequence));
        assert_eq!(log.iter().next().map(|entry| entry.number), Some(1000 - LOG_MAX as u64));
    }
}

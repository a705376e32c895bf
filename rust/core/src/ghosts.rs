//! Ghosts: what the last evicted blocks were, so that a block which is asked for again is known to have been here.
//!
//! A ghost is 64 bits for a block and all above it (`index/trace.rs`), kept for a fixed number of evictions: one write for
//! each evicted block, one look for each that is asked for again, and one more. It counts, and decides nothing: two paths
//! of one hash spoil a statistic.

use crate::error::Result;
use crate::memory::{Table, with_capacity};

/// The last evicted blocks.
#[derive(Debug, Default)]
pub struct Ghosts {
    /// By the number of the eviction, modulo the length.
    ring: Vec<u64>,
    /// Trace -> number of its last eviction.
    numbers: Table<u64, u64>,
    kept: usize,
}

impl Ghosts {
    /// Remembers so many evictions; 0: none.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(kept: usize) -> Result<Self> {
        let mut numbers = Table::default();
        numbers.try_reserve(kept)?;
        Ok(Self { ring: with_capacity(kept)?, numbers, kept })
    }

    /// A block was evicted, as the `number`th, from 0.
    pub fn add(&mut self, trace: u64, number: u64) {
        let place = (number % self.kept as u64) as usize;
        if place == self.ring.len() {
            self.ring.push(trace);
        } else {
            let old = std::mem::replace(&mut self.ring[place], trace);
            if self.numbers.get(&old) == Some(&(number - self.kept as u64)) {
                self.numbers.remove(&old);
            }
        }
        self.numbers.insert(trace, number);
    }

    /// A block is asked for: the number of its eviction, if that is remembered. It is a ghost no more.
    pub fn take(&mut self, trace: u64) -> Option<u64> {
        self.numbers.remove(&trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_evictions_are_remembered_and_each_is_found_once() {
        let mut ghosts = Ghosts::new(3).unwrap();
        for number in 0..5 {
            ghosts.add(100 + number, number);
        }
        assert_eq!([ghosts.take(100), ghosts.take(101), ghosts.take(102)], [None, None, Some(2)]);
        assert_eq!([ghosts.take(102), ghosts.take(104)], [None, Some(4)]);
        ghosts.add(104, 5);
        ghosts.add(104, 6);
        ghosts.add(1, 7);
        ghosts.add(2, 8);
        assert_eq!(ghosts.take(104), Some(6), "its first eviction has left, its second has not");
        assert!(ghosts.numbers.len() <= 3);
    }
}

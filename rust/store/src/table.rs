//! Where each key is: a hash table of positions, 8 bytes a slot, that asks its owner what lies there.
//!
//! Linear probing, at most three quarters full; a removal moves later entries back, so that there are no tombstones to
//! collect. Between 11 and 21 bytes an entry; 32 for the moment in which it grows.

const EMPTY: u64 = u64::MAX;
const LEAST: usize = 16;

/// Positions by the hash of what lies there. A position is any number below 2^64 - 1.
#[derive(Debug, Default)]
pub struct Table {
    slots: Vec<u64>,
    len: usize,
}

impl Table {
    /// Positions in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u64>()
    }

    /// The first position with this hash that `is_it`.
    pub fn find(&self, hash: u64, is_it: impl Fn(u64) -> bool) -> Option<u64> {
        self.slot_of(hash, is_it).map(|slot| self.slots[slot])
    }

    /// Adds a position. Its owner has made sure that what lies there is in no other.
    pub fn insert(&mut self, hash: u64, position: u64, hash_of: impl Fn(u64) -> u64) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let grown = vec![EMPTY; (self.slots.len() * 2).max(LEAST)];
            let old = std::mem::replace(&mut self.slots, grown);
            for position in old.into_iter().filter(|&position| position != EMPTY) {
                self.put(hash_of(position), position);
            }
        }
        self.put(hash, position);
        self.len += 1;
    }

    /// Takes a position out; false if it is not in it.
    pub fn remove(&mut self, hash: u64, position: u64, hash_of: impl Fn(u64) -> u64) -> bool {
        let Some(mut hole) = self.slot_of(hash, |other| other == position) else { return false };
        let mask = self.slots.len() - 1;
        let mut next = (hole + 1) & mask;
        while self.slots[next] != EMPTY {
            let ideal = hash_of(self.slots[next]) as usize & mask;
            // It may move back if the hole is not before its place, seen around the ring.
            if next.wrapping_sub(ideal) & mask >= next.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.slots[hole] = EMPTY;
        self.len -= 1;
        true
    }

    fn slot_of(&self, hash: u64, is_it: impl Fn(u64) -> bool) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        while self.slots[slot] != EMPTY {
            if is_it(self.slots[slot]) {
                return Some(slot);
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    fn put(&mut self, hash: u64, position: u64) {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        while self.slots[slot] != EMPTY {
            slot = (slot + 1) & mask;
        }
        self.slots[slot] = position;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few hashes, so that runs of entries with one home collide and wrap around the end.
        #[test]
        fn tables_are_as_sets_are(steps in proptest::collection::vec((any::<bool>(), 0..200_u64), 0..400), hashes in 1..40_u64) {
            let hash_of = |position: u64| (position % hashes).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7;
            let (mut table, mut model) = (Table::default(), BTreeSet::new());
            for (adds, position) in steps {
                let hash = hash_of(position);
                if adds && model.insert(position) {
                    table.insert(hash, position, hash_of);
                } else if !adds {
                    prop_assert_eq!(table.remove(hash, position, hash_of), model.remove(&position));
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for position in 0..200 {
                let found = table.find(hash_of(position), |other| other == position);
                prop_assert_eq!(found.is_some(), model.contains(&position));
            }
        }
    }

    #[test]
    fn an_entry_costs_32_bytes_at_most() {
        let mut table = Table::default();
        for position in 0..100_000 {
            let before = table.bytes();
            table.insert(position, position, |position| position);
            let grew = if table.bytes() == before { 0 } else { before };
            assert!(position < 100 || (table.bytes() + grew) as u64 <= 33 * position, "at {position}");
        }
    }
}

//! Keyed hashing, and a chained table whose links live in its elements.
//!
//! The nodes' table is reserved at construction and never rehashed, which would stall one call (I13). A chain is as long as
//! chance makes it, since callers do not know the key (W14). Elements compare in full: a hash never proves anything
//! (I3).

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::error::Result;
use crate::ids::{NodeId, Token};
use crate::memory::zeroed;

/// A SipHash-1-3 key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    k0: u64,
    k1: u64,
    /// Bits of a hash that are kept: all, but in tests of collisions.
    mask: u32,
}

impl Key {
    /// The key drawn from a seed.
    #[must_use]
    pub const fn from_seed(seed: u64) -> Self {
        Self { k0: seed, k1: seed.rotate_left(32) ^ 0x6b76_7061_6765_7221, mask: u32::MAX }
    }

    /// A key whose hashes all collide (0 bits) or nearly so. For tests only: an attacker's dream.
    #[doc(hidden)]
    #[must_use]
    pub const fn weak(seed: u64, bits: u32) -> Self {
        let mut key = Self::from_seed(seed);
        key.mask = (1 << bits) - 1;
        key
    }

    /// The hash of a child: its parent and the tokens of its first block.
    #[must_use]
    pub fn hash_tokens(self, parent: NodeId, tokens: &[Token]) -> u32 {
        let mut hasher = SipHasher13::new_with_keys(self.k0 ^ u64::from(parent.word()), self.k1);
        hasher.write(bytemuck::cast_slice(tokens));
        hasher.finish() as u32 & self.mask
    }

    /// The hash of a name.
    #[must_use]
    pub fn hash_bytes(self, name: &[u8]) -> u32 {
        SipHasher13::new_with_keys(self.k0, self.k1).hash(name) as u32 & self.mask
    }
}

/// Heads of chains.
#[derive(Debug)]
pub struct Buckets {
    /// `NodeId::word() ^ NONE`, so that zeroed memory is a table of empty chains.
    heads: Vec<u32>,
}

impl Buckets {
    /// A table of at least `buckets` chains.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn new(buckets: usize) -> Result<Self> {
        Ok(Self { heads: zeroed(buckets.next_power_of_two())? })
    }

    /// Chains.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.heads.len()
    }

    /// Has it no chain? (Never.)
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    fn slot(&self, hash: u32) -> usize {
        hash as usize & (self.heads.len() - 1)
    }

    /// The first element of a hash's chain.
    #[must_use]
    pub fn first(&self, hash: u32) -> NodeId {
        NodeId::from_word(!self.heads[self.slot(hash)])
    }

    /// Puts an element in front.
    pub fn set_first(&mut self, hash: u32, id: NodeId) {
        let slot = self.slot(hash);
        self.heads[slot] = !id.word();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_what_is_hashed_counts() {
        let (key, node, root) = (Key::from_seed(7), NodeId::node(3), NodeId::root(3));
        let hash = key.hash_tokens(node, &[1, 2]);
        let others = [
            key.hash_tokens(root, &[1, 2]),
            key.hash_tokens(NodeId::node(4), &[1, 2]),
            key.hash_tokens(node, &[2, 1]),
            key.hash_tokens(node, &[1, 2, 0]),
            Key::from_seed(8).hash_tokens(node, &[1, 2]),
        ];
        assert!(!others.contains(&hash), "{others:?}");
        assert_eq!(Key::from_seed(7).hash_tokens(node, &[1, 2]), hash);
        assert_ne!(key.hash_bytes(b"a"), key.hash_bytes(b"b"));
    }

    #[test]
    fn a_weak_key_keeps_few_bits() {
        for (bits, end) in [(0, 1), (1, 2), (3, 8)] {
            let key = Key::weak(1, bits);
            let hashes: std::collections::BTreeSet<u32> =
                (0..200).map(|token| key.hash_tokens(NodeId::root(0), &[token])).collect();
            assert_eq!(hashes, (0..end).collect());
        }
    }

    #[test]
    fn a_table_of_zeroes_is_a_table_of_empty_chains() {
        let mut buckets = Buckets::new(5).unwrap();
        assert!((0..100).all(|hash| buckets.first(hash).is_none()));
        buckets.set_first(3, NodeId::node(0));
        buckets.set_first(4, NodeId::root(0));
        assert_eq!(
            [3, 3 + 8, 4, 5].map(|hash| buckets.first(hash).some()),
            [Some(NodeId::node(0)), Some(NodeId::node(0)), Some(NodeId::root(0)), None]
        );
        buckets.set_first(11, NodeId::NONE);
        assert!(buckets.first(3).is_none());
        assert!(Buckets::new(0).unwrap().first(u32::MAX).is_none());
    }
}

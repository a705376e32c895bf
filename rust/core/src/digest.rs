//! Keys by which blocks are known outside the pager: digests chained over identity, namespace and tokens.
//! `docs/design/rules.md` 17.1. Inside, tokens decide; here they are compared, too, by whoever keeps the block: its *meta*
//! has them.

use std::ops::Range;

use sha2::{Digest as _, Sha256};

use crate::content;
use crate::error::Result;
use crate::ids::Token;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// What stands above the first block of a path. It begins with eight zero bytes, as no key of a block does: by them a store
/// sees that there is no block above.
#[must_use]
pub fn root(identity: &[u8], namespace: &[u8], block_size: usize) -> Digest {
    let mut hash = Sha256::new_with_prefix(b"\0kvpager");
    hash.update((block_size as u32).to_le_bytes());
    hash.update((identity.len() as u64).to_le_bytes());
    hash.update(identity);
    hash.update(namespace);
    let whole: Digest = hash.finalize().into();
    let mut root = [0; 32];
    root[8..].copy_from_slice(&whole[..24]);
    root
}

/// Blocks as a store knows them.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Records {
    /// Their keys.
    pub keys: Vec<Digest>,
    /// For each, one after the other: the key of the block above, and its tokens.
    pub metas: Vec<u8>,
}

impl Records {
    /// Consecutive blocks of a path, whole units of it; `above` is the key of the block above.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn below(above: Digest, tokens: &[Token], block_size: usize) -> Result<Self> {
        let mut records = Self::default();
        records.reserve(tokens.len() / block_size, block_size)?;
        records.push(above, tokens, block_size);
        Ok(records)
    }

    /// Makes room for so many more blocks.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self, blocks: usize, block_size: usize) -> Result<()> {
        self.keys.try_reserve(blocks)?;
        Ok(self.metas.try_reserve(blocks * meta_bytes(block_size))?)
    }

    /// Drops all but some.
    pub fn keep(&mut self, blocks: Range<usize>, block_size: usize) {
        let bytes = meta_bytes(block_size);
        self.keys.truncate(blocks.end);
        self.keys.drain(..blocks.start);
        self.metas.truncate(blocks.end * bytes);
        self.metas.drain(..blocks.start * bytes);
    }

    /// Adds blocks as `below` makes them. `reserve` made room.
    pub fn push(&mut self, mut above: Digest, tokens: &[Token], block_size: usize) {
        let mut rest = tokens;
        while !rest.is_empty() {
            let (unit, others) = rest.split_at(first_unit(rest, block_size) * block_size);
            let whole = (unit.len() > block_size).then(|| digest(2, above, unit));
            for (nth, block) in unit.chunks(block_size).enumerate() {
                let key = whole.map_or_else(|| digest(1, above, block), |whole| block_in_unit(whole, nth as u32));
                self.metas.extend_from_slice(&above);
                self.metas.extend(block.iter().flat_map(|token| token.to_le_bytes()));
                self.keys.push(key);
                above = key;
            }
            rest = others;
        }
    }
}

/// Length of a block's meta.
#[must_use]
pub const fn meta_bytes(block_size: usize) -> usize {
    size_of::<Digest>() + block_size * size_of::<Token>()
}

/// Blocks of the first unit of a list of whole blocks.
fn first_unit(tokens: &[Token], block_size: usize) -> usize {
    let ends = (block_size..tokens.len()).step_by(block_size);
    let inside = ends.take_while(|&end| content::spans(tokens[end - 1], tokens[end])).count();
    inside + 1
}

fn digest(kind: u8, above: Digest, tokens: &[Token]) -> Digest {
    let mut hash = Sha256::new_with_prefix([kind]);
    hash.update(above);
    // In pieces, through a buffer: bytes of the other order on some machines.
    let mut bytes = [0; 256];
    for piece in tokens.chunks(64) {
        for (out, token) in bytes.chunks_exact_mut(4).zip(piece) {
            out.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(&bytes[..piece.len() * 4]);
    }
    hash.finalize().into()
}

fn block_in_unit(unit: Digest, nth: u32) -> Digest {
    let mut hash = Sha256::new_with_prefix([3]);
    hash.update(unit);
    hash.update(nth.to_le_bytes());
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::{Records, root};
    use crate::ids::{CONTENT_START, Token};

    const C: Token = CONTENT_START;

    fn records(tokens: &[Token]) -> Records {
        Records::below(root(b"model", b"\0a", 2), tokens, 2).expect("memory")
    }

    #[test]
    fn a_key_covers_all_above_it() {
        let (one, other) = (records(&[1, 2, 3, 4]), records(&[9, 2, 3, 4]));
        assert_ne!(one.keys[1], other.keys[1]);
        assert_eq!(one.metas[40..72], one.keys[0]);
        assert_eq!(one.metas[72..], [3, 0, 0, 0, 4, 0, 0, 0]);
        assert_eq!(records(&[1, 2]).keys[..], one.keys[..1]);
    }

    #[test]
    fn a_block_of_a_run_has_a_key_that_covers_the_whole_run() {
        let (one, other) = (records(&[1, C, C, C, C, 7]), records(&[1, C, C, C, C + 1, 7]));
        for nth in 0..3 {
            assert_ne!(one.keys[nth], other.keys[nth]);
        }
        assert_eq!(one.metas[..40], other.metas[..40]);
    }

    #[test]
    fn roots_differ_by_each_of_their_parts() {
        let roots = [root(b"a", b"\0", 2), root(b"", b"a\0", 2), root(b"a", b"\0", 4), root(b"a\0", b"", 2)];
        for (nth, one) in roots.iter().enumerate() {
            assert!(roots[nth + 1..].iter().all(|other| other != one));
        }
    }
}

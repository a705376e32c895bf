//! Which host blocks a store has, as far as the pager has been told, and by which keys. `docs/design/rules.md` 17.2.

use crate::digest::Digest;
use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::zeroed;

/// What is known of a block.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Mark {
    /// Nothing.
    #[default]
    Unknown,
    /// A plan takes it to the store.
    Saving,
    /// The store has had it.
    Stored,
}

/// The marks of a tier's blocks. Memory is asked for when a store is first spoken of: 33 bytes a block.
#[derive(Debug, Default)]
pub struct Stored {
    marks: Vec<Mark>,
    keys: Vec<Digest>,
}

impl Stored {
    /// Makes room for the marks of so many blocks.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn reserve(&mut self, num_blocks: usize) -> Result<()> {
        if self.marks.is_empty() {
            let keys = zeroed(num_blocks)?;
            self.marks = zeroed(num_blocks)?;
            self.keys = keys;
        }
        Ok(())
    }

    /// The key of a block that is stored, or is being saved.
    #[must_use]
    pub fn key(&self, block: BlockId) -> Option<Digest> {
        (*self.marks.get(block as usize)? != Mark::Unknown).then(|| self.keys[block as usize])
    }

    /// Has a store had it?
    #[must_use]
    pub fn is_stored(&self, block: BlockId) -> bool {
        self.marks.get(block as usize) == Some(&Mark::Stored)
    }

    /// Is it being saved?
    #[must_use]
    pub fn is_saving(&self, block: BlockId) -> bool {
        self.marks.get(block as usize) == Some(&Mark::Saving)
    }

    /// A plan takes a block to the store. `reserve` made room.
    pub fn begin(&mut self, block: BlockId, key: Digest) {
        self.marks[block as usize] = Mark::Saving;
        self.keys[block as usize] = key;
    }

    /// That plan has ended.
    pub fn end(&mut self, block: BlockId, is_stored: bool) {
        self.marks[block as usize] = if is_stored { Mark::Stored } else { Mark::Unknown };
    }

    /// A block came from the store. `reserve` made room.
    pub fn set(&mut self, block: BlockId, key: Digest) {
        self.begin(block, key);
        self.end(block, true);
    }

    /// The store may have lost a block.
    pub fn doubt(&mut self, block: BlockId) {
        if self.is_stored(block) {
            self.clear(block);
        }
    }

    /// Something else will be in the block.
    pub fn clear(&mut self, block: BlockId) {
        if let Some(mark) = self.marks.get_mut(block as usize) {
            *mark = Mark::Unknown;
        }
    }
}

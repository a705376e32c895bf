//! Where the tables of a batch's rows differ from what was last made of them.
//!
//! A bit for each row says whether its table has changed, so that the rows come out in order without being sorted, and a
//! row that changes again costs nothing more. For a table that only grew by a block, the block is here: writing it needs no
//! look at the table.

use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::zeroed;

/// No block. (Ids are below 2^31.)
const NO_BLOCK: BlockId = BlockId::MAX;

/// What has changed in a row's table.
#[derive(Clone, Copy, Default, Debug)]
pub struct Change {
    /// The row.
    pub row: u32,
    /// The first column.
    pub column: u32,
    block: BlockId,
}

impl Change {
    /// From a column on the table may be anything.
    #[must_use]
    pub const fn from_column(row: u32, column: u32) -> Self {
        Self { row, column, block: NO_BLOCK }
    }

    /// A block was appended in this column.
    #[must_use]
    pub const fn appended(row: u32, column: u32, block: BlockId) -> Self {
        Self { row, column, block }
    }

    /// The block, if it was appended and nothing else has changed.
    #[must_use]
    pub const fn block(&self) -> Option<BlockId> {
        if self.block == NO_BLOCK { None } else { Some(self.block) }
    }
}

/// The changes of all rows, one for each.
#[derive(Default, Debug)]
pub struct Changes {
    has_changed: Vec<u64>,
    changes: Vec<Change>,
}

impl Changes {
    /// None, of so many rows.
    ///
    /// # Errors
    /// `Memory`.
    pub fn with_rows(rows: usize) -> Result<Self> {
        Ok(Self { has_changed: zeroed(rows.div_ceil(64))?, changes: zeroed(rows)? })
    }

    /// Adds a change.
    pub fn note(&mut self, mut change: Change) {
        let (word, bit) = (&mut self.has_changed[change.row as usize / 64], 1 << (change.row % 64));
        let place = &mut self.changes[change.row as usize];
        if *word & bit != 0 {
            change = Change::from_column(change.row, change.column.min(place.column));
        }
        *word |= bit;
        *place = change;
    }

    /// Takes all out, in the order of rows.
    pub fn drain(&mut self) -> impl Iterator<Item = Change> {
        let changes = &self.changes;
        self.has_changed.iter_mut().enumerate().flat_map(move |(at, word)| {
            let mut left = std::mem::take(word);
            std::iter::from_fn(move || {
                let bit = (left != 0).then_some(left.trailing_zeros())?;
                left &= left - 1;
                Some(changes[at * 64 + bit as usize])
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_out_once_and_from_its_first_column_on() {
        let mut changes = Changes::with_rows(200).unwrap();
        changes.note(Change::appended(130, 7, 1));
        changes.note(Change::appended(3, 4, 9));
        changes.note(Change::from_column(64, 5));
        changes.note(Change::appended(130, 8, 2));
        changes.note(Change::from_column(64, 6));
        let taken: Vec<_> = changes.drain().map(|change| (change.row, change.column, change.block())).collect();
        assert_eq!(taken, [(3, 4, Some(9)), (64, 5, None), (130, 7, None)]);
        assert_eq!(changes.drain().count(), 0);
    }
}

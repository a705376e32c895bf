//! What other kernels read in the place of a padded table: each row's blocks, or each position's slot, one behind the
//! other. Made of a step's `seq_lens` and `block_tables`.

use crate::error::{Error, Result};
use crate::memory::with_capacity;

/// A step's lengths and tables.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    /// Tokens of each row.
    pub seq_lens: &'a [i32],
    /// `columns` blocks of each row.
    pub block_tables: &'a [i32],
    /// Blocks that a row has room for.
    pub columns: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

/// Rows of different length, one behind the other: row r has `indices[indptr[r]..indptr[r + 1]]`.
#[derive(Debug)]
pub struct Ragged {
    /// Where each row starts, and the total.
    pub indptr: Vec<i32>,
    /// The entries.
    pub indices: Vec<i32>,
}

impl<'a> Tables<'a> {
    /// The tokens of each row, and the blocks that they are in.
    fn rows(&self) -> impl Iterator<Item = (usize, &'a [i32])> {
        let block_size = self.block_size;
        let rows = self.seq_lens.iter().zip(self.block_tables.chunks_exact(self.columns));
        rows.map(move |(&len, table)| {
            let len = len.max(0).cast_unsigned() as usize;
            (len, &table[..len.div_ceil(block_size)])
        })
    }

    /// Tokens of the longest row.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.rows().map(|(len, _)| len).max().unwrap_or_default()
    }

    /// Do the lengths fit the tables? (Whoever has the arrays can write to them.)
    ///
    /// # Errors
    /// `Value` if not.
    pub fn check(&self) -> Result<()> {
        let most = self.columns * self.block_size;
        match self.seq_lens.iter().position(|&len| len.max(0).cast_unsigned() as usize > most) {
            None => Ok(()),
            Some(row) => Err(Error::Value(format!(
                "seq_lens[{row}] is {}; a row has room for {most} tokens",
                self.seq_lens[row]
            ))),
        }
    }

    /// The blocks of each row.
    ///
    /// # Errors
    /// `Value` for a length that its table has no room for, or a total beyond 2^31 - 1; `Memory`.
    pub fn pages(&self) -> Result<Ragged> {
        self.check()?;
        self.ragged(|_, table| table.len(), |_, table, indices| indices.extend_from_slice(table))
    }

    /// Tokens in the last block of each row; 0 for a row without tokens.
    ///
    /// # Errors
    /// `Memory`.
    pub fn last_page_lens(&self) -> Result<Vec<i32>> {
        let mut lens = with_capacity(self.seq_lens.len())?;
        let block_size = self.block_size as i32;
        lens.extend(self.seq_lens.iter().map(|&len| if len > 0 { (len - 1) % block_size + 1 } else { 0 }));
        Ok(lens)
    }

    /// The slot of each position of each row.
    ///
    /// # Errors
    /// As `pages`; `Value` for slots beyond 2^31 - 1.
    pub fn slots(&self) -> Result<Ragged> {
        self.check_slots()?;
        self.ragged(|len, _| len, |len, table, indices| self.push_slots(len, table, indices))
    }

    /// The slot of each position of each row, in rows of `width`, 0 behind the last.
    ///
    /// # Errors
    /// As `slots`.
    pub fn token_table(&self, width: usize) -> Result<Vec<i32>> {
        self.check_slots()?;
        let mut table = with_capacity(self.seq_lens.len().saturating_mul(width))?;
        for (row, (len, blocks)) in self.rows().enumerate() {
            self.push_slots(len.min(width), blocks, &mut table);
            table.resize((row + 1) * width, 0);
        }
        Ok(table)
    }

    fn check_slots(&self) -> Result<()> {
        self.check()?;
        let highest = self.rows().flat_map(|(_, table)| table).max().copied().unwrap_or(0);
        if (i64::from(highest) + 1) * self.block_size as i64 > i64::from(i32::MAX) + 1 {
            return Err(Error::Value(format!(
                "block {highest} of {} tokens has slots beyond 2147483647, which this form has no room for",
                self.block_size
            )));
        }
        Ok(())
    }

    fn push_slots(&self, len: usize, table: &[i32], indices: &mut Vec<i32>) {
        let end = indices.len() + len;
        let block_size = self.block_size as i32;
        for &block in table {
            let first = block.wrapping_mul(block_size);
            indices.extend((0..block_size).map(|offset| first.wrapping_add(offset)));
        }
        indices.truncate(end);
    }

    fn ragged(
        &self,
        count: impl Fn(usize, &[i32]) -> usize,
        push: impl Fn(usize, &[i32], &mut Vec<i32>),
    ) -> Result<Ragged> {
        let mut indptr = with_capacity(self.seq_lens.len() + 1)?;
        let mut total = 0;
        indptr.push(0);
        for (len, table) in self.rows() {
            total += count(len, table);
            indptr.push(i32::try_from(total).map_err(|_| {
                Error::Value(format!("the rows have {total} entries and more; this form has room for 2147483647"))
            })?);
        }
        // A row's last block is pushed whole, and cut.
        let mut indices = with_capacity(total + self.block_size)?;
        for (len, table) in self.rows() {
            push(len, table, &mut indices);
        }
        Ok(Ragged { indptr, indices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: Tables<'_> =
        Tables { seq_lens: &[5, 0, 4], block_tables: &[7, 2, -1, -1, -1, -1, 3, -1, -1], columns: 3, block_size: 4 };

    #[test]
    fn pages_stand_one_behind_the_other() {
        let Ragged { indptr, indices } = TABLES.pages().unwrap();
        assert_eq!((indptr.as_slice(), indices.as_slice()), (&[0, 2, 2, 3][..], &[7, 2, 3][..]));
        assert_eq!(TABLES.last_page_lens().unwrap(), [1, 0, 4]);
    }

    #[test]
    fn slots_stand_one_behind_the_other_or_in_rows() {
        let Ragged { indptr, indices } = TABLES.slots().unwrap();
        assert_eq!(
            (indptr.as_slice(), indices.as_slice()),
            (&[0, 5, 5, 9][..], &[28, 29, 30, 31, 8, 12, 13, 14, 15][..])
        );
        assert_eq!(TABLES.token_table(5).unwrap(), [28, 29, 30, 31, 8, 0, 0, 0, 0, 0, 12, 13, 14, 15, 0]);
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        assert!(Tables { seq_lens: &[13, 0, 0], ..TABLES }.pages().is_err());
        assert!(Tables { block_tables: &[1 << 29, 0, 0], seq_lens: &[1], ..TABLES }.slots().is_err());
        let highest = Tables { block_tables: &[(1 << 29) - 1, 0, 0], seq_lens: &[4], ..TABLES };
        assert_eq!(highest.slots().unwrap().indices.last(), Some(&i32::MAX));
    }
}

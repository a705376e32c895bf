//! The arrays of one buffer, which belong to the caller.

use super::Shape;
use crate::error::Result;
use crate::memory::with_capacity;

/// The arrays that one step fills.
#[derive(Debug)]
pub struct Arrays<'a> {
    /// `max_seqs` rows of `max_blocks`.
    pub block_tables: &'a mut [i32],
    /// `max_seqs`.
    pub seq_lens: &'a mut [i32],
    /// `max_tokens`.
    pub slot_mapping: &'a mut [i64],
    /// `max_tokens`.
    pub positions: &'a mut [i32],
    /// `max_seqs + 1`.
    pub query_start_loc: &'a mut [i32],
}

impl Arrays<'_> {
    /// Fills all of it with what stands for nothing. (Writing zeros over zeros would touch every page.)
    pub fn blank(&mut self, shape: &Shape, is_zeroed: bool) {
        if !is_zeroed || shape.pad_block != 0 {
            self.block_tables.fill(shape.pad_block);
        }
        self.seq_lens.fill(shape.pad_seq_len);
        self.slot_mapping.fill(shape.pad_slot);
        if !is_zeroed {
            self.positions.fill(0);
            self.query_start_loc.fill(0);
        }
    }

    /// Pads what the buffer's last step used and this one does not.
    pub fn pad(&mut self, shape: &Shape, written: &mut Written, rows: usize, tokens: usize) {
        if rows < written.rows {
            self.seq_lens[rows..written.rows].fill(shape.pad_seq_len);
        }
        if tokens < written.tokens {
            self.slot_mapping[tokens..written.tokens].fill(shape.pad_slot);
            self.positions[tokens..written.tokens].fill(0);
        }
        if tokens != written.tokens || rows < written.rows {
            self.query_start_loc[rows + 1..].fill(tokens as i32);
        }
        (written.rows, written.tokens) = (rows, tokens);
    }
}

/// How much of a buffer's arrays is not padding.
#[derive(Debug)]
pub struct Written {
    /// Columns of each row.
    pub columns: Vec<u32>,
    /// Rows.
    pub rows: usize,
    /// Positions.
    pub tokens: usize,
}

impl Written {
    /// Nothing, of so many rows.
    ///
    /// # Errors
    /// `Memory`.
    pub fn with_rows(rows: usize) -> Result<Self> {
        let mut columns = with_capacity(rows)?;
        columns.resize(rows, 0);
        Ok(Self { columns, rows: 0, tokens: 0 })
    }
}

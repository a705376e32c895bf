//! The limits of a batch.

use crate::error::{Error, Result};

/// Most buffers.
pub const BUFFERS_MAX: usize = 4;

/// Most rows.
pub const MAX_SEQS_LIMIT: usize = 65_536;

const ELEMENTS_END: usize = 1 << 31;

/// How large a batch is, and what its arrays hold where there is nothing.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Rows.
    pub max_seqs: usize,
    /// Columns of the block tables.
    pub max_blocks: usize,
    /// Positions of one step.
    pub max_tokens: usize,
    /// Steps that may be open at once.
    pub buffers: usize,
    /// Block where a table has none.
    pub pad_block: i32,
    /// Slot behind the last planned position.
    pub pad_slot: i64,
    /// Length of an empty row.
    pub pad_seq_len: i32,
}

impl Shape {
    /// Checks the limits.
    ///
    /// # Errors
    /// `Config`.
    pub fn validate(&self) -> Result<()> {
        let within = |name: &str, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::Config(format!("{name} is {value}: it must be 1 to {most}")))
        };
        within("max_seqs", self.max_seqs, MAX_SEQS_LIMIT)?;
        within("max_blocks", self.max_blocks, ELEMENTS_END - 1)?;
        within("max_tokens", self.max_tokens, ELEMENTS_END - 1)?;
        within("buffers", self.buffers, BUFFERS_MAX)?;
        let elements = self.max_seqs.saturating_mul(self.max_blocks).max(self.max_tokens).saturating_mul(self.buffers);
        if elements >= ELEMENTS_END {
            return Err(Error::Config(format!(
                "max_seqs * max_blocks * buffers is {} and max_tokens * buffers {}: both must be below 2147483648",
                self.max_seqs.saturating_mul(self.max_blocks).saturating_mul(self.buffers),
                self.max_tokens.saturating_mul(self.buffers)
            )));
        }
        Ok(())
    }
}

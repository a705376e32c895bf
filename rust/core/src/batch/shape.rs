//! The limits of a batch.

use crate::error::{Error, Result};

/// Most buffers.
pub const BUFFERS_MAX: usize = 4;
/// The limits of `buffers`, in words.
pub const BUFFERS_LIMITS: &str = "1 to 4";
/// The limits of `max_seqs`, in words.
pub const MAX_SEQS_LIMITS: &str = "1 to 65536";
/// The limits of `max_blocks` and `max_tokens`, in words.
pub const COUNT_LIMITS: &str = "1 to 2147483647";

const MAX_SEQS_END: usize = 65_537;
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
        for (name, value, end, limits) in [
            ("max_seqs", self.max_seqs, MAX_SEQS_END, MAX_SEQS_LIMITS),
            ("max_blocks", self.max_blocks, ELEMENTS_END, COUNT_LIMITS),
            ("max_tokens", self.max_tokens, ELEMENTS_END, COUNT_LIMITS),
            ("buffers", self.buffers, BUFFERS_MAX + 1, BUFFERS_LIMITS),
        ] {
            if value == 0 || value >= end {
                return Err(Error::Config(format!("{name} is {value}; it must be {limits}")));
            }
        }
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

//! What a step is asked for.

use super::Slow;
use crate::error::{Error, Result};

/// How many positions a step plans.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same number for each sequence.
    All(u32),
    /// A number for each row.
    Each(&'a [i32]),
}

impl Counts<'_> {
    /// Those of a row.
    #[must_use]
    pub fn of(self, row: usize) -> u32 {
        match self {
            Self::All(count) => count,
            Self::Each(counts) => counts[row].cast_unsigned(),
        }
    }

    /// The number of each row, if that is the same one, and not 0.
    #[must_use]
    pub const fn each(self) -> Option<u32> {
        match self {
            Self::All(count) if count > 0 => Some(count),
            _ => None,
        }
    }

    /// Is there a number for each row?
    ///
    /// # Errors
    /// `Value` if not.
    pub fn check(self, rows: usize) -> Result<()> {
        let Self::Each(counts) = self else { return Ok(()) };
        if counts.len() != rows {
            return Err(Error::Value(format!(
                "num_tokens has {} numbers; the batch has {rows} rows: one for each, 0 for an empty row",
                counts.len()
            )));
        }
        if let Some(row) = counts.iter().position(|&count| count < 0) {
            return Err(Error::Value(format!("num_tokens[{row}] is {}: it must be 0 or more", counts[row])));
        }
        Ok(())
    }
}

/// The tokens of positions beyond a sequence's own.
#[derive(Clone, Copy, Debug)]
pub enum Ahead<'a> {
    /// Not known yet: placeholders.
    Unknown,
    /// One for each such position, rows in order; -1 is a placeholder.
    Given(&'a [i32]),
    /// Only blocks are asked for.
    Blocks,
}

impl<'a> Ahead<'a> {
    /// The tokens that a row adds.
    #[must_use]
    pub fn tokens(self, row: &Slow) -> &'a [i32] {
        match self {
            Self::Given(tokens) => &tokens[row.tokens_at as usize..][..row.added as usize],
            _ => &[-1][..row.added as usize],
        }
    }
}

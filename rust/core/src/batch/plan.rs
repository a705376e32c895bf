//! What a step that is open has promised.

use crate::error::Result;
use crate::ids::BlockId;
use crate::memory::with_capacity;

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// Behind its last position.
    pub end: u32,
    /// Positions; 0 for a row that was left out.
    pub num: u32,
    /// Drafts among them.
    pub drafts: u32,
    /// Does it start with a placeholder that it added?
    pub has_placeholder: bool,
    /// Does it (still) name its sequence?
    pub is_named: bool,
}

impl Planned {
    /// A row that was left out.
    pub const NOTHING: Self = Self { end: 0, num: 0, drafts: 0, has_placeholder: false, is_named: false };
}

/// Blocks that a step appended to a table.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Row of the step.
    pub row: u32,
    /// Entries before.
    pub before: u32,
    /// Entries after.
    pub after: u32,
    /// Tokens of the sequence before.
    pub len: u32,
}

/// A copy that a step handed out.
#[derive(Clone, Copy, Debug)]
pub struct LentCopy {
    /// Read, and held by the step.
    pub source: BlockId,
    /// Written.
    pub target: BlockId,
    /// Names it among all copies.
    pub ticket: u64,
    /// Row of the step that it was made for; `NO_ROW` if a single call had queued it.
    pub row: u32,
    /// Position in that row's table.
    pub column: u32,
}

/// One step.
#[derive(Debug)]
pub struct Plan {
    /// Its rows.
    pub rows: Vec<Planned>,
    /// Its copies: those from the queue, then its own, by rows.
    pub copies: Vec<LentCopy>,
    /// Tables that it made longer, by rows.
    pub growths: Vec<Growth>,
    /// Rows that wrote to the rest of a block before they grew by the next one; and that block.
    pub crossings: Vec<(u32, BlockId)>,
    /// What `updates` shows: row, first column, end column.
    pub updates: Vec<(u32, u32, u32)>,
    /// Rows whose commit, as far as could be told, touches more than the row.
    pub suspects: Vec<u32>,
    /// The batch's `num_chills` after it: while that stays, no other row has become one.
    pub num_chills: u64,
    /// Positions of each row, if those are as many.
    pub num_each: Option<u32>,
    /// Positions of all rows.
    pub num_tokens: usize,
    /// Positions of those rows that it (still) names.
    pub num_named_tokens: usize,
    /// What was handed out before it, and it: its place in the order of launches.
    pub launch: u64,
    /// Its number among the pager's fences.
    pub fence: u64,
    /// Have rows moved or been removed since?
    pub is_moved: bool,
}

impl Plan {
    /// No step, without room for one.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            rows: Vec::new(),
            copies: Vec::new(),
            growths: Vec::new(),
            crossings: Vec::new(),
            updates: Vec::new(),
            suspects: Vec::new(),
            num_chills: 0,
            num_each: None,
            num_tokens: 0,
            num_named_tokens: 0,
            launch: 0,
            fence: 0,
            is_moved: false,
        }
    }

    /// A new step begins.
    pub fn begin(&mut self, num_each: Option<u32>, num_tokens: usize) {
        self.rows.clear();
        self.copies.clear();
        self.growths.clear();
        self.crossings.clear();
        self.updates.clear();
        self.suspects.clear();
        (self.num_each, self.num_tokens, self.num_named_tokens) = (num_each, num_tokens, num_tokens);
        self.is_moved = false;
    }

    /// Has each row as many positions as any other, and names its sequence still?
    #[must_use]
    pub fn is_even(&self) -> bool {
        self.num_each.is_some_and(|num| self.num_named_tokens == num as usize * self.rows.len())
    }

    /// Room for the step of so many rows.
    ///
    /// # Errors
    /// `Memory`.
    pub fn with_rows(rows: usize) -> Result<Self> {
        Ok(Self {
            rows: with_capacity(rows)?,
            copies: Vec::new(),
            growths: with_capacity(rows)?,
            crossings: with_capacity(rows)?,
            updates: with_capacity(rows)?,
            suspects: with_capacity(rows)?,
            ..Self::none()
        })
    }
}

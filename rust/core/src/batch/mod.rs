//! A batch: rows of sequences that are stepped together, and the steps that are open.
//!
//! A row keeps a copy of what a usual decode step needs of its sequence, so that such a step and its commit touch
//! only consecutive memory:
//!
//! ```text
//! tokens of the sequence   |-- in the tree --|-- in its tail --|-- pending here --|
//! positions                0                                   flushed           len
//! may be written as is                               planned ..... limit
//! ```
//!
//! A row may be *cold*: its sequence has been used on its own since, and the next step looks at it again. What is
//! pending is *flushed* into the sequence before anybody else reads that, which makes the row cold; its tail has room for
//! `PENDING_MAX` tokens until then, so that flushing cannot fail. A block that becomes full is published from here; the
//! sequence learns of that when it is flushed, too.

mod arrays;
mod asked;
mod changes;
mod filling;
mod forms;
mod outcome;
mod plan;
mod row;
mod shape;

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::ids::{BlockId, Handle, Token};
use crate::memory::{with_capacity, zeroed};

pub use arrays::Arrays;
pub use asked::{Ahead, Counts};
pub use changes::{Change, Changes};
pub use filling::{Cursor, plan_rows};
pub use forms::{Ragged, Tables};
pub use outcome::{Outcome, Told, commit_usual_rows, find_slow_rows};
pub use plan::{Growth, LentCopy, Plan, Planned};
pub use row::{PENDING_MAX, Pending, Row};
pub use shape::{BUFFERS_LIMITS, BUFFERS_MAX, COUNT_LIMITS, MAX_SEQS_LIMITS, Shape};

/// The token of a position whose token is not known yet.
pub const PLACEHOLDER: Token = Token::MAX;

/// No row.
pub const NO_ROW: u32 = u32::MAX;

/// Where a sequence is in batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seat {
    /// In none.
    None,
    /// In a row.
    Row {
        /// The batch.
        batch: Handle,
        /// Its row.
        row: u32,
    },
    /// In no row any more, but perhaps named by steps that are still open.
    Left {
        /// The batch.
        batch: Handle,
        /// Its row in the step of each buffer, as of that step.
        plan_rows: [u32; BUFFERS_MAX],
    },
}

impl Seat {
    /// The batch that has a row for the sequence, or had one and may name it.
    #[must_use]
    pub const fn batch(self) -> Option<Handle> {
        match self {
            Self::None => None,
            Self::Row { batch, .. } | Self::Left { batch, .. } => Some(batch),
        }
    }
}

/// A row that the step's usual path does not cover.
#[derive(Clone, Copy, Debug)]
pub struct Slow {
    /// The row.
    pub row: u32,
    /// Positions to plan.
    pub num: u32,
    /// Of these, positions beyond the sequence's tokens.
    pub added: u32,
    /// Where their tokens start in the argument.
    pub tokens_at: u32,
    /// Blocks to take.
    pub needed: u32,
}

/// Rows, and open steps.
#[derive(Debug)]
pub struct Batch {
    /// How large it is.
    pub shape: Shape,
    /// Tokens of a block.
    pub block_size: u32,
    /// What steps need of each row.
    pub rows: Vec<Row>,
    /// The sequence of each row.
    pub sequences: Vec<Option<Handle>>,
    /// Times that a row has become cold, or another sequence's.
    pub num_chills: u64,
    /// Pending tokens of each row.
    pub pending: Vec<Pending>,
    /// For each buffer and row: its row in that buffer's step, as of that step.
    pub plan_rows: Vec<Vec<u32>>,
    /// The step of each buffer.
    pub plans: Vec<Plan>,
    /// The oldest open step. Step k is in buffer k mod buffers.
    pub oldest: u64,
    /// The step that comes next.
    pub next: u64,
    /// Sequences that left their row while a step named them.
    pub left: Vec<Handle>,
    /// Empty rows below the last one in use.
    pub holes: BTreeSet<u32>,
    /// Rows in use.
    pub num_sequences: usize,
    /// For each buffer, and for `updates` (the last): where tables differ from what is written there.
    pub changes: Vec<Changes>,
    /// For each buffer: columns written in each row, rows and tokens written, and the last `query_start_loc`.
    pub written: Vec<arrays::Written>,
    // Scratch of one call, kept so that a steady step allocates nothing.
    /// Rows that a step must look at.
    pub slow: Vec<Slow>,
    /// Rows that a commit must look at.
    pub slow_rows: Vec<u32>,
    /// Blocks taken for a step.
    pub taken: Vec<BlockId>,
    /// Shared blocks that a step's rows write to, one entry for each row.
    pub shared: Vec<BlockId>,
    /// Copies that this call asked for: ticket, row, column.
    pub own_copies: Vec<(u64, u32, u32)>,
}

impl Batch {
    /// An empty batch.
    ///
    /// # Errors
    /// `Config` for a shape outside its limits; `Memory`.
    pub fn new(shape: Shape, block_size: usize) -> Result<Self> {
        shape.validate()?;
        let (rows, buffers) = (shape.max_seqs, shape.buffers);
        let per_buffer = || -> Result<Vec<Vec<u32>>> { (0..buffers).map(|_| with_capacity(rows)).collect() };
        let mut batch = Self {
            rows: with_capacity(rows)?,
            num_chills: 0,
            sequences: with_capacity(rows)?,
            pending: with_capacity(rows)?,
            plan_rows: per_buffer()?,
            plans: Vec::new(),
            oldest: 0,
            next: 0,
            left: Vec::new(),
            holes: BTreeSet::new(),
            num_sequences: 0,
            changes: Vec::new(),
            written: Vec::new(),
            slow: with_capacity(rows)?,
            slow_rows: with_capacity(rows)?,
            taken: Vec::new(),
            shared: Vec::new(),
            own_copies: Vec::new(),
            shape,
            block_size: block_size as u32,
        };
        for _ in 0..buffers {
            batch.plans.push(Plan::with_rows(rows)?);
            batch.written.push(arrays::Written::with_rows(rows)?);
        }
        for _ in 0..=buffers {
            batch.changes.push(Changes::with_rows(rows)?);
        }
        Ok(batch)
    }

    // ---- steps -----------------------------------------------------------------------------------------------------

    /// Open steps.
    #[must_use]
    pub const fn num_open(&self) -> usize {
        (self.next - self.oldest) as usize
    }

    /// The buffer of a step.
    #[must_use]
    pub const fn buffer_of(&self, step: u64) -> usize {
        (step % self.shape.buffers as u64) as usize
    }

    /// The step with this number, which is open.
    #[must_use]
    pub fn plan(&self, step: u64) -> &Plan {
        &self.plans[self.buffer_of(step)]
    }

    /// Copies that open steps have handed out.
    pub fn lent_copies(&self) -> impl Iterator<Item = &LentCopy> {
        (self.oldest..self.next).flat_map(|step| &self.plan(step).copies)
    }

    fn plan_row(&self, seat: Seat, buffer: usize) -> u32 {
        match seat {
            Seat::None => NO_ROW,
            Seat::Row { row, .. } => self.plan_rows[buffer][row as usize],
            Seat::Left { plan_rows, .. } => plan_rows[buffer],
        }
    }

    /// The open rows that name a sequence, newest first.
    pub fn naming(&self, seat: Seat) -> impl Iterator<Item = &Planned> {
        (self.oldest..self.next).rev().filter_map(move |step| {
            let buffer = self.buffer_of(step);
            let planned = self.plans[buffer].rows.get(self.plan_row(seat, buffer) as usize)?;
            planned.is_named.then_some(planned)
        })
    }

    /// Positions of a sequence that are given to steps: up to the end of the newest row that names it.
    #[must_use]
    pub fn num_planned(&self, seat: Seat, num_committed: usize) -> usize {
        self.naming(seat).next().map_or(num_committed, |planned| planned.end as usize)
    }

    /// Is a sequence named by an open step?
    #[must_use]
    pub fn names(&self, seat: Seat) -> bool {
        self.naming(seat).next().is_some()
    }

    /// The sequence was cut to `len` tokens: open rows that end behind that are void.
    pub fn void(&mut self, seat: Seat, len: usize) {
        for step in self.oldest..self.next {
            let buffer = self.buffer_of(step);
            let (row, plan) = (self.plan_row(seat, buffer) as usize, &mut self.plans[buffer]);
            if let Some(planned) = plan.rows.get_mut(row)
                && planned.is_named
                && planned.end as usize > len
            {
                planned.is_named = false;
                plan.num_named_tokens -= planned.num as usize;
            }
        }
    }

    // ---- rows ------------------------------------------------------------------------------------------------------

    /// The lowest empty row, if there is one.
    #[must_use]
    pub fn empty_row(&self) -> Option<u32> {
        match self.holes.first() {
            Some(&hole) => Some(hole),
            None => (self.rows.len() < self.shape.max_seqs).then_some(self.rows.len() as u32),
        }
    }

    /// The row of a caller's number, if it is in use.
    #[must_use]
    pub fn in_use(&self, row: i32) -> Option<usize> {
        usize::try_from(row).ok().filter(|&at| self.sequences.get(at).is_some_and(Option::is_some))
    }

    /// Which rows a caller has named: each must be in use, and named once.
    ///
    /// # Errors
    /// `Value` for one that is not; `Memory`.
    pub fn named_rows(&self, rows: &[i32]) -> Result<Vec<bool>> {
        let mut is_named: Vec<bool> = zeroed(self.rows.len())?;
        for (nth, &row) in rows.iter().enumerate() {
            let Some(at) = self.in_use(row) else {
                return Err(Error::Value(format!("rows[{nth}] is {row}: that row is empty")));
            };
            if std::mem::replace(&mut is_named[at], true) {
                return Err(Error::Value(format!("rows[{nth}] is {row} for a second time")));
            }
        }
        Ok(is_named)
    }

    /// Puts a sequence into the lowest empty row, which there is.
    pub fn seat(&mut self, sequence: Handle) -> u32 {
        let row = self.holes.pop_first().unwrap_or_else(|| {
            self.rows.push(Row::EMPTY);
            self.sequences.push(None);
            self.pending.push(Pending::EMPTY);
            for plan_rows in &mut self.plan_rows {
                plan_rows.push(NO_ROW);
            }
            self.rows.len() as u32 - 1
        });
        self.sequences[row as usize] = Some(sequence);
        self.num_sequences += 1;
        self.patch(row, 0);
        row
    }

    /// Gives a row to another sequence, whose table differs from a column on.
    pub fn replace(&mut self, row: u32, sequence: Handle, column: usize) {
        self.set_row(row, Some(sequence));
        self.patch(row, column);
    }

    /// Gives a row to a child of another row's sequence, whose table differs from a column on. All that the one row keeps
    /// holds for the other as well, but that neither may write to the block that both have now.
    pub fn share(&mut self, from: usize, to: u32, child: Handle, column: usize) {
        self.set_row(to, Some(child));
        self.rows[from].limit = 0;
        self.rows[to as usize] = self.rows[from];
        self.pending[to as usize] = self.pending[from];
        self.patch(to, column);
    }

    /// A row has this sequence, which no step names there, and must be looked at.
    fn set_row(&mut self, row: u32, sequence: Option<Handle>) {
        let at = row as usize;
        self.chill(at);
        self.sequences[at] = sequence;
        for plan_rows in &mut self.plan_rows {
            plan_rows[at] = NO_ROW;
        }
    }

    /// A row keeps nothing any more.
    pub fn chill(&mut self, at: usize) {
        self.rows[at] = Row::EMPTY;
        self.num_chills += 1;
    }

    /// Empties a row.
    pub fn unseat(&mut self, row: u32) {
        self.set_row(row, None);
        self.num_sequences -= 1;
        self.holes.insert(row);
        self.patch(row, 0);
        while self.sequences.last() == Some(&None) {
            self.sequences.pop();
            self.rows.pop();
            self.pending.pop();
            for plan_rows in &mut self.plan_rows {
                plan_rows.pop();
            }
            self.holes.remove(&(self.rows.len() as u32));
        }
    }

    /// Moves the sequence of the last row to an empty one.
    pub fn move_last(&mut self, to: u32) {
        let (from, at) = (self.rows.len() - 1, to as usize);
        self.rows[at] = self.rows[from];
        self.sequences[at] = self.sequences[from];
        self.pending[at] = self.pending[from];
        for plan_rows in &mut self.plan_rows {
            plan_rows[at] = plan_rows[from];
        }
        self.holes.remove(&to);
        self.num_sequences += 1;
        self.unseat(from as u32);
        self.patch(to, 0);
        self.mark_moved();
    }

    /// Rows of open steps can no longer be found by their number.
    pub fn mark_moved(&mut self) {
        for step in self.oldest..self.next {
            let buffer = self.buffer_of(step);
            self.plans[buffer].is_moved = true;
        }
    }

    /// The tokens that wait in a row.
    #[must_use]
    pub fn pending(&self, row: usize) -> &[Token] {
        let waiting = (self.rows[row].len - self.rows[row].flushed) as usize;
        &self.pending[row].0[..waiting]
    }

    /// Can a token wait in a row?
    #[must_use]
    pub fn has_room_for_token(&self, row: usize) -> bool {
        !self.rows[row].is_cold() && self.pending(row).len() + 1 < PENDING_MAX
    }

    /// A block has got another holder: whether rows may write to it is not known any more.
    pub fn forget_limits(&mut self, block: BlockId) {
        for row in self.rows.iter_mut().filter(|row| row.block == block) {
            row.limit = 0;
        }
    }

    /// A row's table changed from a column on.
    pub fn patch(&mut self, row: u32, column: usize) {
        self.patch_all(Change::from_column(row, column as u32));
    }

    /// A block was appended to a row's table.
    pub fn patch_block(&mut self, row: u32, column: u32, block: BlockId) {
        self.patch_all(Change::appended(row, column, block));
    }

    fn patch_all(&mut self, change: Change) {
        for changes in &mut self.changes {
            changes.note(change);
        }
    }

    /// What `updates` shows next has this row from a column on.
    pub fn patch_updates(&mut self, row: u32, column: u32) {
        if let Some(changes) = self.changes.last_mut() {
            changes.note(Change::from_column(row, column));
        }
    }
}

//! What a commit is told, and the commit of rows that touches nothing but them.

use super::{Batch, PLACEHOLDER, Pending, Plan, Planned, Row};

/// What a commit is told of its rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome<'a> {
    /// The token behind each row's last position; -1: none.
    pub next_tokens: Option<&'a [i32]>,
    /// How many of each row's drafts stay; all, if not given.
    pub num_accepted: Option<&'a [i32]>,
}

impl Outcome<'_> {
    /// The token behind a row's last position.
    #[must_use]
    pub fn token(&self, row: usize) -> i32 {
        self.next_tokens.map_or(-1, |tokens| tokens[row])
    }

    /// Is each row told a token, and nothing else?
    fn is_tokens(self) -> bool {
        // The signs of all at once: a loop without a way out.
        let signs = self.next_tokens.map(|tokens| tokens.iter().fold(0, |signs, token| signs | token));
        self.num_accepted.is_none() && signs >= Some(0)
    }

    /// Drafts that do not stay; more than there are if the number given is no such number.
    fn rejected(&self, row: usize, planned: &Planned) -> u32 {
        self.num_accepted.map_or(0, |accepted| planned.drafts.wrapping_sub(accepted[row].cast_unsigned()))
    }
}

/// What a commit is told of one row.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// The token behind its last position; -1: none.
    pub token: i32,
    /// Drafts that do not stay.
    pub rejected: u32,
}

impl Told {
    /// Of a row of a step.
    #[must_use]
    pub fn of(outcome: Outcome<'_>, nth: usize, planned: &Planned) -> Self {
        Self { token: outcome.token(nth), rejected: outcome.rejected(nth, planned) }
    }

    /// Does the commit touch nothing but the row? (What may be wrong with it needs a look, too.) No part of this branches:
    /// with drafts, each is true by chance.
    #[must_use]
    #[expect(clippy::needless_bitwise_bool, reason = "a branch that chance takes costs more than all of it")]
    pub const fn is_usual(self, row: &Row, planned: &Planned, block_size: u32, is_only_step: bool) -> bool {
        let is_given = (self.rejected == 0) & (self.token >= 0);
        (planned.end.wrapping_sub(self.rejected) < row.publish_at)
            & (is_given | (row.len == planned.end))
            & (self.rejected <= planned.drafts)
            & self.cuts_end(row, planned, is_only_step)
            & self.keeps_table(row, planned, block_size)
    }

    /// Are rejected drafts, if there are any, the end of what the row has, and no other step's?
    #[must_use]
    #[expect(clippy::needless_bitwise_bool, reason = "as for `is_usual`")]
    pub const fn cuts_end(self, row: &Row, planned: &Planned, is_only_step: bool) -> bool {
        (self.rejected == 0) | ((row.len == planned.end) & is_only_step)
    }

    /// Is the table no longer than it must be without rejected drafts, if there are any?
    #[must_use]
    pub const fn keeps_table(self, row: &Row, planned: &Planned, block_size: u32) -> bool {
        (self.rejected == 0) | (planned.end.wrapping_sub(self.rejected).wrapping_add(block_size) > row.table_end)
    }

    /// Commits a row. The token behind it is added, or takes the place of a placeholder.
    pub fn apply(self, row: &mut Row, pending: &mut Pending, planned: &Planned) {
        let end = planned.end - self.rejected;
        row.committed = end;
        row.planned -= self.rejected;
        row.len -= self.rejected;
        if self.token < 0 {
            return;
        }
        let place = &mut pending.0[(end - row.flushed) as usize];
        let is_next = row.len == end;
        if is_next || *place == PLACEHOLDER {
            *place = self.token.cast_unsigned();
        }
        row.len += u32::from(is_next);
    }
}

/// Notes in `slow_rows` which rows are more than usual.
pub fn find_slow_rows(batch: &mut Batch, plan: &Plan, outcome: Outcome<'_>) {
    let (block_size, is_only_step) = (batch.block_size, batch.num_open() == 1);
    let is_slow = |nth: usize, planned: &Planned, row: &Row| {
        planned.is_named & !Told::of(outcome, nth, planned).is_usual(row, planned, block_size, is_only_step)
    };
    if outcome.is_tokens() && plan.num_chills == batch.num_chills {
        let rows = plan.suspects.iter().filter_map(|&nth| Some((nth, batch.rows.get(nth as usize)?)));
        let slow = rows.filter(|&(nth, row)| is_slow(nth as usize, &plan.rows[nth as usize], row));
        batch.slow_rows.extend(slow.map(|(nth, _)| nth));
    } else {
        // Each is noted, and the next one in its place if it is none: which are slow is a matter of chance.
        let (rows, mut count) = (plan.rows.iter().zip(&batch.rows).enumerate(), 0);
        batch.slow_rows.resize(plan.rows.len(), 0);
        for (nth, (planned, row)) in rows {
            batch.slow_rows[count] = nth as u32;
            count += usize::from(is_slow(nth, planned, row));
        }
        batch.slow_rows.truncate(count);
    }
}

/// Commits the rows whose commit touches nothing else: all but the slow ones, which are in order and have their own answer.
pub fn commit_usual_rows(batch: &mut Batch, slow: &[u32], plan: &Plan, outcome: Outcome<'_>, applied: &mut [bool]) {
    // Rows at the end may be gone.
    let num_rows = plan.rows.len().min(batch.rows.len());
    let is_even = plan.is_even() && batch.num_open() == 1 && outcome.num_accepted.is_none();
    let (mut start, mut before) = (0, 0);
    for stop in slow.iter().map(|&row| row as usize).chain([num_rows]) {
        let range = start..stop;
        let rows = batch.rows[range.clone()].iter_mut().zip(&mut batch.pending[range.clone()]);
        let (planned, applied) = (&plan.rows[range.clone()], &mut applied[range.clone()]);
        match outcome.next_tokens {
            Some(tokens) if is_even => {
                applied.fill(true);
                for ((row, pending), &token) in rows.zip(&tokens[range]) {
                    before ^= row.commit_all(pending, token);
                }
            }
            _ => {
                for (((row, pending), (planned, applied)), nth) in rows.zip(planned.iter().zip(applied)).zip(range) {
                    *applied = planned.is_named;
                    if planned.is_named {
                        Told::of(outcome, nth, planned).apply(row, pending, planned);
                    }
                }
            }
        }
        start = stop + 1;
    }
    std::hint::black_box(before);
}

//! Beams: rows that go on from other rows.

use super::Pager;
use super::rows::append_reserved;
use crate::batch::Seat;
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::Handle;
use crate::memory::{with_capacity, zeroed};
use crate::sequence::Sequence;

/// What became of the rows that took part.
#[derive(Debug)]
pub struct Beams {
    /// The row of each beam.
    pub places: Vec<u32>,
    /// The new sequence of each beam, unless it keeps its parent's.
    pub children: Vec<Option<Handle>>,
    /// Sequences that no beam goes on from.
    pub released: Vec<Handle>,
}

/// What a row is in a reorder.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Role {
    /// It does not take part.
    #[default]
    Apart,
    /// No beam goes on from it (so far).
    Leaves,
    /// Its first beam keeps it.
    Stays,
}

impl Pager {
    /// Beam i continues the sequence of row `parents[i]` with `tokens[i]`. Of `rows` (all in use, if not given), those
    /// without a beam are released.
    ///
    /// # Errors
    /// `Step` if a step is open; `Value` for bad rows or parents, and if there are too few rows; `Token`; `Memory`.
    pub fn reorder(&mut self, handle: Handle, parents: &[i32], tokens: &[i32], rows: Option<&[i32]>) -> Result<Beams> {
        let mut roles = self.check_beams(handle, parents, tokens, rows)?;
        // Whatever can be refused comes first: the children, which hold nothing yet, and room for the tokens.
        let mut places = with_capacity(parents.len())?;
        let mut unborn = with_capacity(parents.len())?;
        for &parent in parents {
            let row = parent.cast_unsigned();
            let is_first = std::mem::replace(&mut roles[row as usize], Role::Stays) == Role::Leaves;
            places.push(row);
            unborn.push(if is_first {
                self.make_room_for_token(handle, row)?
            } else {
                Some(self.beam_of(handle, row)?)
            });
        }
        let leaves = |&row: &usize| roles[row] == Role::Leaves;
        let mut released = with_capacity((0..roles.len()).filter(leaves).count())?;
        for row in (0..roles.len()).filter(leaves) {
            released.push(self.sequence_of(handle, row as u32)?);
        }
        self.sequences.reserve(parents.len())?;
        let (mut children, mut born) = (with_capacity(parents.len())?, with_capacity(parents.len())?);

        for (child, &row) in unborn.into_iter().zip(&places) {
            let Some(child) = child else {
                children.push(None);
                continue;
            };
            let parent = self.sequence_of(handle, row)?;
            self.with_running(parent, "reorder", |pager, parent| {
                pager.adopt(parent, std::iter::once(child), &mut born);
                Ok(())
            })?;
            children.push(born.pop());
        }
        self.replace_rows(handle, &roles, &children, &mut places)?;
        self.with_batch(handle, |pager, batch| {
            for (&row, &token) in places.iter().zip(tokens) {
                let at = row as usize;
                if !batch.rows[at].push(&mut batch.pending[at], &[token])
                    && let Some(sequence) = batch.sequences[at].and_then(|handle| pager.sequences.get_mut(handle))
                {
                    append_reserved(sequence, &[token.cast_unsigned()], pager.config.block_size);
                }
            }
            Ok(())
        })?;
        Ok(Beams { places, children, released })
    }

    /// Room for the token of a beam that keeps its row: there, or in its sequence. (It needs no child.)
    fn make_room_for_token(&mut self, handle: Handle, row: u32) -> Result<Option<Box<Sequence>>> {
        let sequence = self.sequence_of(handle, row)?;
        if !self.get_batch(handle)?.has_room_for_token(row as usize) {
            self.with_running(sequence, "reorder", |pager, sequence| {
                sequence.tail.reserve(1, pager.config.block_size)
            })?;
        }
        Ok(None)
    }

    /// A child for a beam whose parent another one keeps, with room for a token. It takes over the memory of one that was
    /// left by an earlier call, if there is one: beams come and go at each token.
    fn beam_of(&mut self, handle: Handle, row: u32) -> Result<Box<Sequence>> {
        let parent = self.sequence_of(handle, row)?;
        let left = self.left_beams.pop();
        self.with_running(parent, "reorder", |pager, parent| {
            parent.tail.reserve(1, pager.config.block_size)?;
            let mut child = match left {
                Some(left) => pager.child_in(parent, left)?,
                None => pager.child_of(parent)?,
            };
            child.tail.reserve(1, pager.config.block_size)?;
            Ok(child)
        })
    }

    /// The role of each row, before any beam has claimed one.
    fn check_beams(&self, handle: Handle, parents: &[i32], tokens: &[i32], rows: Option<&[i32]>) -> Result<Vec<Role>> {
        let batch = self.get_batch(handle)?;
        if batch.num_open() > 0 {
            return Err(Error::Step(format!("reorder: step {} is open; commit it first", batch.oldest)));
        }
        if tokens.len() != parents.len() {
            return Err(Error::Value(format!("there are {} parents and {} tokens", parents.len(), tokens.len())));
        }
        if let Some(position) = tokens.iter().position(|&token| token < 0) {
            return Err(Error::Token { position, value: tokens[position].cast_unsigned() });
        }
        let is_named = rows.map(|rows| batch.named_rows(rows)).transpose()?;
        let mut roles: Vec<Role> = zeroed(batch.rows.len())?;
        let mut num_taking = 0;
        for (at, role) in roles.iter_mut().enumerate() {
            if is_named.as_ref().map_or_else(|| batch.sequences[at].is_some(), |is_named| is_named[at]) {
                (*role, num_taking) = (Role::Leaves, num_taking + 1);
            }
        }
        let mut is_parent: Vec<bool> = zeroed(roles.len())?;
        let mut num_kept = 0;
        let mut sequences = with_capacity(parents.len())?;
        for (nth, &parent) in parents.iter().enumerate() {
            let Some(at) = batch.in_use(parent).filter(|&at| roles[at] == Role::Leaves) else {
                return Err(Error::Value(format!("parents[{nth}] is {parent}: no row in use that takes part")));
            };
            if !std::mem::replace(&mut is_parent[at], true) {
                num_kept += 1;
                sequences.extend(batch.sequences[at].map(|sequence| (nth, sequence)));
            }
        }
        let empty = batch.shape.max_seqs - batch.num_sequences + num_taking - num_kept;
        for (nth, sequence) in sequences {
            let sequence = self.running(sequence, "reorder")?;
            let row = &batch.rows[parents[nth].cast_unsigned() as usize];
            let (len, committed) = if row.is_cold() {
                (sequence.len, sequence.num_committed)
            } else {
                (row.len as usize, row.committed as usize)
            };
            if len > committed {
                return Err(Error::Value(format!(
                    "parents[{nth}] is {}: of its {len} tokens {committed} are committed. Commit the step without next tokens first",
                    parents[nth]
                )));
            }
        }
        if parents.len() - num_kept > empty {
            return Err(Error::Value(format!(
                "{} beams need another row; {empty} are empty: max_seqs",
                parents.len() - num_kept
            )));
        }
        Ok(roles)
    }

    /// Releases the sequences of the rows that leave, and gives the new ones the lowest empty rows.
    fn replace_rows(
        &mut self,
        handle: Handle,
        roles: &[Role],
        children: &[Option<Handle>],
        places: &mut [u32],
    ) -> Result<()> {
        let batch = self.get_batch(handle)?;
        let is_empty = |&row: &usize| {
            roles.get(row) == Some(&Role::Leaves) || batch.sequences.get(row).is_none_or(Option::is_none)
        };
        let mut empty = (0..).filter(is_empty);
        // For each child: where its table and the one that its row shows begin to differ, if somebody leaves that row.
        let mut columns = with_capacity(children.len())?;
        for (place, child) in places.iter_mut().zip(children) {
            let Some(child) = child.and_then(|child| self.sequences.get(child)) else {
                columns.push(None);
                continue;
            };
            let row = empty.next().unwrap_or_default();
            *place = row as u32;
            let leaver = batch.sequences.get(row).copied().flatten().and_then(|leaver| self.sequences.get(leaver));
            columns.push(leaver.map(|leaver| {
                let common = leaver.table.iter().zip(&child.table).take_while(|(old, new)| old == new);
                common.count()
            }));
        }
        let mut left = with_capacity(roles.len())?;
        for row in (0..roles.len()).filter(|&row| roles[row] == Role::Leaves) {
            let leaver = self.sequence_of(handle, row as u32)?;
            self.leave_for_good(leaver);
            left.extend(self.end(leaver, Departure::Finished));
        }
        self.left_beams = left;
        self.with_batch(handle, |pager, batch| {
            let mut next_unused = 0;
            for ((&row, child), column) in places.iter().zip(children).zip(columns) {
                let &Some(child) = child else { continue };
                if let Some(column) = column {
                    batch.replace(row, child, column);
                    next_unused = row as usize + 1;
                } else {
                    batch.seat(child);
                }
                pager.set_seat(child, Seat::Row { batch: handle, row });
            }
            // Rows below were taken in order; the others that were left are empty now.
            for row in (next_unused..roles.len()).filter(|&row| roles[row] == Role::Leaves) {
                batch.unseat(row as u32);
            }
            Ok(())
        })
    }
}

//! Beams: rows that go on from other rows.

use super::Pager;
use super::rows::{append_reserved, closed};
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
            let sequence = self.sequence_of(handle, row)?;
            let Some(mut parent) = self.sequences.take(sequence) else { return Err(closed()) };
            let child = self.beam_of(&mut parent, is_first);
            self.sequences.put_back(sequence, parent);
            unborn.push(child?);
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
            if let Some(parent) = self.sequences.take(parent) {
                self.adopt(&parent, std::iter::once(child), &mut born);
                let handle = Handle { slot: parent.slot, serial: parent.serial };
                self.sequences.put_back(handle, parent);
            }
            children.push(born.pop());
        }
        self.replace_rows(handle, &roles, &children, &mut places)?;
        for (&row, &token) in places.iter().zip(tokens) {
            let sequence = self.sequence_of(handle, row)?;
            if let Some(sequence) = self.sequences.get_mut(sequence) {
                append_reserved(sequence, &[token.cast_unsigned()], self.config.block_size);
            }
        }
        Ok(Beams { places, children, released })
    }

    /// A child for a beam, unless it is the first and keeps its parent. Either has room for a token.
    fn beam_of(&self, parent: &mut Sequence, is_first: bool) -> Result<Option<Box<Sequence>>> {
        parent.tail.reserve(1, self.config.block_size)?;
        if is_first {
            return Ok(None);
        }
        let mut child = self.child_of(parent)?;
        child.tail.reserve(1, self.config.block_size)?;
        Ok(Some(child))
    }

    /// The role of each row, before any beam has claimed one. Parents have brought home what their rows kept.
    fn check_beams(
        &mut self,
        handle: Handle,
        parents: &[i32],
        tokens: &[i32],
        rows: Option<&[i32]>,
    ) -> Result<Vec<Role>> {
        let batch = self.batches.get(handle).ok_or_else(closed)?;
        if batch.num_open() > 0 {
            return Err(Error::Step(format!("reorder: step {} is open; commit it first", batch.oldest)));
        }
        if tokens.len() != parents.len() {
            return Err(Error::Value(format!("there are {} parents and {} tokens", parents.len(), tokens.len())));
        }
        if let Some(position) = tokens.iter().position(|&token| token < 0) {
            return Err(Error::Token { position, value: tokens[position].cast_unsigned() });
        }
        let in_use =
            |row: i32| usize::try_from(row).ok().filter(|&at| batch.sequences.get(at).is_some_and(Option::is_some));
        let mut roles: Vec<Role> = zeroed(batch.rows.len())?;
        let mut num_taking = 0;
        match rows {
            Some(rows) => {
                for (nth, &row) in rows.iter().enumerate() {
                    let Some(at) = in_use(row) else {
                        return Err(Error::Value(format!("rows[{nth}] is {row}: that row is empty")));
                    };
                    if std::mem::replace(&mut roles[at], Role::Leaves) == Role::Leaves {
                        return Err(Error::Value(format!("rows[{nth}] is {row} for a second time")));
                    }
                    num_taking += 1;
                }
            }
            None => {
                for (role, sequence) in roles.iter_mut().zip(&batch.sequences) {
                    if sequence.is_some() {
                        (*role, num_taking) = (Role::Leaves, num_taking + 1);
                    }
                }
            }
        }
        let mut is_parent: Vec<bool> = zeroed(roles.len())?;
        let mut num_kept = 0;
        let mut sequences = with_capacity(parents.len())?;
        for (nth, &parent) in parents.iter().enumerate() {
            let Some(at) = in_use(parent).filter(|&at| roles[at] == Role::Leaves) else {
                return Err(Error::Value(format!("parents[{nth}] is {parent}: no row in use that takes part")));
            };
            if !std::mem::replace(&mut is_parent[at], true) {
                num_kept += 1;
                sequences.extend(batch.sequences[at].map(|sequence| (nth, sequence)));
            }
        }
        let empty = batch.shape.max_seqs - batch.num_sequences + num_taking - num_kept;
        for (nth, sequence) in sequences {
            self.flush_row(sequence);
            let sequence = self.running(sequence, "reorder")?;
            if sequence.len > sequence.num_committed {
                return Err(Error::Value(format!(
                    "parents[{nth}] is {}: of its {} tokens {} are committed. Commit the step without next tokens first",
                    parents[nth], sequence.len, sequence.num_committed
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
        let batch = self.batches.get(handle).ok_or_else(closed)?;
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
        for row in (0..roles.len()).filter(|&row| roles[row] == Role::Leaves) {
            let leaver = self.sequence_of(handle, row as u32)?;
            if let Some(leaver) = self.sequences.get_mut(leaver) {
                leaver.seat = Seat::None;
            }
            self.release(leaver, Departure::Finished);
        }
        let batch = self.batches.get_mut(handle).ok_or_else(closed)?;
        let mut next_unused = 0;
        for ((&row, child), column) in places.iter().zip(children).zip(columns) {
            let &Some(child) = child else { continue };
            if let Some(column) = column {
                batch.replace(row, child, column);
                next_unused = row as usize + 1;
            } else {
                batch.seat(child);
            }
            if let Some(child) = self.sequences.get_mut(child) {
                child.seat = Seat::Row { batch: handle, row };
            }
        }
        // Rows below were taken in order; the others that were left are empty now.
        for row in (next_unused..roles.len()).filter(|&row| roles[row] == Role::Leaves) {
            batch.unseat(row as u32);
        }
        Ok(())
    }

    fn sequence_of(&self, handle: Handle, row: u32) -> Result<Handle> {
        let batch = self.batches.get(handle).ok_or_else(closed)?;
        batch.sequences.get(row as usize).copied().flatten().ok_or_else(closed)
    }
}

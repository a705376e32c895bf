//! Beams: rows that go on from other rows.

use std::collections::BTreeSet;

use super::Pager;
use super::rows::{append_reserved, closed};
use crate::batch::Seat;
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::Handle;
use crate::memory::with_capacity;

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

impl Pager {
    /// Beam i continues the sequence of row `parents[i]` with `tokens[i]`. Of `rows` (all in use, if not given), those
    /// without a beam are released.
    ///
    /// # Errors
    /// `Step` if a step is open; `Value` for bad rows or parents, and if there are too few rows; `Token`; `Memory`.
    pub fn reorder(&mut self, handle: Handle, parents: &[i32], tokens: &[i32], rows: Option<&[i32]>) -> Result<Beams> {
        let rows = self.check_beams(handle, parents, tokens, rows)?;
        // The first beam of a row keeps it; the rows without any are free for the others.
        let mut keeps = BTreeSet::new();
        let mut places = with_capacity(parents.len())?;
        let mut children = with_capacity(parents.len())?;
        for &parent in parents {
            let row = parent.cast_unsigned();
            let is_first = keeps.insert(row);
            places.push(row);
            let sequence = self.sequence_of(handle, row)?;
            self.flush_row(sequence);
            let Some(mut parent) = self.sequences.take(sequence) else { return Err(closed()) };
            let child = parent.tail.reserve(1, self.config.block_size).and_then(|()| {
                if is_first {
                    return Ok(None);
                }
                let mut child = self.child_of(&parent)?;
                child.tail.reserve(1, self.config.block_size)?;
                Ok(Some(child))
            });
            self.sequences.put_back(sequence, parent);
            children.push(child?);
        }
        let leaving: BTreeSet<u32> = rows.difference(&keeps).copied().collect();
        let mut released = with_capacity(leaving.len())?;
        for &row in &leaving {
            released.push(self.sequence_of(handle, row)?);
        }
        self.sequences.reserve(children.iter().flatten().count())?;

        let mut beams = with_capacity(parents.len())?;
        for (child, &row) in children.into_iter().zip(&places) {
            let parent = self.sequence_of(handle, row)?;
            beams.push(match child {
                Some(child) => self.with_running(parent, "reorder", |pager, parent| {
                    let mut handles = Vec::new();
                    pager.adopt(parent, vec![child], &mut handles);
                    Ok(handles.pop())
                })?,
                None => None,
            });
        }
        self.replace_rows(handle, &leaving, &beams, &mut places)?;
        for (&row, &token) in places.iter().zip(tokens) {
            let sequence = self.sequence_of(handle, row)?;
            if let Some(sequence) = self.sequences.get_mut(sequence) {
                append_reserved(sequence, &[token.cast_unsigned()], self.config.block_size);
            }
        }
        Ok(Beams { places, children: beams, released })
    }

    /// The rows that take part, all of them in order.
    fn check_beams(
        &mut self,
        handle: Handle,
        parents: &[i32],
        tokens: &[i32],
        rows: Option<&[i32]>,
    ) -> Result<BTreeSet<u32>> {
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
        let in_use = |row: i32| usize::try_from(row).ok().and_then(|at| *batch.sequences.get(at)?);
        let mut taking = BTreeSet::new();
        match rows {
            Some(rows) => {
                for (nth, &row) in rows.iter().enumerate() {
                    if in_use(row).is_none() {
                        return Err(Error::Value(format!("rows[{nth}] is {row}: that row is empty")));
                    }
                    if !taking.insert(row.cast_unsigned()) {
                        return Err(Error::Value(format!("rows[{nth}] is {row} for a second time")));
                    }
                }
            }
            None => taking.extend((0..batch.rows.len() as u32).filter(|&row| batch.sequences[row as usize].is_some())),
        }
        let mut sequences = with_capacity(parents.len())?;
        for (nth, &parent) in parents.iter().enumerate() {
            let sequence = in_use(parent).filter(|_| taking.contains(&parent.cast_unsigned()));
            sequences.push(
                sequence.ok_or_else(|| {
                    Error::Value(format!("parents[{nth}] is {parent}: no row in use that takes part"))
                })?,
            );
        }
        let kept: BTreeSet<i32> = parents.iter().copied().collect();
        let (children, leaving) = (parents.len() - kept.len(), taking.len() - kept.len());
        let empty = batch.shape.max_seqs - batch.num_sequences + leaving;
        for (nth, sequence) in sequences.into_iter().enumerate() {
            self.flush_row(sequence);
            let sequence = self.running(sequence, "reorder")?;
            if sequence.len > sequence.num_committed {
                return Err(Error::Value(format!(
                    "parents[{nth}] is {}: of its {} tokens {} are committed. Commit the step without next tokens first",
                    parents[nth], sequence.len, sequence.num_committed
                )));
            }
        }
        if children > empty {
            return Err(Error::Value(format!("{children} beams need another row; {empty} are empty: max_seqs")));
        }
        Ok(taking)
    }

    /// Releases the sequences of some rows, and gives the new ones the lowest empty rows.
    fn replace_rows(
        &mut self,
        handle: Handle,
        leaving: &BTreeSet<u32>,
        beams: &[Option<Handle>],
        places: &mut [u32],
    ) -> Result<()> {
        let batch = self.batches.get(handle).ok_or_else(closed)?;
        let empty: BTreeSet<u32> = batch.holes.union(leaving).copied().collect();
        let mut empty = empty.into_iter().chain(batch.rows.len() as u32..);
        let mut columns = with_capacity(beams.len())?;
        for (place, beam) in places.iter_mut().zip(beams) {
            let Some(child) = beam.and_then(|child| self.sequences.get(child)) else { continue };
            let row = empty.next().unwrap_or_default();
            *place = row;
            if !leaving.contains(&row) {
                continue;
            }
            // What the row shows is written again only from where the old table and the new one differ.
            let Some(leaver) = self.sequences.get(self.sequence_of(handle, row)?) else { continue };
            let common = leaver.table.iter().zip(&child.table).take_while(|(old, new)| old == new).count();
            columns.push((row, common));
        }
        for &row in leaving {
            let leaver = self.sequence_of(handle, row)?;
            if let Some(leaver) = self.sequences.get_mut(leaver) {
                leaver.seat = Seat::None;
            }
            self.release(leaver, Departure::Finished);
        }
        let batch = self.batches.get_mut(handle).ok_or_else(closed)?;
        let mut columns = columns.into_iter().peekable();
        let mut unused = leaving.clone();
        for (&row, beam) in places.iter().zip(beams) {
            let &Some(child) = beam else { continue };
            if let Some((_, column)) = columns.next_if(|(place, _)| *place == row) {
                unused.remove(&row);
                batch.replace(row, child, column);
            } else {
                batch.seat(child);
            }
            if let Some(child) = self.sequences.get_mut(child) {
                child.seat = Seat::Row { batch: handle, row };
            }
        }
        for row in unused {
            batch.unseat(row);
        }
        Ok(())
    }

    fn sequence_of(&self, handle: Handle, row: u32) -> Result<Handle> {
        let batch = self.batches.get(handle).ok_or_else(closed)?;
        batch.sequences.get(row as usize).copied().flatten().ok_or_else(closed)
    }
}

//! Rows of batches: who sits where, and what a row keeps of its sequence.

use super::Pager;
use super::life::FORK_MAX;
use crate::batch::{BUFFERS_MAX, Batch, NO_ROW, PENDING_MAX, PLACEHOLDER, Pending, Row, Seat, Shape};
use crate::error::{Error, Result};
use crate::ids::{CONTENT_START, Handle, NodeId, Token};
use crate::memory::with_capacity;
use crate::sequence::Sequence;

impl Pager {
    /// A batch without sequences.
    ///
    /// # Errors
    /// `Config`, `Memory`.
    pub fn batch(&mut self, shape: Shape) -> Result<Handle> {
        self.batches.reserve(1)?;
        Ok(self.batches.insert(Box::new(Batch::new(shape, self.config.block_size)?)))
    }

    /// The batch behind a handle.
    ///
    /// # Errors
    /// `Value` once it is closed.
    pub fn get_batch(&self, batch: Handle) -> Result<&Batch> {
        self.batches.get(batch).ok_or_else(closed)
    }

    /// The sequence of a row that is in use.
    pub(super) fn sequence_of(&self, handle: Handle, row: u32) -> Result<Handle> {
        self.get_batch(handle)?.sequences.get(row as usize).copied().flatten().ok_or_else(closed)
    }

    pub(super) fn set_seat(&mut self, sequence: Handle, seat: Seat) {
        if let Some(sequence) = self.sequences.get_mut(sequence) {
            sequence.seat = seat;
        }
    }

    /// Runs `call` on a batch, which is out of the slab meanwhile.
    pub(super) fn with_batch<R>(
        &mut self,
        handle: Handle,
        call: impl FnOnce(&mut Self, &mut Batch) -> Result<R>,
    ) -> Result<R> {
        let Some(mut batch) = self.batches.take(handle) else {
            return Err(closed());
        };
        let result = call(self, &mut batch);
        self.batches.put_back(handle, batch);
        result
    }

    /// Puts a sequence into the batch's lowest empty row; answers that.
    ///
    /// # Errors
    /// `Stale` unless it is running; `Value` if it is in a batch, or there is no room for it.
    pub fn add_row(&mut self, handle: Handle, sequence: Handle) -> Result<u32> {
        let running = self.running(sequence, "add")?;
        let (seat, columns) = (running.seat, running.table.len());
        self.with_batch(handle, |pager, batch| {
            match seat {
                Seat::Row { .. } => {
                    return Err(Error::Value(format!("sequence {} is in a batch already", sequence.serial)));
                }
                Seat::Left { batch: other, .. }
                    if other != handle && pager.batches.get(other).is_some_and(|other| other.names(seat)) =>
                {
                    return Err(Error::Value(format!(
                        "sequence {} is named by an open step of another batch: commit or cancel that first",
                        sequence.serial
                    )));
                }
                Seat::Left { .. } | Seat::None => {}
            }
            if columns > batch.shape.max_blocks {
                return Err(Error::Value(format!(
                    "sequence {} has {columns} blocks; a row has room for max_blocks {}",
                    sequence.serial, batch.shape.max_blocks
                )));
            }
            if batch.empty_row().is_none() {
                return Err(Error::Value(format!("all {} rows are in use: max_seqs", batch.shape.max_seqs)));
            }
            let row = batch.seat(sequence);
            if let Seat::Left { batch: same, plan_rows } = seat
                && same == handle
            {
                // It may still be named here.
                for (at, rows) in batch.plan_rows.iter_mut().enumerate() {
                    rows[row as usize] = plan_rows[at];
                }
                batch.left.retain(|&left| left != sequence);
                batch.mark_moved();
            }
            pager.set_seat(sequence, Seat::Row { batch: handle, row });
            Ok(row)
        })
    }

    /// `count` children of each of these rows' sequences, each in a row of its own; those of the first row first.
    ///
    /// # Errors
    /// `Value` for a bad count, a row that is empty or named twice, too few empty rows; `Memory`.
    pub fn fork_rows(&mut self, handle: Handle, rows: &[i32], count: usize) -> Result<Vec<Handle>> {
        let batch = self.get_batch(handle)?;
        if count == 0 || count > FORK_MAX {
            return Err(Error::Value(format!("n is {count}; it must be 1 to {FORK_MAX}")));
        }
        batch.named_rows(rows)?;
        let mut parents = with_capacity(rows.len())?;
        parents.extend(rows.iter().filter_map(|&row| batch.sequences[batch.in_use(row)?]));
        let (total, empty) = (parents.len().saturating_mul(count), batch.shape.max_seqs - batch.num_sequences);
        if total > empty {
            return Err(Error::Value(format!("{total} children need a row each; {empty} are empty: max_seqs")));
        }
        let mut families = with_capacity(parents.len())?;
        for &parent in &parents {
            families.push(self.with_running(parent, "fork", |pager, parent| pager.children_of(parent, count))?);
        }
        let mut handles = with_capacity(total)?;
        self.sequences.reserve(total)?;
        for (parent, children) in parents.into_iter().zip(families) {
            self.with_running(parent, "fork", |pager, parent| {
                pager.adopt(parent, children.into_iter(), &mut handles);
                Ok(())
            })?;
        }
        for &child in &handles {
            if let Some(batch) = self.batches.get_mut(handle) {
                let row = batch.seat(child);
                self.set_seat(child, Seat::Row { batch: handle, row });
            }
        }
        Ok(handles)
    }

    /// Empties the row of a sequence; answers which it was. Open steps go on naming the sequence.
    ///
    /// # Errors
    /// `Value` if it is not in this batch; `Memory`.
    pub fn remove_row(&mut self, handle: Handle, sequence: Handle) -> Result<u32> {
        let Some(row) = self.row_of(handle, sequence) else {
            return Err(Error::Value(format!("remove: sequence {} has no row in this batch", sequence.serial)));
        };
        self.flush_row(sequence);
        let Some(batch) = self.batches.get_mut(handle) else { return Ok(row) };
        let mut seat = Seat::None;
        if batch.names(Seat::Row { batch: handle, row }) {
            batch.left.try_reserve(1)?;
            batch.left.push(sequence);
            let mut plan_rows = [NO_ROW; BUFFERS_MAX];
            for (at, rows) in batch.plan_rows.iter().enumerate() {
                plan_rows[at] = rows[row as usize];
            }
            seat = Seat::Left { batch: handle, plan_rows };
            batch.mark_moved();
        }
        batch.unseat(row);
        self.set_seat(sequence, seat);
        Ok(row)
    }

    /// The row of a sequence, if it is in this batch.
    #[must_use]
    pub fn row_of(&self, handle: Handle, sequence: Handle) -> Option<u32> {
        match self.sequences.get(sequence)?.seat {
            Seat::Row { batch, row } if batch == handle => Some(row),
            _ => None,
        }
    }

    /// Moves sequences from the last rows to empty ones, until no row in between is empty; answers (from, to) of each
    /// move.
    ///
    /// # Errors
    /// `Memory`.
    pub fn condense(&mut self, handle: Handle) -> Result<Vec<(u32, u32)>> {
        self.with_batch(handle, |pager, batch| {
            let mut moves = with_capacity(batch.holes.len())?;
            while let Some(&to) = batch.holes.first() {
                let from = batch.rows.len() as u32 - 1;
                let last = batch.sequences[from as usize];
                batch.move_last(to);
                if let Some(last) = last {
                    pager.set_seat(last, Seat::Row { batch: handle, row: to });
                }
                moves.push((from, to));
            }
            Ok(moves)
        })
    }

    // ---- what a row keeps of its sequence --------------------------------------------------------------------------

    /// What a warm row knows of its sequence.
    pub(super) fn row_seen(&self, sequence: &Sequence) -> Option<&Row> {
        let Seat::Row { batch, row } = sequence.seat else { return None };
        self.batches.get(batch)?.rows.get(row as usize).filter(|row| !row.is_cold())
    }

    /// Brings what a row keeps of a sequence home, before the sequence is read on its own.
    pub fn flush_row(&mut self, handle: Handle) {
        if self.sequences.get(handle).is_none_or(|sequence| sequence.seat == Seat::None) {
            return;
        }
        if let Some(mut sequence) = self.sequences.take(handle) {
            self.leave_row(&mut sequence);
            self.sequences.put_back(handle, sequence);
        }
    }

    /// The same for all sequences, before they are drawn or checked.
    pub fn flush_rows(&mut self) {
        for handle in self.batches.handles() {
            let Some(batch) = self.batches.get(handle) else { continue };
            for at in 0..batch.sequences.len() {
                if let Some(sequence) = self.batches.get(handle).and_then(|batch| batch.sequences[at]) {
                    self.flush_row(sequence);
                }
            }
        }
    }

    /// Brings what its row keeps of a sequence home, before a call on that alone.
    pub(super) fn leave_row(&mut self, sequence: &mut Sequence) {
        if let Seat::Row { batch, row } = sequence.seat
            && let Some(batch) = self.batches.get_mut(batch)
        {
            flush(batch, row as usize, sequence, self.config.block_size);
        }
    }

    /// Its table changed from a column on.
    pub(super) fn patch(&mut self, sequence: &Sequence, column: usize) {
        if let Seat::Row { batch, row } = sequence.seat
            && let Some(batch) = self.batches.get_mut(batch)
        {
            batch.patch(row, column);
        }
    }

    /// Open steps no longer name a sequence that was cut to `len` tokens before their end.
    pub(super) fn void(&mut self, sequence: &Sequence, len: usize) {
        if let Some(batch) = sequence.seat.batch().and_then(|batch| self.batches.get_mut(batch)) {
            batch.void(sequence.seat, len);
        }
    }

    /// A sequence gives its blocks back: no step names it and no row has it any more.
    pub(super) fn vacate(&mut self, sequence: &mut Sequence, handle: Handle) {
        self.withdraw(sequence);
        self.void(sequence, 0);
        match std::mem::replace(&mut sequence.seat, Seat::None) {
            Seat::Row { batch, row } => {
                if let Some(batch) = self.batches.get_mut(batch) {
                    follow_row(&batch.rows[row as usize], sequence, self.config.block_size);
                    batch.unseat(row);
                }
            }
            Seat::Left { batch, .. } => {
                if let Some(batch) = self.batches.get_mut(batch) {
                    batch.left.retain(|&left| left != handle);
                }
            }
            Seat::None => {}
        }
    }

    /// Positions given to steps.
    #[must_use]
    pub fn num_planned(&self, sequence: &Sequence) -> usize {
        let committed = sequence.num_committed;
        self.batch_of(sequence).map_or(committed, |batch| batch.num_planned(sequence.seat, committed))
    }

    /// Is it named by an open step?
    pub(super) fn is_named(&self, sequence: &Sequence) -> bool {
        self.batch_of(sequence).is_some_and(|batch| batch.names(sequence.seat))
    }

    fn batch_of(&self, sequence: &Sequence) -> Option<&Batch> {
        self.batches.get(sequence.seat.batch()?)
    }

    /// Its tokens before the first placeholder.
    pub(crate) fn num_known(&self, sequence: &Sequence) -> usize {
        let Some(batch) = self.batch_of(sequence) else { return sequence.len };
        // A placeholder waits for the commit of the step whose row ends before it.
        let ends = batch.naming(sequence.seat).map(|planned| planned.end as usize);
        ends.filter(|&end| self.is_placeholder(sequence, end)).last().unwrap_or(sequence.len)
    }

    /// Is the token of a position of its tail unknown?
    pub(super) fn is_placeholder(&self, sequence: &Sequence, position: usize) -> bool {
        let (block_size, start) = (self.config.block_size, sequence.path_blocks * self.config.block_size);
        (start..sequence.len).contains(&position) && sequence.tail.get(position - start, block_size) == PLACEHOLDER
    }

    /// Looks at a row's sequence again: nothing is pending then, and the row knows how far steps need not look.
    ///
    /// # Errors
    /// `Memory`: the row stays cold.
    pub(super) fn refresh(&self, batch: &mut Batch, at: usize, sequence: &mut Sequence) -> Result<()> {
        let planned = batch.num_planned(sequence.seat, sequence.num_committed);
        self.refresh_at(batch, at, sequence, planned)
    }

    /// The same for a row that is planned up to a position, perhaps by a step that is not open yet.
    pub(super) fn refresh_at(
        &self,
        batch: &mut Batch,
        at: usize,
        sequence: &mut Sequence,
        planned: usize,
    ) -> Result<()> {
        debug_assert!(batch.rows[at].is_cold());
        let block_size = self.config.block_size;
        sequence.tail.reserve(PENDING_MAX, block_size)?;
        let place = planned / block_size;
        let is_writable = sequence.table.get(place).is_some_and(|&block| self.is_writable(block));
        let len = sequence.len;
        let flushed = len - self.move_to_row(&mut batch.pending[at], sequence);
        let (committed, full) = (sequence.num_committed, sequence.num_committed / block_size * block_size);
        let is_plain = sequence.tail.is_empty()
            && sequence.announced.is_none()
            && !(sequence.has_content || sequence.is_silent || sequence.pinned || sequence.end.is_root());
        batch.rows[at] = Row {
            planned: planned as u32,
            len: len as u32,
            flushed: flushed as u32,
            committed: committed as u32,
            publish_at: if flushed <= committed { (full + block_size) as u32 } else { 0 },
            node: if is_plain { sequence.end } else { NodeId::NONE },
            ..Row::EMPTY
        };
        self.set_limit(batch, at, sequence, is_writable);
        Ok(())
    }

    /// Moves tokens of the tail to the row: all, if they are few, so that they can be published without another look at the
    /// sequence's memory; else those that are not committed. (What is announced is compared where it is.) Answers how many.
    fn move_to_row(&self, pending: &mut Pending, sequence: &mut Sequence) -> usize {
        let block_size = self.config.block_size;
        let (all, few) = (sequence.tail.len(), PENDING_MAX / 2);
        let count = if all <= few { all } else { sequence.len - sequence.num_committed };
        if count > few || sequence.announced.is_some() {
            return 0;
        }
        let rest = all - count;
        sequence.tail.copy_from(rest, &mut pending.0[..count], block_size);
        sequence.tail.truncate(rest, block_size);
        sequence.len -= count;
        count
    }

    /// Notes how far a row may be planned without a closer look. `is_writable`: is the block of its next position, if
    /// there is one, its own?
    pub(super) fn set_limit(&self, batch: &mut Batch, at: usize, sequence: &Sequence, is_writable: bool) {
        let block_size = self.config.block_size;
        let blocks = batch.shape.max_blocks.min(sequence.table.len());
        let row = &mut batch.rows[at];
        let place = row.planned as usize / block_size;
        row.table_end = (sequence.table.len() * block_size) as u32;
        row.limit = 0;
        if is_writable && place < blocks {
            row.limit = row.pending_limit(((place + 1) * block_size) as u32);
        }
        // Behind the table's end: the last block, to which rejected drafts lead back.
        let place = place.min(sequence.table.len() - 1);
        (row.block, row.block_start) = (sequence.table[place], (place * block_size) as u32);
    }
}

fn closed() -> Error {
    Error::Value("the batch is closed".to_owned())
}

/// Brings a row's pending tokens and its committed positions home; the row is cold then.
pub(super) fn flush(batch: &mut Batch, at: usize, sequence: &mut Sequence, block_size: usize) {
    let row = &batch.rows[at];
    if row.is_cold() {
        return;
    }
    follow_row(row, sequence, block_size);
    append_reserved(sequence, batch.pending(at), block_size);
    batch.chill(at);
}

/// Tells a sequence of the positions that its row has committed, and of the blocks that it has published.
pub(super) fn follow_row(row: &Row, sequence: &mut Sequence, block_size: usize) {
    if row.is_cold() {
        return;
    }
    sequence.num_committed = row.committed as usize;
    // Published blocks came from the row: what the sequence has itself ends where they begin.
    sequence.path_blocks += (row.flushed as usize - sequence.len) / block_size;
    sequence.len = row.flushed as usize;
}

/// Adds tokens for which the tail has room.
pub(super) fn append_reserved(sequence: &mut Sequence, tokens: &[Token], block_size: usize) {
    if tokens.is_empty() {
        return;
    }
    sequence.len += tokens.len();
    match sequence.tail.extend(tokens, block_size) {
        Ok(_) => {}
        Err(_) => unreachable!("room for the tokens of a row was reserved"),
    }
    sequence.has_content |= tokens.iter().any(|&token| token >= CONTENT_START && token != PLACEHOLDER);
}

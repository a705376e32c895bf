//! The end of a step: commit or cancel. And what is known of its tokens meanwhile.

use std::ops::Range;

use super::Pager;
use super::rows::{append_reserved, flush};
use crate::batch::{
    Batch, Growth, LentCopy, Outcome, PENDING_MAX, PLACEHOLDER, Plan, Planned, Seat, Told, commit_usual_rows,
    find_slow_rows,
};
use crate::error::{Error, Result};
use crate::evict::Context;
use crate::ids::{CONTENT_START, Handle};
use crate::memory::with_capacity;
use crate::sequence::Sequence;

/// Where the sequence of a step's row is now.
#[derive(Clone, Copy, Debug)]
enum Place {
    Row(usize),
    Left(Handle),
    Gone,
}

/// The places of a step's rows: the rows themselves, unless some moved.
struct Places(Option<Vec<Place>>);

impl Places {
    fn of(&self, row: usize) -> Place {
        self.0.as_ref().map_or(Place::Row(row), |places| places[row])
    }
}

impl Pager {
    /// The KV of the oldest open step is written. Notes in `applied` which rows were named, and not void.
    ///
    /// # Errors
    /// `Step` unless it is the oldest open step; `Value`, `Token` for bad arguments; `Memory`.
    pub fn commit_step(&mut self, handle: Handle, step: u64, outcome: Outcome<'_>, applied: &mut [bool]) -> Result<()> {
        self.with_batch(handle, |pager, batch| {
            check_is_oldest(batch, step)?;
            pager.with_plan(batch, step, |pager, batch, plan, places| {
                pager.check_commit(batch, plan, places, outcome)?;
                pager.fences.close(plan.fence);
                pager.commit_plan(batch, plan, places, outcome, applied);
                batch.oldest += 1;
                Ok(())
            })
        })
    }

    /// May this step be committed now?
    ///
    /// # Errors
    /// `Step` if not.
    pub fn check_oldest(&mut self, handle: Handle, step: u64) -> Result<()> {
        self.with_batch(handle, |_, batch| check_is_oldest(batch, step))
    }

    /// The newest open step was never launched.
    ///
    /// # Errors
    /// `Step` unless it is the newest open step, and nothing was handed out since; `Memory`.
    pub fn cancel_step(&mut self, handle: Handle, step: u64) -> Result<()> {
        self.with_batch(handle, |pager, batch| {
            check_is_open(batch, step, "cancel")?;
            if step + 1 != batch.next {
                return Err(Error::Step(format!(
                    "cancel: step {step} is not the newest open one; cancel step {} first",
                    batch.next - 1
                )));
            }
            if batch.plan(step).launch != pager.num_launches {
                return Err(Error::Step(format!(
                    "cancel: a step of another batch, or copies, were handed out after step {step}, and may read what its copies bring"
                )));
            }
            pager.cancel_newest(batch)
        })
    }

    fn cancel_newest(&mut self, batch: &mut Batch) -> Result<()> {
        self.with_plan(batch, batch.next - 1, |pager, batch, plan, places| {
            pager.fences.close(plan.fence);
            pager.cancel_step_plan(batch, plan, places);
            batch.next -= 1;
            pager.num_launches -= u64::from(plan.launch == pager.num_launches);
            Ok(())
        })
    }

    /// Ends a batch: open steps are cancelled, and its sequences are in no batch any more.
    pub fn close_batch(&mut self, handle: Handle) {
        let Some(mut batch) = self.batches.take(handle) else { return };
        while batch.num_open() > 0 {
            if self.cancel_newest(&mut batch).is_err() {
                // No memory to find moved rows by. They keep what the step gave them, and its copies are not asked for
                // again: who drops a batch in the middle of a step computes its sequences anew.
                let buffer = batch.buffer_of(batch.next - 1);
                self.fences.close(batch.plans[buffer].fence);
                self.end_loans(&mut batch.plans[buffer]);
                batch.next -= 1;
            }
        }
        for at in 0..batch.rows.len() {
            if batch.sequences[at].is_some() {
                self.with_row(&mut batch, at, |pager, batch, sequence| {
                    flush(batch, at, sequence, pager.config.block_size);
                    sequence.seat = Seat::None;
                });
            }
        }
        for left in batch.left.drain(..) {
            if let Some(sequence) = self.sequences.get_mut(left) {
                sequence.seat = Seat::None;
            }
        }
        self.batches.retire(handle);
    }

    /// The tokens of an open step's positions, as they are known now: -1 for placeholders, and for void rows.
    ///
    /// # Errors
    /// `Step` if it is not open; `Memory`.
    pub fn step_tokens(&mut self, handle: Handle, step: u64) -> Result<Vec<i32>> {
        self.with_batch(handle, |pager, batch| {
            check_is_open(batch, step, "token_ids")?;
            pager.with_plan(batch, step, |pager, batch, plan, places| {
                let mut tokens = with_capacity(plan.num_tokens)?;
                for (nth, planned) in plan.rows.iter().enumerate() {
                    let (end, num) = (planned.end as usize, planned.num as usize);
                    let place = if planned.is_named { places.of(nth) } else { Place::Gone };
                    let after = tokens.len() + num;
                    pager.with_place(batch, place, |pager, _, sequence| {
                        pager.push_tokens(sequence, end - num..end, &mut tokens);
                    });
                    tokens.resize(after, -1);
                }
                Ok(tokens)
            })
        })
    }

    fn push_tokens(&self, sequence: &Sequence, range: Range<usize>, tokens: &mut Vec<i32>) {
        let (block_size, start) = (self.config.block_size, sequence.path_blocks * self.config.block_size);
        // What an open step names is not committed, so it is not on the path.
        tokens.extend(range.map(|position| sequence.tail.get(position - start, block_size).cast_signed()));
    }

    /// Runs `call` on the plan of an open step, which is out of the batch meanwhile: nobody is named by it.
    fn with_plan<R>(
        &mut self,
        batch: &mut Batch,
        step: u64,
        call: impl FnOnce(&mut Self, &mut Batch, &mut Plan, &Places) -> Result<R>,
    ) -> Result<R> {
        let buffer = batch.buffer_of(step);
        let places = self.places(batch, buffer)?;
        let mut plan = std::mem::replace(&mut batch.plans[buffer], Plan::none());
        let result = call(self, batch, &mut plan, &places);
        batch.plans[buffer] = plan;
        self.forget_left(batch);
        result
    }

    fn places(&self, batch: &Batch, buffer: usize) -> Result<Places> {
        let plan = &batch.plans[buffer];
        if !plan.is_moved {
            return Ok(Places(None));
        }
        let mut places = with_capacity(plan.rows.len())?;
        places.resize(plan.rows.len(), Place::Gone);
        for (at, &plan_row) in batch.plan_rows[buffer].iter().enumerate() {
            if let Some(place) = places.get_mut(plan_row as usize) {
                *place = Place::Row(at);
            }
        }
        for &left in &batch.left {
            if let Some(Seat::Left { plan_rows, .. }) = self.sequences.get(left).map(|sequence| sequence.seat)
                && let Some(place) = places.get_mut(plan_rows[buffer] as usize)
            {
                *place = Place::Left(left);
            }
        }
        Ok(Places(Some(places)))
    }

    /// Sequences without a row that no step names any more are done with this batch.
    fn forget_left(&mut self, batch: &mut Batch) {
        let mut left = std::mem::take(&mut batch.left);
        left.retain(|&handle| {
            let Some(sequence) = self.sequences.get_mut(handle) else { return false };
            let is_named = batch.names(sequence.seat);
            if !is_named {
                sequence.seat = Seat::None;
            }
            is_named
        });
        batch.left = left;
    }

    // ---- commit ----------------------------------------------------------------------------------------------------

    /// Checks what the commit is told, and asks for the memory that it may use.
    fn check_commit(&mut self, batch: &mut Batch, plan: &Plan, places: &Places, outcome: Outcome<'_>) -> Result<()> {
        let rows = plan.rows.len();
        for (name, given) in [("next_tokens", outcome.next_tokens), ("num_accepted", outcome.num_accepted)] {
            if let Some(given) = given
                && given.len() != rows
            {
                return Err(Error::Value(format!("{name} has {} values; the step has {rows} rows", given.len())));
            }
        }
        batch.slow_rows.clear();
        if places.0.is_none() {
            find_slow_rows(batch, plan, outcome);
        } else {
            batch.slow_rows.extend(0..rows as u32);
        }
        let slow = std::mem::take(&mut batch.slow_rows);
        let result = slow.iter().try_for_each(|&nth| self.check_row(batch, plan, places, outcome, nth as usize));
        batch.slow_rows = slow;
        result
    }

    fn check_row(
        &mut self,
        batch: &Batch,
        plan: &Plan,
        places: &Places,
        outcome: Outcome<'_>,
        nth: usize,
    ) -> Result<()> {
        let planned = &plan.rows[nth];
        if !planned.is_named {
            return Ok(());
        }
        if let Some(accepted) = outcome.num_accepted
            && !(0..=planned.drafts.cast_signed()).contains(&accepted[nth])
        {
            return Err(Error::Value(format!(
                "num_accepted[{nth}] is {}: row {nth} has {} drafts",
                accepted[nth], planned.drafts
            )));
        }
        let token = outcome.token(nth);
        if token < -1 {
            return Err(Error::Value(format!(
                "next_tokens[{nth}] is {token}: it must be a token of 0 to 2147483647, or -1 for none"
            )));
        }
        let (handle, row) = match places.of(nth) {
            Place::Row(at) => (batch.sequences[at], Some(at).filter(|&at| !batch.rows[at].is_cold())),
            Place::Left(handle) => (Some(handle), None),
            Place::Gone => (None, None),
        };
        if row.is_some() && token >= 0 {
            // A warm row's sequence has room for what waits and one more.
            return Ok(());
        }
        let Some(sequence) = handle.and_then(|handle| self.sequences.get_mut(handle)) else { return Ok(()) };
        if row.is_none() {
            sequence.tail.reserve(1, self.config.block_size)?;
        }
        if token >= 0 {
            return Ok(());
        }
        let end = planned.end;
        let waits = match row.map(|at| (&batch.rows[at], batch.pending(at))) {
            Some((row, pending)) if end >= row.flushed => {
                pending.get((end - row.flushed) as usize) == Some(&PLACEHOLDER)
            }
            _ => handle
                .and_then(|handle| self.sequences.get(handle))
                .is_some_and(|sequence| self.is_placeholder(sequence, end as usize)),
        };
        if waits {
            return Err(Error::Value(format!(
                "next_tokens gives row {nth} no token, but a later step has planned position {end} for it"
            )));
        }
        Ok(())
    }

    fn commit_plan(
        &mut self,
        batch: &mut Batch,
        plan: &mut Plan,
        places: &Places,
        outcome: Outcome<'_>,
        applied: &mut [bool],
    ) {
        let (mut slow, are_in_place) = (std::mem::take(&mut batch.slow_rows), places.0.is_none());
        applied.fill(false);
        slow.retain(|&nth| {
            let (nth, planned) = (nth as usize, &plan.rows[nth as usize]);
            if !planned.is_named {
                return true;
            }
            let told = Told::of(outcome, nth, planned);
            match places.of(nth) {
                // The loop of usual rows has it, too.
                Place::Row(at) if self.is_usual_then(batch, at, planned, told) && are_in_place => return false,
                Place::Row(at) => self.commit_slow(batch, at, planned, told),
                Place::Left(handle) => {
                    if let Some(mut sequence) = self.sequences.take(handle) {
                        self.commit_row(batch, &mut sequence, planned, told);
                        self.sequences.put_back(handle, sequence);
                    }
                }
                Place::Gone => return true,
            }
            applied[nth] = true;
            true
        });
        if are_in_place {
            commit_usual_rows(batch, &slow, plan, outcome, applied);
        }
        batch.slow_rows = slow;
        self.counters.computed_tokens += num_written(plan, outcome);
        self.counters.copies += plan.copies.len() as u64;
        self.end_loans(plan);
    }

    /// A step lets go of the sources of its copies.
    fn end_loans(&mut self, plan: &mut Plan) {
        for copy in plan.copies.drain(..) {
            self.copies.end_loan(copy.ticket, copy.source, copy.target);
            self.let_go_of_block(copy.source, Context::COPY);
        }
    }

    /// Does the commit of a row touch nothing but that, once the block that it may fill is published (which this does)?
    fn is_usual_then(&mut self, batch: &mut Batch, at: usize, planned: &Planned, told: Told) -> bool {
        told.cuts_end(&batch.rows[at], planned, batch.num_open() == 1)
            && (planned.end - told.rejected < batch.rows[at].publish_at || self.commit_block(batch, at, planned, told))
            && told.keeps_table(&batch.rows[at], planned, batch.block_size)
    }

    /// Commits a row that the usual path does not cover, or that has moved since the step.
    fn commit_slow(&mut self, batch: &mut Batch, at: usize, planned: &Planned, told: Told) {
        let is_only_step = batch.num_open() == 1;
        let row = &mut batch.rows[at];
        if told.cuts_end(row, planned, is_only_step) && planned.end - told.rejected < row.publish_at {
            told.apply(row, &mut batch.pending[at], planned);
            if !told.keeps_table(row, planned, batch.block_size) {
                self.cut_row(batch, at);
            }
            return;
        }
        self.with_row(batch, at, |pager, batch, sequence| {
            flush(batch, at, sequence, pager.config.block_size);
            pager.commit_row(batch, sequence, planned, told);
            // Without memory the row stays cold, and the next step looks at it again.
            let _ = pager.refresh(batch, at, sequence);
        });
    }

    /// Publishes the block that a row's step fills, if all tokens of that wait in the row and nobody else is concerned.
    fn commit_block(&mut self, batch: &mut Batch, at: usize, planned: &Planned, told: Told) -> bool {
        let block_size = batch.block_size;
        let row = batch.rows[at];
        if row.node.is_none() {
            return false;
        }
        let end = planned.end - told.rejected;
        // A whole block behind this one would have to be announced.
        let len = (row.len - told.rejected).max(end + u32::from(told.token >= 0));
        let (pending, size) = (&mut batch.pending[at], block_size as usize);
        let is_one = end >= row.publish_at
            && len < row.publish_at + block_size
            && row.flushed + block_size == row.publish_at
            && size <= PENDING_MAX;
        if !is_one {
            return false;
        }
        let block = if row.block_start == row.flushed {
            row.block
        } else {
            // Its step, or the next one, has gone on to another block.
            let sequence = batch.sequences[at].and_then(|handle| self.sequences.get(handle));
            let Some(sequence) = sequence else { return false };
            sequence.table[(row.flushed / block_size) as usize]
        };
        if !self.publish_block(row.node, &pending.0[..size], block) {
            return false;
        }
        batch.rows[at].publish(pending, block_size);
        true
    }

    /// Gives back the blocks of a row's table that were for drafts only.
    fn cut_row(&mut self, batch: &mut Batch, at: usize) {
        self.with_row(batch, at, |pager, batch, sequence| {
            let blocks = batch.rows[at].planned.div_ceil(batch.block_size) as usize;
            pager.cut_table(sequence, blocks);
            batch.patch(at as u32, blocks);
            // The step made its block writable; a fork may have come since.
            let place = (batch.rows[at].planned / batch.block_size) as usize;
            let is_writable = sequence.table.get(place).is_some_and(|&block| pager.is_writable(block));
            pager.set_limit(batch, at, sequence, is_writable);
        });
    }

    /// Commits a row by its sequence, which has all of its tokens.
    fn commit_row(&mut self, batch: &mut Batch, sequence: &mut Sequence, planned: &Planned, told: Told) {
        let Told { token, rejected } = told;
        let (block_size, end) = (self.config.block_size, (planned.end - rejected) as usize);
        let is_given = token >= 0;
        if is_given && sequence.len == end {
            append_reserved(sequence, &[token.cast_unsigned()], block_size);
        } else if is_given && (rejected > 0 || self.is_placeholder(sequence, end)) {
            // In the place of the first rejected draft, or of the placeholder.
            sequence.tail.set(end - sequence.path_blocks * block_size, token.cast_unsigned(), block_size);
            sequence.has_content |= token.cast_unsigned() >= CONTENT_START;
        }
        if rejected > 0 {
            self.cut_table(sequence, end.div_ceil(block_size));
            if end < (sequence.path_blocks + 1) * block_size {
                self.withdraw(sequence);
            }
            self.cut_tokens(sequence, end + usize::from(is_given));
            batch.void(sequence.seat, end);
            if let Seat::Row { row, .. } = sequence.seat {
                batch.patch(row, sequence.table.len());
            }
        }
        self.commit_to(sequence, end);
    }

    // ---- cancel ----------------------------------------------------------------------------------------------------

    fn cancel_step_plan(&mut self, batch: &mut Batch, plan: &mut Plan, places: &Places) {
        for nth in (0..plan.rows.len()).rev() {
            let planned = plan.rows[nth];
            let growth = plan.growths.pop_if(|growth| growth.row as usize == nth);
            if planned.is_named {
                self.with_place(batch, places.of(nth), |pager, batch, sequence| {
                    pager.cancel_row(batch, sequence, &planned, growth);
                });
            }
            while let Some(copy) = plan.copies.pop_if(|copy| copy.row as usize == nth) {
                self.cancel_copy(batch, copy, planned.is_named.then(|| places.of(nth)));
            }
        }
        while let Some(copy) = plan.copies.pop() {
            self.cancel_copy(batch, copy, None);
        }
        // Whether the caller has applied the step's updates or not, the next ones make up for them.
        for (row, from, _) in plan.updates.drain(..) {
            batch.patch_updates(row, from);
        }
    }

    /// Takes back what a step did to a sequence.
    fn cancel_row(&mut self, batch: &mut Batch, sequence: &mut Sequence, planned: &Planned, growth: Option<Growth>) {
        let (start, end) = ((planned.end - planned.num) as usize, planned.end as usize);
        // What a commit has put in a placeholder's place stays: it was sampled.
        let waits = planned.has_placeholder && self.is_placeholder(sequence, start);
        let stays = usize::from(planned.has_placeholder && !waits);
        let added = planned.drafts as usize + usize::from(waits);
        if added > 0 {
            self.cut_tokens(sequence, end - added);
        } else if self.is_placeholder(sequence, end) {
            // Its own row was cut by a truncate.
            self.cut_tokens(sequence, end);
        }
        if let Some(growth) = growth
            && sequence.len <= growth.len as usize + stays
            && sequence.table.len() == growth.after as usize
        {
            self.cut_table(sequence, growth.before as usize);
            if let Seat::Row { row, .. } = sequence.seat {
                batch.patch(row, growth.before as usize);
            }
        }
    }

    /// Takes a copy back; `place`: where the sequence is that it was made for, if the step names that.
    fn cancel_copy(&mut self, batch: &mut Batch, copy: LentCopy, place: Option<Place>) {
        let LentCopy { source, target, ticket, column, .. } = copy;
        // The target has not been filled, so what was to be copied from it comes from the source.
        let is_current = self.copies.is_current(target, ticket);
        let readers = if is_current { self.copies.reroute(target, source) } else { 0 };
        if readers > 0 {
            self.hold_block(source, readers);
            for _ in 0..readers {
                self.let_go_of_block(target, Context::COPY);
            }
        }
        let mut is_restored = false;
        if is_current
            && let Some(place) = place
            && self.is_writable(target)
        {
            self.with_place(batch, place, |_, batch, sequence| {
                let column = column as usize;
                if sequence.table.get(column) == Some(&target) {
                    // The hold on the source passes from the copy to the table.
                    sequence.table[column] = source;
                    is_restored = true;
                    if let Seat::Row { row, .. } = sequence.seat {
                        batch.patch(row, column);
                    }
                }
            });
        }
        if is_restored {
            // Who was its last holder meanwhile is not any more: a row may have kept that it can write there.
            batch.forget_limits(source);
            self.batches.iter_mut().for_each(|batch| batch.forget_limits(source));
            self.copies.end_loan(ticket, source, target);
            self.let_go_of_block(target, Context::COPY);
        } else if is_current {
            self.copies.take_back(ticket, source, target);
        } else {
            self.copies.end_loan(ticket, source, target);
            self.let_go_of_block(source, Context::COPY);
        }
    }

    /// Runs `call` with the sequence of a step's row out of the slab; its own row, if it has one, is cold after that.
    fn with_place(&mut self, batch: &mut Batch, place: Place, call: impl FnOnce(&mut Self, &mut Batch, &mut Sequence)) {
        match place {
            Place::Row(at) => self.with_row(batch, at, |pager, batch, sequence| {
                flush(batch, at, sequence, pager.config.block_size);
                call(pager, batch, sequence);
            }),
            Place::Left(handle) => {
                if let Some(mut sequence) = self.sequences.take(handle) {
                    call(self, batch, &mut sequence);
                    self.sequences.put_back(handle, sequence);
                }
            }
            Place::Gone => {}
        }
    }
}

/// Positions that a commit says to be written: all of the step's, but those of void rows, and rejected drafts.
fn num_written(plan: &Plan, outcome: Outcome<'_>) -> u64 {
    let rejected = outcome.num_accepted.map_or(0, |accepted| {
        let rows = plan.rows.iter().zip(accepted).filter(|(planned, _)| planned.is_named);
        rows.map(|(planned, &accepted)| u64::from(planned.drafts - accepted.cast_unsigned())).sum()
    });
    plan.num_named_tokens as u64 - rejected
}

fn check_is_oldest(batch: &Batch, step: u64) -> Result<()> {
    check_is_open(batch, step, "commit")?;
    if step == batch.oldest {
        return Ok(());
    }
    Err(Error::Step(format!("commit: step {step} is not the oldest open one; commit step {} first", batch.oldest)))
}

fn check_is_open(batch: &Batch, step: u64, call: &str) -> Result<()> {
    if (batch.oldest..batch.next).contains(&step) {
        return Ok(());
    }
    Err(Error::Step(format!("{call}: step {step} is not open any more")))
}

//! I2, I4, I10: rows and sequences know of each other, and what a row keeps is what its sequence is.

use super::Checker;
use crate::batch::{Batch, Seat};
use crate::sequence::State;

impl Checker<'_> {
    pub(super) fn check_batches(&mut self) {
        for batch in self.pager.batches.iter() {
            self.check_rows(batch);
        }
        let seated = |seat: &Seat| matches!(seat, Seat::Row { .. });
        let sequences = self.pager.sequences.iter().filter(|sequence| seated(&sequence.seat)).count();
        let rows: usize = self.pager.batches.iter().map(|batch| batch.num_sequences).sum();
        self.expect(rows == sequences, || format!("I10: {rows} rows are in use, and {sequences} sequences have one"));
    }

    fn check_rows(&mut self, batch: &Batch) {
        let pager = self.pager;
        let in_use = batch.sequences.iter().flatten().count();
        self.expect(in_use == batch.num_sequences && batch.holes.len() == batch.rows.len() - in_use, || {
            format!("I10: a batch counts {} sequences and has {in_use}", batch.num_sequences)
        });
        for (at, row) in batch.rows.iter().enumerate() {
            let Some(handle) = batch.sequences[at] else {
                self.expect(batch.holes.contains(&(at as u32)), || format!("I10: row {at} is empty and in use"));
                continue;
            };
            let sequence = pager.sequences.get(handle);
            let is_seated = sequence.is_some_and(|sequence| {
                sequence.state == State::Running && matches!(sequence.seat, Seat::Row { row, .. } if row as usize == at)
            });
            self.expect(is_seated, || format!("I10: the sequence of row {at} does not run there"));
            let Some(sequence) = sequence.filter(|_| !row.is_cold()) else { continue };
            let (serial, block_size) = (handle.serial, pager.config().block_size);
            let planned = pager.num_planned(sequence);
            self.expect(row.planned as usize == planned, || {
                format!("I2: row {at} has planned {} positions, and sequence {serial} {planned}", row.planned)
            });
            self.expect(batch.pending(at).is_empty() && row.len as usize == sequence.len, || {
                format!("I2: row {at} has {} tokens, and sequence {serial} {}", row.len, sequence.len)
            });
            self.expect(row.committed as usize == sequence.num_committed, || {
                format!(
                    "I4: row {at} has committed {}, and sequence {serial} {}",
                    row.committed, sequence.num_committed
                )
            });
            if row.limit > row.planned {
                let block = sequence.table.get(planned / block_size).copied();
                let slot = row.slot_base(block_size as u32) + i64::from(row.planned);
                let is_right = block.is_some_and(|block| {
                    slot == i64::from(block) * block_size as i64 + (planned % block_size) as i64
                        && pager.is_writable(block)
                });
                let is_within = (row.limit as usize - 1) / block_size == planned / block_size;
                self.expect(is_right && is_within, || {
                    format!("I4: row {at} would write position {planned} of sequence {serial} to slot {slot}")
                });
            }
        }
    }
}

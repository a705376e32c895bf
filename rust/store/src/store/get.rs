//! Reading.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{LogStore, lock};
use crate::error::Result;
use crate::format::{KEY_BYTES, prefix};
use crate::index::{Position, Segment};
use crate::read::{Found, RowsMut};
use crate::stats::add;

impl LogStore {
    /// Reads records into rows. True where the record of that key and that meta was read whole; the bytes of other
    /// rows are undefined. `metas` is one after the other.
    ///
    /// # Errors
    /// `Closed`.
    pub fn get_many(
        &self,
        keys: &[[u8; KEY_BYTES]],
        metas: &[u8],
        rows: &mut dyn RowsMut,
        row_ids: &[usize],
    ) -> Result<Vec<bool>> {
        self.check_open()?;
        let mut answers = vec![false; keys.len()];
        let mut wanted: Vec<(Position, Arc<Segment>, usize)> = Vec::with_capacity(keys.len());
        {
            let index = lock(&self.index)?;
            let now = self.clock.fetch_add(1, Ordering::Relaxed);
            for (number, key) in keys.iter().enumerate() {
                let found = index.find(&prefix(key));
                if let Some((at, segment)) = found.and_then(|at| Some((at, index.segment(at)?))) {
                    segment.tick.store(now, Ordering::Relaxed);
                    wanted.push((at, segment.clone(), number));
                }
            }
        }
        // In the order of the disk.
        wanted.sort_unstable_by_key(|(at, segment, number)| (segment.number, at.slot, *number));
        let mut reader = self.reader()?;
        let mut run = (u64::MAX, 0);
        for (nth, (at, segment, number)) in wanted.iter().enumerate() {
            let slot = at.slot as usize;
            if run.0 != segment.number || slot >= run.1 {
                run = (segment.number, run_of(&wanted[nth..]));
                reader.begin();
            }
            let asked = (&keys[*number][..], &metas[number * self.geometry.meta_bytes..][..self.geometry.meta_bytes]);
            match reader.record(&segment.file, segment.number, slot, run.1, asked, rows, row_ids[*number]) {
                Ok(Found::Whole) => answers[*number] = true,
                Ok(Found::Other) => {}
                Ok(Found::Torn) => self.found_torn(*at, segment)?,
                Err(_) => {
                    reader.begin();
                    add(&self.counters.read_errors, 1);
                }
            }
        }
        self.give_back(reader);
        let hits = answers.iter().filter(|&&is_hit| is_hit).count();
        add(&self.counters.hits, hits as u64);
        add(&self.counters.misses, (keys.len() - hits) as u64);
        Ok(answers)
    }

    /// A record that was read is damaged, unless it was deleted or replaced meanwhile: then nobody finds it there any
    /// more.
    fn found_torn(&self, at: Position, segment: &Arc<Segment>) -> Result<()> {
        let mut index = lock(&self.index)?;
        if index.segment(at).is_some_and(|there| Arc::ptr_eq(there, segment)) && index.unlink(at) {
            add(&self.counters.corrupt, 1);
        }
        Ok(())
    }
}

/// The slot after the last of those that lie one behind the other.
fn run_of(wanted: &[(Position, Arc<Segment>, usize)]) -> usize {
    let (first, segment, _) = &wanted[0];
    let mut end = first.slot as usize + 1;
    for (at, of, _) in &wanted[1..] {
        if of.number != segment.number || at.slot as usize > end {
            break;
        }
        end = end.max(at.slot as usize + 1);
    }
    end
}

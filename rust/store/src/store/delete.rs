//! Deletion, for good.

use std::io;
use std::os::unix::fs::FileExt;

use super::{LogStore, Writer, lock};
use crate::error::{Error, Result};
use crate::files::{self, keys_path, sync_directory};
use crate::format::{KEY_BYTES, Prefix, prefix};
use crate::index::Position;
use crate::open;
use crate::settings::SyncPolicy;
use crate::stats::add;

impl LogStore {
    /// Deletes records, all that are below them, and what hangs in the air, for good; answers how many. Looks at every record.
    ///
    /// # Errors
    /// `Closed`; `Io` if the disk could not be changed: then they are not found any more, but may be after a restart.
    pub fn delete_many(&self, keys: &[[u8; KEY_BYTES]]) -> Result<usize> {
        let mut writer = lock(&self.writer)?;
        self.check_open()?;
        if keys.is_empty() {
            return Ok(0);
        }
        let doomed: Vec<Prefix> = keys.iter().map(|key| prefix(key)).collect();
        let (positions, count) = {
            let mut index = lock(&self.index)?;
            let positions = index.without(&doomed);
            let count = positions.iter().filter(|at| index.kill(**at)).count();
            (positions, count)
        };
        add(&self.counters.deleted, count as u64);
        let mut outcome = Ok(());
        for group in positions.chunk_by(|a, b| a.member == b.member) {
            if let Err(error) = self.blank(&mut writer, group)? {
                add(&self.counters.write_errors, 1);
                outcome = Err(Error::Io(format!(
                    "cannot delete from the store at {}: {error}; the records are not found any more, but may be after a restart",
                    self.directory.display()
                )));
            }
        }
        if !positions.is_empty() && self.sync != SyncPolicy::Never {
            self.count(&sync_directory(&self.directory));
        }
        outcome.map(|()| count)
    }

    /// Writes zeros over the heads of records of one segment; one in which no other is left goes as a whole.
    fn blank(&self, writer: &mut Writer, group: &[Position]) -> Result<io::Result<()>> {
        let member = group[0].member;
        let (segment, live) = {
            let mut index = lock(&self.index)?;
            let Some(there) = index.member(member) else { return Ok(Ok(())) };
            // Whatever happens next, its keys are not to be trusted.
            there.has_keys = false;
            (there.segment.clone(), there.live)
        };
        let is_tail = writer.tail.as_ref().is_some_and(|tail| tail.member == member);
        let drop_it = |writer: &mut Writer| -> Result<io::Result<()>> {
            let dropped = self.drop_member(member)?;
            if is_tail && dropped.is_ok() {
                writer.tail = None;
            }
            Ok(dropped.map(|_| ()))
        };
        if live == 0 && self.count(&drop_it(writer)?) {
            return Ok(Ok(()));
        }
        // Keys that stay, because the directory cannot be changed, say of a deleted record that it is there: a hint, no more.
        self.count(&files::remove(&keys_path(&self.directory, segment.number)));
        let zeros = vec![0; self.geometry.head_bytes()];
        let blank = |at: &Position| segment.file.write_all_at(&zeros, self.geometry.offset(at.slot as usize));
        let blanked = group.iter().try_for_each(blank).and_then(|()| match self.sync {
            SyncPolicy::Never => Ok(()),
            SyncPolicy::Segment | SyncPolicy::Always => segment.file.sync_data(),
        });
        if blanked.is_err() {
            // Then all of it, rather than leave what was to be deleted.
            let evicted = live as u64;
            let dropped = drop_it(writer)?;
            if dropped.is_ok() {
                add(&self.counters.evicted, evicted);
            }
            return Ok(dropped);
        }
        if !is_tail {
            let keys = {
                let mut index = lock(&self.index)?;
                index.member(member).map(|there| self.geometry.keys_file(segment.number, &there.entries))
            };
            let has_keys =
                keys.is_some_and(|keys| self.count(&open::write_keys(&self.directory, segment.number, &keys)));
            if let Some(there) = lock(&self.index)?.member(member) {
                there.has_keys = has_keys;
            }
        }
        Ok(Ok(()))
    }

    /// Deletes everything, for good.
    ///
    /// # Errors
    /// `Closed`; `Io` if a file could not be deleted.
    pub fn clear(&self) -> Result<()> {
        let mut writer = lock(&self.writer)?;
        self.check_open()?;
        writer.tail = None;
        let members: Vec<u32> = lock(&self.index)?.members().map(|(member, _)| member).collect();
        let mut outcome = Ok(());
        for member in members {
            match self.drop_member(member)? {
                Ok(records) => add(&self.counters.deleted, records),
                Err(error) => {
                    add(&self.counters.write_errors, 1);
                    outcome = Err(Error::io("clear", &self.directory, &error));
                }
            }
        }
        if self.sync != SyncPolicy::Never {
            self.count(&sync_directory(&self.directory));
        }
        outcome
    }
}

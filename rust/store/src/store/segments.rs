//! Segments come, are full, and go.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{LogStore, Tail, Writer, lock};
use crate::error::Result;
use crate::files::{self, keys_path, segment_path, sync_directory};
use crate::index::Segment;
use crate::open;
use crate::settings::{SEGMENTS_MAX, SyncPolicy, segment_charge};
use crate::stats::{add, get};

impl LogStore {
    pub(super) fn sync_tail(&self, tail: &mut Tail) -> bool {
        if self.sync == SyncPolicy::Never || !tail.is_dirty {
            return true;
        }
        tail.is_dirty = !self.count(&tail.segment.file.sync_data().and_then(|()| sync_directory(&self.directory)));
        !tail.is_dirty
    }

    /// The tail is full, or the store is closed: nobody writes to it for now.
    pub(super) fn seal(&self, writer: &mut Writer) -> Result<()> {
        let Some(mut tail) = writer.tail.take() else { return Ok(()) };
        self.sync_tail(&mut tail);
        let (live, has_keys, keys) = {
            let mut index = lock(&self.index)?;
            let Some(member) = index.member(tail.member) else { return Ok(()) };
            member.entries.shrink_to_fit();
            (member.live, member.has_keys, self.geometry.keys_file(tail.segment.number, &member.entries))
        };
        if live == 0 {
            self.count(&self.drop_member(tail.member)?);
            return Ok(());
        }
        let end = self.geometry.offset(tail.count);
        let is_cut = tail.is_ready || has_keys || self.count(&tail.segment.file.set_len(end));
        let has_keys = has_keys || is_cut && self.count(&open::write_keys(&self.directory, tail.segment.number, &keys));
        let bytes = tail.segment.file.metadata().map_or(end, |metadata| metadata.len());
        let charge = segment_charge(self.geometry, tail.count).max(files::charged(bytes));
        let mut index = lock(&self.index)?;
        if let Some(member) = index.member(tail.member) {
            member.has_keys = has_keys;
            let before = std::mem::replace(&mut member.charge, charge);
            self.counters.charged.fetch_sub(before.saturating_sub(charge), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes room for a segment, takes it of the limit, and makes the file. False if that cannot be.
    pub(super) fn begin_segment(&self, writer: &mut Writer, now: u64) -> Result<bool> {
        let charge = segment_charge(self.geometry, self.slots as usize);
        loop {
            let coldest = {
                let index = lock(&self.index)?;
                let has_room = get(&self.counters.charged) + charge <= self.max_bytes;
                if has_room && index.members().count() < SEGMENTS_MAX {
                    break;
                }
                index.coldest(None)
            };
            let Some(coldest) = coldest else { return Ok(false) };
            match self.drop_member(coldest)? {
                Ok(records) => add(&self.counters.evicted, records),
                refused @ Err(_) => return Ok(self.count(&refused)),
            }
        }
        let number = writer.next_number;
        let Some(next) = number.checked_add(1) else { return Ok(false) };
        writer.next_number = next;
        let path = segment_path(&self.directory, number);
        let header = self.geometry.segment_header(number, self.slots);
        let made = files::create(&path).and_then(|file| {
            let written = file.write_all_at(&header, 0);
            if written.is_err() {
                let _ = files::remove(&path);
            }
            written.map(|()| file)
        });
        let file = match made {
            Ok(file) => file,
            refused @ Err(_) => return Ok(self.count(&refused)),
        };
        add(&self.counters.charged, charge);
        let segment = Arc::new(Segment { number, file, slots: self.slots, tick: AtomicU64::new(now) });
        let entries = Vec::with_capacity(self.slots as usize);
        let member = lock(&self.index)?.add(segment.clone(), entries, charge, false);
        writer.tail = Some(Tail { member, segment, count: 0, is_ready: true, is_dirty: true });
        Ok(true)
    }

    /// Deletes a segment's files, then forgets its records; answers how many a key found. If the files cannot be
    /// deleted, nothing is forgotten: their bytes still count.
    pub(super) fn drop_member(&self, member: u32) -> Result<io::Result<u64>> {
        let number = lock(&self.index)?.member(member).map(|member| member.segment.number);
        let Some(number) = number else { return Ok(Ok(0)) };
        if let Err(error) = self.remove_files(number) {
            return Ok(Err(error));
        }
        let removed = lock(&self.index)?.remove(member);
        let (live, charge) = removed.map_or((0, 0), |member| (member.live, member.charge));
        self.counters.charged.fetch_sub(charge, Ordering::Relaxed);
        Ok(Ok(live as u64))
    }

    pub(super) fn remove_files(&self, number: u64) -> io::Result<()> {
        files::remove(&keys_path(&self.directory, number))?;
        files::remove(&segment_path(&self.directory, number))
    }
}

//! Writing: a call gathers records, writes them to the tail, and only then can they be found.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use super::{LogStore, Tail, Writer, lock};
use crate::error::Result;
use crate::files::{self, keys_path};
use crate::format::{Entry, HEAD_BYTES, KEY_BYTES, Prefix, prefix};
use crate::index::Position;
use crate::read::{Reader, Rows};
use crate::settings::SyncPolicy;
use crate::stats::{add, get};

/// Bytes that small records are gathered to before they are written.
const BATCH_BYTES: usize = 256 << 10;

impl LogStore {
    /// Stores records. True where the record is there now; false where it was dropped, for want of room or because
    /// the system refused. What is there already is not written again.
    ///
    /// # Errors
    /// `Closed`.
    pub fn put_many(
        &self,
        keys: &[[u8; KEY_BYTES]],
        metas: &[u8],
        rows: &dyn Rows,
        row_ids: &[usize],
    ) -> Result<Vec<bool>> {
        let mut writer = lock(&self.writer)?;
        self.check_open()?;
        let writer = &mut *writer;
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut reader = self.reader()?;
        let evicted = get(&self.counters.evicted);
        let mut put = Put { answers: vec![false; keys.len()], now, ..Put::default() };
        let batch = (BATCH_BYTES / self.geometry.record_bytes()).max(1);
        for (number, key) in keys.iter().enumerate() {
            let meta = &metas[number * self.geometry.meta_bytes..][..self.geometry.meta_bytes];
            let entry = Entry::new(key, meta);
            if put.pending.len() == batch || put.keys.contains(&entry.key) {
                self.flush(writer, &mut put)?;
            }
            if self.is_present(&mut reader, &entry.key, key, meta, now)? {
                put.answers[number] = true;
                add(&self.counters.present, 1);
                continue;
            }
            let is_full = |tail: &Tail| tail.count + put.pending.len() >= tail.segment.slots as usize;
            if writer.tail.as_ref().is_none_or(is_full) {
                self.flush(writer, &mut put)?;
                self.sync_if_always(writer, &mut put)?;
                self.seal(writer)?;
                if !self.begin_segment(writer, now)? {
                    continue;
                }
            }
            let Some(tail) = &writer.tail else { continue };
            let slot = tail.count + put.pending.len();
            let start = writer.filled;
            writer.filled += self.geometry.record_bytes();
            if writer.buffer.len() < writer.filled {
                writer.buffer.resize(writer.filled, 0);
            }
            let record = &mut writer.buffer[start..writer.filled];
            record[8..HEAD_BYTES].copy_from_slice(key);
            record[HEAD_BYTES..self.geometry.head_bytes()].copy_from_slice(meta);
            rows.copy(row_ids[number], &mut record[self.geometry.head_bytes()..][..self.geometry.row_bytes]);
            self.geometry.stamp(tail.segment.number, slot, record);
            put.pending.push((number, entry));
            put.keys.insert(entry.key);
        }
        self.flush(writer, &mut put)?;
        self.sync_if_always(writer, &mut put)?;
        self.give_back(reader);
        if get(&self.counters.evicted) > evicted {
            // A call that stores more than there is room for drops some of its own again.
            let index = lock(&self.index)?;
            for (answer, key) in put.answers.iter_mut().zip(keys) {
                *answer &= index.find(&prefix(key)).is_some();
            }
        }
        let stored = put.answers.iter().filter(|&&is_there| is_there).count();
        add(&self.counters.dropped, (keys.len() - stored) as u64);
        Ok(put.answers)
    }

    /// Is this very record there? The key and the meta are compared on the disk.
    fn is_present(
        &self,
        reader: &mut Reader,
        prefix: &Prefix,
        key: &[u8; KEY_BYTES],
        meta: &[u8],
        now: u64,
    ) -> Result<bool> {
        let (at, segment) = {
            let index = lock(&self.index)?;
            let Some(at) = index.find(prefix) else { return Ok(false) };
            let Some(segment) = index.segment(at) else { return Ok(false) };
            (at, segment.clone())
        };
        reader.begin();
        match reader.head(&segment.file, segment.number, at.slot as usize) {
            Ok(Some(head)) if head[8..HEAD_BYTES] == *key && head[HEAD_BYTES..] == *meta => {
                segment.tick.store(now, Ordering::Relaxed);
                Ok(true)
            }
            Ok(_) => Ok(false),
            Err(_) => {
                add(&self.counters.read_errors, 1);
                Ok(false)
            }
        }
    }

    /// Writes what is pending to the tail; then it can be found.
    fn flush(&self, writer: &mut Writer, put: &mut Put) -> Result<()> {
        let pending = std::mem::take(&mut put.pending);
        put.keys.clear();
        let Some(tail) = writer.tail.as_mut().filter(|_| !pending.is_empty()) else { return Ok(()) };
        let offset = self.geometry.offset(tail.count);
        let records = &writer.buffer[..std::mem::take(&mut writer.filled)];
        let written = self.make_ready(tail).and_then(|()| tail.segment.file.write_all_at(records, offset));
        tail.is_dirty = true;
        tail.segment.tick.store(put.now, Ordering::Relaxed);
        if !self.count(&written) {
            // What a write left before it failed must not be found after a restart: it was answered as dropped.
            self.count(&tail.segment.file.set_len(offset));
            return Ok(());
        }
        let mut index = lock(&self.index)?;
        for (number, entry) in pending {
            index.publish(tail.member, entry);
            put.answers[number] = true;
            put.unsynced.push((number, Position { member: tail.member, slot: tail.count as u32 }));
            tail.count += 1;
            add(&self.counters.stored, 1);
        }
        Ok(())
    }

    /// Before a tail that an earlier process left is written to: its keys would be wrong, and what is torn must go.
    fn make_ready(&self, tail: &mut Tail) -> io::Result<()> {
        if !tail.is_ready {
            files::remove(&keys_path(&self.directory, tail.segment.number))?;
            tail.segment.file.set_len(self.geometry.offset(tail.count))?;
            if let Ok(mut index) = self.index.lock()
                && let Some(member) = index.member(tail.member)
            {
                member.has_keys = false;
            }
            tail.is_ready = true;
        }
        Ok(())
    }

    /// With `sync` always: what this call wrote is on the disk, or it is dropped.
    fn sync_if_always(&self, writer: &mut Writer, put: &mut Put) -> Result<()> {
        let unsynced = std::mem::take(&mut put.unsynced);
        if self.sync != SyncPolicy::Always || unsynced.is_empty() {
            return Ok(());
        }
        if let Some(tail) = &mut writer.tail
            && !self.sync_tail(tail)
        {
            let mut index = lock(&self.index)?;
            for (number, at) in unsynced {
                put.answers[number] = false;
                index.unlink(at);
            }
        }
        Ok(())
    }
}

/// The state of one call of `put_many`.
#[derive(Default)]
struct Put {
    answers: Vec<bool>,
    /// The call's number on the store's clock.
    now: u64,
    /// Records in the buffer: which of the call's, and what the index will say of them.
    pending: Vec<(usize, Entry)>,
    /// Their keys.
    keys: HashSet<Prefix>,
    /// Records that were written since the last sync.
    unsynced: Vec<(usize, Position)>,
}

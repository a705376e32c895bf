//! Opening a store: what an earlier process left.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{LogStore, Tail, Writer, lock};
use crate::error::{Error, Result};
use crate::files::{self, Lock, MANIFEST, Manifest, keys_path, list, segment_path};
use crate::index::Segment;
use crate::open::{self, Opened};
use crate::settings::{SEGMENTS_MAX, Settings, SyncPolicy, segment_charge};
use crate::stats::{Counters, add, get};

impl LogStore {
    /// Opens a store, or makes one. Reads the keys of all segments, and looks through those without.
    ///
    /// # Errors
    /// `Config` if a setting is outside its limits or does not fit what is there; `Io` if the system refuses, or
    /// another store writes to this directory.
    pub fn open(settings: &Settings) -> Result<Self> {
        settings.check()?;
        let directory = settings.directory.clone();
        let mut expected = Manifest::new(settings.meta_bytes, settings.row_bytes, &settings.identity);
        let fixed = expected.charged();
        let slots = settings.slots(expected.geometry, fixed)?;
        fs::create_dir_all(&directory).map_err(|error| Error::io("make", &directory, &error))?;
        let lock = Lock::take(&directory)?;
        let listing = list(&directory).map_err(|error| Error::io("list", &directory, &error))?;
        if listing.has_manifest {
            let found = Manifest::read(&directory)?;
            found.check(&expected, &directory)?;
            expected = found;
        } else if listing.segments.is_empty() && !listing.foreign.iter().any(|name| name == MANIFEST) {
            expected.write(&directory, settings.sync != SyncPolicy::Never)?;
        } else {
            return Err(Error::Config(format!(
                "{} has segments of a store, but no manifest that says what is in them, or one that is no regular \
                 file: delete them to start again",
                directory.display()
            )));
        }
        let Some(next_number) = listing.greatest.map_or(Some(0), |greatest| greatest.checked_add(1)) else {
            return Err(Error::Config(format!("{} has a file with the last number there is", directory.display())));
        };
        let store = Self {
            geometry: expected.geometry,
            sync: settings.sync,
            max_bytes: settings.max_bytes,
            slots,
            index: Mutex::default(),
            writer: Mutex::new(Writer { tail: None, next_number, buffer: Vec::new(), filled: 0 }),
            readers: Mutex::default(),
            is_closed: AtomicBool::new(false),
            lock: Mutex::new(Some(lock)),
            clock: AtomicU64::new(0),
            counters: Counters { charged: AtomicU64::new(fixed), ..Counters::default() },
            directory,
        };
        for number in listing.keys.iter().filter(|number| listing.segments.binary_search(number).is_err()) {
            // Its segment was dropped, and the process ended in between.
            store.count(&files::remove(&keys_path(&store.directory, *number)));
        }
        store.load(&listing.segments)?;
        Ok(store)
    }

    /// Takes the segments that are there, the last one as tail if it has room; then drops the oldest while they are
    /// too many.
    fn load(&self, numbers: &[u64]) -> Result<()> {
        let mut writer = lock(&self.writer)?;
        for &number in numbers {
            let path = segment_path(&self.directory, number);
            let is_last = numbers.last() == Some(&number);
            let opened = open::open(&self.directory, self.geometry, number, is_last, true)
                .map_err(|error| Error::io("open", &path, &error))?;
            let Some(opened) = opened else {
                self.remove_files(number).map_err(|error| Error::io("delete the unusable", &path, &error))?;
                add(&self.counters.discarded, 1);
                continue;
            };
            let is_tail = is_last && opened.slots == self.slots && opened.entries.len() < opened.slots as usize;
            self.take(&mut writer, number, opened, is_tail)?;
        }
        let tail = writer.tail.as_ref().map(|tail| tail.member);
        loop {
            let index = lock(&self.index)?;
            let is_too_much = get(&self.counters.charged) > self.max_bytes || index.members().count() > SEGMENTS_MAX;
            let coldest = index.coldest(tail);
            drop(index);
            let Some(member) = coldest.filter(|_| is_too_much) else { break };
            let dropped = self.drop_member(member)?;
            add(
                &self.counters.evicted,
                dropped.map_err(|error| Error::io("drop a segment of", &self.directory, &error))?,
            );
        }
        Ok(())
    }

    fn take(&self, writer: &mut Writer, number: u64, opened: Opened, is_tail: bool) -> Result<()> {
        let Opened { file, slots, mut entries, mut has_keys, mut bytes } = opened;
        let count = entries.len();
        let end = self.geometry.offset(count);
        if is_tail {
            entries.reserve_exact(slots as usize - count);
        } else if !has_keys {
            // Repaired, so that the next start is fast. If that fails, it will be looked through again.
            if bytes != end && self.count(&file.set_len(end)) {
                bytes = end;
            }
            let keys = self.geometry.keys_file(number, &entries);
            has_keys = bytes == end && self.count(&open::write_keys(&self.directory, number, &keys));
        }
        let charge = if is_tail {
            segment_charge(self.geometry, slots as usize)
        } else {
            segment_charge(self.geometry, count).max(files::charged(bytes))
        };
        add(&self.counters.charged, charge);
        let tick = AtomicU64::new(self.clock.fetch_add(1, Ordering::Relaxed));
        let segment = Arc::new(Segment { number, file, slots, tick });
        let member = lock(&self.index)?.add(segment.clone(), entries, charge, has_keys);
        if is_tail {
            writer.tail = Some(Tail { member, segment, count, is_ready: false, is_dirty: false });
        }
        Ok(())
    }
}

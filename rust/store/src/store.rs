//! The store: who may do what at the same time, and in which order files change.
//!
//! One lock for those who write (`put_many`, `delete_many`, `clear`, `close`), held while they do; one for the index, never held
//! during I/O but for building the small file of keys. A reader takes the second for as long as it needs to look up
//! where its records are, and holds the files themselves: one that is dropped meanwhile stays readable, and what was deleted
//! meanwhile has a wrong checksum.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::files::{self, Lock, Manifest, keys_path, list, segment_path, sync_directory};
use crate::format::{Entry, Geometry, HEAD_BYTES, KEY_BYTES, Prefix, prefix};
use crate::index::{Index, Position, Segment};
use crate::open::{self, Opened};
use crate::read::{Found, Reader, Rows, RowsMut};
use crate::settings::{SEGMENTS_MAX, Settings, SyncPolicy, segment_charge};

/// Bytes that small records are gathered to before they are written.
const BATCH_BYTES: usize = 256 << 10;
/// Readers that are kept for the next calls.
const READERS_MAX: usize = 8;

/// A store that this process has open for writing.
#[derive(Debug)]
pub struct LogStore {
    directory: PathBuf,
    geometry: Geometry,
    sync: SyncPolicy,
    max_bytes: u64,
    /// Slots of a new segment.
    slots: u32,
    index: Mutex<Index>,
    writer: Mutex<Writer>,
    readers: Mutex<Vec<Reader>>,
    is_closed: AtomicBool,
    /// Until `close`.
    lock: Mutex<Option<Lock>>,
    /// Calls so far: what "used longest ago" means.
    clock: AtomicU64,
    counters: Counters,
}

#[derive(Debug)]
struct Writer {
    tail: Option<Tail>,
    next_number: u64,
    /// Records on their way to the tail, in its first `filled` bytes.
    buffer: Vec<u8>,
    filled: usize,
}

/// The segment that is being filled.
#[derive(Debug)]
struct Tail {
    member: u32,
    segment: Arc<Segment>,
    /// Slots that are filled.
    count: usize,
    /// Does its file end there, without keys that would have to be taken away?
    is_ready: bool,
    /// Was it written to since it was synced?
    is_dirty: bool,
}

/// Numbers of a store.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Records that a key finds.
    pub records: u64,
    /// Segments.
    pub segments: u64,
    /// Bytes of the limit that are taken: what is there, and what the segment being filled will have.
    pub bytes: u64,
    /// The limit.
    pub max_bytes: u64,
    /// Bytes of memory for the index.
    pub index_bytes: u64,
    /// Records read whole.
    pub hits: u64,
    /// Records asked for in vain.
    pub misses: u64,
    /// Records written.
    pub stored: u64,
    /// Records that were to be stored and were there.
    pub present: u64,
    /// Records that were to be stored and are not.
    pub dropped: u64,
    /// Records found damaged when they were read.
    pub corrupt: u64,
    /// Records that went with their segment when room was needed.
    pub evicted: u64,
    /// Records deleted by a caller.
    pub deleted: u64,
    /// Segments that could not be used, deleted when the store was opened.
    pub discarded_segments: u64,
    /// Reads that the system refused.
    pub read_errors: u64,
    /// Writes, syncs and deletions of files that the system refused.
    pub write_errors: u64,
}

impl Stats {
    /// All of them, by name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 16] {
        [
            ("records", self.records),
            ("segments", self.segments),
            ("bytes", self.bytes),
            ("max_bytes", self.max_bytes),
            ("index_bytes", self.index_bytes),
            ("hits", self.hits),
            ("misses", self.misses),
            ("stored", self.stored),
            ("present", self.present),
            ("dropped", self.dropped),
            ("corrupt", self.corrupt),
            ("evicted", self.evicted),
            ("deleted", self.deleted),
            ("discarded_segments", self.discarded_segments),
            ("read_errors", self.read_errors),
            ("write_errors", self.write_errors),
        ]
    }
}

#[derive(Debug, Default)]
struct Counters {
    charged: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    stored: AtomicU64,
    present: AtomicU64,
    dropped: AtomicU64,
    corrupt: AtomicU64,
    evicted: AtomicU64,
    deleted: AtomicU64,
    discarded: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    mutex.lock().map_err(|_| Error::Poisoned)
}

impl LogStore {
    /// Opens a store, or makes one. Reads the keys of all segments, and looks through those without.
    ///
    /// # Errors
    /// `Config` if a setting is outside its limits or does not fit what is there; `Io` if the system refuses, or another
    /// store writes to this directory.
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
        } else if listing.segments.is_empty() {
            expected.write(&directory, settings.sync != SyncPolicy::Never)?;
        } else {
            return Err(Error::Config(format!(
                "{} has segments of a store, but no manifest that says what is in them: delete them to start again",
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

    /// Takes the segments that are there, the last one as tail if it has room; then drops the oldest while they are too many.
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

    /// Which keys are there? A hint: the record may be another's, or damaged.
    ///
    /// # Errors
    /// `Closed`.
    pub fn contains_many(&self, keys: &[[u8; KEY_BYTES]]) -> Result<Vec<bool>> {
        self.check_open()?;
        let index = lock(&self.index)?;
        Ok(keys.iter().map(|key| index.find(&prefix(key)).is_some()).collect())
    }

    /// Reads records into rows. True where the record of that key and that meta was read whole; the bytes of other rows are undefined.
    /// `metas` is one after the other.
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

    /// A record that was read is damaged, unless it was deleted or replaced meanwhile: then nobody finds it there any more.
    fn found_torn(&self, at: Position, segment: &Arc<Segment>) -> Result<()> {
        let mut index = lock(&self.index)?;
        if index.segment(at).is_some_and(|there| Arc::ptr_eq(there, segment)) && index.unlink(at) {
            add(&self.counters.corrupt, 1);
        }
        Ok(())
    }

    /// Stores records. True where the record is there now; false where it was dropped, for want of room or because the system
    /// refused. What is there already is not written again.
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
        let mut put = Put { answers: vec![false; keys.len()], ..Put::default() };
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
        if let Some(tail) = &writer.tail {
            tail.segment.tick.store(now, Ordering::Relaxed);
        }
        self.give_back(reader);
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

    fn sync_tail(&self, tail: &mut Tail) -> bool {
        if self.sync == SyncPolicy::Never || !tail.is_dirty {
            return true;
        }
        tail.is_dirty = !self.count(&tail.segment.file.sync_data().and_then(|()| sync_directory(&self.directory)));
        !tail.is_dirty
    }

    /// The tail is full, or the store is closed: nobody writes to it for now.
    fn seal(&self, writer: &mut Writer) -> Result<()> {
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
    fn begin_segment(&self, writer: &mut Writer, now: u64) -> Result<bool> {
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

    /// Deletes a segment's files, then forgets its records; answers how many a key found. If the files cannot be deleted,
    /// nothing is forgotten: their bytes still count.
    fn drop_member(&self, member: u32) -> Result<io::Result<u64>> {
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

    fn remove_files(&self, number: u64) -> io::Result<()> {
        files::remove(&keys_path(&self.directory, number))?;
        files::remove(&segment_path(&self.directory, number))
    }

    /// Deletes records and all that are below them, for good; answers how many. Looks at every record.
    ///
    /// # Errors
    /// `Closed`; `Io` if the disk could not be changed: then they are not found any more, but may be after a restart.
    pub fn delete_many(&self, keys: &[[u8; KEY_BYTES]]) -> Result<usize> {
        let mut writer = lock(&self.writer)?;
        self.check_open()?;
        let doomed: Vec<Prefix> = keys.iter().map(|key| prefix(key)).collect();
        let (positions, count) = {
            let mut index = lock(&self.index)?;
            let positions = index.below(&doomed);
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
            let _ = self.count(&sync_directory(&self.directory));
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
            if is_tail {
                writer.tail = None;
            }
            Ok(self.drop_member(member)?.map(|_| ()))
        };
        if live == 0 {
            return drop_it(writer);
        }
        let blanked = files::remove(&keys_path(&self.directory, segment.number)).and_then(|()| {
            let zeros = vec![0; self.geometry.head_bytes()];
            for at in group {
                segment.file.write_all_at(&zeros, self.geometry.offset(at.slot as usize))?;
            }
            if self.sync == SyncPolicy::Never { Ok(()) } else { segment.file.sync_data() }
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

    /// Writes what is left to write, syncs it (but for `never`) and lets others open the directory. Calls after it are refused; another
    /// `close` does nothing.
    ///
    /// # Errors
    /// `Poisoned`.
    pub fn close(&self) -> Result<()> {
        let mut writer = lock(&self.writer)?;
        if !self.is_closed.swap(true, Ordering::SeqCst) {
            self.seal(&mut writer)?;
            *lock(&self.index)? = Index::default();
            *lock(&self.readers)? = Vec::new();
            writer.buffer = Vec::new();
            lock(&self.lock)?.take().map(Lock::release);
        }
        Ok(())
    }

    /// In the child of a fork: lets go of the parent's right to write, which a child that lives longer would keep from
    /// others. The store itself is the parent's and must not be used, nor dropped.
    pub fn abandon(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            *lock = None;
        }
    }

    /// Numbers of the store. They stay readable after `close`, but for those of the index.
    ///
    /// # Errors
    /// `Poisoned`.
    pub fn stats(&self) -> Result<Stats> {
        let counters = &self.counters;
        let index = lock(&self.index)?;
        Ok(Stats {
            records: index.len() as u64,
            segments: index.members().count() as u64,
            bytes: get(&counters.charged),
            max_bytes: self.max_bytes,
            index_bytes: index.bytes() as u64,
            hits: get(&counters.hits),
            misses: get(&counters.misses),
            stored: get(&counters.stored),
            present: get(&counters.present),
            dropped: get(&counters.dropped),
            corrupt: get(&counters.corrupt),
            evicted: get(&counters.evicted),
            deleted: get(&counters.deleted),
            discarded_segments: get(&counters.discarded),
            read_errors: get(&counters.read_errors),
            write_errors: get(&counters.write_errors),
        })
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Bytes of a payload.
    pub fn row_bytes(&self) -> usize {
        self.geometry.row_bytes
    }

    /// Bytes of a meta.
    pub fn meta_bytes(&self) -> usize {
        self.geometry.meta_bytes
    }

    /// Bytes of a full segment.
    pub fn segment_bytes(&self) -> u64 {
        self.geometry.offset(self.slots as usize)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(Error::Closed(format!("the store at {} is closed", self.directory.display())));
        }
        Ok(())
    }

    fn reader(&self) -> Result<Reader> {
        Ok(lock(&self.readers)?.pop().unwrap_or_else(|| Reader::new(self.geometry)))
    }

    fn give_back(&self, reader: Reader) {
        if let Ok(mut readers) = self.readers.lock()
            && readers.len() < READERS_MAX
        {
            readers.push(reader);
        }
    }

    /// Was it done? If not, it is counted.
    fn count<T>(&self, outcome: &io::Result<T>) -> bool {
        if outcome.is_err() {
            add(&self.counters.write_errors, 1);
        }
        outcome.is_ok()
    }
}

impl Drop for LogStore {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// The state of one call of `put_many`.
#[derive(Default)]
struct Put {
    answers: Vec<bool>,
    /// Records in the buffer: which of the call's, and what the index will say of them.
    pending: Vec<(usize, Entry)>,
    /// Their keys.
    keys: HashSet<Prefix>,
    /// Records that were written since the last sync.
    unsynced: Vec<(usize, Position)>,
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

//! The store: who may do what at the same time, and in which order files change.
//!
//! One lock for those who write (`put_many`, `delete_many`, `clear`, `close`), held while they do; one for the index,
//! never held during I/O. A reader takes the second for as long as it needs to look up where its records are, and
//! holds the files themselves: one that is dropped meanwhile stays readable, and what was deleted meanwhile has a
//! wrong checksum.

mod delete;
mod get;
mod put;
mod segments;
mod start;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::files::Lock;
use crate::format::{Geometry, KEY_BYTES, prefix};
use crate::index::{Index, Segment};
use crate::read::Reader;
use crate::settings::SyncPolicy;
use crate::stats::{Counters, Stats, add, get};

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

fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    mutex.lock().map_err(|_| Error::Poisoned)
}

impl LogStore {
    /// Which keys are there? A hint: the record may be another's, or damaged.
    ///
    /// # Errors
    /// `Closed`.
    pub fn contains_many(&self, keys: &[[u8; KEY_BYTES]]) -> Result<Vec<bool>> {
        self.check_open()?;
        let index = lock(&self.index)?;
        Ok(keys.iter().map(|key| index.find(&prefix(key)).is_some()).collect())
    }

    /// Writes what is left to write, syncs it (but for `never`) and lets others open the directory. Calls after it
    /// are refused; another `close` does nothing.
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
            let held = lock(&self.lock)?.take();
            held.into_iter().for_each(Lock::release);
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

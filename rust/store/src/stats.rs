//! What a store counts.

use std::sync::atomic::{AtomicU64, Ordering};

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

/// Numbers that change while several threads look.
#[derive(Debug, Default)]
pub struct Counters {
    pub charged: AtomicU64,
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub stored: AtomicU64,
    pub present: AtomicU64,
    pub dropped: AtomicU64,
    pub corrupt: AtomicU64,
    pub evicted: AtomicU64,
    pub deleted: AtomicU64,
    pub discarded: AtomicU64,
    pub read_errors: AtomicU64,
    pub write_errors: AtomicU64,
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

/// What a counter says.
pub fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

//! What the tests of the store share: folders that go away, rows in memory, keys that are easy to name.

#![allow(dead_code, missing_docs)]

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use kvpager_store::{LogStore, Rows, RowsMut, Settings, SyncPolicy};

/// A folder of this process's own, deleted at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvpager-store-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    /// The files as they are now, in another folder: what a process that is killed leaves.
    pub fn copy(&self) -> Self {
        let copy = Self::new();
        fs::create_dir_all(&copy.0).unwrap();
        for entry in fs::read_dir(&self.0).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.0.join(path.file_name().unwrap())).unwrap();
        }
        copy
    }

    /// Bytes of all files, and of all pages that they begin.
    pub fn bytes(&self) -> (u64, u64) {
        let lens = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        lens.fold((0, 0), |(bytes, pages), len| (bytes + len, pages + len.next_multiple_of(4096)))
    }

    /// Files whose name ends so, sorted.
    pub fn files(&self, end: &str) -> Vec<PathBuf> {
        let paths = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let mut paths: Vec<PathBuf> = paths.filter(|path| path.to_str().unwrap().ends_with(end)).collect();
        paths.sort();
        paths
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Rows one behind the other.
pub struct Arena {
    pub bytes: Vec<u8>,
    pub row_bytes: usize,
}

impl Arena {
    pub fn new(rows: usize, row_bytes: usize) -> Self {
        Self { bytes: vec![0xee; rows * row_bytes], row_bytes }
    }

    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [u8] {
        &mut self.bytes[row * self.row_bytes..][..self.row_bytes]
    }
}

impl Rows for Arena {
    fn copy(&self, row: usize, into: &mut [u8]) {
        into.copy_from_slice(self.row(row));
    }
}

impl RowsMut for Arena {
    fn piece(&mut self, row: usize, bytes: Range<usize>) -> &mut [u8] {
        &mut self.row_mut(row)[bytes]
    }
}

pub const META_BYTES: usize = 40;

/// The key of a number. Numbers 20 apart have keys that agree in the half that the index keeps.
pub fn key(id: usize) -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].fill((id % 20) as u8);
    key[16..].fill(id as u8);
    key
}

/// A meta of a number: its parent is `(id - 1) / 2`, as in a heap.
pub fn meta(id: usize, variant: u8) -> Vec<u8> {
    let mut meta = if id == 0 { vec![0xff; 32] } else { key((id - 1) / 2).to_vec() };
    meta.extend([id as u8, variant, 0, 0, 0, 0, 0, 0]);
    meta
}

/// The payload of a record: no two are alike, and no part of one is like another's.
pub fn payload(id: usize, variant: u8, row_bytes: usize) -> Vec<u8> {
    let mut state = (id as u64 * 256 + u64::from(variant)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..row_bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

pub fn settings(directory: &Path, row_bytes: usize, max_bytes: u64) -> Settings {
    Settings {
        directory: directory.to_owned(),
        row_bytes,
        meta_bytes: META_BYTES,
        max_bytes,
        identity: b"a model".to_vec(),
        sync: SyncPolicy::Never,
        segment_bytes: Some(1),
    }
}

pub fn put(store: &LogStore, records: &[(usize, u8)]) -> Vec<bool> {
    let mut arena = Arena::new(records.len(), store.row_bytes());
    for (row, &(id, variant)) in records.iter().enumerate() {
        arena.row_mut(row).copy_from_slice(&payload(id, variant, store.row_bytes()));
    }
    let keys: Vec<_> = records.iter().map(|&(id, _)| key(id)).collect();
    let metas: Vec<u8> = records.iter().flat_map(|&(id, variant)| meta(id, variant)).collect();
    let rows: Vec<usize> = (0..records.len()).collect();
    store.put_many(&keys, &metas, &arena, &rows).unwrap()
}

/// Which of the records are there. What is said to be there is compared.
pub fn get(store: &LogStore, records: &[(usize, u8)]) -> Vec<bool> {
    let mut arena = Arena::new(records.len(), store.row_bytes());
    let keys: Vec<_> = records.iter().map(|&(id, _)| key(id)).collect();
    let metas: Vec<u8> = records.iter().flat_map(|&(id, variant)| meta(id, variant)).collect();
    // Rows backwards, so that a row is not taken for a number.
    let rows: Vec<usize> = (0..records.len()).rev().collect();
    let answers = store.get_many(&keys, &metas, &mut arena, &rows).unwrap();
    for (i, &(id, variant)) in records.iter().enumerate() {
        let is_right = arena.row(rows[i]) == payload(id, variant, store.row_bytes());
        assert!(!answers[i] || is_right, "wrong bytes for record {id} variant {variant}");
    }
    answers
}

pub fn contains(store: &LogStore, ids: &[usize]) -> Vec<bool> {
    store.contains_many(&ids.iter().map(|&id| key(id)).collect::<Vec<_>>()).unwrap()
}

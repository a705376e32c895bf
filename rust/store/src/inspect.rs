//! A look at a directory from outside: reads only, takes no lock, and may run beside whoever writes.

use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::files::{self, Manifest, keys_path, list, segment_path};
use crate::format::{Geometry, HEADER_BYTES};
use crate::open;
use crate::read::Reader;

/// So many damaged slots of a segment are looked at twice. A writer deletes one at a time.
const LOOKS_AGAIN: u64 = 8;

/// What is in a directory.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// What it says of its store.
    pub manifest: Manifest,
    /// Numbers of its segments, ascending.
    pub segments: Vec<u64>,
    /// Names that are not the store's, or not regular files: they stay as they are.
    pub foreign: Vec<String>,
    /// Bytes of all files of the store.
    pub bytes: u64,
}

/// The file of a segment's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// There, and right.
    Good,
    /// Not there: the segment is being filled, or its writer ended in the middle.
    Missing,
    /// There, and wrong: the segment is looked through when it is opened.
    Damaged,
}

/// What is in a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentReport {
    /// Bytes of its file.
    pub bytes: u64,
    /// Slots that it has room for; 0 if its header is damaged, another store's, or not there yet.
    pub slots: u32,
    /// Records. With `verify`, whole ones; else what the keys or the heads of the records tell.
    pub records: u64,
    /// Slots whose record was deleted.
    pub deleted: u64,
    /// Slots with something else in them.
    pub damaged: u64,
    /// Bytes after the last slot: a record that is being written, or was when its writer ended.
    pub unfinished_bytes: u64,
    /// Its keys.
    pub keys: Keys,
}

impl SegmentReport {
    /// Is it no segment of this store's? One that is about to be made has no header yet.
    #[must_use]
    pub fn is_unusable(&self) -> bool {
        self.slots == 0 && self.bytes >= HEADER_BYTES
    }
}

/// Looks what is in a directory.
///
/// # Errors
/// `Io` if it cannot be read; `Config` if there is no manifest, or one of another version.
pub fn inspect(directory: &Path) -> Result<Inspection> {
    let listing = list(directory).map_err(|error| Error::io("list", directory, &error))?;
    if !listing.has_manifest {
        return Err(Error::Config(format!("{} is no store of kvpager's: it has no manifest", directory.display())));
    }
    let manifest = Manifest::read(directory)?;
    let bytes = files::bytes(directory).map_err(|error| Error::io("list", directory, &error))?;
    Ok(Inspection { manifest, segments: listing.segments, foreign: listing.foreign, bytes })
}

/// Looks what is in a segment. None if it is not there any more.
///
/// # Errors
/// `Io` if it cannot be read.
pub fn look(directory: &Path, geometry: Geometry, number: u64) -> Result<Option<SegmentReport>> {
    report(directory, geometry, number, false)
}

/// Reads a whole segment and checks every record. None if it is not there any more.
///
/// # Errors
/// `Io` if it cannot be read.
pub fn verify(directory: &Path, geometry: Geometry, number: u64) -> Result<Option<SegmentReport>> {
    report(directory, geometry, number, true)
}

fn report(directory: &Path, geometry: Geometry, number: u64, checked: bool) -> Result<Option<SegmentReport>> {
    let path = segment_path(directory, number);
    match read(directory, geometry, number, checked) {
        Ok(report) => Ok(Some(report)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", &path, &error)),
    }
}

fn read(directory: &Path, geometry: Geometry, number: u64, checked: bool) -> io::Result<SegmentReport> {
    let file = files::open_existing(&segment_path(directory, number), false)?;
    let bytes = file.metadata()?.len();
    let slots = open::slots(&file, geometry, number)?.unwrap_or(0);
    let entries = open::entries_of_keys(directory, geometry, number, bytes, slots);
    let keys = match &entries {
        Some(_) => Keys::Good,
        None if keys_path(directory, number).symlink_metadata().is_ok() => Keys::Damaged,
        None => Keys::Missing,
    };
    let mut report = SegmentReport { bytes, slots, records: 0, deleted: 0, damaged: 0, unfinished_bytes: 0, keys };
    if let Some(entries) = entries.filter(|_| !checked) {
        report.deleted = entries.iter().filter(|entry| entry.is_dead()).count() as u64;
        report.records = entries.len() as u64 - report.deleted;
        return Ok(report);
    }
    let mut reader = Reader::new(geometry);
    let mut end = if slots == 0 { 0 } else { geometry.offset(0) };
    for slot in 0..slots as usize {
        let Some(mut seen) = reader.look(&file, number, slot, checked)? else { break };
        if seen.entry.is_none() && !seen.is_blank && report.damaged < LOOKS_AGAIN {
            // It may be about to be deleted: zeros in one half of its head, and not yet in the other.
            thread::sleep(Duration::from_millis(1));
            reader.begin();
            seen = reader.look(&file, number, slot, checked)?.unwrap_or(seen);
        }
        end = geometry.offset(slot + 1);
        match seen.entry {
            Some(_) => report.records += 1,
            None if seen.is_blank => report.deleted += 1,
            None => report.damaged += 1,
        }
    }
    if !report.is_unusable() {
        report.unfinished_bytes = bytes.saturating_sub(end);
    }
    Ok(report)
}

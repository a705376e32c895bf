//! Opening what an earlier process left: segments with good keys are taken by them, others are looked through.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use crate::files::{self, keys_path, open_existing, segment_path};
use crate::format::{ENTRY_BYTES, Entry, Geometry, HEADER_BYTES, KEYS_HEADER_BYTES};
use crate::read::Reader;

/// A segment as it was found.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: File,
    /// Slots that it has room for.
    pub slots: u32,
    /// What is in each slot that was written.
    pub entries: Vec<Entry>,
    /// Were its keys there, and right?
    pub has_keys: bool,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Opens a segment; None if it is none of this store's. Where its keys are missing or wrong, the heads of its records
/// tell them, and of the `last` segment, whose end may be torn, the payloads are checked, too.
///
/// # Errors
/// If the system refuses.
pub fn open(directory: &Path, geometry: Geometry, number: u64, last: bool, writes: bool) -> io::Result<Option<Opened>> {
    let file = open_existing(&segment_path(directory, number), writes)?;
    let bytes = file.metadata()?.len();
    let Some(slots) = slots(&file, geometry, number)? else { return Ok(None) };
    let keys = entries_of_keys(directory, geometry, number, bytes, slots);
    let has_keys = keys.is_some();
    let entries = match keys {
        Some(entries) => entries,
        None => scan(&file, geometry, number, slots, last)?,
    };
    Ok(Some(Opened { file, slots, entries, has_keys, bytes }))
}

/// Slots that a segment has room for; None if it is none of this store's.
///
/// # Errors
/// If the system refuses.
pub fn slots(file: &File, geometry: Geometry, number: u64) -> io::Result<Option<u32>> {
    let mut header = Vec::new();
    file.take(HEADER_BYTES).read_to_end(&mut header)?;
    Ok(geometry.slots_of(&header, number))
}

/// The entries that a segment's keys tell, if they are there and right.
pub fn entries_of_keys(
    directory: &Path,
    geometry: Geometry,
    number: u64,
    bytes: u64,
    slots: u32,
) -> Option<Vec<Entry>> {
    let limit = (KEYS_HEADER_BYTES + slots as usize * ENTRY_BYTES) as u64;
    let mut file = Vec::new();
    // One byte more than it may have, so that a longer one is seen to be wrong.
    open_existing(&keys_path(directory, number), false).ok()?.take(limit + 1).read_to_end(&mut file).ok()?;
    geometry.entries_of(number, bytes, &file)
}

/// What the records themselves tell. Slots after the last good one are not in it: they can be written again.
fn scan(file: &File, geometry: Geometry, number: u64, slots: u32, checked: bool) -> io::Result<Vec<Entry>> {
    let mut reader = Reader::new(geometry);
    let mut entries = Vec::new();
    for slot in 0..slots as usize {
        let Some(seen) = reader.look(file, number, slot, checked)? else { break };
        entries.push(seen.entry.unwrap_or(Entry::DEAD));
    }
    let end = entries.iter().rposition(|entry| !entry.is_dead()).map_or(0, |last| last + 1);
    entries.truncate(end);
    Ok(entries)
}

/// Writes the file of a segment's keys.
///
/// # Errors
/// If the system refuses: then there is none.
pub fn write_keys(directory: &Path, number: u64, keys: &[u8]) -> io::Result<()> {
    let path = keys_path(directory, number);
    files::remove(&path)?;
    let written = files::create(&path).and_then(|mut file| file.write_all(keys));
    if written.is_err() {
        let _ = files::remove(&path);
    }
    written
}

//! Reading records: small ones many at a time through a buffer, large ones straight to where they are wanted.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::format::{Entry, Geometry};

/// Bytes that are read ahead of small records. It stays in a core's own cache.
const BUFFER_BYTES: usize = 256 << 10;
/// A record up to so many bytes is read with its neighbours.
const SMALL_BYTES: usize = 32 << 10;
/// A payload is read and checked in pieces of so many bytes: what was just read is still in the core's own cache.
const PIECE_BYTES: usize = 128 << 10;

/// Rows that payloads are read into.
pub trait RowsMut {
    /// A part of a row.
    fn piece(&mut self, row: usize, bytes: Range<usize>) -> &mut [u8];
}

/// Rows that payloads are copied from.
pub trait Rows {
    /// Copies a row.
    fn copy(&self, row: usize, into: &mut [u8]);
}

/// What was found in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The record that was asked for, whole.
    Whole,
    /// A record of another key or another meta.
    Other,
    /// Nothing whole.
    Torn,
}

/// Bytes of one file after the other, some ahead.
#[derive(Debug)]
pub struct Reader {
    geometry: Geometry,
    buffer: Vec<u8>,
    /// Which bytes of the file are in the buffer.
    held: Range<u64>,
}

impl Reader {
    /// A reader of records of these sizes.
    pub fn new(geometry: Geometry) -> Self {
        let len = BUFFER_BYTES.max(geometry.head_bytes());
        Self { geometry, buffer: vec![0; len], held: 0..0 }
    }

    /// Forgets what was read ahead: another file comes next, or the same after somebody wrote to it.
    pub fn begin(&mut self) {
        self.held = 0..0;
    }

    /// Reads the record in a slot into a row, if it is that of this key and meta. Reads ahead up to slot `end`.
    ///
    /// # Errors
    /// If the system refuses. A file that ends too early is no error.
    #[allow(clippy::too_many_arguments)]
    pub fn record(
        &mut self,
        file: &File,
        number: u64,
        slot: usize,
        end: usize,
        key_and_meta: (&[u8], &[u8]),
        rows: &mut dyn RowsMut,
        row: usize,
    ) -> io::Result<Found> {
        let geometry = self.geometry;
        let offset = geometry.offset(slot);
        let is_small = geometry.record_bytes() <= SMALL_BYTES;
        let (want, limit) = if is_small {
            (geometry.record_bytes(), geometry.offset(end.max(slot + 1)))
        } else {
            (geometry.head_bytes(), offset + geometry.head_bytes() as u64)
        };
        let Some(bytes) = self.bytes(file, offset, want, limit)? else { return Ok(Found::Torn) };
        let (head, rest) = bytes.split_at(geometry.head_bytes());
        let Some(mut check) = geometry.check_head(number, slot, head) else { return Ok(Found::Torn) };
        if head[8..40] != *key_and_meta.0 || head[40..] != *key_and_meta.1 {
            return Ok(Found::Other);
        }
        if is_small {
            let payload = &rest[..geometry.row_bytes];
            check.update(payload);
            rows.piece(row, 0..payload.len()).copy_from_slice(payload);
        } else {
            let start = offset + geometry.head_bytes() as u64;
            for begin in (0..geometry.row_bytes).step_by(PIECE_BYTES) {
                let piece = rows.piece(row, begin..(begin + PIECE_BYTES).min(geometry.row_bytes));
                match file.read_exact_at(piece, start + begin as u64) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Found::Torn),
                    other => other?,
                }
                check.update(piece);
            }
        }
        Ok(if check.matches() { Found::Whole } else { Found::Torn })
    }

    /// The head in a slot, if there is a good one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn head(&mut self, file: &File, number: u64, slot: usize) -> io::Result<Option<&[u8]>> {
        let geometry = self.geometry;
        let offset = geometry.offset(slot);
        let head = self.bytes(file, offset, geometry.head_bytes(), offset + geometry.head_bytes() as u64)?;
        Ok(head.filter(|head| geometry.check_head(number, slot, head).is_some()))
    }

    /// What is in a slot: its entry if there is a good head, and, where it was `checked`, a good payload; and whether
    /// the slot is blank, as one is whose record was deleted. None where the file ends before the slot does.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn look(&mut self, file: &File, number: u64, slot: usize, checked: bool) -> io::Result<Option<Seen>> {
        let geometry = self.geometry;
        let (offset, end) = (geometry.offset(slot), geometry.offset(slot + 1));
        // Whole buffers, where records are small or their payloads are wanted, too.
        let far = if checked || geometry.record_bytes() <= SMALL_BYTES { u64::MAX } else { 0 };
        let head_bytes = geometry.head_bytes();
        let Some(head) = self.bytes(file, offset, head_bytes, far.max(offset + head_bytes as u64))? else {
            return Ok(None);
        };
        let is_blank = head[..40].iter().all(|&byte| byte == 0);
        let good = geometry.check_head(number, slot, head).map(|check| (Entry::of_head(head), check));
        let mut entry = good.as_ref().map(|(entry, _)| *entry);
        if let Some((_, mut check)) = good.filter(|_| checked) {
            let (mut at, payload_end) = (offset + head_bytes as u64, offset + (head_bytes + geometry.row_bytes) as u64);
            while at < payload_end {
                let len = ((payload_end - at) as usize).min(PIECE_BYTES);
                let Some(piece) = self.bytes(file, at, len, u64::MAX)? else { return Ok(None) };
                check.update(piece);
                at += len as u64;
            }
            entry = entry.filter(|_| check.matches());
        }
        let is_there = self.held.end >= end || file.metadata()?.len() >= end;
        Ok(is_there.then_some(Seen { entry, is_blank }))
    }

    /// `len` bytes from `offset`, and as many ahead as fit and lie before `limit`. None if the file ends before.
    fn bytes(&mut self, file: &File, offset: u64, len: usize, limit: u64) -> io::Result<Option<&[u8]>> {
        if offset < self.held.start || offset + len as u64 > self.held.end {
            let room = self.buffer.len().min(usize::try_from(limit - offset).unwrap_or(usize::MAX));
            let mut filled = 0;
            while filled < len {
                match file.read_at(&mut self.buffer[filled..room], offset + filled as u64) {
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.held = offset..offset + filled as u64;
            if filled < len {
                return Ok(None);
            }
        }
        let from = (offset - self.held.start) as usize;
        Ok(Some(&self.buffer[from..from + len]))
    }
}

/// What a look at a slot tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The record, if there is a good one.
    pub entry: Option<Entry>,
    /// Nothing was ever written there, or what was there was deleted.
    pub is_blank: bool,
}

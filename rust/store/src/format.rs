//! What is in the files, to the byte. All numbers are little-endian.
//!
//! ```text
//! kvpager-<number>.seg    64 bytes of header, then slots of one size, filled in order
//!   header                magic "kvpgseg1", store u64, number u64, slots u32, meta_bytes u32, row_bytes u64,
//!                         zeros, crc u32 of the 60 bytes before
//!   slot                  head crc u32, payload crc u32, key [32], meta [meta_bytes], payload [row_bytes],
//!                         zeros up to a multiple of 8
//! kvpager-<number>.keys   of a segment that nobody writes to: 40 bytes of header, then an entry a slot
//!   header                magic "kvpgkey1", store u64, number u64, count u32, segment bytes u64,
//!                         crc u32 of the 36 bytes before and the entries
//!   entry                 the first 16 bytes of the key, the first 8 of the parent's; zeros where a record is no more
//! ```
//!
//! Both checksums of a slot start from what the slot is: its store, segment and number. So no copy of a record, and
//! none that an older file left in the same blocks of the disk, is good anywhere else. The payload's goes on from the
//! key and the meta, so that a head whose payload was not written fits no older payload.

use crc32fast::Hasher;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a segment before its first slot.
pub const HEADER_BYTES: u64 = 64;
/// Bytes of a slot before its meta.
pub const HEAD_BYTES: usize = 8 + KEY_BYTES;
/// Bytes of an entry of a key file.
pub const ENTRY_BYTES: usize = 24;
/// Bytes of a key file before its first entry.
pub const KEYS_HEADER_BYTES: usize = 40;
/// Version of all of this.
pub const VERSION: u32 = 1;

const SEGMENT_MAGIC: &[u8; 8] = b"kvpgseg1";
const KEYS_MAGIC: &[u8; 8] = b"kvpgkey1";

/// Sizes that all records of a store share, and the store's random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Drawn when the store was made.
    pub store: u64,
    /// Bytes of a meta.
    pub meta_bytes: usize,
    /// Bytes of a payload.
    pub row_bytes: usize,
}

impl Geometry {
    /// Bytes of a slot before its payload.
    #[must_use]
    pub fn head_bytes(&self) -> usize {
        HEAD_BYTES + self.meta_bytes
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        (self.head_bytes() + self.row_bytes).next_multiple_of(8)
    }

    /// Where a slot begins.
    #[must_use]
    pub fn offset(&self, slot: usize) -> u64 {
        HEADER_BYTES + slot as u64 * self.record_bytes() as u64
    }

    /// The header of a segment.
    #[must_use]
    pub fn segment_header(&self, number: u64, slots: u32) -> [u8; HEADER_BYTES as usize] {
        let mut header = [0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(SEGMENT_MAGIC);
        header[8..16].copy_from_slice(&self.store.to_le_bytes());
        header[16..24].copy_from_slice(&number.to_le_bytes());
        header[24..28].copy_from_slice(&slots.to_le_bytes());
        header[28..32].copy_from_slice(&(self.meta_bytes as u32).to_le_bytes());
        header[32..40].copy_from_slice(&(self.row_bytes as u64).to_le_bytes());
        let crc = crc32fast::hash(&header[..60]);
        header[60..].copy_from_slice(&crc.to_le_bytes());
        header
    }

    /// How many slots a segment has room for; None if this is no header of this store's segment of that number.
    #[must_use]
    pub fn slots_of(&self, header: &[u8], number: u64) -> Option<u32> {
        let slots = u32::from_le_bytes(header.get(24..28)?.try_into().ok()?);
        (header == self.segment_header(number, slots)).then_some(slots)
    }

    /// Writes a record's head; its key, meta and payload are in their places.
    pub fn stamp(&self, number: u64, slot: usize, record: &mut [u8]) {
        let (head, payload) = record.split_at_mut(self.head_bytes());
        let mut crc = self.start(number, slot);
        crc.update(&head[8..]);
        let mut whole = crc.clone();
        whole.update(&payload[..self.row_bytes]);
        let payload_crc = whole.finalize().to_le_bytes();
        crc.update(&payload_crc);
        head[..4].copy_from_slice(&crc.finalize().to_le_bytes());
        head[4..8].copy_from_slice(&payload_crc);
    }

    /// Is this the head that was written to that slot? Then the checksum of its payload, begun.
    #[must_use]
    pub fn check_head(&self, number: u64, slot: usize, head: &[u8]) -> Option<PayloadCheck> {
        let mut crc = self.start(number, slot);
        crc.update(&head[8..self.head_bytes()]);
        let begun = crc.clone();
        crc.update(&head[4..8]);
        (crc.finalize().to_le_bytes() == head[..4]).then(|| PayloadCheck { crc: begun, expected: array(&head[4..8]) })
    }

    /// The key file of a segment.
    #[must_use]
    pub fn keys_file(&self, number: u64, entries: &[Entry]) -> Vec<u8> {
        let mut file = Vec::with_capacity(KEYS_HEADER_BYTES + entries.len() * ENTRY_BYTES);
        file.extend_from_slice(KEYS_MAGIC);
        file.extend_from_slice(&self.store.to_le_bytes());
        file.extend_from_slice(&number.to_le_bytes());
        file.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        file.extend_from_slice(&self.offset(entries.len()).to_le_bytes());
        file.extend_from_slice(&[0; 4]);
        for entry in entries {
            file.extend_from_slice(&entry.key);
            file.extend_from_slice(&entry.parent);
        }
        let crc = keys_crc(&file);
        file[36..40].copy_from_slice(&crc);
        file
    }

    /// The entries of a key file that is whole, of this store, and of a segment of that number and length.
    #[must_use]
    pub fn entries_of(&self, number: u64, segment_bytes: u64, file: &[u8]) -> Option<Vec<Entry>> {
        let header = file.get(..KEYS_HEADER_BYTES)?;
        let entries = &file[KEYS_HEADER_BYTES..];
        let is_whole = header[..8] == *KEYS_MAGIC
            && header[8..16] == self.store.to_le_bytes()
            && header[16..24] == number.to_le_bytes()
            && header[24..28] == ((entries.len() / ENTRY_BYTES) as u32).to_le_bytes()
            && header[28..36] == segment_bytes.to_le_bytes()
            && self.offset(entries.len() / ENTRY_BYTES) == segment_bytes
            && entries.len().is_multiple_of(ENTRY_BYTES)
            && header[36..40] == keys_crc(file);
        is_whole.then(|| {
            let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
            let entry = |bytes: &[u8; ENTRY_BYTES]| Entry { key: array(&bytes[..16]), parent: array(&bytes[16..]) };
            entries.iter().map(entry).collect()
        })
    }

    fn start(&self, number: u64, slot: usize) -> Hasher {
        let mut crc = Hasher::new();
        crc.update(&self.store.to_le_bytes());
        crc.update(&number.to_le_bytes());
        crc.update(&(slot as u64).to_le_bytes());
        crc
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

fn keys_crc(file: &[u8]) -> [u8; 4] {
    let mut crc = Hasher::new();
    crc.update(&file[..36]);
    crc.update(&file[KEYS_HEADER_BYTES..]);
    crc.finalize().to_le_bytes()
}

/// The checksum of a payload that is read piece by piece.
pub struct PayloadCheck {
    crc: Hasher,
    expected: [u8; 4],
}

impl PayloadCheck {
    /// The next bytes.
    pub fn update(&mut self, piece: &[u8]) {
        self.crc.update(piece);
    }

    /// Were these the bytes that were written?
    pub fn matches(self) -> bool {
        self.crc.finalize().to_le_bytes() == self.expected
    }
}

/// What the index knows of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The first half of the key; zeros where the record is no more.
    pub key: Prefix,
    /// The beginning of the parent's key.
    pub parent: [u8; 8],
}

/// The first half of a key.
pub type Prefix = [u8; 16];

impl Entry {
    /// A slot without a record.
    pub const DEAD: Self = Self { key: [0; 16], parent: [0; 8] };

    /// The entry of a record of a key and a meta.
    pub fn new(key: &[u8], meta: &[u8]) -> Self {
        Self { key: prefix(key), parent: array(&meta[..8]) }
    }

    /// The entry of a record, by its head.
    pub fn of_head(head: &[u8]) -> Self {
        Self::new(&head[8..HEAD_BYTES], &head[HEAD_BYTES..])
    }

    /// Is there no record?
    pub fn is_dead(&self) -> bool {
        self.key == Self::DEAD.key
    }
}

/// The prefix that stands for a key. None is all zeros.
pub fn prefix(key: &[u8]) -> Prefix {
    let mut prefix: Prefix = array(&key[..16]);
    if prefix == Entry::DEAD.key {
        prefix[15] = 1;
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { store: 7, meta_bytes: 48, row_bytes: 61 };

    fn record() -> Vec<u8> {
        let mut record: Vec<u8> = (0..GEOMETRY.record_bytes()).map(|at| at as u8).collect();
        GEOMETRY.stamp(3, 5, &mut record);
        record
    }

    fn is_good(geometry: Geometry, number: u64, slot: usize, record: &[u8]) -> bool {
        geometry.check_head(number, slot, record).is_some_and(|mut check| {
            check.update(&record[geometry.head_bytes()..][..geometry.row_bytes]);
            check.matches()
        })
    }

    #[test]
    fn a_record_is_good_in_its_place_only() {
        let record = record();
        assert!(is_good(GEOMETRY, 3, 5, &record));
        assert!(!is_good(GEOMETRY, 3, 6, &record));
        assert!(!is_good(GEOMETRY, 4, 5, &record));
        assert!(!is_good(Geometry { store: 8, ..GEOMETRY }, 3, 5, &record));
    }

    #[test]
    fn each_flipped_bit_of_a_record_is_found() {
        let record = record();
        for bit in 0..(GEOMETRY.head_bytes() + GEOMETRY.row_bytes) * 8 {
            let mut broken = record.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_good(GEOMETRY, 3, 5, &broken), "bit {bit}");
        }
    }

    #[test]
    fn a_new_head_over_an_old_payload_is_found() {
        let old = record();
        let mut new = record();
        new[GEOMETRY.head_bytes()..].fill(9);
        GEOMETRY.stamp(3, 5, &mut new);
        new[GEOMETRY.head_bytes()..].copy_from_slice(&old[GEOMETRY.head_bytes()..]);
        assert!(!is_good(GEOMETRY, 3, 5, &new));
        let mut other_meta = record();
        other_meta[HEAD_BYTES] ^= 1;
        GEOMETRY.stamp(3, 5, &mut other_meta);
        other_meta[4..8].copy_from_slice(&old[4..8]);
        assert!(!is_good(GEOMETRY, 3, 5, &other_meta));
    }

    #[test]
    fn zeros_are_no_record() {
        assert!(GEOMETRY.check_head(0, 0, &vec![0; GEOMETRY.record_bytes()]).is_none());
        assert!(Geometry { store: 0, ..GEOMETRY }.check_head(0, 0, &vec![0; GEOMETRY.record_bytes()]).is_none());
    }

    #[test]
    fn each_flipped_bit_of_a_header_is_found() {
        let header = GEOMETRY.segment_header(3, 10);
        assert_eq!(GEOMETRY.slots_of(&header, 3), Some(10));
        assert_eq!(GEOMETRY.slots_of(&header, 4), None);
        assert_eq!(GEOMETRY.slots_of(&header[..63], 3), None);
        for bit in 0..header.len() * 8 {
            let mut broken = header;
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(GEOMETRY.slots_of(&broken, 3), None, "bit {bit}");
        }
    }

    #[test]
    fn each_flipped_bit_of_a_key_file_is_found() {
        let entries = [Entry { key: [1; 16], parent: [2; 8] }, Entry::DEAD, Entry { key: [3; 16], parent: [1; 8] }];
        let file = GEOMETRY.keys_file(3, &entries);
        let segment_bytes = GEOMETRY.offset(3);
        assert_eq!(GEOMETRY.entries_of(3, segment_bytes, &file).as_deref(), Some(&entries[..]));
        assert_eq!(GEOMETRY.entries_of(4, segment_bytes, &file), None);
        assert_eq!(GEOMETRY.entries_of(3, segment_bytes + 1, &file), None);
        for len in 0..file.len() {
            assert_eq!(GEOMETRY.entries_of(3, segment_bytes, &file[..len]), None, "{len} bytes");
        }
        for bit in 0..file.len() * 8 {
            let mut broken = file.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(GEOMETRY.entries_of(3, segment_bytes, &broken), None, "bit {bit}");
        }
    }

    #[test]
    fn no_prefix_is_that_of_a_dead_slot() {
        assert_ne!(prefix(&[0; 32]), Entry::DEAD.key);
        assert_eq!(prefix(&[5; 32]), [5; 16]);
    }

    #[test]
    fn an_entry_has_24_bytes() {
        assert_eq!(size_of::<Entry>(), ENTRY_BYTES);
    }
}

//! Each kind of byte of a segment and of its keys, flipped: what was not hit stays readable, what was hit is a miss.

mod support;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use kvpager_store::{Error, Keys, LogStore, Settings, inspect, look, verify};
use support::{Folder, META_BYTES, get, put, settings};

const ROW_BYTES: usize = 99;
const RECORD_BYTES: u64 = (40 + META_BYTES + ROW_BYTES).next_multiple_of(8) as u64;
/// 8 in segment 0, 8 in segment 1, 3 in segment 2, which is not full.
const RECORDS: usize = 19;

fn made() -> (Folder, Settings) {
    let folder = Folder::new();
    let settings = settings(&folder.0, ROW_BYTES, 1 << 20);
    let store = LogStore::open(&settings).unwrap();
    assert!(put(&store, &all()).into_iter().all(|is_there| is_there));
    drop(store);
    (folder, settings)
}

fn all() -> Vec<(usize, u8)> {
    (0..RECORDS).map(|id| (id, 0)).collect()
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn missing(store: &LogStore) -> Vec<usize> {
    get(store, &all()).iter().enumerate().filter(|(_, is_there)| !**is_there).map(|(id, _)| id).collect()
}

/// Where each kind of byte of a slot is, and whether a record without it is lost.
fn kinds() -> Vec<(&'static str, u64, bool)> {
    let head = 40 + META_BYTES as u64;
    vec![
        ("head crc", 0, true),
        ("payload crc", 4, true),
        ("key", 8, true),
        ("second half of the key", 30, true),
        ("meta, parent", 40, true),
        ("meta, tokens", head - 1, true),
        ("payload, first", head, true),
        ("payload, last", head + ROW_BYTES as u64 - 1, true),
        ("padding", RECORD_BYTES - 1, false),
    ]
}

#[test]
fn a_flipped_byte_of_a_record_costs_that_record() {
    for without_keys in [false, true] {
        for (segment, slot) in [(0, 0), (0, 3), (1, 7), (2, 0), (2, 2)] {
            for (kind, at, is_lost) in kinds() {
                let (folder, settings) = made();
                flip(&folder.files(".seg")[segment], 64 + slot * RECORD_BYTES + at);
                if without_keys {
                    folder.files(".keys").iter().for_each(|path| fs::remove_file(path).unwrap());
                }
                let store = LogStore::open(&settings).unwrap();
                let lost = segment * 8 + slot as usize;
                let expected = if is_lost { vec![lost] } else { vec![] };
                assert_eq!(missing(&store), expected, "{kind} of {lost}, without keys: {without_keys}");
                // It is found once, and can be stored again.
                assert!(store.stats().unwrap().corrupt <= 1);
                assert!(put(&store, &all()).into_iter().all(|is_there| is_there));
                assert_eq!(missing(&store), []);
                drop(store);
                assert_eq!(missing(&LogStore::open(&settings).unwrap()), [], "{kind} of {lost}, at the next start");
            }
        }
    }
}

#[test]
fn a_flipped_byte_of_a_segments_header_costs_the_segment() {
    for at in [0, 8, 16, 24, 28, 32, 45, 60, 63] {
        let (folder, settings) = made();
        flip(&folder.files(".seg")[1], at);
        let store = LogStore::open(&settings).unwrap();
        assert_eq!(missing(&store), (8..16).collect::<Vec<_>>(), "byte {at}");
        assert_eq!(store.stats().unwrap().discarded_segments, 1);
        assert_eq!(folder.files(".seg").len(), 2, "its space is back");
    }
}

#[test]
fn a_flipped_byte_of_the_keys_costs_nothing() {
    for segment in 0..3 {
        let len = fs::metadata(&made().0.files(".keys")[segment]).unwrap().len();
        for at in (0..len).step_by(5) {
            let (folder, settings) = made();
            let path = folder.files(".keys")[segment].clone();
            flip(&path, at);
            let manifest = inspect(&folder.0).unwrap().manifest;
            assert_eq!(look(&folder.0, manifest.geometry, segment as u64).unwrap().unwrap().keys, Keys::Damaged);
            let store = LogStore::open(&settings).unwrap();
            assert_eq!(missing(&store), [], "byte {at} of the keys of segment {segment}");
            drop(store);
            assert_eq!(
                look(&folder.0, manifest.geometry, segment as u64).unwrap().unwrap().keys,
                Keys::Good,
                "repaired"
            );
        }
    }
}

#[test]
fn wherever_a_segment_ends_what_is_before_is_there() {
    let len = fs::metadata(&made().0.files(".seg")[2]).unwrap().len();
    for end in 0..=len {
        let (folder, settings) = made();
        let path = &folder.files(".seg")[2];
        OpenOptions::new().write(true).open(path).unwrap().set_len(end).unwrap();
        let store = LogStore::open(&settings).unwrap();
        let whole = end.saturating_sub(64) / RECORD_BYTES;
        assert_eq!(missing(&store), (16 + whole as usize..RECORDS).collect::<Vec<_>>(), "cut after {end} bytes");
        assert!(put(&store, &all()).into_iter().all(|is_there| is_there));
        assert_eq!(missing(&store), []);
    }
}

#[test]
fn a_flipped_byte_of_the_manifest_is_an_error() {
    let (folder, settings) = made();
    let path = folder.0.join("kvpager.manifest");
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut broken = whole.clone();
        broken[at] ^= 1;
        fs::write(&path, &broken).unwrap();
        assert!(matches!(LogStore::open(&settings), Err(Error::Config(_))), "byte {at}");
    }
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert!(LogStore::open(&settings).is_err());
    fs::write(&path, whole).unwrap();
    assert_eq!(missing(&LogStore::open(&settings).unwrap()), []);
}

#[test]
fn verify_counts_what_is_damaged() {
    let (folder, settings) = made();
    let store = LogStore::open(&settings).unwrap();
    store.delete_many(&[support::key(18)]).unwrap();
    drop(store);
    flip(&folder.files(".seg")[0], 64 + RECORD_BYTES - 10);
    fs::write(&folder.files(".seg")[1], [7; 100]).unwrap();
    let geometry = inspect(&folder.0).unwrap().manifest.geometry;
    let counts = |number| {
        let report = verify(&folder.0, geometry, number).unwrap().unwrap();
        (report.slots, report.records, report.deleted, report.damaged)
    };
    assert_eq!(counts(0), (8, 7, 0, 1));
    assert_eq!(counts(1), (0, 0, 0, 0));
    assert_eq!(counts(2), (8, 2, 1, 0));
    assert_eq!(verify(&folder.0, geometry, 9).unwrap(), None);
}

#[test]
fn what_lies_behind_the_last_record_is_cut_off_and_its_slots_are_used_again() {
    let (folder, settings) = made();
    let geometry = inspect(&folder.0).unwrap().manifest.geometry;
    for path in folder.files(".seg") {
        let mut content = fs::read(&path).unwrap();
        content.extend(vec![0xaa; 3 * RECORD_BYTES as usize + 5]);
        fs::write(&path, content).unwrap();
    }
    drop(LogStore::open(&settings).unwrap());
    for number in 0..3 {
        let report = look(&folder.0, geometry, number).unwrap().unwrap();
        assert_eq!((report.keys, report.unfinished_bytes), (Keys::Good, 0), "segment {number}");
    }
    let path = &folder.files(".seg")[2];
    let mut content = fs::read(path).unwrap();
    content.extend(vec![0xaa; 3 * RECORD_BYTES as usize]);
    fs::write(path, content).unwrap();
    let store = LogStore::open(&settings).unwrap();
    assert!(put(&store, &[(19, 0)])[0]);
    // While it is written to, nothing says its keys.
    assert_eq!(look(&folder.0, geometry, 2).unwrap().unwrap().keys, Keys::Missing);
    drop(store);
    let report = look(&folder.0, geometry, 2).unwrap().unwrap();
    assert_eq!((report.keys, report.bytes, report.records), (Keys::Good, 64 + 4 * RECORD_BYTES, 4));
}

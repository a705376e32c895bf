//! The store by small scenarios: the limit, what goes first, restarts, who may write, what is not ours.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kvpager_store::{Error, LogStore, Settings, SyncPolicy};
use support::{Folder, contains, get, key, put, settings};

const ROW_BYTES: usize = 3000;

/// A store with room for `segments` of 8 records.
fn small(folder: &Folder, segments: u64) -> Settings {
    let record = (40 + support::META_BYTES + ROW_BYTES).next_multiple_of(8) as u64;
    let segment = (64 + 8 * record).next_multiple_of(4096) + 4096;
    settings(&folder.0, ROW_BYTES, 3 * 4096 + segments * segment)
}

fn numbered(ids: std::ops::Range<usize>) -> Vec<(usize, u8)> {
    // Apart in the half of the key that decides.
    ids.map(|id| (id, 0)).collect()
}

fn all_there(answers: &[bool]) -> bool {
    answers.iter().all(|&is_there| is_there)
}

#[test]
fn the_segment_used_longest_ago_goes_first() {
    let folder = Folder::new();
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    assert!(all_there(&put(&store, &numbered(0..8))));
    assert!(all_there(&put(&store, &numbered(8..16))));
    assert!(all_there(&get(&store, &numbered(0..1))));
    assert!(all_there(&put(&store, &numbered(16..17))));
    assert!(all_there(&get(&store, &numbered(0..8))));
    assert_eq!(contains(&store, &[8, 15, 16]), [false, false, true]);
    let stats = store.stats().unwrap();
    assert_eq!((stats.evicted, stats.records, stats.segments), (8, 9, 2));
}

#[test]
fn after_a_restart_the_oldest_goes_first() {
    let folder = Folder::new();
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    put(&store, &numbered(0..8));
    put(&store, &numbered(8..16));
    get(&store, &numbered(0..8));
    drop(store);
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    put(&store, &numbered(16..17));
    assert_eq!(contains(&store, &[0, 8, 16]), [false, true, true]);
}

#[test]
fn a_call_that_is_too_large_says_what_is_left() {
    let folder = Folder::new();
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    let records: Vec<_> = (0..20).map(|id| (id, 0)).collect();
    let answers = put(&store, &records);
    assert_eq!(answers, get(&store, &records));
    assert_eq!(answers.iter().filter(|&&is_there| is_there).count(), 12);
    assert!(all_there(&answers[..8]), "parents rather than children");
    assert_eq!(store.stats().unwrap().dropped, 8);
}

#[test]
fn a_smaller_limit_holds_from_the_start() {
    let folder = Folder::new();
    let store = LogStore::open(&small(&folder, 5)).unwrap();
    put(&store, &numbered(0..20));
    drop(store);
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    assert!(folder.bytes().1 <= small(&folder, 2).max_bytes);
    assert_eq!(contains(&store, &[0, 7, 8, 19]), [false, false, true, true]);
}

#[test]
fn a_limit_with_no_room_is_refused_by_its_number() {
    let folder = Folder::new();
    let least = small(&folder, 2).max_bytes;
    let refused = LogStore::open(&Settings { max_bytes: least - 1, ..small(&folder, 2) }).unwrap_err().to_string();
    assert!(refused.contains(&least.to_string()), "{refused}");
    LogStore::open(&Settings { max_bytes: least, ..small(&folder, 2) }).unwrap();
    for wrong in [
        Settings { row_bytes: 0, ..small(&folder, 2) },
        Settings { row_bytes: usize::MAX, ..small(&folder, 2) },
        Settings { meta_bytes: 31, ..small(&folder, 2) },
        Settings { identity: vec![0; 65_537], ..small(&folder, 2) },
        Settings { max_bytes: 1 << 40, ..small(&folder, 2) },
    ] {
        assert!(matches!(LogStore::open(&wrong), Err(Error::Config(_))), "{wrong:?}");
    }
}

#[test]
fn segments_of_another_size_are_read_and_not_written_to() {
    let folder = Folder::new();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 16 << 20)).unwrap();
    put(&store, &numbered(0..3));
    drop(store);
    let larger = Settings { segment_bytes: Some(100_000), ..settings(&folder.0, ROW_BYTES, 16 << 20) };
    let store = LogStore::open(&larger).unwrap();
    assert!(all_there(&put(&store, &numbered(0..20))));
    assert_eq!(store.stats().unwrap().segments, 2);
    assert!(all_there(&get(&store, &numbered(0..20))));
    assert!(folder.bytes().1 <= store.stats().unwrap().bytes);
}

#[test]
fn restarts_go_on_where_they_were() {
    let folder = Folder::new();
    for round in 0..20 {
        let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
        assert!(all_there(&get(&store, &numbered(0..round))));
        put(&store, &numbered(round..round + 1));
    }
    assert_eq!(folder.files(".seg").len(), 3);
    assert_eq!(folder.files(".keys").len(), 3);
}

#[test]
fn a_start_without_a_write_changes_no_file() {
    let folder = Folder::new();
    put(&LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap(), &numbered(0..11));
    let content = || {
        let files = [".seg", ".keys", ".manifest"].into_iter().flat_map(|end| folder.files(end));
        files.map(|path| (fs::metadata(&path).unwrap().modified().unwrap(), path)).collect::<Vec<_>>()
    };
    let before = content();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    assert!(all_there(&get(&store, &numbered(0..11))));
    drop(store);
    assert_eq!(content(), before);
}

#[test]
fn one_at_a_time_writes() {
    let folder = Folder::new();
    let first = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    let refused = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap_err();
    let Error::Io(message) = refused else { panic!("{refused:?}") };
    assert!(message.contains("in use") && message.contains(&std::process::id().to_string()), "{message}");
    first.close().unwrap();
    LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
}

#[test]
fn a_store_of_another_kind_is_refused_by_both_names() {
    let folder = Folder::new();
    drop(LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap());
    let same = || settings(&folder.0, ROW_BYTES, 1 << 20);
    for (wrong, there, here) in [
        (Settings { row_bytes: 77, ..same() }, "row_bytes 3000", "77"),
        (Settings { meta_bytes: 96, ..same() }, "meta_bytes 40", "96"),
        (Settings { identity: b"other".to_vec(), ..same() }, "b\"a model\"", "b\"other\""),
    ] {
        let Error::Config(message) = LogStore::open(&wrong).unwrap_err() else { panic!() };
        assert!(message.contains(there) && message.contains(here), "{message}");
    }
    let path = folder.0.join("kvpager.manifest");
    let newer = fs::read_to_string(&path).unwrap().replace("version 1", "version 2");
    fs::write(&path, newer).unwrap();
    let message = LogStore::open(&same()).unwrap_err().to_string();
    assert!(message.contains("version 2") && message.contains("writes 1"), "{message}");
    fs::remove_file(&path).unwrap();
    fs::write(folder.0.join("kvpager-0000000000000000.seg"), b"x").unwrap();
    assert!(LogStore::open(&same()).unwrap_err().to_string().contains("no manifest"));
}

#[test]
fn what_is_not_ours_stays() {
    let folder = Folder::new();
    let outside = Folder::new();
    fs::create_dir_all(&folder.0).unwrap();
    fs::create_dir_all(&outside.0).unwrap();
    fs::write(outside.0.join("victim"), b"precious").unwrap();
    fs::write(folder.0.join("notes.txt"), b"mine").unwrap();
    fs::create_dir(folder.0.join("kvpager-0000000000000005.seg")).unwrap();
    for name in ["kvpager-0000000000000007.seg", "kvpager-0000000000000008.keys", "kvpager-0000000000000009.keys"] {
        symlink(outside.0.join("victim"), folder.0.join(name)).unwrap();
    }
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    for round in 0..10 {
        assert!(all_there(&put(&store, &(0..8).map(|id| (id, round)).collect::<Vec<_>>())));
    }
    store.clear().unwrap();
    drop(store);
    assert_eq!(fs::read(outside.0.join("victim")).unwrap(), b"precious");
    assert_eq!(fs::read(folder.0.join("notes.txt")).unwrap(), b"mine");
    let foreign = kvpager_store::inspect(&folder.0).unwrap().foreign;
    assert_eq!(foreign.len(), 5, "{foreign:?}");
    for name in ["kvpager.lock", "kvpager.manifest"] {
        fs::remove_file(folder.0.join(name)).unwrap();
        symlink(outside.0.join("victim"), folder.0.join(name)).unwrap();
        assert!(LogStore::open(&small(&folder, 2)).is_err(), "{name} is a link");
        fs::remove_file(folder.0.join(name)).unwrap();
        assert_eq!(fs::read(outside.0.join("victim")).unwrap(), b"precious");
    }
}

#[test]
fn a_segment_of_another_store_is_not_read() {
    let (one, other) = (Folder::new(), Folder::new());
    put(&LogStore::open(&settings(&one.0, ROW_BYTES, 1 << 20)).unwrap(), &numbered(0..8));
    drop(LogStore::open(&settings(&other.0, ROW_BYTES, 1 << 20)).unwrap());
    for path in one.files(".seg").iter().chain(&one.files(".keys")) {
        fs::copy(path, other.0.join(path.file_name().unwrap())).unwrap();
    }
    let store = LogStore::open(&settings(&other.0, ROW_BYTES, 1 << 20)).unwrap();
    assert_eq!(contains(&store, &[0, 7]), [false, false]);
    assert_eq!(store.stats().unwrap().discarded_segments, 1);
}

#[test]
fn deleted_records_stay_away() {
    let folder = Folder::new();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    put(&store, &numbered(0..19));
    // 1 and what is below it: 3 4 7 8 9 10 15 16 17 18.
    assert_eq!(store.delete_many(&[key(1)]).unwrap(), 11);
    let left = [0, 2, 5, 6, 11, 12, 13, 14];
    let crashed = folder.copy();
    drop(store);
    for folder in [&folder, &crashed] {
        let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
        let there: Vec<usize> = (0..19).filter(|&id| get(&store, &[(id, 0)])[0]).collect();
        assert_eq!(there, left);
        assert_eq!(contains(&store, &[1, 18]), [false, false]);
    }
    for path in crashed.files(".keys") {
        fs::remove_file(path).unwrap();
    }
    let store = LogStore::open(&settings(&crashed.0, ROW_BYTES, 1 << 20)).unwrap();
    assert_eq!((0..19).filter(|&id| get(&store, &[(id, 0)])[0]).collect::<Vec<_>>(), left);
}

#[test]
fn an_emptied_segment_gives_its_space_back() {
    let folder = Folder::new();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    put(&store, &[(1, 0), (3, 0), (4, 0), (7, 0), (8, 0), (9, 0), (10, 0), (15, 0), (0, 0)]);
    let before = store.stats().unwrap().bytes;
    assert_eq!(store.delete_many(&[key(1)]).unwrap(), 8);
    assert_eq!(folder.files(".seg").len(), 1);
    assert!(store.stats().unwrap().bytes < before);
}

#[test]
fn calls_after_close_are_refused() {
    let folder = Folder::new();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    put(&store, &numbered(0..3));
    store.close().unwrap();
    store.close().unwrap();
    assert!(matches!(store.contains_many(&[key(0)]), Err(Error::Closed(_))));
    assert!(matches!(store.delete_many(&[key(0)]), Err(Error::Closed(_))));
    assert!(matches!(store.clear(), Err(Error::Closed(_))));
    assert_eq!(store.stats().unwrap().stored, 3);
}

#[test]
fn every_policy_finds_what_a_crash_left() {
    for sync in [SyncPolicy::Never, SyncPolicy::Segment, SyncPolicy::Always] {
        let folder = Folder::new();
        let store = LogStore::open(&Settings { sync, ..settings(&folder.0, ROW_BYTES, 1 << 20) }).unwrap();
        put(&store, &numbered(0..13));
        let crashed = folder.copy();
        let store = LogStore::open(&settings(&crashed.0, ROW_BYTES, 1 << 20)).unwrap();
        assert!(all_there(&get(&store, &numbered(0..13))), "{sync:?}");
    }
}

#[test]
fn readers_beside_a_writer_read_right_bytes_or_none() {
    let folder = Folder::new();
    let store = LogStore::open(&small(&folder, 2)).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut hits = 0;
                while !is_over.load(Ordering::Relaxed) || hits == 0 {
                    // `get` compares the bytes of what it is told is there.
                    for round in 0..4 {
                        hits += get(&store, &(0..20).map(|id| (id, round)).collect::<Vec<_>>())
                            .iter()
                            .filter(|hit| **hit)
                            .count();
                    }
                }
            });
        }
        for round in 0..200_usize {
            put(&store, &(0..8).map(|id| ((id + round) % 20, (round % 4) as u8)).collect::<Vec<_>>());
            if round % 10 == 0 {
                store.delete_many(&[key(round % 20)]).unwrap();
            }
            if round % 50 == 49 {
                store.clear().unwrap();
            }
        }
        put(&store, &[(0, 0)]);
        is_over.store(true, Ordering::Relaxed);
    });
    let stats = store.stats().unwrap();
    assert_eq!((stats.read_errors, stats.write_errors), (0, 0), "{stats:?}");
}

#[test]
fn half_a_key_is_a_hint() {
    let folder = Folder::new();
    let store = LogStore::open(&settings(&folder.0, ROW_BYTES, 1 << 20)).unwrap();
    put(&store, &[(0, 0)]);
    let mut arena = support::Arena::new(1, ROW_BYTES);
    // Key 20 agrees with key 0 in the half that the index keeps; the meta is that of 0.
    assert_eq!(store.contains_many(&[key(20)]).unwrap(), [true]);
    assert_eq!(store.get_many(&[key(20)], &support::meta(0, 0), &mut arena, &[0]).unwrap(), [false]);
    assert_eq!(store.get_many(&[key(0)], &support::meta(0, 0), &mut arena, &[0]).unwrap(), [true]);
    assert_eq!(store.put_many(&[key(20)], &support::meta(0, 0), &arena, &[0]).unwrap(), [true]);
    assert_eq!(store.get_many(&[key(20)], &support::meta(0, 0), &mut arena, &[0]).unwrap(), [true]);
    assert_eq!(store.get_many(&[key(0)], &support::meta(0, 0), &mut arena, &[0]).unwrap(), [false]);
}

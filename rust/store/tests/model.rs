//! Random histories against a map: puts, gets, deletions, restarts and crashes must be as in the map while there is
//! room for everything; with a small limit, flipped bytes and cut files, what is read must be right, and what was
//! deleted must stay away.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use kvpager_store::{LogStore, Settings, SyncPolicy};
use proptest::prelude::*;
use support::{Folder, contains, get, key, put, settings};

const IDS: usize = 40;

#[derive(Debug, Clone)]
enum Step {
    Put(Vec<(usize, u8)>),
    Get(Vec<(usize, u8)>),
    Delete(Vec<usize>),
    Clear,
    Reopen,
    Crash,
    /// A file, a byte of it, and what is changed there.
    Flip(usize, usize, u8),
    /// A file, and where it ends from now on.
    Cut(usize, usize),
}

fn step(damages: bool) -> impl Strategy<Value = Step> {
    let records = || proptest::collection::vec((0..IDS, 0..2_u8), 1..12);
    prop_oneof![
        8 => records().prop_map(Step::Put),
        6 => records().prop_map(Step::Get),
        2 => proptest::collection::vec(0..IDS, 1..3).prop_map(Step::Delete),
        u32::from(!damages) => Just(Step::Clear),
        2 => Just(Step::Reopen),
        2 => Just(Step::Crash),
        4 * u32::from(damages) => (any::<usize>(), any::<usize>(), 1..=255_u8).prop_map(|(f, b, x)| Step::Flip(f, b, x)),
        u32::from(damages) => (any::<usize>(), any::<usize>()).prop_map(|(f, b)| Step::Cut(f, b)),
    ]
}

/// The records that a key finds, by the half of the key that decides.
type Map = BTreeMap<usize, (usize, u8)>;

fn delete(map: &mut Map, ids: &[usize]) -> usize {
    let (before, left) = (map.len(), left_of(&map.values().copied().collect(), ids));
    map.retain(|_, record| left.contains(record));
    before - map.len()
}

/// Those of some records that are left when keys and all that hangs from them are deleted, whichever record a key has.
fn left_of(records: &BTreeSet<(usize, u8)>, ids: &[usize]) -> BTreeSet<(usize, u8)> {
    let doomed: Vec<usize> = ids.iter().map(|id| id % 20).collect();
    let mut kept = BTreeSet::new();
    loop {
        let hangs = |id: usize| id == 0 || kept.iter().any(|&(parent, _)| parent % 20 == (id - 1) / 2 % 20);
        let more: BTreeSet<_> =
            records.iter().copied().filter(|&(id, _)| !doomed.contains(&(id % 20)) && hangs(id)).collect();
        if more.len() == kept.len() {
            return kept;
        }
        kept = more;
    }
}

struct World {
    folder: Folder,
    settings: Settings,
    store: Option<LogStore>,
}

impl World {
    fn new(row_bytes: usize, max_bytes: u64, sync: SyncPolicy) -> Self {
        let folder = Folder::new();
        let settings = Settings { sync, ..settings(&folder.0, row_bytes, max_bytes) };
        let store = Some(LogStore::open(&settings).unwrap());
        Self { folder, settings, store }
    }

    fn store(&self) -> &LogStore {
        self.store.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        self.store = None;
        self.store = Some(LogStore::open(&self.settings).unwrap());
    }

    /// Goes on with the files as they are.
    fn crash(&mut self) {
        let copy = self.folder.copy();
        self.store = None;
        self.settings.directory.clone_from(&copy.0);
        self.folder = copy;
        self.store = Some(LogStore::open(&self.settings).unwrap());
    }

    /// A file of records or keys.
    fn file(&self, which: usize) -> Option<fs::File> {
        let mut files = self.folder.files(".seg");
        files.extend(self.folder.files(".keys"));
        let path = files.get(which.checked_rem(files.len())?)?;
        Some(OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    fn flip(&self, which: usize, byte: usize, by: u8) {
        let Some(file) = self.file(which) else { return };
        let len = file.metadata().unwrap().len() as usize;
        if len > 0 {
            let mut value = [0];
            file.read_exact_at(&mut value, (byte % len) as u64).unwrap();
            file.write_all_at(&[value[0] ^ by], (byte % len) as u64).unwrap();
        }
    }

    fn cut(&self, which: usize, byte: usize) {
        let Some(file) = self.file(which) else { return };
        let len = file.metadata().unwrap().len() as usize;
        file.set_len((byte % (len + 1)) as u64).unwrap();
    }

    fn check_limit(&self) {
        let (bytes, pages) = self.folder.bytes();
        let stats = self.store().stats().unwrap();
        assert!(bytes <= pages && pages <= self.settings.max_bytes, "{pages} bytes on the disk; {stats:?}");
        assert!(stats.bytes <= stats.max_bytes && pages <= stats.bytes, "{pages} bytes on the disk; {stats:?}");
    }
}

/// The smallest limit, as the refusal of a smaller one tells it.
fn least(row_bytes: usize) -> u64 {
    let refused = LogStore::open(&settings(&Folder::new().0, row_bytes, 1)).unwrap_err().to_string();
    refused.split("must be ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
}

fn sync() -> impl Strategy<Value = SyncPolicy> {
    prop_oneof![8 => Just(SyncPolicy::Never), 1 => Just(SyncPolicy::Segment), 1 => Just(SyncPolicy::Always)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn with_room_for_everything_it_is_a_map(
        row_bytes in prop_oneof![Just(1_usize), Just(100), Just(5000), Just(40_000)],
        sync in sync(),
        steps in proptest::collection::vec(step(false), 1..40),
    ) {
        let mut world = World::new(row_bytes, 100 * least(row_bytes), sync);
        let mut map = Map::new();
        for step in steps {
            match step {
                Step::Put(records) => {
                    prop_assert!(put(world.store(), &records).into_iter().all(|is_there| is_there));
                    map.extend(records.iter().map(|&(id, variant)| (id % 20, (id, variant))));
                }
                Step::Get(records) => {
                    let expected: Vec<bool> = records.iter().map(|record| map.get(&(record.0 % 20)) == Some(record)).collect();
                    prop_assert_eq!(get(world.store(), &records), expected);
                }
                Step::Delete(ids) => {
                    let keys: Vec<_> = ids.iter().map(|&id| key(id)).collect();
                    prop_assert_eq!(world.store().delete_many(&keys).unwrap(), delete(&mut map, &ids));
                }
                Step::Clear => {
                    world.store().clear().unwrap();
                    map.clear();
                    prop_assert_eq!(world.folder.files(".seg").len() + world.folder.files(".keys").len(), 0);
                }
                Step::Reopen => world.reopen(),
                Step::Crash => world.crash(),
                Step::Flip(..) | Step::Cut(..) => unreachable!("no damage here"),
            }
            world.check_limit();
            let ids: Vec<usize> = (0..IDS).collect();
            let expected: Vec<bool> = ids.iter().map(|id| map.contains_key(&(id % 20))).collect();
            prop_assert_eq!(contains(world.store(), &ids), expected);
            prop_assert_eq!(world.store().stats().unwrap().records as usize, map.len());
        }
        let stats = world.store().stats().unwrap();
        prop_assert_eq!((stats.corrupt, stats.evicted, stats.dropped, stats.write_errors, stats.read_errors), (0, 0, 0, 0, 0));
    }

    #[test]
    fn whatever_happens_to_the_files_no_wrong_bytes_are_read(
        row_bytes in prop_oneof![Just(1_usize), Just(100), Just(5000), Just(40_000)],
        sync in sync(),
        room in 2..5_u64,
        steps in proptest::collection::vec(step(true), 1..60),
    ) {
        let mut world = World::new(row_bytes, least(row_bytes) * room / 2, sync);
        // All that may be there: when a record is lost, an older one of its key may come back.
        let mut possible = BTreeSet::new();
        for step in steps {
            match step {
                Step::Put(records) => {
                    put(world.store(), &records);
                    possible.extend(records);
                }
                Step::Get(records) => {
                    for (record, is_there) in records.iter().zip(get(world.store(), &records)) {
                        prop_assert!(!is_there || possible.contains(record), "record {:?} was deleted", record);
                    }
                }
                Step::Delete(ids) => {
                    let keys: Vec<_> = ids.iter().map(|&id| key(id)).collect();
                    world.store().delete_many(&keys).unwrap();
                    possible = left_of(&possible, &ids);
                }
                // Not drawn here, but a failure may be made smaller by it.
                Step::Clear => {
                    world.store().clear().unwrap();
                    possible.clear();
                }
                Step::Reopen => world.reopen(),
                Step::Crash => world.crash(),
                Step::Flip(file, byte, by) => world.flip(file, byte, by),
                Step::Cut(file, byte) => {
                    world.store = None;
                    world.cut(file, byte);
                    world.reopen();
                }
            }
            world.check_limit();
        }
        // It works as ever.
        let records: Vec<_> = (0..6).map(|id| (id, 7)).collect();
        prop_assert!(put(world.store(), &records).into_iter().all(|is_there| is_there));
        prop_assert!(get(world.store(), &records).into_iter().all(|is_there| is_there));
    }
}

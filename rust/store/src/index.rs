//! What is where, in memory: for each segment its entries by slot, and one table of all keys.
//!
//! 24 bytes a record for the entry and 11 to 32 for the table, so at most 56 at the worst moment of its growth. The
//! entries of the segment that is being filled are reserved at its start.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::{Entry, Prefix};
use crate::table::Table;

/// A file of records. It stays open for whoever reads it, also when it has been dropped.
#[derive(Debug)]
pub struct Segment {
    /// Its number: later ones are greater.
    pub number: u64,
    /// The file.
    pub file: File,
    /// Slots that it has room for.
    pub slots: u32,
    /// When it was last used, on the store's clock of calls.
    pub tick: AtomicU64,
}

/// A segment, and what the index keeps of it.
#[derive(Debug)]
pub struct Member {
    /// The segment.
    pub segment: Arc<Segment>,
    /// What was put into each slot, dead or replaced records included.
    pub entries: Vec<Entry>,
    /// Records that a key finds.
    pub live: usize,
    /// Bytes of the limit that it holds.
    pub charge: u64,
    /// Has it keys beside it on the disk?
    pub has_keys: bool,
}

/// Where a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Index of the member.
    pub member: u32,
    /// Slot in its segment.
    pub slot: u32,
}

impl Position {
    fn pack(self) -> u64 {
        u64::from(self.member) << 32 | u64::from(self.slot)
    }

    fn unpack(packed: u64) -> Self {
        Self { member: (packed >> 32) as u32, slot: packed as u32 }
    }
}

/// All that is known of the records.
#[derive(Debug, Default)]
pub struct Index {
    members: Vec<Option<Member>>,
    table: Table,
    hasher: RandomState,
}

impl Index {
    /// Records that a key finds.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let entries: usize = self.members().map(|(_, member)| member.entries.capacity()).sum();
        self.table.bytes() + entries * size_of::<Entry>() + self.members.capacity() * size_of::<Option<Member>>()
    }

    /// All segments with their indices.
    pub fn members(&self) -> impl Iterator<Item = (u32, &Member)> {
        let numbered = self.members.iter().enumerate();
        numbered.filter_map(|(index, member)| member.as_ref().map(|member| (index as u32, member)))
    }

    /// A segment that is there.
    pub fn member(&mut self, index: u32) -> Option<&mut Member> {
        self.members.get_mut(index as usize)?.as_mut()
    }

    /// Where the record of a key is.
    pub fn find(&self, key: &Prefix) -> Option<Position> {
        let found = self.table.find(self.hasher.hash_one(key), |at| entry_at(&self.members, at).key == *key);
        found.map(Position::unpack)
    }

    /// The segment at a position.
    pub fn segment(&self, position: Position) -> Option<&Arc<Segment>> {
        self.members.get(position.member as usize)?.as_ref().map(|member| &member.segment)
    }

    /// Adds a segment with what is in it already. Of two records of one key, that added last is found.
    pub fn add(&mut self, segment: Arc<Segment>, entries: Vec<Entry>, charge: u64, has_keys: bool) -> u32 {
        let free = self.members.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.members.push(None);
            self.members.len() - 1
        });
        self.members[index] = Some(Member { segment, entries, live: 0, charge, has_keys });
        let count = self.members[index].as_ref().map_or(0, |member| member.entries.len());
        for slot in 0..count {
            self.link(Position { member: index as u32, slot: slot as u32 });
        }
        index as u32
    }

    /// The next slot of a segment was written.
    pub fn publish(&mut self, index: u32, entry: Entry) {
        let Some(member) = self.member(index) else { return };
        member.entries.push(entry);
        let slot = member.entries.len() - 1;
        self.link(Position { member: index, slot: slot as u32 });
    }

    /// A key finds what is at a position, and nothing else any more.
    fn link(&mut self, position: Position) {
        let entry = *entry_at(&self.members, position.pack());
        if entry.is_dead() {
            return;
        }
        if let Some(older) = self.find(&entry.key) {
            self.unlink(older);
        }
        let (members, hasher) = (&self.members, &self.hasher);
        self.table.insert(hasher.hash_one(entry.key), position.pack(), |at| hasher.hash_one(entry_at(members, at).key));
        if let Some(member) = self.member(position.member) {
            member.live += 1;
        }
    }

    /// No key finds what is at a position any more. Did one?
    pub fn unlink(&mut self, position: Position) -> bool {
        let (members, hasher) = (&self.members, &self.hasher);
        let is_there = members.get(position.member as usize).and_then(Option::as_ref);
        if is_there.is_none_or(|member| member.entries.len() <= position.slot as usize) {
            return false;
        }
        let key = entry_at(members, position.pack()).key;
        let hash_of = |at| hasher.hash_one(entry_at(members, at).key);
        let was_found = self.table.remove(hasher.hash_one(key), position.pack(), hash_of);
        if was_found && let Some(member) = self.member(position.member) {
            member.live -= 1;
        }
        was_found
    }

    /// The record at a position is dead: nothing says its key any more. Could it be found?
    pub fn kill(&mut self, position: Position) -> bool {
        let was_found = self.unlink(position);
        if let Some(entry) =
            self.member(position.member).and_then(|member| member.entries.get_mut(position.slot as usize))
        {
            *entry = Entry::DEAD;
        }
        was_found
    }

    /// Drops a segment, and all that is found in it.
    pub fn remove(&mut self, index: u32) -> Option<Member> {
        let count = self.member(index)?.entries.len();
        let live = self.member(index)?.live;
        for slot in 0..count {
            self.unlink(Position { member: index, slot: slot as u32 });
        }
        self.members[index as usize].take().map(|member| Member { live, ..member })
    }

    /// The segment that was used longest ago, of those that are not `tail`. Of those that one call used, the newest: a
    /// block lies behind its parents, as a rule, and is worth nothing without them.
    pub fn coldest(&self, tail: Option<u32>) -> Option<u32> {
        let others = self.members().filter(|(index, _)| Some(*index) != tail);
        others
            .min_by_key(|(_, member)| (member.segment.tick.load(Ordering::Relaxed), Reverse(member.segment.number)))
            .map(|(index, _)| index)
    }

    /// What is not to be there any more without these keys, in order of position: all but the records whose chains of
    /// parents lead to a root without any of them. That is their records, all below, and what hangs in the air: it may be
    /// of what was below, where something in between was lost. Replaced records go, too. Without a root all records are
    /// below it. Looks at all records, and needs 17 bytes for each meanwhile.
    pub fn without(&self, keys: &[Prefix]) -> Vec<Position> {
        let all = self
            .members()
            .flat_map(|(member, m)| (0..m.entries.len() as u32).map(move |slot| Position { member, slot }));
        let mut by_parent: Vec<([u8; 8], u64)> =
            all.map(|at| (entry_at(&self.members, at.pack()).parent, at.pack())).collect();
        by_parent.sort_unstable();
        let doomed: HashSet<Prefix> = keys.iter().copied().collect();
        let mut kept = vec![false; by_parent.len()];
        let mut open = if keys.iter().any(|key| key.starts_with(&ROOT)) { vec![] } else { vec![ROOT] };
        while let Some(parent) = open.pop() {
            let first = by_parent.partition_point(|(other, _)| *other < parent);
            let children = by_parent[first..].iter().take_while(|(other, _)| *other == parent);
            for (&(_, at), kept) in children.zip(&mut kept[first..]) {
                let child = entry_at(&self.members, at).key;
                if !*kept && !doomed.contains(&child) && self.find(&child) == Some(Position::unpack(at)) {
                    *kept = true;
                    open.push(beginning(&child));
                }
            }
        }
        let gone = by_parent.into_iter().zip(kept).filter(|(_, kept)| !kept).map(|((_, at), _)| at);
        let mut gone: Vec<Position> =
            gone.filter(|&at| !entry_at(&self.members, at).is_dead()).map(Position::unpack).collect();
        gone.sort_unstable();
        gone
    }
}

/// How the key of what is above a first block begins, and no block's: there is nothing above.
const ROOT: [u8; 8] = [0; 8];

fn beginning(key: &Prefix) -> [u8; 8] {
    let mut beginning = ROOT;
    beginning.copy_from_slice(&key[..8]);
    beginning
}

fn entry_at(members: &[Option<Member>], at: u64) -> &Entry {
    let Position { member, slot } = Position::unpack(at);
    let member = members[member as usize].as_ref().expect("a position in the table is of a segment that is there");
    &member.entries[slot as usize]
}

//! Leaks, hangs, lost capacity (L).

use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::ids::Handle;
use kvpager_core::preemptions::Why;
use kvpager_core::transfers::Tier;
use kvpager_core::{Config, Error, Pager};

use super::support::{A, assert_sound, cache, config, hit_tokens, num_cached, pager, start, table};
use super::{Call, admit, assert_refused, prompt, stale};

/// A refusal for want of blocks.
fn full(needed: usize, free: usize, evictable: usize, total: usize) -> Error {
    Error::OutOfBlocks { needed, free, evictable, total, rows: Box::default(), reserve: 0, tier: Tier::Device }
}

#[test]
fn l1_a_release_is_idempotent_and_counted() {
    let mut pager = pager(8, 4);
    let (handle, preempted) = (start(&mut pager, &prompt(1, 9)), start(&mut pager, &prompt(2, 9)));
    pager.release(handle, Departure::Aborted);
    let before = dump(&pager, true).unwrap();
    pager.release(handle, Departure::Finished);
    pager.release_dropped(handle);
    assert_eq!(dump(&pager, true).unwrap(), before);
    assert_eq!((pager.stats().counters.noop_calls, pager.stats().counters.clock_ticks), (1, 1));

    pager.preempt(preempted, Why::default()).unwrap();
    assert_refused(&mut pager, &stale(preempted, "preempted", "preempt"), |pager| {
        pager.preempt(preempted, Why::default())
    });
    pager.release(preempted, Departure::Finished);
    assert_refused(&mut pager, &stale(preempted, "released", "resume"), |pager| pager.resume(preempted));
    assert_eq!(pager.stats().active_blocks, 0);
}

#[test]
fn l2_who_waits_holds_nothing() {
    let mut pager = pager(8, 4);
    let holder = admit(&mut pager, &prompt(1, 20));
    for first in [2, 3] {
        let error = full(4, 3, 0, 8);
        assert_refused(&mut pager, &error, |pager| pager.admit(&prompt(first, 16), A, false));
    }
    assert_eq!(pager.stats().counters.refused_calls, 2);
    admit(&mut pager, &prompt(4, 12));
    pager.release(holder, Departure::Finished);
    admit(&mut pager, &prompt(2, 16));
    assert_sound(&pager);
}

#[test]
fn l5_a_full_pool_of_cached_blocks_admits_by_evicting_exactly_what_is_missing() {
    for free in 0..4 {
        let mut pager = pager(12 + free, 4);
        for first in 0..4 {
            cache(&mut pager, &prompt(first, 12));
        }
        assert_eq!((pager.stats().free_blocks, pager.stats().cached_blocks), (free, 12));
        assert!(pager.can_admit(&prompt(9, 20), A).unwrap());
        admit(&mut pager, &prompt(9, 20));
        assert_eq!(pager.stats().counters.evicted_blocks, 5 - free as u64);
        assert_sound(&pager);
    }
}

#[test]
fn l6_what_is_larger_than_the_pool_never_fits_and_holds_nobody_up() {
    let mut pager = Pager::new(Config { null_block: true, ..config(9, 4) }).unwrap();
    let error = Error::NeverFits { needed: 9, usable: 8, tier: Tier::Device };
    assert_refused(&mut pager, &error, |pager| pager.admit(&prompt(1, 33), A, false));
    assert!(!pager.can_admit(&prompt(1, 33), A).unwrap());
    cache(&mut pager, &prompt(2, 32));
    assert_refused(&mut pager, &error, |pager| pager.admit(&prompt(2, 33), A, false));
    assert_eq!(pager.stats().counters.evicted_blocks, 0);
    admit(&mut pager, &prompt(3, 32));
    assert_sound(&pager);
}

#[test]
fn l7_the_need_at_a_block_boundary_is_counted_in_blocks() {
    // Four sequences stand at a boundary and two blocks are left: two grow, two are told what is missing.
    let mut pager = pager(6, 4);
    let handles: Vec<Handle> = (0..4).map(|first| start(&mut pager, &prompt(first, 4))).collect();
    assert_eq!(pager.stats().free_blocks, 2);
    pager.append(handles[0], 1).unwrap();
    pager.append(handles[1], 1).unwrap();
    let error = full(1, 0, 0, 6);
    for &handle in &handles[2..] {
        assert_refused(&mut pager, &error, |pager| pager.append(handle, 1));
    }
    // Inside their blocks the others go on.
    assert_eq!(pager.extend(handles[0], &[1, 2, 3]).unwrap().len(), 3);
    let error = full(2, 0, 0, 6);
    assert_refused(&mut pager, &error, |pager| pager.extend(handles[0], &[1, 2, 3, 4, 5]));
}

#[test]
fn l7_the_need_counts_blocks_to_be_copied() {
    let mut pager = pager(3, 4);
    let parent = start(&mut pager, &prompt(1, 6));
    let child = pager.fork(parent, 1).unwrap()[0];
    let error = full(2, 1, 0, 3);
    assert_refused(&mut pager, &error, |pager| pager.extend(child, &[1, 2, 3]));
    pager.append(child, 1).unwrap();
    assert_sound(&pager);
}

#[test]
fn l8_a_long_chain_and_many_leaves_work_like_short_ones() {
    // Size itself is tried in `flat.rs`; here, that the answers are right.
    let mut pager = pager(300, 1);
    let chain = prompt(1, 100);
    cache(&mut pager, &chain);
    for leaf in 0..200 {
        cache(&mut pager, &[&chain[..50], &[5000 + leaf]].concat());
    }
    assert_eq!((pager.stats().cached_blocks, pager.stats().free_blocks), (300, 0));
    let handle = admit(&mut pager, &[9]);
    assert_eq!((table(&pager, handle), hit_tokens(&pager, &prompt(1, 101))), (&[99][..], 99));
    assert_sound(&pager);
}

#[test]
fn l10_a_reset_drops_what_is_cached_and_lets_live_sequences_go_on() {
    let mut pager = pager(16, 4);
    cache(&mut pager, &prompt(1, 13));
    let live = start(&mut pager, &prompt(2, 9));
    let child = pager.fork(live, 1).unwrap()[0];
    pager.reset(Some(b"new weights".to_vec())).unwrap();
    assert_eq!((pager.stats().cached_blocks, pager.stats().active_blocks), (0, 3));
    for old in [prompt(1, 13), prompt(2, 9)] {
        assert_eq!(hit_tokens(&pager, &old), 0);
    }
    // They decode on, and what they publish nobody ever hits.
    for handle in [live, child] {
        pager.extend(handle, &prompt(3, 8)).unwrap();
        pager.commit(handle, None).unwrap();
    }
    assert_eq!(hit_tokens(&pager, &prompt(2, 9)), 0);
    assert_sound(&pager);
    pager.release(live, Departure::Finished);
    pager.preempt(child, Why::default()).unwrap();
    assert_eq!(pager.stats().free_blocks, 16);

    // Admitted again, it publishes again.
    pager.resume(child).unwrap();
    pager.commit(child, None).unwrap();
    assert_eq!(hit_tokens(&pager, &prompt(2, 9)), 8);
    assert_eq!(pager.config().identity, b"new weights");
    assert_sound(&pager);
}

#[test]
fn l10_a_sequence_whose_path_was_forgotten_publishes_again_once_it_is_resumed() {
    let mut pager = pager(16, 4);
    let handle = start(&mut pager, &prompt(1, 13));
    assert_eq!(pager.forget(&prompt(1, 8), A).unwrap(), 2);
    // Cut back above what was forgotten, it stays silent, and so does its fork.
    pager.truncate(handle, 4).unwrap();
    let child = pager.fork(handle, 1).unwrap()[0];
    for handle in [handle, child] {
        pager.extend(handle, &prompt(1, 13)[4..]).unwrap();
        pager.commit(handle, None).unwrap();
        assert_eq!(hit_tokens(&pager, &prompt(1, 13)), 4);
    }
    pager.preempt(handle, Why::default()).unwrap();
    pager.resume(handle).unwrap();
    pager.commit(handle, None).unwrap();
    assert_eq!(hit_tokens(&pager, &prompt(1, 13)), 12);
    assert_sound(&pager);
}

#[test]
fn l10_frames_of_before_a_reset_are_handed_out_last() {
    let mut pager = pager(8, 4);
    cache(&mut pager, &prompt(1, 16));
    pager.reset(None).unwrap();
    assert_eq!(pager.num_free_blocks(), 8);
    let handle = admit(&mut pager, &prompt(2, 32));
    assert_eq!(table(&pager, handle), [4, 5, 6, 7, 3, 2, 1, 0]);
    assert_eq!(pager.stats().counters.evicted_blocks, 0);
    assert_sound(&pager);
}

#[test]
fn l11_a_stale_handle_reaches_nobody() {
    let mut pager = pager(16, 4);
    let old = start(&mut pager, &prompt(1, 9));
    pager.release(old, Departure::Finished);
    pager.reset(None).unwrap();
    let new = start(&mut pager, &prompt(2, 9));
    assert_eq!(new.slot, old.slot, "the row is used again");
    let calls: [(&'static str, Call); 8] = [
        ("append", |pager, handle| pager.append(handle, 1).map(drop)),
        ("extend", |pager, handle| pager.extend(handle, &[1]).map(drop)),
        ("slots", |pager, handle| pager.slots(handle, 0, 0).map(drop)),
        ("commit", |pager, handle| pager.commit(handle, None)),
        ("fork", |pager, handle| pager.fork(handle, 1).map(drop)),
        ("truncate", |pager, handle| pager.truncate(handle, 1)),
        ("preempt", |pager, handle| pager.preempt(handle, Why::default())),
        ("resume", Pager::resume),
    ];
    for (name, call) in calls {
        assert_refused(&mut pager, &stale(old, "released", name), |pager| call(pager, old));
    }
    assert_eq!(pager.sequence(old, "tokens").unwrap_err(), stale(old, "released", "tokens"));
    pager.release(old, Departure::Finished);
    assert_eq!(table(&pager, new).len(), 3);
}

#[test]
fn l14_namespaces_come_and_go() {
    let mut pager = pager(8, 4);
    let name = |nth: u32| format!("\0adapter {nth}").into_bytes();
    for nth in 0..2000 {
        let handle = pager.admit(&prompt(1, 9), &name(nth), false).unwrap();
        pager.commit(handle, None).unwrap();
        pager.release(handle, Departure::Finished);
        if nth % 100 == 0 {
            assert_sound(&pager);
        }
    }
    // Only the namespaces that still have a block are left.
    let left = dump(&pager, false).unwrap().lines().filter(|line| line.starts_with("namespace")).count();
    assert_eq!(left, pager.stats().cached_blocks.div_ceil(2));

    // One that never published leaves with its last sequence; one that was forgotten, with its blocks.
    let quiet = pager.admit(&prompt(1, 9), b"\0quiet", false).unwrap();
    pager.release(quiet, Departure::Finished);
    pager.forget(&prompt(1, 4), &name(1999)).unwrap();
    let drawing = dump(&pager, false).unwrap();
    assert!(!drawing.contains("quiet") && !drawing.contains("1999"), "{drawing}");
    assert_sound(&pager);
}

#[test]
fn l15_the_last_sequence_that_outgrows_the_pool_is_told_the_numbers() {
    let mut pager = pager(4, 4);
    let handle = start(&mut pager, &prompt(1, 16));
    let error = full(1, 0, 0, 4);
    assert_refused(&mut pager, &error, |pager| pager.append(handle, 1));
    assert_eq!(error.to_string(), "needed 1 blocks of the device; 0 free and 0 evictable of 4");
    // Preempted it still fits, and goes on where it was.
    pager.preempt(handle, Why::default()).unwrap();
    pager.resume(handle).unwrap();
    assert_eq!((num_cached(&pager, handle), pager.stats().counters.recomputed_tokens), (12, 4));
}

#[test]
fn l15_a_fork_of_too_many_children_is_refused() {
    let mut pager = pager(4, 4);
    let handle = start(&mut pager, &prompt(1, 6));
    for count in [0, usize::MAX] {
        let before = dump(&pager, true).unwrap();
        assert!(matches!(pager.fork(handle, count), Err(Error::Value(_))));
        assert_eq!(dump(&pager, true).unwrap(), before);
    }
    pager.fork(handle, 300).unwrap();
    assert_sound(&pager);
}

//! Eviction and accounting (E).

use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::{Config, Error, Pager, PolicyKind};

use super::support::{A, B, assert_sound, cache, config, hit_tokens, pager, start};
use super::{admit, prompt};

#[test]
fn e1_a_hit_moves_the_whole_path_and_tails_go_first() {
    let mut pager = pager(10, 4);
    for first in 0..3 {
        cache(&mut pager, &prompt(first, 12));
    }
    // All of the first chain is recent now, its head included.
    let handle = admit(&mut pager, &prompt(0, 13));
    pager.release(handle, Departure::Finished);
    for (blocks, left) in [(2, [12, 8, 12]), (3, [12, 4, 12]), (4, [12, 0, 12]), (5, [12, 0, 8]), (8, [8, 0, 0])] {
        let handle = admit(&mut pager, &prompt(9, blocks * 4));
        let hits = [0, 1, 2].map(|first| hit_tokens(&pager, &prompt(first, 13)));
        assert_eq!(hits, left, "{blocks} blocks taken");
        assert_sound(&pager);
        pager.release(handle, Departure::Aborted);
    }
}

#[test]
fn e2_peeks_change_nothing() {
    let mut pager = pager(12, 4);
    cache(&mut pager, &prompt(1, 13));
    cache(&mut pager, &prompt(2, 13));
    let handle = start(&mut pager, &prompt(3, 9));
    let (before, stats) = (dump(&pager, true).unwrap(), pager.stats());
    for tokens in [prompt(1, 13), prompt(1, 6), prompt(9, 60), prompt(2, 14)] {
        let _ = (pager.find_prefix(&tokens, A), pager.find_prefix(&tokens, B), pager.can_admit(&tokens, A));
    }
    assert_eq!(pager.find_prefix(&[], A), Err(Error::EmptyPrompt));
    let _ = (
        pager.running(handle, "peek").map(drop),
        dump(&pager, false).unwrap(),
        kvpager_core::check::check(&pager).unwrap(),
    );
    assert_eq!((dump(&pager, true).unwrap(), pager.stats()), (before, stats));
}

/// Hit tokens of the system prompt after it was used 50 times and then a pool's worth of unique prompts came by.
fn after_a_scan(policy: PolicyKind) -> usize {
    let mut pager = Pager::new(Config { policy, ..config(64, 4) }).unwrap();
    let system = prompt(1, 32);
    for user in 0..50 {
        cache(&mut pager, &[&system[..], &[10_000 + user]].concat());
    }
    for unique in 0..16 {
        cache(&mut pager, &prompt(100 + unique, 16));
    }
    assert_sound(&pager);
    hit_tokens(&pager, &prompt(1, 33))
}

#[test]
fn e3_a_scan_flushes_what_was_hot_with_lru_and_not_with_slru() {
    assert_eq!(after_a_scan(PolicyKind::Slru), 32);
    assert_eq!(after_a_scan(PolicyKind::Lru), 0);
}

#[test]
fn e3_slru_demotes_to_the_block() {
    // Protected may hold 4 of 8 blocks. Six that were hit are cached: the two deepest of the coldest move on, unmarked.
    let mut pager = Pager::new(Config { policy: PolicyKind::Slru, ..config(8, 1) }).unwrap();
    for first in [1, 2] {
        cache(&mut pager, &prompt(first, 3));
        let handle = admit(&mut pager, &prompt(first, 4));
        pager.release(handle, Departure::Aborted);
    }
    let drawing = dump(&pager, true).unwrap();
    assert!(drawing.contains("queue probation: 2 1\nqueue protected: 0 5 4 3\n"), "{drawing}");
    assert_sound(&pager);
}

#[test]
fn e4_an_admission_that_was_retried_is_counted_once() {
    let mut pager = pager(8, 4);
    cache(&mut pager, &prompt(1, 9));
    let holder = admit(&mut pager, &prompt(2, 24));
    let before = pager.stats().counters;
    for _ in 0..100 {
        assert!(matches!(pager.admit(&prompt(1, 13), A, false), Err(Error::OutOfBlocks { needed: 2, .. })));
    }
    pager.release(holder, Departure::Finished);
    pager.admit(&prompt(1, 13), A, false).unwrap();
    let after = pager.stats().counters;
    assert_eq!(after.refused_calls - before.refused_calls, 100);
    assert_eq!((after.queried_tokens - before.queried_tokens, after.hit_tokens - before.hit_tokens), (13, 8));
    assert_eq!(after.admitted_sequences - before.admitted_sequences, 1);
}

#[test]
fn e5_a_partial_block_that_is_freed_pushes_nothing_out() {
    let mut pager = pager(4, 4);
    cache(&mut pager, &prompt(1, 13));
    assert_eq!((pager.stats().cached_blocks, pager.stats().free_blocks), (3, 1));
    for first in 2..20 {
        let handle = start(&mut pager, &prompt(first, 3));
        pager.release(handle, Departure::Finished);
    }
    assert_eq!((pager.stats().cached_blocks, pager.stats().counters.evicted_blocks), (3, 0));
    assert_eq!(hit_tokens(&pager, &prompt(1, 13)), 12);
}

#[test]
fn e6_idle_age_and_hits_at_eviction_are_counted() {
    let mut pager = pager(4, 4);
    cache(&mut pager, &prompt(1, 9));
    for _ in 0..3 {
        let handle = admit(&mut pager, &prompt(1, 5));
        pager.release(handle, Departure::Finished);
    }
    // Four releases so far. The first block was hit thrice and idle since the fourth, the second was never hit, and idle since the first.
    let handle = admit(&mut pager, &prompt(2, 16));
    let counters = pager.stats().counters;
    assert_eq!((counters.evicted_blocks, counters.evicted_hits, counters.evicted_idle_ticks), (2, 3, 1 + 4));
    pager.release(handle, Departure::Finished);
    assert_sound(&pager);
}

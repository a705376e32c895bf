//! I13, L8: no call's cost grows with the pool, the number of cached blocks, or sequences that it does not touch. No recursion, no scan, no
//! rehash.
//!
//! Times are compared as the least of many, with wide margins: a scan of these trees would be thousands of times slower, not a few.

mod support;

use std::time::{Duration, Instant};

use kvpager_core::check::check;
use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::fences::Fences;
use kvpager_core::ids::{Handle, Token};
use kvpager_core::pager::{Admitted, Asked, End, RecoveryCost, VictimPolicy, Wish};
use kvpager_core::preemptions::Why;
use kvpager_core::{Config, Pager, PolicyKind};
use support::allocator::{Allocator, measure};
use support::{A, B, cache, config, fetch_joined, hit_tokens, pager, start};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const DEEP: usize = 100_000;
const WIDE: usize = 50_000;

/// A stack on which no recursion over 100,000 nodes would end well.
const SMALL_STACK_BYTES: usize = 128 << 10;

fn on_a_small_stack(test: fn()) {
    std::thread::Builder::new().stack_size(SMALL_STACK_BYTES).spawn(test).unwrap().join().unwrap();
}

fn chain(len: usize) -> Vec<Token> {
    (0..len as Token).map(|nth| nth.wrapping_mul(2_654_435_761) >> 4).collect()
}

/// A cached chain in which each block is a node of its own: two sequences commit it in step, and a node with two holders does not grow.
fn deep_tree(blocks: usize, policy: PolicyKind) -> (Pager, Vec<Token>) {
    let mut pager = Pager::new(Config { policy, ..config(2 * blocks + 2, 1) }).unwrap();
    let tokens = chain(blocks + 1);
    let pair = [(); 2].map(|()| pager.admit(&tokens[..1], A, false).unwrap());
    for &token in &tokens[1..] {
        for handle in pair {
            pager.commit(handle, None).unwrap();
            pager.append(handle, token).unwrap();
        }
    }
    for handle in pair {
        pager.release(handle, Departure::Finished);
    }
    assert_eq!(pager.stats().cached_blocks, blocks);
    (pager, tokens)
}

/// Leaves below one parent.
fn wide_tree(leaves: usize) -> Pager {
    let mut pager = pager(leaves + 3, 1);
    for leaf in 0..leaves as Token {
        cache(&mut pager, &[7, leaf]);
    }
    assert_eq!(pager.stats().cached_blocks, leaves + 1);
    pager
}

/// The least time of several.
fn fastest(times: usize, mut work: impl FnMut()) -> Duration {
    (0..times)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .min()
        .unwrap()
}

#[test]
fn l8_a_deep_tree_is_evicted_forgotten_reset_and_drawn_without_recursion() {
    on_a_small_stack(|| {
        let (mut pager, tokens) = deep_tree(DEEP, PolicyKind::Lru);
        assert_eq!(dump(&pager, true).unwrap().lines().filter(|line| line.contains("100000 blocks")).count(), 1);

        // Half of it makes room for another chain, tail first.
        let other: Vec<Token> = tokens.iter().map(|token| token ^ 1).collect();
        let handle = pager.admit(&[&other[..], &other[..DEEP / 2]].concat(), A, false).unwrap();
        assert_eq!(hit_tokens(&pager, &tokens), DEEP - (DEEP / 2 - 1));
        pager.release(handle, Departure::Aborted);

        assert_eq!(pager.forget(&tokens[..1000], A).unwrap(), DEEP - (DEEP / 2 - 1) - 999);
        pager.reset(None).unwrap();
        assert_eq!(pager.stats().free_blocks, 2 * DEEP + 2);
    });
}

#[test]
fn l8_a_deep_tree_is_held_demoted_and_let_go_of_without_recursion() {
    on_a_small_stack(|| {
        let (mut pager, tokens) = deep_tree(DEEP, PolicyKind::Slru);
        let handle = pager.admit(&tokens, A, false).unwrap();
        let child = pager.fork(handle, 1).unwrap()[0];
        pager.forget(&tokens[..DEEP / 2], A).unwrap();
        pager.release(handle, Departure::Finished);
        pager.preempt(child, Why::default()).unwrap();
        pager.resume(child).unwrap();
        pager.release(child, Departure::Finished);
        assert_eq!(pager.stats().active_blocks, 0);
    });
}

#[test]
fn l8_one_eviction_costs_the_same_among_50_000_leaves_as_among_ten() {
    on_a_small_stack(|| {
        let evict_one = |leaves: usize| {
            let mut pager = wide_tree(leaves);
            // This one takes the two free blocks, and each of those below the coldest leaf.
            pager.admit(&[1, 1], B, false).unwrap();
            let time = fastest(8, || drop(pager.admit(&[1], B, false)));
            assert_eq!(pager.stats().counters.evicted_blocks, 8);
            time
        };
        let (few, many) = (evict_one(10), evict_one(WIDE));
        assert!(many < few * 20 + Duration::from_micros(50), "{few:?} among 10 leaves, {many:?} among {WIDE}");
    });
}

/// A question of one candidate of two; the other stays.
fn asked(needed: usize, candidates: [Handle; 2]) -> Asked {
    Asked {
        needed,
        policy: VictimPolicy::Cheapest,
        candidates: Some(candidates.to_vec()),
        priorities: Vec::new(),
        cost: RecoveryCost::default(),
        spare_after: 2,
        keep: 1,
        left_out: Vec::new(),
        finishing: Vec::new(),
    }
}

#[test]
fn i13_victims_cost_what_the_candidates_are_and_not_what_else_there_is() {
    let choose = |leaves: usize| {
        let mut pager = pager(leaves + 20, 1);
        let candidates = [0, 1].map(|nth| pager.admit(&[nth; 4], B, false).unwrap());
        for leaf in 0..leaves as Token {
            cache(&mut pager, &[7, leaf]);
        }
        // The rest is held as well, by somebody who is no candidate.
        pager.admit(&vec![3; pager.num_free_blocks() + pager.num_evictable_blocks()], A, false).unwrap();
        let asked = asked(3, candidates);
        let (victims, measured) = measure(|| pager.choose_victims(&asked).unwrap());
        assert_eq!((victims.len(), victims[0].blocks), (1, 4));
        (fastest(8, || drop(pager.choose_victims(&asked))), (measured.calls, measured.largest_bytes))
    };
    let ((few, few_asked), (many, many_asked)) = (choose(10), choose(WIDE));
    assert_eq!(few_asked, many_asked);
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} among 10 leaves, {many:?} among {WIDE}");
}

#[test]
fn l8_what_a_deep_path_would_free_is_found_without_recursion() {
    on_a_small_stack(|| {
        let (mut pager, tokens) = deep_tree(DEEP, PolicyKind::Lru);
        let deep = pager.admit(&tokens, A, false).unwrap();
        let other = pager.admit(&[1], B, false).unwrap();
        pager.commit(other, None).unwrap();
        let room = pager.num_free_blocks() + pager.num_evictable_blocks();
        let victims = pager.choose_victims(&asked(room + 2, [deep, other])).unwrap();
        assert_eq!((victims[0].handle, victims[0].blocks), (deep, tokens.len()));
        pager.preempt(deep, Why::default()).unwrap();
        assert_eq!(pager.num_free_blocks() + pager.num_evictable_blocks(), room + tokens.len());
    });
}

#[test]
fn i13_nothing_of_the_pools_size_is_allocated_after_construction() {
    let mut pager = pager(WIDE + 3, 1);
    let ((), measured) = measure(|| {
        for leaf in 0..WIDE as Token {
            cache(&mut pager, &[leaf, 0]);
        }
    });
    // The free stack, the slabs and the tables never grow. What remains: the buffer of a sequence, of 32 blocks.
    assert!(measured.largest_bytes <= 512, "{measured:?}");
}

#[test]
fn i13_reset_costs_the_same_for_every_pool() {
    let time = |leaves: usize| {
        let mut pager = wide_tree(leaves);
        let (time, measured) = measure(|| fastest(1, || pager.reset(None).unwrap()));
        assert_eq!(measured.calls, 0);
        assert_eq!(pager.stats().free_blocks, leaves + 3);
        time
    };
    let (few, many) = (time(10), time(WIDE));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} for 10 leaves, {many:?} for {WIDE}");
}

/// A hot prefix is held in O(1), however many hold it and however much is cached.
#[test]
fn i13_a_decode_step_costs_the_same_in_a_full_pool() {
    let time = |leaves: usize| {
        let mut pager = Pager::new(config(leaves + 600, 1)).unwrap();
        for leaf in 0..leaves as Token {
            cache(&mut pager, &[7, leaf]);
        }
        let handle = start(&mut pager, &[9, 9]);
        fastest(500, || {
            pager.append(handle, 9).unwrap();
            pager.commit(handle, None).unwrap();
        })
    };
    let (few, many) = (time(10), time(WIDE));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} beside 10 leaves, {many:?} beside {WIDE}");
}

/// Regression: what was forgotten stayed in its hash chain as long as somebody held it, so that whoever forgot and published one prompt again
/// and again made each of these calls a little slower.
#[test]
fn i13_a_prompt_can_be_forgotten_and_published_any_number_of_times() {
    let time = |times: usize| {
        let mut pager = pager(2 * times + 8, 1);
        for _ in 0..times {
            start(&mut pager, &[7, 7]);
            assert_eq!(pager.forget(&[7], A).unwrap(), 2);
        }
        fastest(8, || {
            let handle = start(&mut pager, &[7, 7]);
            pager.release(handle, Departure::Finished);
            pager.forget(&[7], A).unwrap();
        })
    };
    let (few, many) = (time(10), time(20_000));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} after 10, {many:?} after 20,000");
}

/// Regression: preempted sequences keep their namespaces although they hold no block, and the table of namespaces was as small as the pool.
#[test]
fn i13_any_number_of_preempted_sequences_may_have_namespaces_of_their_own() {
    let time = |count: u32| {
        let mut pager = pager(4, 1);
        let mut preempt = |nth: u32| {
            let handle = pager.admit(&[7, 7], &nth.to_le_bytes(), false).unwrap();
            pager.preempt(handle, Why::default()).unwrap();
        };
        (0..count).for_each(&mut preempt);
        let mut next = count;
        fastest(8, || {
            next += 1;
            preempt(next);
        })
    };
    let (few, many) = (time(10), time(20_000));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} beside 10, {many:?} beside 20,000");
}

/// Regression: who left was looked for among all who had joined.
#[test]
fn i13_one_of_many_that_joined_a_fetch_leaves_at_the_same_cost() {
    let time = |count: usize| {
        let (mut pager, _, handles) = fetch_joined(2, count);
        let mut each = handles[count / 2..].iter();
        fastest(8, || pager.release(*each.next().unwrap(), Departure::Aborted))
    };
    let (few, many) = (time(20), time(300_000));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} of 20, {many:?} of 300,000");
}

/// Who joins and leaves again and again leaves nothing behind.
#[test]
fn i13_a_fetch_may_be_joined_and_left_any_number_of_times() {
    let (mut pager, plan, handles) = fetch_joined(2, 3);
    pager.release(handles[2], Departure::Aborted);
    let prompt: Vec<Token> = (0..4).chain([1, 1, 0]).collect();
    let mut join_and_leave = || {
        let wish = Wish { pinned: false, wait: false, fetch: Some(1) };
        let Admitted::Sequence(handle) = pager.admit_as(&prompt, A, wish).unwrap() else { unreachable!() };
        assert_eq!(pager.sequence(handle, "test").unwrap().plan, Some(plan));
        pager.release(handle, Departure::Aborted);
    };
    (0..100).for_each(|_| join_and_leave());
    let ((), measured) = measure(|| (0..10_000).for_each(|_| join_and_leave()));
    assert_eq!(measured.live_bytes, 0, "{measured:?}");
    assert!(pager.end_plan(plan, End::Complete).unwrap());
    assert_eq!(check(&pager).unwrap(), [] as [String; 0]);
}

/// Regression: for each plan, the checker looked at each sequence.
#[test]
fn i13_the_checker_takes_its_time_for_each_plan_once() {
    let time = |count: usize| {
        let mut pager = Pager::new(Config { num_host_blocks: count, ..config(count, 1) }).unwrap();
        for nth in 0..count {
            let handle = start(&mut pager, &[nth as Token]);
            pager.swap_out(handle, Why::default()).unwrap();
        }
        fastest(3, || assert_eq!(check(&pager).unwrap(), [] as [String; 0]))
    };
    let (few, many) = (time(500), time(20_000));
    // 100 to 400 times as long, since it leaves the caches; a look at each for each took 5,000 times as long.
    assert!(many < few * 1500, "{few:?} for 500, {many:?} for 20,000: 40 times as many");
}

/// Regression: each step that ended looked at all that was fenced, also while an older one kept all of it fenced.
#[test]
fn i13_a_step_ends_at_the_same_cost_whatever_an_older_one_fences() {
    let time = |count: u32| {
        let mut fences = Fences::new(true);
        fences.open();
        (0..count).for_each(|block| fences.note_block(block));
        fastest(8, || {
            let step = fences.open();
            fences.close(step);
        })
    };
    let (few, many) = (time(10), time(1_000_000));
    assert!(many < few * 20 + Duration::from_micros(50), "{few:?} with 10, {many:?} with 1,000,000");
}

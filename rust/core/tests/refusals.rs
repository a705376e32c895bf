//! I7: where the machine's memory is used up, a call answers `Memory` and has changed nothing, or succeeds all the same.
//!
//! Every call of a history is tried again and again on a pager of its own; each time the allocator refuses one request more. See
//! `support::allocator` for what it can refuse.

mod support;

use kvpager_core::dump::dump;
use kvpager_core::evict::Departure;
use kvpager_core::pager::End;
use kvpager_core::run::{RUN_TOKENS_MAX, Run};
use kvpager_core::tail::Tail;
use kvpager_core::transfers::PlanId;
use kvpager_core::{Error, Pager, Result};
use support::allocator::{Allocator, refuse_above, refuse_from, refuse_nth};
use support::history::{Answer, Call, Driver, Story, draw_config};
use support::{A, Rng, assert_sound, config, fetch_joined, seeds};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const CALLS: usize = 60;

/// A pager after these calls.
fn after(history: &[Call], make: &dyn Fn() -> Pager) -> Driver {
    let mut driver = Driver::new(make());
    for call in history {
        driver.apply(call);
    }
    driver
}

/// Refuses each request of the last call in turn; answers how many of these refusals it met.
fn refuse_each(history: &[Call], make: &dyn Fn() -> Pager, seed: u64) -> usize {
    let (call, before) = history.split_last().unwrap();
    for nth in 0.. {
        let mut driver = after(before, make);
        let drawn = dump(&driver.pager, true).unwrap();
        let (answer, was_refused) = refuse_nth(nth, || driver.apply(call));
        assert_sound(&driver.pager);
        if answer == Answer::Refused(Error::Memory) {
            assert_eq!(dump(&driver.pager, true).unwrap(), drawn, "I7: KVPAGER_SEED={seed}: {call:?}, request {nth}");
        }
        if !was_refused {
            return nth;
        }
        // The pager is as good as before: once there is memory again, the same call gives the answer it would have given.
        if answer == Answer::Refused(Error::Memory) {
            let expected = after(before, make).apply(call);
            assert_eq!(driver.apply(call), expected, "KVPAGER_SEED={seed}: {call:?}, request {nth}");
            assert_sound(&driver.pager);
        }
    }
    unreachable!()
}

#[test]
fn i7_a_call_that_is_refused_memory_changes_nothing() {
    for seed in seeds(40_001, 25) {
        println!("KVPAGER_SEED={seed}");
        let mut rng = Rng(seed);
        let config = draw_config(&mut rng);
        let mut story = Story::new(rng, &config);
        let make = || Pager::new(config.clone()).unwrap();
        let (mut driver, mut history, mut refused) = (Driver::new(make()), Vec::new(), 0);
        for _ in 0..CALLS {
            history.push(story.next(&driver));
            driver.apply(&history[history.len() - 1]);
            // Its answer has no room for an error: a list of copies that cannot be had ends the process.
            if !matches!(history[history.len() - 1], Call::TakeCopies) {
                refused += refuse_each(&history, &make, seed);
            }
        }
        assert!(refused > 0);
    }
}

#[test]
fn i7_construction_that_is_refused_memory_says_so() {
    // By size, since a table of zeroes is asked for twice: the one safe way to get it cannot be refused.
    let mut refused = 0;
    for bytes in (0..8).map(|power| 500 << power) {
        match refuse_above(bytes, || Pager::new(config(1000, 16))) {
            Ok(_) => break,
            Err(error) => assert_eq!(error, Error::Memory),
        }
        refused += 1;
    }
    assert_eq!(refused, 7, "the largest are the nodes, 64,000 bytes");
}

/// Regression: a buffer that was made before a later one was refused stayed behind, unused, and a run that was taken out of the tail
/// afterwards left a short buffer in front of it.
#[test]
fn a_tail_whose_growth_was_refused_goes_on_as_if_nothing_had_happened() {
    const BLOCK_SIZE: usize = 16;
    let tokens: Vec<u32> = (0..3 * RUN_TOKENS_MAX as u32).collect();
    let start = 40 * BLOCK_SIZE + 5;
    for nth in 0.. {
        let (mut tail, _) = Tail::from_tokens(&tokens[..start], BLOCK_SIZE).unwrap();
        let (result, was_refused) = refuse_nth(nth, || tail.extend(&tokens[start..], BLOCK_SIZE));
        if !was_refused {
            assert!(nth > 2, "{nth} requests");
            break;
        }
        assert_eq!((result, tail.len()), (Err(Error::Memory), start));
        let run: Run = tail.take_run(40, BLOCK_SIZE).unwrap();
        assert_eq!(run.token_area(BLOCK_SIZE)[..40 * BLOCK_SIZE], tokens[..40 * BLOCK_SIZE]);
        tail.extend(&tokens[start..], BLOCK_SIZE).unwrap();
        let rest: Vec<u32> = tail.slices(BLOCK_SIZE).flatten().copied().collect();
        assert_eq!(rest, tokens[40 * BLOCK_SIZE..]);
    }
}

/// A large subtree is forgotten without asking for memory in the middle of it.
#[test]
fn i7_forgetting_many_nodes_can_be_refused() {
    let make = || support::pager(700, 1);
    let mut history: Vec<Call> = Vec::new();
    for leaf in 0..300 {
        history.push(Call::Admit { tokens: vec![7, leaf], namespace: A, pinned: false });
        history.push(Call::Commit(u64::from(leaf), None));
        history.push(Call::Drop(u64::from(leaf)));
    }
    history.push(Call::Forget(vec![7], A));
    assert!(refuse_each(&history, &make, 0) > 0);
}

/// Regression: the number of the plan, and the blocks that its sequences hold beside their paths, went into ordered maps, whose growth
/// nobody can refuse: without memory the process ended. From each request on all are refused here, whatever their size.
#[test]
fn i7_the_end_of_a_fetch_that_many_joined_asks_before_anything_changes() {
    type Ending = fn(&mut Pager, PlanId) -> Result<bool>;
    const DONE: [bool; 9] = [true, true, true, true, true, false, true, true, true];
    let ends: [(&str, Ending); 4] = [
        ("complete", |pager, plan| pager.end_plan(plan, End::Complete)),
        ("fail", |pager, plan| pager.end_plan(plan, End::Failed(None))),
        ("fail in part", |pager, plan| pager.end_plan(plan, End::Failed(Some(&DONE)))),
        ("abandon", Pager::abandon_plan),
    ];
    for (name, end) in ends {
        let mut met = [0; 2];
        for nth in 0.. {
            let (mut pager, plan, handles) = fetch_joined(9, 4);
            pager.release(handles[1], Departure::Aborted);
            let before = dump(&pager, true).unwrap();
            let (answer, was_refused) = refuse_from(nth, || end(&mut pager, plan));
            assert_sound(&pager);
            if !was_refused {
                break;
            }
            met[usize::from(answer.is_ok())] += 1;
            if let Err(error) = answer {
                assert_eq!((error, dump(&pager, true).unwrap()), (Error::Memory, before), "I7: {name}, request {nth}");
                assert!(end(&mut pager, plan).unwrap());
            }
            // What could not be indexed without memory is indexed later; what arrived is there.
            let arrived = match name {
                "complete" => 18,
                "fail in part" => 10,
                _ => 0,
            };
            for handle in [handles[0], handles[2], handles[3]] {
                let sequence = pager.sequence(handle, "test").unwrap();
                assert_eq!((sequence.num_cached, sequence.len), (arrived, 21), "{name}, request {nth}");
            }
            assert!(pager.unfinished_plans(None).unwrap().len() == usize::from(name == "abandon"));
        }
        assert!(met[0] > 0, "{name}: {met:?} requests refused and done without");
    }
}

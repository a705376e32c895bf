//! The pager against a naive one, over random histories: every answer, and after every call the whole drawing, must be the same.
//!
//! After every call the checker must be silent, and a call that was refused must have changed nothing (I7). `KVPAGER_SEED=<n>` replays one run,
//! `KVPAGER_RUNS=<n>` does more than the default.

mod support;

use std::collections::BTreeMap;

use kvpager_core::check::check;
use kvpager_core::dump::dump;
use kvpager_core::stats::Counters;
use kvpager_core::{Config, Pager};
use support::drawing::draw;
use support::history::{Call, Driver, Story, draw_config};
use support::naive::Naive;
use support::{A, Rng, config, seeds};

const CALLS: usize = 200;

/// How often each kind of call was carried out, and refused.
type Tally = BTreeMap<String, (usize, usize)>;

/// The drawing. The naive pager does not know who computes what others want: `kvpager.reference` is held to that.
fn drawn(driver: &Driver) -> String {
    dump(&driver.pager, true).unwrap().replace("; computing\n", "\n")
}

fn run(seed: u64, tally: &mut Tally) -> Counters {
    let mut rng = Rng(seed);
    let config: Config = draw_config(&mut rng);
    let mut naive = Naive::new(config.clone());
    let mut story = Story::new(rng, &config);
    let mut driver = Driver::new(Pager::new(config).unwrap());
    let mut before = drawn(&driver);
    for nth in 0..CALLS {
        let call = story.next(&driver);
        let expected = naive.apply(&call);
        let answer = driver.apply(&call);
        assert_eq!(answer, expected, "KVPAGER_SEED={seed}, call {nth}: {call:?}\nbefore:\n{before}");
        let violations = check(&driver.pager).unwrap();
        assert!(violations.is_empty(), "KVPAGER_SEED={seed}, call {nth}: {call:?}: {violations:#?}\nbefore:\n{before}");
        let after = drawn(&driver);
        let wanted = draw(&naive);
        assert!(
            after == wanted,
            "KVPAGER_SEED={seed}, call {nth}: {call:?}\nbefore:\n{before}\nexpected:\n{wanted}\ngot:\n{after}"
        );
        assert_eq!(driver.pager.stats(), naive.stats(), "KVPAGER_SEED={seed}, call {nth}: {call:?}");
        if answer.is_refused() {
            assert_eq!(after, before, "I7: KVPAGER_SEED={seed}, call {nth}: {call:?}");
        }
        for (&serial, sequence) in &naive.sequences {
            assert_eq!(
                driver.tokens(serial).as_ref(),
                Some(&sequence.tokens),
                "KVPAGER_SEED={seed}, call {nth}: {call:?}"
            );
        }
        before = after;

        let kind = format!("{call:?}").split(|c: char| !c.is_alphabetic()).next().unwrap_or_default().to_owned();
        let (done, refused) = tally.entry(kind).or_default();
        *(if answer.is_refused() { refused } else { done }) += 1;
    }
    naive.counters
}

#[test]
fn the_pager_answers_as_a_naive_one_does() {
    let mut tally = Tally::new();
    let mut sums = [0; 10];
    let seeds = seeds(1, 200);
    for &seed in &seeds {
        println!("KVPAGER_SEED={seed}");
        let counters = run(seed, &mut tally);
        for (sum, (_, count)) in sums.iter_mut().zip(counters.named()) {
            *sum += count;
        }
    }
    println!("{tally:#?}\n{sums:?}");
    if seeds.len() < 100 {
        return;
    }
    // The histories are worth something only if they get everywhere.
    assert_eq!(tally.len(), 15);
    for (kind, &(done, refused)) in &tally {
        let never_refused = ["Release", "Drop", "TakeCopies"].contains(&kind.as_str());
        assert!(done > 100 && (refused > 0 || never_refused), "{kind}: {done} carried out, {refused} refused");
    }
    assert!(sums.iter().all(|&sum| sum > 50), "{sums:?}");
}

/// Pools of the random histories are too small for it: below 32 levels a drawing is not indented any more.
#[test]
fn a_deep_tree_is_drawn_as_the_naive_pager_draws_it() {
    let config = config(300, 1);
    let (mut naive, mut driver) = (Naive::new(config.clone()), Driver::new(Pager::new(config).unwrap()));
    for depth in 0..100 {
        let tokens = [vec![7; depth], vec![100 + depth as u32]].concat();
        let serial = depth as u64;
        for call in
            [Call::Admit { tokens, namespace: A, pinned: false }, Call::Commit(serial, None), Call::Drop(serial)]
        {
            assert_eq!(driver.apply(&call), naive.apply(&call));
        }
    }
    assert_eq!(drawn(&driver), draw(&naive));
    assert!(dump(&driver.pager, false).unwrap().contains("\n90: "));
}

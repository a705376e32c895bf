//! The pager against a naive one, over random histories: every answer, and after every call the whole drawing, must be the same.
//!
//! After every call the checker must be silent, and a call that was refused must have changed nothing (I7). `KVPAGER_SEED=<n>` replays one run,
//! `KVPAGER_RUNS=<n>` does more than the default.

mod support;

use kvpager_core::check::check;
use kvpager_core::dump::dump;
use kvpager_core::{Config, Pager};
use support::drawing::draw;
use support::history::{Driver, Story, draw_config};
use support::naive::Naive;
use support::{Rng, seeds};

const CALLS: usize = 200;

fn run(seed: u64) {
    let mut rng = Rng(seed);
    let config: Config = draw_config(&mut rng);
    let mut naive = Naive::new(config.clone());
    let mut story = Story::new(rng, &config);
    let mut driver = Driver::new(Pager::new(config).unwrap());
    let mut before = dump(&driver.pager, true);
    for nth in 0..CALLS {
        let call = story.next(&driver);
        let expected = naive.apply(&call);
        let answer = driver.apply(&call);
        assert_eq!(answer, expected, "KVPAGER_SEED={seed}, call {nth}: {call:?}\nbefore:\n{before}");
        let violations = check(&driver.pager);
        assert!(violations.is_empty(), "KVPAGER_SEED={seed}, call {nth}: {call:?}: {violations:#?}\nbefore:\n{before}");
        let after = dump(&driver.pager, true);
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
    }
}

#[test]
fn the_pager_answers_as_a_naive_one_does() {
    for seed in seeds(1, 300) {
        println!("KVPAGER_SEED={seed}");
        run(seed);
    }
}

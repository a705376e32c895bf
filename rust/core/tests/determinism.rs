//! I11: the same calls give the same answers, whatever the seed of the hash key. Tensor-parallel ranks replay one log.

mod support;

use kvpager_core::dump::dump;
use kvpager_core::{Config, Pager};
use support::history::{Driver, Story, draw_config};
use support::{Rng, seeds};

const CALLS: usize = 150;

#[test]
fn i11_no_answer_depends_on_the_seed() {
    for seed in seeds(20_001, 80) {
        println!("KVPAGER_SEED={seed}");
        let mut rng = Rng(seed);
        let config = draw_config(&mut rng);
        let mut story = Story::new(rng, &config);
        let mut ranks = [config.seed, !config.seed, 0]
            .map(|seed| Driver::new(Pager::new(Config { seed, ..config.clone() }).unwrap()));
        for nth in 0..CALLS {
            let call = story.next(&ranks[0]);
            let [first, second, third] = ranks.each_mut().map(|rank| rank.apply(&call));
            assert!(
                first == second && second == third,
                "KVPAGER_SEED={seed}, call {nth}: {call:?}: {first:?} {second:?}"
            );
            // Drawing costs more than a call.
            if nth % 10 == 9 {
                let [first, second, third] = ranks.each_ref().map(|rank| dump(&rank.pager, true).unwrap());
                assert!(
                    first == second && second == third,
                    "KVPAGER_SEED={seed}, call {nth}:\n{first}\n{second}\n{third}"
                );
                assert_eq!(ranks[0].pager.stats(), ranks[1].pager.stats());
            }
        }
    }
}

/// The log of one pager, played into a new one, leads to the same state.
#[test]
fn i11_a_log_can_be_replayed() {
    for seed in seeds(30_001, 20) {
        println!("KVPAGER_SEED={seed}");
        let mut rng = Rng(seed);
        let config = draw_config(&mut rng);
        let mut story = Story::new(rng, &config);
        let mut first = Driver::new(Pager::new(config.clone()).unwrap());
        let mut log = Vec::new();
        for _ in 0..CALLS {
            let call = story.next(&first);
            let answer = first.apply(&call);
            log.push((call, answer));
        }
        let mut second = Driver::new(Pager::new(config).unwrap());
        for (call, answer) in log {
            assert_eq!(second.apply(&call), answer, "KVPAGER_SEED={seed}: {call:?}");
        }
        assert_eq!(dump(&first.pager, true).unwrap(), dump(&second.pager, true).unwrap(), "KVPAGER_SEED={seed}");
    }
}

//! I3, W14: a hash finds candidates and proves nothing. With keys under which all hashes collide, every answer is the same.

mod support;

use kvpager_core::dump::dump;
use kvpager_core::hash::Key;
use kvpager_core::ids::Token;
use kvpager_core::{Config, Pager};
use support::history::{Driver, Story, draw_config};
use support::{A, B, Rng, assert_sound, cache, config, seeds, start};

const CALLS: usize = 150;

fn weak(config: &Config, bits: u32) -> Pager {
    Pager::with_key(config.clone(), Key::weak(config.seed, bits)).unwrap()
}

#[test]
fn i3_colliding_hashes_change_no_answer() {
    for seed in seeds(10_001, 100) {
        println!("KVPAGER_SEED={seed}");
        let mut rng = Rng(seed);
        let config = draw_config(&mut rng);
        let mut story = Story::new(rng, &config);
        let mut strong = Driver::new(Pager::new(config.clone()).unwrap());
        let mut others = [0, 1].map(|bits| Driver::new(weak(&config, bits)));
        for nth in 0..CALLS {
            let call = story.next(&strong);
            let expected = strong.apply(&call);
            for other in &mut others {
                assert_eq!(other.apply(&call), expected, "KVPAGER_SEED={seed}, call {nth}: {call:?}");
            }
        }
        for other in &others {
            assert_eq!(dump(&other.pager, true).unwrap(), dump(&strong.pager, true).unwrap(), "KVPAGER_SEED={seed}");
            assert_sound(&other.pager);
        }
    }
}

/// Every pair of one-block prompts, children and namespaces lies in one chain, and still each is found for itself alone.
#[test]
fn w14_a_collision_is_a_miss_and_never_a_hit() {
    let mut pager = weak(&config(400, 2), 0);
    let prompts: Vec<[Token; 3]> = (0..100).map(|nth| [nth, nth / 10, 0]).collect();
    for prompt in &prompts[..50] {
        cache(&mut pager, prompt);
    }
    for (nth, prompt) in prompts.iter().enumerate() {
        let hit = if nth < 50 { 2 } else { 0 };
        assert_eq!(pager.find_prefix(prompt, A).unwrap().num_tokens, hit, "{prompt:?}");
        assert_eq!(pager.find_prefix(prompt, B).unwrap().num_tokens, 0, "{prompt:?} in the other namespace");
    }
    assert_sound(&pager);
}

/// A child is looked for below its own parent only, however equal it is to another's.
#[test]
fn w14_equal_blocks_below_different_parents_stay_apart() {
    let mut pager = weak(&config(40, 1), 0);
    let one = start(&mut pager, &[1, 7, 7, 7, 0]);
    let other = start(&mut pager, &[2, 7, 7, 7, 0]);
    let (one, other) = (support::table(&pager, one), support::table(&pager, other));
    assert!(one.iter().all(|block| !other.contains(block)));
    assert_sound(&pager);
}

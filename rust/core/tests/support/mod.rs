//! What the integration tests share.

#![allow(dead_code, reason = "each test program uses a part of this")]

pub mod allocator;
pub mod drawing;
pub mod history;
pub mod naive;

use kvpager_core::check::check;
use kvpager_core::evict::Departure;
use kvpager_core::ids::{Handle, Token};
use kvpager_core::pager::{Admitted, End, Wish};
use kvpager_core::transfers::PlanId;
use kvpager_core::{Config, Pager, PolicyKind};

/// The encoded namespaces of the tests.
pub const A: &[u8] = b"\0a";
pub const B: &[u8] = b"\0b";

/// A small generator (splitmix64), so that a seed means the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `end`, which is above zero.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The seeds of a random test's runs: one each, or the one to be replayed (`KVPAGER_SEED`). `KVPAGER_RUNS` makes it longer.
pub fn seeds(first: u64, runs: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    match number("KVPAGER_SEED") {
        Some(seed) => vec![seed],
        None => (first..first + number("KVPAGER_RUNS").unwrap_or(runs)).collect(),
    }
}

/// Plain settings; a test changes what it is about.
pub fn config(num_blocks: usize, block_size: usize) -> Config {
    Config {
        num_blocks,
        block_size,
        policy: PolicyKind::Lru,
        watermark: 0.0,
        identity: Vec::new(),
        seed: 0,
        null_block: false,
        prefix_cache: true,
        num_host_blocks: 0,
        num_ghost_blocks: 0,
    }
}

pub fn pager(num_blocks: usize, block_size: usize) -> Pager {
    Pager::new(config(num_blocks, block_size)).unwrap()
}

/// Admits a prompt in namespace `A` and commits all of it.
pub fn start(pager: &mut Pager, tokens: &[Token]) -> Handle {
    let handle = pager.admit(tokens, A, false).unwrap();
    pager.commit(handle, None).unwrap();
    handle
}

/// Leaves the full blocks of a prompt cached.
pub fn cache(pager: &mut Pager, tokens: &[Token]) {
    let handle = start(pager, tokens);
    pager.release(handle, Departure::Finished);
}

pub fn table(pager: &Pager, handle: Handle) -> &[u32] {
    &pager.running(handle, "table").unwrap().table
}

pub fn num_cached(pager: &Pager, handle: Handle) -> usize {
    pager.running(handle, "num_cached").unwrap().num_cached as usize
}

pub fn hit_tokens(pager: &Pager, tokens: &[Token]) -> usize {
    pager.find_prefix(tokens, A).unwrap().num_tokens
}

/// A prefix of so many blocks comes back from the host for `count` sequences at once, by a plan that is started. Each goes on differently.
pub fn fetch_joined(blocks: usize, count: usize) -> (Pager, PlanId, Vec<Handle>) {
    let num_blocks = blocks + 2 * count;
    let mut pager = Pager::new(Config { num_host_blocks: blocks, ..config(num_blocks, 2) }).unwrap();
    let prompt = |nth: usize| (0..blocks * 2).chain([nth, nth, 0]).map(|token| token as Token).collect::<Vec<_>>();
    cache(&mut pager, &prompt(0)[..=2 * blocks]);
    let offload = pager.offload(blocks).unwrap().unwrap();
    assert!(pager.start_plan(offload, None).unwrap() && pager.end_plan(offload, End::Complete).unwrap());
    let large = pager.admit(&vec![1; 2 * num_blocks], A, false).unwrap();
    pager.release(large, Departure::Aborted);

    let wish = Wish { pinned: false, wait: false, fetch: Some(1) };
    let admit = |nth| match pager.admit_as(&prompt(nth), A, wish).unwrap() {
        Admitted::Sequence(handle) => handle,
        Admitted::Computing(_) => unreachable!("none is to wait"),
    };
    let handles: Vec<Handle> = (0..count).map(admit).collect();
    let plan = pager.unfinished_plans(None).unwrap()[0].id;
    assert!(pager.start_plan(plan, None).unwrap());
    (pager, plan, handles)
}

/// Every promise that the checker can recount holds.
#[track_caller]
pub fn assert_sound(pager: &Pager) {
    assert_eq!(check(pager).unwrap(), [] as [String; 0]);
}

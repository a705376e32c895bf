//! The memory formula of the crate's documentation, and which calls allocate.
//!
//! Counted are the bytes that the allocator is asked for. What construction reserves is not: its pages come only as they are touched. Of it,
//! the formula's test adds what is touched: a byte of state a block, 4 bytes of free stack for each block that was freed before, and for each
//! node 64 bytes, 24 for eviction, and a word of the children's table.

mod support;

use kvpager_core::Pager;
use kvpager_core::batch::{Planned, Row};
use kvpager_core::evict::{Departure, Slot};
use kvpager_core::ids::{BlockId, Handle, NodeId, Token};
use kvpager_core::index::{Node, Root};
use kvpager_core::run::{RUN_TOKENS_MAX, Run};
use kvpager_core::sequence::Sequence;
use kvpager_core::tail::{GROWTH_BLOCKS, Tail};
use support::allocator::{Allocator, Measured, measure};
use support::{A, cache, pager, start};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const BLOCK_SIZE: usize = 16;

#[test]
fn sizes_are_pinned() {
    let sizes = [
        ("Node", size_of::<Node>(), 64),
        ("Slot", size_of::<Slot>(), 24),
        ("Root", size_of::<Root>(), 48),
        ("Run", size_of::<Run>(), 24),
        ("Tail", size_of::<Tail>(), 48),
        ("Row", size_of::<Row>(), 40),
        ("Planned", size_of::<Planned>(), 16),
        ("Sequence", size_of::<Sequence>(), 256),
        ("Handle", size_of::<Handle>(), 16),
        ("NodeId", size_of::<NodeId>(), 4),
    ];
    for (name, size, pinned) in sizes {
        assert_eq!(size, pinned, "{name}");
    }
}

#[test]
fn what_steps_need_of_a_sequence_is_in_its_first_64_bytes() {
    let ends = [
        std::mem::offset_of!(Sequence, table) + size_of::<Vec<BlockId>>(),
        std::mem::offset_of!(Sequence, end) + size_of::<NodeId>(),
        std::mem::offset_of!(Sequence, first_duplicate) + size_of::<usize>(),
        std::mem::offset_of!(Sequence, is_silent) + size_of::<bool>(),
    ];
    assert!(ends.iter().all(|&end| end <= 64), "{ends:?}");
}

/// A prompt of so many full blocks, and a token; prompts of different numbers share nothing.
fn prompt(number: usize, blocks: usize) -> Vec<Token> {
    (0..=blocks * BLOCK_SIZE).map(|at| (number * 1_000_003 + at) as Token).collect()
}

/// What construction reserved and a chain touches.
fn touched_bytes(blocks: usize, nodes: usize, was_freed: bool) -> usize {
    blocks * (1 + 4 * usize::from(was_freed)) + nodes * (size_of::<Node>() + size_of::<Slot>() + 4)
}

/// Bytes of cached chains of one length; all blocks were in use before.
fn bytes_of_chains(chains: usize, blocks: usize) -> usize {
    let mut pager = pager(chains * blocks + 1, BLOCK_SIZE);
    // One-off work beforehand: every block was held and freed, so the free stack is in use, and the slab of sequences has its slot.
    let filler = pager.admit(&prompt(0, chains * blocks), A, false).unwrap();
    pager.release(filler, Departure::Aborted);
    let ((), measured) = measure(|| {
        for number in 1..=chains {
            cache(&mut pager, &prompt(number, blocks));
        }
    });
    let cached = pager.stats().cached_blocks;
    assert_eq!(cached, chains * blocks);
    let nodes = chains * blocks.div_ceil(RUN_TOKENS_MAX / BLOCK_SIZE);
    usize::try_from(measured.live_bytes).unwrap() + touched_bytes(cached, nodes, true)
}

#[test]
fn a_cached_block_of_a_chain_takes_75_bytes() {
    // 64 of tokens, 4 of id, 1 of state, 4 of free stack; the rest is the block's share of its node.
    for (chains, blocks) in [(80, 100), (20, 600), (4, 5000)] {
        let (bytes, cached) = (bytes_of_chains(chains, blocks), chains * blocks);
        assert!(
            (73 * cached..=75 * cached).contains(&bytes),
            "{bytes} bytes for {cached} blocks in chains of {blocks}"
        );
    }
    // In short chains that share is larger: 92 bytes a node, and room for a block that release does not shrink.
    for blocks in [1, 4, 10, 64] {
        let (bytes, cached) = (bytes_of_chains(100, blocks), 100 * blocks);
        let most = 73 * cached + 100 * (92 + 68) + 100;
        assert!((73 * cached..=most).contains(&bytes), "{bytes} bytes for {cached} blocks in chains of {blocks}");
    }
}

#[test]
fn a_pool_takes_what_the_formula_says_at_construction() {
    let blocks = 1 << 16;
    let (_pager, measured) = measure(|| pager(blocks, BLOCK_SIZE));
    // State, stack, node, slot of eviction, two tables of heads.
    let formula = blocks * (1 + 4 + size_of::<Node>() + size_of::<Slot>() + 4 + 4);
    let bytes = usize::try_from(measured.live_bytes).unwrap();
    assert!(bytes <= formula + 1024, "{bytes} bytes, not the formula's {formula}");
    assert!(measured.calls <= 10, "{measured:?}");
}

#[test]
fn a_released_pager_gives_all_memory_back() {
    let ((), measured) = measure(|| {
        let mut pager = pager(100, BLOCK_SIZE);
        let handle = start(&mut pager, &prompt(1, 40));
        pager.fork(handle, 3).unwrap();
        cache(&mut pager, &prompt(2, 20));
    });
    assert_eq!(measured.live_bytes, 0, "{measured:?}");
}

/// Decodes `tokens` tokens, each committed.
fn decode(pager: &mut Pager, handle: Handle, tokens: usize) -> Measured {
    let ((), measured) = measure(|| {
        for token in 0..tokens {
            pager.append(handle, token as Token).unwrap();
            pager.commit(handle, None).unwrap();
        }
    });
    measured
}

#[test]
fn a_decode_step_inside_a_block_allocates_nothing() {
    for blocks in [1, 5, 100, 700] {
        let mut pager = pager(1000, BLOCK_SIZE);
        let handle = start(&mut pager, &prompt(1, blocks));
        let measured = decode(&mut pager, handle, BLOCK_SIZE - 2);
        assert_eq!(measured.calls, 0, "{measured:?}");
    }
}

#[test]
fn decoding_over_block_boundaries_allocates_at_growth_points_only() {
    // A cold prompt of 5 blocks lies in a run with room for 32, and its table has room for 8 blocks more than its own 6.
    let mut pager = pager(1000, BLOCK_SIZE);
    let handle = start(&mut pager, &prompt(1, 5));
    let measured = decode(&mut pager, handle, 8 * BLOCK_SIZE);
    assert_eq!(measured.calls, 0, "inside the room of the table: {measured:?}");
    let measured = decode(&mut pager, handle, (GROWTH_BLOCKS - 5 - 8 - 1) * BLOCK_SIZE);
    assert_eq!(measured.calls, 2, "the table doubled twice, 14 -> 28 -> 56: {measured:?}");
    // The run is full. From here on a run each 32 blocks, its tail, and now and then the table.
    let measured = decode(&mut pager, handle, 32 * BLOCK_SIZE);
    assert!(measured.calls <= 4, "{measured:?}");
}

#[test]
fn a_sequence_on_a_hot_prefix_decodes_without_allocating() {
    let mut pager = pager(1000, BLOCK_SIZE);
    cache(&mut pager, &prompt(1, 100));
    let handle = start(&mut pager, &prompt(1, 100));
    decode(&mut pager, handle, BLOCK_SIZE);
    let measured = decode(&mut pager, handle, 6 * BLOCK_SIZE);
    assert_eq!(measured.calls, 0, "{measured:?}");
}

#[test]
fn peeks_allocate_nothing() {
    let mut pager = pager(1000, BLOCK_SIZE);
    cache(&mut pager, &prompt(1, 100));
    let (hot, cold) = (prompt(1, 120), prompt(2, 120));
    let (_, measured) = measure(|| {
        assert_eq!(pager.find_prefix(&hot, A).unwrap().num_blocks, 100);
        assert_eq!(pager.find_prefix(&cold, A).unwrap().num_blocks, 0);
        assert!(pager.can_admit(&hot, A).unwrap() && pager.can_admit(&cold, A).unwrap());
        pager.stats()
    });
    assert_eq!(measured.calls, 0, "{measured:?}");
}

#[test]
fn an_admission_allocates_as_often_for_a_long_prompt_as_for_a_short_one() {
    let admit = |blocks| {
        let mut pager = pager(2000, BLOCK_SIZE);
        cache(&mut pager, &prompt(1, 3));
        let prompt = prompt(2, blocks);
        let (handle, measured) = measure(|| pager.admit(&prompt, A, false).unwrap());
        pager.release(handle, Departure::Aborted);
        measured.calls
    };
    // The sequence, its table, its queue of buffers, and one buffer for 8,192 tokens; its
    // announcement; the name of the namespace is there.
    assert_eq!([admit(1), admit(100), admit(400)], [5; 3]);
    assert_eq!(admit(1600), 5 + 3);
}

#[test]
fn eviction_and_release_allocate_nothing_for_whole_runs() {
    let mut pager = pager(400, BLOCK_SIZE);
    for number in 0..10 {
        cache(&mut pager, &prompt(number, 39));
    }
    let prompt = prompt(10, 38);
    let handle = pager.admit(&prompt, A, false).unwrap();
    let ((), measured) = measure(|| pager.release(handle, Departure::Aborted));
    assert_eq!(measured.calls, 0, "{measured:?}");
}

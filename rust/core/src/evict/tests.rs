//! The order of victims, and what a policy moves.

use super::{Context, Departure, Eviction};
use crate::config::PolicyKind;
use crate::ids::NodeId;

const CONTEXT: Context = Context { sequence: Some(0), pinned: false, departure: Departure::Finished };

/// Nodes 0..count, none of them idle.
fn eviction(kind: PolicyKind, num_blocks: usize, count: u32) -> Eviction {
    let mut evict = Eviction::new(kind, num_blocks).unwrap();
    (0..count).for_each(|index| evict.start(NodeId::node(index)));
    evict
}

fn queues(evict: &Eviction) -> Vec<(&'static str, usize, Vec<u32>)> {
    let words = |queue| evict.iter(queue).map(NodeId::word).collect();
    evict.iter_queues().map(|(name, queue)| (name, queue.blocks(), words(queue))).collect()
}

#[test]
fn lru_evicts_what_became_idle_first() {
    let mut evict = eviction(PolicyKind::Lru, 100, 4);
    for (index, clock) in [(2, 5), (0, 5), (3, 7)] {
        evict.enqueue(NodeId::node(index), 10, clock, CONTEXT);
    }
    evict.hit(NodeId::node(0));
    assert_eq!(queues(&evict), [("lru", 30, vec![2, 0, 3])]);
    assert_eq!((evict.victim(), evict.evictable(), evict.excess()), (Some(NodeId::node(2)), 30, None));

    evict.dequeue(NodeId::node(0), 10);
    evict.enqueue(NodeId::node(0), 11, 9, CONTEXT);
    assert_eq!(queues(&evict), [("lru", 31, vec![2, 3, 0])]);
    let slot = evict.slot(NodeId::node(0));
    assert_eq!((slot.hits(), slot.idle_since(), slot.is_marked()), (1, 9, false));

    evict.evict(NodeId::node(2), 4);
    assert_eq!(queues(&evict), [("lru", 27, vec![2, 3, 0])]);
}

#[test]
fn a_node_that_is_not_idle_is_in_no_queue() {
    let mut evict = eviction(PolicyKind::Lru, 100, 1);
    evict.dequeue(NodeId::node(0), 10);
    assert!(!evict.slot(NodeId::node(0)).is_queued() && evict.victim().is_none());
    assert_eq!(evict.evictable(), 0);
}

#[test]
fn a_split_puts_the_upper_half_right_behind_the_lower() {
    let mut evict = eviction(PolicyKind::Slru, 100, 3);
    evict.hit(NodeId::node(1));
    for index in 0..3 {
        evict.enqueue(NodeId::node(index), 10, 4, CONTEXT);
    }
    evict.split(NodeId::node(0), NodeId::node(3));
    evict.split(NodeId::node(1), NodeId::node(4));
    assert_eq!(queues(&evict), [("probation", 20, vec![0, 3, 2]), ("protected", 10, vec![1, 4])]);
    let slot = evict.slot(NodeId::node(4));
    assert_eq!((slot.hits(), slot.idle_since(), slot.is_marked()), (1, 4, true));
}

#[test]
fn slru_evicts_what_was_never_hit_first() {
    let mut evict = eviction(PolicyKind::Slru, 100, 3);
    evict.hit(NodeId::node(0));
    for index in 0..3 {
        evict.enqueue(NodeId::node(index), 10, 0, CONTEXT);
    }
    assert_eq!(queues(&evict), [("probation", 20, vec![1, 2]), ("protected", 10, vec![0])]);
    for expected in [1, 2, 0] {
        let victim = evict.victim().unwrap();
        assert_eq!(victim, NodeId::node(expected));
        evict.dequeue(victim, 10);
    }
}

#[test]
fn slru_protects_half_of_the_pool_to_the_block() {
    for (num_blocks, protected, excess) in [(40, 20, None), (41, 20, None), (40, 21, Some(1)), (41, 30, Some(10))] {
        let mut evict = eviction(PolicyKind::Slru, num_blocks, 1);
        evict.hit(NodeId::node(0));
        evict.enqueue(NodeId::node(0), protected, 0, CONTEXT);
        assert_eq!(evict.excess().map(|excess| (excess.from, excess.to, excess.blocks)), excess.map(|n| (1, 0, n)));
    }
}

#[test]
fn what_is_demoted_joins_the_recent_end_unmarked() {
    let mut evict = eviction(PolicyKind::Slru, 20, 3);
    evict.hit(NodeId::node(0));
    evict.hit(NodeId::node(1));
    for index in 0..3 {
        evict.enqueue(NodeId::node(index), 6, 3, CONTEXT);
    }
    assert_eq!((evict.excess().unwrap().blocks, evict.coldest_of(1)), (2, Some(NodeId::node(0))));
    evict.demote(NodeId::node(0), 6, 0);
    assert_eq!(queues(&evict), [("probation", 12, vec![2, 0]), ("protected", 6, vec![1])]);
    let slot = evict.slot(NodeId::node(0));
    assert_eq!((slot.hits(), slot.idle_since(), slot.is_marked()), (1, 3, false));
    // A hit since then protects it again.
    evict.dequeue(NodeId::node(0), 6);
    evict.hit(NodeId::node(0));
    evict.enqueue(NodeId::node(0), 1, 8, CONTEXT);
    assert_eq!(queues(&evict)[1], ("protected", 7, vec![1, 0]));
}

#[test]
fn a_reset_keeps_the_order_of_eviction_and_a_second_one_comes_behind() {
    let mut evict = eviction(PolicyKind::Slru, 100, 4);
    evict.hit(NodeId::node(0));
    for index in 0..3 {
        evict.enqueue(NodeId::node(index), 10, 0, CONTEXT);
    }
    evict.retire();
    assert_eq!((evict.evictable(), evict.num_stale()), (0, 30));
    evict.enqueue(NodeId::node(3), 5, 0, CONTEXT);
    evict.retire();
    let order: Vec<u32> = evict.iter(evict.stale()).map(NodeId::word).collect();
    assert_eq!((order, evict.num_stale()), (vec![1, 2, 0, 3], 35));

    evict.take_stale(NodeId::node(1), 4, false);
    assert_eq!((evict.stalest(), evict.num_stale()), (Some(NodeId::node(1)), 31));
    evict.take_stale(NodeId::node(1), 6, true);
    assert_eq!((evict.stalest(), evict.num_stale()), (Some(NodeId::node(2)), 25));
}

#[test]
fn a_slot_that_is_used_again_knows_nothing() {
    let mut evict = eviction(PolicyKind::Slru, 100, 1);
    evict.hit(NodeId::node(0));
    evict.enqueue(NodeId::node(0), 1, 7, CONTEXT);
    evict.dequeue(NodeId::node(0), 1);
    evict.start(NodeId::node(0));
    let slot = evict.slot(NodeId::node(0));
    assert_eq!((slot.hits(), slot.idle_since(), slot.is_marked(), slot.is_queued()), (0, 0, false, false));
}

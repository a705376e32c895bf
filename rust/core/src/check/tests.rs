//! The checker is tested with broken pagers: one broken structure for each kind of violation that it can report.

use super::check;
use crate::config::{Config, PolicyKind};
use crate::dump::dump;
use crate::evict::{Context, Departure};
use crate::ids::{BlockId, Handle, NodeId, TOKEN_END, Token};
use crate::pager::{Admitted, End, ExtraHold, Pager, Wish};
use crate::preemptions::Why;
use crate::run::Run;
use crate::sequence::Sequence;
use crate::transfers::PlanId;

const A: &[u8] = b"\0a";
const B: &[u8] = b"\0b";
const BLOCK_SIZE: usize = 2;
const CONTEXT: Context = Context { sequence: None, pinned: false, departure: Departure::Moved };

/// A healthy pager with one of everything: splits, cached leaves and parents, a duplicate, a shared partial block, a
/// queued copy, a sequence that is preempted, two namespaces.
struct Scene {
    pager: Pager,
    /// Runs on the path `1 2 3 4 5 6`, whose first two blocks another path shares.
    running: Handle,
    /// Committed the same block as somebody else, later.
    duplicate: Handle,
    /// Holds an indexed block in part.
    cut: Handle,
    preempted: Handle,
    /// Runs in the other namespace.
    other: Handle,
}

fn config() -> Config {
    Config {
        num_blocks: 40,
        block_size: BLOCK_SIZE,
        policy: PolicyKind::Lru,
        watermark: 0.0,
        identity: Vec::new(),
        seed: 1,
        null_block: false,
        prefix_cache: true,
        num_host_blocks: 0,
        num_ghost_blocks: 0,
    }
}

impl Scene {
    fn new() -> Self {
        let mut pager = Pager::new(config()).unwrap();
        let running = start(&mut pager, &[1, 2, 3, 4, 5, 6, 7], A);
        for prompt in [&[1, 2, 3, 4, 9, 9, 9, 9, 1][..], &[8, 8, 8, 8, 8], &[8, 8, 8, 8, 7, 7, 7]] {
            let handle = start(&mut pager, prompt, A);
            pager.release(handle, Departure::Finished);
        }
        let first = pager.admit(&[3, 3, 3], A, false).unwrap();
        let duplicate = pager.admit(&[3, 3, 3], A, false).unwrap();
        pager.commit(first, None).unwrap();
        pager.commit(duplicate, None).unwrap();
        let cut = start(&mut pager, &[6, 6, 6, 6, 6], A);
        pager.truncate(cut, 3).unwrap();
        let parent = start(&mut pager, &[4, 4, 4], A);
        let child = pager.fork(parent, 1).unwrap()[0];
        pager.append(child, 4).unwrap();
        let preempted = start(&mut pager, &[5, 5, 5], A);
        pager.preempt(preempted, Why::default()).unwrap();
        let other = start(&mut pager, &[1, 1, 1], B);
        Self { pager, running, duplicate, cut, preempted, other }
    }

    /// The node that starts with these tokens.
    fn node(&self, first_block: [Token; 2]) -> NodeId {
        let starts = |id: &NodeId| self.pager.index[*id].run.tokens(BLOCK_SIZE)[..BLOCK_SIZE] == first_block;
        self.pager.index.nodes().map(|(id, _)| id).find(starts).unwrap()
    }

    /// A cached leaf whose parent is held, and a cached leaf whose parent is cached.
    fn cached(&self) -> NodeId {
        self.node([9, 9])
    }

    fn cached_below_cached(&self) -> NodeId {
        self.node([7, 7])
    }

    fn root(&self, name: &[u8]) -> NodeId {
        self.pager.index.find_root(name).unwrap()
    }

    fn block_of(&self, node: NodeId) -> BlockId {
        self.pager.index[node].run.blocks(BLOCK_SIZE)[0]
    }

    fn free_block(&self) -> BlockId {
        self.pager.blocks.iter_free().next().unwrap()
    }

    fn with(&mut self, handle: Handle, change: impl FnOnce(&mut Sequence)) {
        let mut sequence = self.pager.sequences.take(handle).unwrap();
        change(&mut sequence);
        self.pager.sequences.put_back(handle, sequence);
    }
}

fn start(pager: &mut Pager, tokens: &[Token], namespace: &[u8]) -> Handle {
    let handle = pager.admit(tokens, namespace, false).unwrap();
    pager.commit(handle, None).unwrap();
    handle
}

/// Breaks a healthy pager; the checker must say so, with this id and these words.
#[track_caller]
fn expect(id: &str, words: &str, break_it: impl FnOnce(&mut Scene)) {
    let mut scene = Scene::new();
    break_it(&mut scene);
    let violations = check(&scene.pager).unwrap();
    let is_reported = violations.iter().any(|violation| violation.starts_with(id) && violation.contains(words));
    assert!(is_reported, "expected {id}: {words:?}, got {violations:#?}");
}

#[test]
fn a_healthy_pager_has_no_violation() {
    let scene = Scene::new();
    assert_eq!(check(&scene.pager).unwrap(), [] as [String; 0], "{}", dump(&scene.pager, true).unwrap());
}

#[test]
fn all_violations_are_reported() {
    let mut scene = Scene::new();
    scene.pager.num_running += 1;
    scene.with(scene.running, |sequence| sequence.num_cached = 99);
    let block = scene.block_of(scene.cached());
    scene.pager.blocks.break_state(block, 1);
    let violations = check(&scene.pager).unwrap();
    for id in ["I1", "I2", "I4"] {
        assert!(violations.iter().any(|violation| violation.starts_with(id)), "{id} is missing in {violations:#?}");
    }
}

// ---- I1 ------------------------------------------------------------------------------------------------------------

#[test]
fn i1_a_queue_that_miscounts_its_blocks() {
    expect("I1", "queue lru counts", |scene| scene.pager.evict.break_queue_length(1));
}

#[test]
fn i1_a_block_that_left_the_free_stack_and_went_nowhere() {
    expect("I1", "free, cached and active count", |scene| scene.pager.blocks.pop(1, &mut Vec::new()));
    expect("I1", "39 blocks are accounted for, of 40", |scene| scene.pager.blocks.pop(1, &mut Vec::new()));
}

#[test]
fn i1_sequences_that_are_miscounted() {
    expect("I1", "sequences are counted", |scene| scene.pager.num_running += 1);
    expect("I1", "sequences are counted", |scene| scene.pager.num_running_pinned += 1);
    expect("I1", "sequences are counted", |scene| scene.pager.num_preempted -= 1);
}

// ---- I2: blocks and their holders ----------------------------------------------------------------------------------

#[test]
fn i2_a_block_in_two_places() {
    expect("I2", "is in two places", |scene| {
        let (one, other) = (scene.cached(), scene.cached_below_cached());
        let block = scene.block_of(other);
        scene.pager.index[one].run.set_blocks(&[block, block], BLOCK_SIZE);
    });
    expect("I2", "is in two places", |scene| {
        let block = scene.block_of(scene.cached());
        scene.pager.blocks.push(block);
    });
}

#[test]
fn i2_states_that_contradict_their_place() {
    expect("I2", "are on the free stack and not free", |scene| {
        let block = scene.free_block();
        scene.pager.blocks.break_state(block, 1);
    });
    expect("I2", "do not know that they are indexed", |scene| {
        let block = scene.block_of(scene.cached());
        scene.pager.blocks.break_state(block, 1);
    });
}

#[test]
fn i2_a_private_block_that_miscounts_its_holders() {
    expect("I2", "counts 2 holders and has 1", |scene| {
        let block = *scene.pager.sequence(scene.running, "").unwrap().table.last().unwrap();
        scene.pager.blocks.hold(block, 1);
    });
}

#[test]
fn i2_a_table_that_names_a_free_block() {
    expect("I2", "holds free block", |scene| {
        let block = scene.free_block();
        scene.with(scene.running, |sequence| *sequence.table.last_mut().unwrap() = block);
    });
}

#[test]
fn i2_a_table_that_names_a_block_twice() {
    expect("I2", "has a block twice", |scene| {
        scene.with(scene.running, |sequence| sequence.table[1] = sequence.table[0]);
    });
}

#[test]
fn i2_a_table_of_the_wrong_length() {
    expect("I2", "needs 4 blocks and its table has 3", |scene| {
        scene.with(scene.running, |sequence| sequence.table.truncate(3));
    });
}

#[test]
fn i2_a_sequence_that_miscounts_its_tokens() {
    expect("I2", "in its tail", |scene| scene.with(scene.running, |sequence| sequence.len += 1));
}

#[test]
fn i2_a_duplicate_that_is_not_known() {
    expect("I2", "first duplicate is 0", |scene| {
        scene.with(scene.duplicate, |sequence| sequence.first_duplicate = Sequence::NO_DUPLICATE);
    });
}

#[test]
fn i2_a_preempted_sequence_that_holds_blocks() {
    expect("I2", "holds blocks", |scene| scene.with(scene.preempted, |sequence| sequence.table.push(0)));
    expect("I2", "holds blocks", |scene| scene.with(scene.preempted, |sequence| sequence.num_committed = 1));
}

#[test]
fn i2_pins_that_nobody_has() {
    expect("I2", "pins and has", |scene| {
        let node = scene.node([5, 6]);
        scene.pager.index.pin(node, 1);
    });
    expect("I2", "held children and has", |scene| {
        let node = scene.node([1, 2]);
        scene.pager.index[node].held_children += 1;
    });
}

#[test]
fn i2_holds_beside_paths_that_are_miscounted() {
    expect("I2", "counts 2 holds beside paths and has 1", |scene| {
        for extra in scene.pager.extra_holds.values_mut() {
            extra.holds += 1;
        }
    });
    expect("I2", "is held beside paths and nobody counts it", |scene| scene.pager.extra_holds.clear());
    expect("I2", "counts 1 holds beside paths and has 0", |scene| {
        let node = scene.cached();
        let block = scene.block_of(node);
        scene.pager.extra_holds.insert(block, ExtraHold { node, holds: 1 });
    });
}

#[test]
fn i2_a_hold_beside_paths_of_another_node() {
    expect("I2", "is held but not the last of", |scene| {
        let node = scene.cached();
        let block = scene.pager.sequence(scene.cut, "").unwrap().table[1];
        scene.pager.extra_holds.get_mut(&block).unwrap().node = node;
    });
}

// ---- I2: nodes and roots -------------------------------------------------------------------------------------------

#[test]
fn i2_an_idle_node_that_waits_in_no_queue() {
    expect("I2", "is idle and waits in no queue", |scene| {
        let node = scene.cached();
        scene.pager.evict.dequeue(node, 2);
    });
}

#[test]
fn i2_a_held_node_that_waits_in_a_queue() {
    expect("I2", "waits in queue lru but is not idle", |scene| {
        let node = scene.cached();
        scene.pager.index.pin(node, 1);
    });
}

#[test]
fn i2_a_node_that_waits_twice() {
    expect("I2", "waits twice", |scene| {
        let node = scene.cached();
        scene.pager.evict.break_links(node, node);
    });
}

#[test]
fn i2_a_dead_node_that_nobody_holds() {
    expect("I2", "is neither held nor stale", |scene| {
        let node = scene.cached();
        scene.pager.index.unlink_sibling(node);
        scene.pager.index.forget(node);
    });
}

#[test]
fn i2_a_namespace_that_miscounts() {
    expect("I2", "children and has", |scene| {
        let root = scene.root(A);
        scene.pager.index.root_mut(root).children += 1;
    });
    expect("I2", "sequences and has", |scene| {
        let root = scene.root(B);
        scene.pager.index.root_mut(root).pins += 1;
    });
}

// ---- I3 ------------------------------------------------------------------------------------------------------------

#[test]
fn i3_a_token_that_cannot_be() {
    expect("I3", "has a token outside 0..2^31-1", |scene| {
        let node = scene.cached();
        scene.pager.index[node].run.token_area_mut(BLOCK_SIZE)[3] = TOKEN_END;
    });
}

#[test]
fn i3_a_node_under_the_wrong_hash() {
    expect("I3", "is looked for and None is found", |scene| {
        let node = scene.cached();
        scene.pager.index[node].hash ^= 1;
    });
}

#[test]
fn i3_a_node_under_other_tokens() {
    expect("I3", "is looked for and None is found", |scene| {
        let node = scene.cached();
        scene.pager.index[node].run.token_area_mut(BLOCK_SIZE)[0] = 1;
    });
}

#[test]
fn i3_two_children_with_the_same_first_block() {
    expect("I3", "is found", |scene| {
        let (node, block) = (scene.cached(), scene.free_block());
        let mut run = Run::with_tokens(&[9, 9], 1, BLOCK_SIZE).unwrap();
        run.set_blocks(&[block], BLOCK_SIZE);
        let parent = scene.pager.index[node].parent;
        scene.pager.index.insert(parent, run);
    });
}

#[test]
fn i3_a_namespace_that_is_not_found() {
    expect("I3", "namespace", |scene| {
        let root = scene.root(B);
        scene.pager.index.root_mut(root).hash ^= 1;
    });
}

#[test]
fn i3_a_sequence_on_a_path_of_another_namespace() {
    expect("I3", "is in another namespace than its path", |scene| {
        let (a, b) = (scene.root(A), scene.root(B));
        scene.with(scene.other, |sequence| sequence.root = a);
        scene.pager.index.root_mut(a).pins += 1;
        scene.pager.index.root_mut(b).pins -= 1;
    });
}

// ---- I4, I5 --------------------------------------------------------------------------------------------------------

#[test]
fn i4_positions_out_of_order() {
    expect("I4", "does not hold", |scene| scene.with(scene.running, |sequence| sequence.num_committed = 8));
    expect("I4", "does not hold", |scene| scene.with(scene.running, |sequence| sequence.num_cached = 8));
}

#[test]
fn i4_a_block_that_was_published_before_it_was_computed() {
    expect("I4", "has published 3 blocks and committed 5 tokens", |scene| {
        scene.with(scene.running, |sequence| sequence.num_committed = 5);
    });
}

#[test]
fn i5_a_run_longer_than_its_buffer() {
    expect("I5", "has more blocks than room", |scene| {
        let node = scene.node([5, 6]);
        let capacity = scene.pager.index[node].run.capacity();
        scene.pager.index[node].run.break_len(capacity + 1);
    });
}

// ---- I6 ------------------------------------------------------------------------------------------------------------

#[test]
fn i6_a_child_whose_parent_is_not_indexed() {
    expect("I6", "is indexed but its parent", |scene| {
        let node = scene.node([1, 2]);
        scene.pager.index.unlink_sibling(node);
        scene.pager.index.forget(node);
    });
}

#[test]
fn i6_children_whose_links_are_broken() {
    expect("I6", "are broken at", |scene| {
        let node = scene.node([9, 9]);
        scene.pager.index[node].older = NodeId::NONE;
    });
    expect("I6", "the last child of", |scene| {
        let (node, first) = (scene.node([1, 2]), scene.node([5, 6]));
        scene.pager.index[node].last_child = first;
    });
}

#[test]
fn i6_nodes_that_cannot_be_reached() {
    expect("I6", "can be reached", |scene| {
        let root = scene.root(A);
        scene.pager.index.root_mut(root).first_child = NodeId::NONE;
        scene.pager.index.root_mut(root).last_child = NodeId::NONE;
    });
}

#[test]
fn i6_a_circle() {
    expect("I6", "the tree has a circle", |scene| {
        let (leaf, top) = (scene.cached(), scene.node([1, 2]));
        scene.pager.index[leaf].first_child = top;
    });
}

#[test]
fn i6_a_parent_that_would_be_evicted_before_its_child() {
    expect("I6", "would be evicted before its child", |scene| {
        let child = scene.cached_below_cached();
        let blocks = scene.pager.index[child].run.len();
        scene.pager.evict.dequeue(child, blocks);
        scene.pager.evict.enqueue(child, blocks, 0, CONTEXT);
    });
}

#[test]
fn i6_a_path_of_another_length() {
    expect("I6", "path has 3 blocks, not 2", |scene| scene.with(scene.running, |sequence| sequence.path_blocks = 2));
}

// ---- I9 ------------------------------------------------------------------------------------------------------------

#[test]
fn i9_a_block_that_is_source_and_target() {
    expect("I9", "is source and target of queued copies", |scene| {
        let (source, _) = scene.pager.copies.iter().next().unwrap();
        let other = scene.block_of(scene.cached());
        scene.pager.copies.push(other, source);
    });
}

#[test]
fn i9_a_copy_into_a_free_block() {
    expect("I9", "a copy into free block", |scene| {
        let (source, free) = (scene.block_of(scene.cached()), scene.free_block());
        scene.pager.copies.push(source, free);
    });
}

// ---- I10 -----------------------------------------------------------------------------------------------------------

/// A healthy pager with a fetch that one sequence waits for, and the fetch broken.
fn expect_of_fetch(violation: &str, break_it: impl FnOnce(&mut Pager, PlanId, Handle)) {
    let mut pager = Pager::new(Config { num_host_blocks: 4, ..config() }).unwrap();
    let first = start(&mut pager, &[1, 2, 3], A);
    let offload = pager.offload_committed(first).unwrap().unwrap();
    pager.start_plan(offload, None).unwrap();
    pager.end_plan(offload, End::Complete).unwrap();
    pager.release(first, Departure::Finished);
    let all = pager.admit(&[9; 80], A, false).unwrap();
    pager.release(all, Departure::Aborted);
    let wish = Wish { pinned: false, wait: false, fetch: Some(1) };
    let Admitted::Sequence(handle) = pager.admit_as(&[1, 2, 4], A, wish).unwrap() else { unreachable!() };
    let plan = pager.sequence(handle, "test").unwrap().plan.unwrap();
    assert_eq!(check(&pager).unwrap(), [] as [String; 0]);
    break_it(&mut pager, plan, handle);
    let found = check(&pager).unwrap();
    assert!(found.iter().any(|each| each.starts_with("I10") && each.contains(violation)), "{found:#?}");
}

#[test]
fn i10_a_fetch_that_others_wait_for_than_it_says() {
    expect_of_fetch("which counts 0 and is for 1", |pager, plan, _| {
        pager.plans.leave_fetch(plan);
    });
    expect_of_fetch("which does not wait for it", |pager, _, handle| {
        pager.sequences.get_mut(handle).unwrap().plan = None;
    });
    expect_of_fetch("which is no more", |pager, plan, _| {
        pager.plans.remove(plan);
    });
}

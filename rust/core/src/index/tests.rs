//! Insert, find, split, remove: ids, the order of siblings, buckets, roots.

use super::{Found, Index};
use crate::hash::Key;
use crate::ids::{BlockId, CONTENT_START, NodeId, Token};
use crate::run::Run;

const BLOCK_SIZE: usize = 2;

fn index(key: Key) -> (Index, NodeId) {
    let mut index = Index::new(64, BLOCK_SIZE, key).unwrap();
    let root = index.find_or_make_root(b"\0a").unwrap();
    (index, root)
}

/// Under the second key all elements lie in one bucket.
fn keys() -> [Key; 2] {
    [Key::from_seed(5), Key::weak(5, 0)]
}

/// A run whose blocks are named like the first token of each.
fn run(tokens: &[Token]) -> Run {
    let blocks: Vec<BlockId> = tokens.chunks_exact(BLOCK_SIZE).map(|block| block[0]).collect();
    let mut run = Run::with_tokens(tokens, blocks.len() + 3, BLOCK_SIZE).unwrap();
    run.set_blocks(&blocks, BLOCK_SIZE);
    run
}

fn children(index: &Index, parent: NodeId) -> Vec<NodeId> {
    let (mut children, mut next, mut older) = (Vec::new(), index.first_child(parent), NodeId::NONE);
    while let Some(id) = next.some() {
        assert_eq!((index[id].older, index[id].parent), (older, parent));
        children.push(id);
        (older, next) = (id, index[id].younger);
    }
    assert_eq!(index.last_child(parent), older);
    children
}

#[test]
fn a_split_leaves_the_lower_half_its_id_and_its_children() {
    for key in keys() {
        let (mut index, root) = index(key);
        let older = index.insert(root, run(&[7, 7]));
        let node = index.insert(root, run(&[1, 1, 2, 2, 3, 3, 4, 4]));
        let younger = index.insert(root, run(&[8, 8]));
        let (a, b) = (index.insert(node, run(&[5, 5])), index.insert(node, run(&[6, 6])));

        let upper = index.split(node, 1).unwrap();
        assert_eq!(
            children(&index, root),
            [older, upper, younger],
            "the upper half takes the place among the siblings"
        );
        assert_eq!(children(&index, upper), [node]);
        assert_eq!(children(&index, node), [a, b]);
        assert_eq!((index[upper].run.blocks(2), index[node].run.blocks(2)), (&[1][..], &[2, 3, 4][..]));
        assert_eq!((index[upper].run.tokens(2), index[node].run.tokens(2)), (&[1, 1][..], &[2, 2, 3, 3, 4, 4][..]));
        assert_eq!((index[upper].run.capacity(), index[node].run.capacity()), (1, 6), "the room stays where runs grow");

        // Each is found under its own first block, and nowhere else.
        assert_eq!(index.find_child(root, &[1, 1]), Some(upper));
        assert_eq!(index.find_child(upper, &[2, 2]), Some(node));
        assert_eq!((index.find_child(root, &[2, 2]), index.find_child(node, &[2, 2])), (None, None));
        let path = [1, 1, 2, 2, 3, 3, 4, 4, 6, 6];
        assert_eq!(index.walk(root, &path, 5), Found { node: b, within: 1, blocks: 5 });
    }
}

#[test]
fn a_split_at_every_place_changes_nothing_that_is_found() {
    let tokens: Vec<Token> = (0..2 * 9).map(|at| at / 2).collect();
    for at in 1..9 {
        for key in keys() {
            let (mut index, root) = index(key);
            let node = index.insert(root, run(&tokens));
            let upper = index.split(node, at).unwrap();
            let found = index.walk(root, &tokens, 9);
            assert_eq!(found, Found { node, within: 9 - at, blocks: 9 });
            assert_eq!(index.walk(root, &tokens, at), Found { node: upper, within: at, blocks: at });
            assert_eq!(index.locate(found, at), Found { node: upper, within: at, blocks: at });
            assert_eq!(index.locate(found, 0), Found { node: root, within: 0, blocks: 0 });
            assert_eq!(index.root_of(node), root);
        }
    }
}

#[test]
fn the_upper_half_is_held_if_the_lower_is() {
    let (mut index, root) = index(Key::from_seed(5));
    let (held, idle) = (index.insert(root, run(&[1, 1, 2, 2])), index.insert(root, run(&[3, 3, 4, 4])));
    assert!(index.pin(held, 2));
    let (above_held, above_idle) = (index.split(held, 1).unwrap(), index.split(idle, 1).unwrap());
    assert_eq!((index[above_held].held_children, index[above_held].pins, index[held].pins), (1, 0, 2));
    assert!(index[above_held].is_held() && !index[above_idle].is_held());
}

#[test]
fn a_dead_node_is_split_outside_of_all_children() {
    let (mut index, root) = index(Key::from_seed(5));
    let (kept, dead) = (index.insert(root, run(&[1, 1])), index.insert(root, run(&[3, 3, 4, 4])));
    index.unlink_sibling(dead);
    index.forget(dead);
    let upper = index.split(dead, 1).unwrap();
    assert_eq!(children(&index, root), [kept]);
    assert!(!index.is_live(upper) && index.find_child(root, &[3, 3]).is_none());
    assert_eq!((index[dead].parent, index[upper].parent), (upper, root));
}

#[test]
fn siblings_stay_in_the_order_of_creation_whoever_leaves() {
    for leaver in 0..4 {
        for key in keys() {
            let (mut index, root) = index(key);
            let mut nodes: Vec<NodeId> = (0..4).map(|token| index.insert(root, run(&[token, token]))).collect();
            let gone = nodes.remove(leaver);
            index.remove(gone);
            assert_eq!(children(&index, root), nodes);
            let token = leaver as Token;
            assert_eq!(index.find_child(root, &[token, token]), None);
            // The slot is used again, as the youngest.
            let again = index.insert(root, run(&[9, 9]));
            nodes.push(again);
            assert_eq!((again, children(&index, root)), (gone, nodes));
        }
    }
}

#[test]
fn a_walk_ends_at_the_first_block_that_differs() {
    for key in keys() {
        let (mut index, root) = index(key);
        let top = index.insert(root, run(&[1, 1, 2, 2]));
        let below = index.insert(top, run(&[3, 3, 4, 4]));
        let walk = |tokens: &[Token], limit| index.walk(root, tokens, limit);
        assert_eq!(walk(&[1, 1, 2, 2, 3, 3, 4, 5], 4), Found { node: below, within: 1, blocks: 3 });
        assert_eq!(walk(&[1, 1, 2, 2, 4, 4, 3, 3], 4), Found { node: top, within: 2, blocks: 2 });
        assert_eq!(walk(&[1, 1, 2, 0], 2), Found { node: top, within: 1, blocks: 1 });
        assert_eq!(walk(&[1, 0], 1), Found { node: root, within: 0, blocks: 0 });
        assert_eq!(walk(&[1, 1, 2, 2, 3, 3], 1), Found { node: top, within: 1, blocks: 1 });
    }
}

#[test]
fn a_found_prefix_ends_inside_no_run_of_content_tokens() {
    const C: Token = CONTENT_START;
    let (mut index, root) = index(Key::from_seed(5));
    let top = index.insert(root, run(&[1, 1, 2, C]));
    index.insert(top, run(&[C, C, C, 3]));
    let tokens = [1, 1, 2, C, C, C, C, C, 9];
    assert_eq!(index.walk(root, &tokens, 4), Found { node: index.first_child(top), within: 1, blocks: 3 });
    assert_eq!(index.find(root, &tokens, 4), Found { node: top, within: 1, blocks: 1 });
}

#[test]
fn blocks_leave_a_run_from_its_tail() {
    let (mut index, root) = index(Key::from_seed(5));
    let node = index.insert(root, run(&[1, 1, 2, 2, 3, 3, 4, 4]));
    let mut taken = Vec::new();
    assert_eq!(index.pop_tail(node, 3, |block| taken.push(block)), 3);
    assert_eq!((taken, index[node].run.blocks(2)), (vec![4, 3, 2], &[1][..]));
    assert_eq!(index[node].run.capacity(), 1, "what is left gives its room back");
    assert_eq!(index.pop_tail(node, 9, |_| {}), 1);
    index.remove(node);
    assert!(index.first_child(root).is_none());
}

#[test]
fn a_new_epoch_hides_everything_and_the_old_can_still_leave() {
    for key in keys() {
        let (mut index, root) = index(key);
        index.root_mut(root).pins = 1;
        let node = index.insert(root, run(&[1, 1]));
        index.start_epoch().unwrap();
        assert!(!index.is_live(node) && !index.is_live(root));
        assert_eq!((index.find_root(b"\0a"), index.find_child(root, &[1, 1])), (None, None));
        let next = index.find_or_make_root(b"\0a").unwrap();
        index.root_mut(next).pins = 1;
        let young = index.insert(next, run(&[1, 1]));
        assert_eq!((index.find_root(b"\0a"), index.find_child(next, &[1, 1])), (Some(next), Some(young)));
        index.remove(node);
        index.root_mut(root).pins = 0;
        index.drop_root_if_unused(root);
        assert_eq!(index.roots().map(|(id, _)| id).collect::<Vec<_>>(), [next]);
        assert_eq!(index.find_child(next, &[1, 1]), Some(young));
    }
}

#[test]
fn l14_a_root_goes_with_its_last_child_and_sequence_and_its_slot_is_used_again() {
    for key in keys() {
        let (mut index, root) = index(key);
        index.root_mut(root).pins = 1;
        let other = index.find_or_make_root(b"\0b").unwrap();
        let node = index.insert(other, run(&[1, 1]));
        index.drop_root_if_unused(root);
        assert!(index.root(root).in_use(), "a sequence holds it");
        index.remove(node);
        assert!(!index.root(other).in_use() && index.root(other).name.is_empty());
        assert_eq!((index.find_root(b"\0a"), index.find_root(b"\0b")), (Some(root), None));
        assert_eq!(index.find_or_make_root(b"\0c").unwrap(), other);
    }
}

#[test]
fn an_epoch_is_never_used_twice() {
    let (mut index, root) = index(Key::from_seed(5));
    index.root_mut(root).pins = 1;
    index.epoch = u32::MAX - 1;
    index.start_epoch().unwrap();
    assert!(index.start_epoch().is_err());
    assert_eq!(index.epoch, u32::MAX, "a refused reset changes nothing");
}

#[test]
fn a_forgotten_node_is_in_no_chain_and_neither_are_its_halves() {
    for key in keys() {
        let (mut index, root) = index(key);
        let (kept, gone) = (index.insert(root, run(&[1, 1])), index.insert(root, run(&[2, 2, 3, 3])));
        index.unlink_sibling(gone);
        index.forget(gone);
        let upper = index.split(gone, 1).unwrap();
        for hash in [index[kept].hash, index[gone].hash, index[upper].hash] {
            let mut next = index.buckets.first(hash);
            while let Some(id) = next.some() {
                assert_eq!(id, kept);
                next = index[id].next_in_bucket;
            }
        }
        index.remove(gone);
        index.remove(upper);
        assert_eq!(index.find_child(root, &[1, 1]), Some(kept));
    }
}

#[test]
fn the_table_of_roots_grows_with_them() {
    let mut index = Index::new(1, BLOCK_SIZE, Key::from_seed(5)).unwrap();
    let name = |nth: u32| nth.to_le_bytes();
    let roots: Vec<NodeId> = (0..2000)
        .map(|nth| {
            let root = index.find_or_make_root(&name(nth)).unwrap();
            index.root_mut(root).pins = 1;
            root
        })
        .collect();
    assert!(index.root_buckets.len() * 32 >= roots.len(), "{} chains", index.root_buckets.len());
    for (nth, &root) in roots.iter().enumerate() {
        assert_eq!(index.find_root(&name(nth as u32)), Some(root));
    }
    // Each leaves from the chain that it is in now.
    for (nth, &root) in roots.iter().enumerate() {
        index.root_mut(root).pins = 0;
        index.drop_root_if_unused(root);
        assert_eq!(index.find_root(&name(nth as u32)), None);
    }
    assert_eq!(index.roots().count(), 0);
}

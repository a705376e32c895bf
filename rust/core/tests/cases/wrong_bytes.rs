//! Wrong bytes (W).

use kvpager_core::evict::Departure;
use kvpager_core::ids::{CONTENT_START, Handle, Token};
use kvpager_core::preemptions::Why;
use kvpager_core::{Error, Pager};

use super::support::{A, assert_sound, cache, hit_tokens, num_cached, pager, start, table};
use super::{admit, prompt};

#[test]
fn w5_a_prefill_that_ends_in_the_middle_is_hit_up_to_what_was_committed() {
    for committed in 0..=64 {
        for is_preempted in [false, true] {
            let mut pager = pager(16, 8);
            let tokens = prompt(1, 64);
            let handle = admit(&mut pager, &tokens);
            pager.commit(handle, Some(committed)).unwrap();
            if is_preempted {
                pager.preempt(handle, Why::default()).unwrap();
            } else {
                pager.release(handle, Departure::Aborted);
            }
            assert_eq!(hit_tokens(&pager, &prompt(1, 65)), committed / 8 * 8, "{committed} committed");
            assert_sound(&pager);
        }
    }
}

#[test]
fn w6_an_abort_before_commit_leaves_no_entry_and_no_leak() {
    let steps: [fn(&mut Pager, Handle); 5] = [
        |_, _| {},
        |pager, handle| drop(pager.append(handle, 5)),
        |pager, handle| drop(pager.extend(handle, &[1, 2, 3, 4, 5])),
        |pager, handle| drop(pager.slots(handle, 0, 4)),
        |pager, handle| drop(pager.truncate(handle, 3)),
    ];
    for last in 0..=steps.len() {
        let mut pager = pager(8, 4);
        let empty = pager.stats().free_blocks;
        let handle = admit(&mut pager, &prompt(1, 9));
        for step in &steps[..last] {
            step(&mut pager, handle);
        }
        pager.release(handle, Departure::Aborted);
        assert_eq!((pager.stats().free_blocks, pager.stats().cached_blocks), (empty, 0));
        assert_eq!(hit_tokens(&pager, &prompt(1, 9)), 0);
        assert_sound(&pager);
    }
}

#[test]
fn w7_nobody_writes_into_a_block_that_somebody_else_maps() {
    // A fork shares the partial block: the first writer gets a copy, the last holder keeps the original.
    let mut pager = pager(16, 4);
    let parent = start(&mut pager, &prompt(1, 6));
    let child = pager.fork(parent, 1).unwrap()[0];
    let shared = table(&pager, parent)[1];
    let slot = pager.append(child, 7).unwrap();
    let copy = table(&pager, child)[1];
    assert_ne!(copy, shared);
    assert_eq!(slot, i64::from(copy) * 4 + 2);
    assert_eq!(pager.append(parent, 8).unwrap(), i64::from(shared) * 4 + 2);
    assert_eq!(pager.take_copies().unwrap(), [[shared, copy]]);
    assert_sound(&pager);

    // Cut back into an indexed block, a sequence copies it before it writes there again.
    let cut = start(&mut pager, &prompt(2, 9));
    let indexed = table(&pager, cut)[1];
    pager.truncate(cut, 6).unwrap();
    pager.append(cut, 9).unwrap();
    assert_ne!(table(&pager, cut)[1], indexed);
    assert_eq!(pager.take_copies().unwrap(), [[indexed, table(&pager, cut)[1]]]);
    assert_eq!(hit_tokens(&pager, &prompt(2, 9)), 8);
    assert_sound(&pager);
}

#[test]
fn w7_what_was_not_computed_yet_is_replaced_without_a_copy() {
    let mut pager = pager(16, 4);
    let parent = admit(&mut pager, &prompt(1, 6));
    let child = pager.fork(parent, 1).unwrap()[0];
    pager.slots(child, 0, 6).unwrap();
    assert!(table(&pager, parent).iter().all(|block| !table(&pager, child).contains(block)));
    assert_eq!(pager.take_copies().unwrap(), [] as [[u32; 2]; 0]);
    assert_sound(&pager);
}

#[test]
fn w8_equal_tokens_in_two_namespaces_never_share() {
    // Encoded names: a value that looks like another kind's name, and fields whose bytes join to the same string.
    let names: [&[u8]; 6] = [
        b"\0",
        b"\0lora",
        b"\x01",
        b"\x01\x04\0\0\0lora\x01\0\0\0x",
        b"\x01\x04\0\0\0salt\x01\0\0\0x",
        b"\x01\x04\0\0\0lora\0\0\0\0",
    ];
    let mut pager = pager(64, 4);
    let tokens = prompt(1, 9);
    for (nth, name) in names.iter().enumerate() {
        for (other, name) in names.iter().enumerate() {
            let hit = if other < nth { 8 } else { 0 };
            assert_eq!(pager.find_prefix(&tokens, name).unwrap().num_tokens, hit);
        }
        let handle = pager.admit(&tokens, name, false).unwrap();
        assert_eq!(num_cached(&pager, handle), 0);
        pager.commit(handle, None).unwrap();
        pager.release(handle, Departure::Finished);
    }
    assert_eq!(pager.stats().cached_blocks, 2 * names.len());
    assert_sound(&pager);
}

#[test]
fn w9_what_is_indexed_is_never_written_again() {
    let mut pager = pager(16, 4);
    let handle = start(&mut pager, &prompt(1, 9));
    let refusal = pager.slots(handle, 0, 8).unwrap_err();
    assert!(
        matches!(&refusal, Error::Value(message) if message.contains("what is committed, or given to a step, is not given again"))
    );

    // The last token of a prompt is computed again, so its block is never one of the index's.
    for len in 1..=9 {
        let again = admit(&mut pager, &prompt(1, len));
        let (cached, blocks) = (num_cached(&pager, again), table(&pager, again).to_vec());
        let last = blocks[blocks.len() - 1];
        assert!(cached < len && !table(&pager, handle)[..2].contains(&last), "prompt of {len}");
        pager.release(again, Departure::Aborted);
    }
    assert_sound(&pager);
}

#[test]
fn w9_a_block_has_one_entry_only() {
    // Forgotten while it is held, a block is not indexed a second time, not even under the same tokens.
    let mut pager = pager(16, 4);
    let handle = start(&mut pager, &prompt(1, 9));
    let child = pager.fork(handle, 1).unwrap()[0];
    assert_eq!(pager.forget(&prompt(1, 4), A).unwrap(), 2);
    for (handle, len) in [(handle, 9), (child, 9)] {
        pager.truncate(handle, 3).unwrap();
        pager.extend(handle, &prompt(1, len)[3..]).unwrap();
        pager.commit(handle, None).unwrap();
    }
    assert_eq!(hit_tokens(&pager, &prompt(1, 9)), 0);
    assert_sound(&pager);
}

#[test]
fn w10_two_equal_prompts_in_one_step_keep_their_own_blocks() {
    let mut pager = pager(16, 4);
    let [first, second] = [(); 2].map(|()| admit(&mut pager, &prompt(1, 9)));
    let tables = [first, second].map(|handle| table(&pager, handle).to_vec());
    pager.commit(first, None).unwrap();
    pager.commit(second, None).unwrap();
    assert_eq!([first, second].map(|handle| table(&pager, handle).to_vec()), tables);
    assert!(tables[0].iter().all(|block| !tables[1].contains(block)));
    assert_sound(&pager);

    // The first one's blocks are the indexed ones; the duplicates are free as soon as the second is gone.
    let third = admit(&mut pager, &prompt(1, 9));
    assert_eq!(table(&pager, third)[..2], tables[0][..2]);
    pager.release(first, Departure::Finished);
    pager.release(third, Departure::Finished);
    assert_eq!((pager.stats().cached_blocks, pager.stats().active_blocks), (0, 5));
    pager.release(second, Departure::Finished);
    assert_eq!((pager.stats().cached_blocks, pager.stats().active_blocks), (2, 0));
    assert_sound(&pager);
}

#[test]
fn w14_crafted_prompts_are_misses() {
    // Prompts that agree in all but one bit, anywhere; collisions of hashes themselves are forced in `collisions.rs`.
    let mut pager = pager(64, 4);
    let tokens = prompt(1, 9);
    cache(&mut pager, &tokens);
    for at in 0..8 {
        for bit in 0..30 {
            let mut crafted = tokens.clone();
            crafted[at] ^= 1 << bit;
            assert_eq!(hit_tokens(&pager, &crafted), at / 4 * 4);
        }
    }
}

/// Two images may agree in their first few tokens: the second does not continue below the first one's blocks.
#[test]
fn w8_a_run_of_content_tokens_is_published_whole_or_not_at_all() {
    const C: Token = CONTENT_START;
    let mut pager = pager(16, 2);
    let first = start(&mut pager, &[C, C, C, 5, 9]);
    let second = admit(&mut pager, &[C, C, C + 1, 5, 9]);
    assert_eq!(num_cached(&pager, second), 0, "a hit ends inside no run");
    pager.commit(second, Some(4)).unwrap();
    assert_eq!(hit_tokens(&pager, &[C, C, C + 1, 5, 9]), 0);

    // Once the first is forgotten the second has the place for itself. It looks again when a block has become full, and not before.
    assert_eq!(pager.forget(&[C, C], A).unwrap(), 2);
    pager.commit(second, Some(5)).unwrap();
    assert_eq!(hit_tokens(&pager, &[C, C, C + 1, 5, 9]), 0);
    pager.append(second, 8).unwrap();
    pager.commit(second, None).unwrap();
    assert_eq!(hit_tokens(&pager, &[C, C, C + 1, 5, 9, 8, 0]), 6);
    pager.release(first, Departure::Finished);
    assert_sound(&pager);
}

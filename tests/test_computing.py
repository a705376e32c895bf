"""The stampede: a prompt that somebody is about to compute is waited for, not computed twice (rules 15)."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import each_implementation, nothing_changes, refuses

import kvpager

pytestmark = each_implementation

PROMPT = list(range(10))


def waits(pager: Any, prompt: list[int], **options: Any) -> kvpager.Computing | None:
    """What an admit would wait for, by both ways of asking."""
    computing = pager.match(prompt, **options).computing
    if computing is not None:
        with nothing_changes(pager):
            assert pager.admit(prompt, wait=True, **options) == computing
            assert pager.try_admit(prompt, wait=True, **options) == computing
    return computing


def test_equal_prompts_cost_one_prefill(implementation):
    pager = implementation(40, 4)
    first = pager.admit(PROMPT, wait=True)
    waiting = [PROMPT] * 3
    assert [waits(pager, prompt) for prompt in waiting] == [kvpager.Computing(first.id, 8)] * 3
    first.commit(4)
    assert waits(pager, PROMPT) == kvpager.Computing(first.id, 8)
    assert pager.match(PROMPT).num_tokens == 4
    first.commit(8)
    assert waits(pager, PROMPT) is None
    others = [pager.admit(prompt, wait=True) for prompt in waiting]
    assert [other.num_cached for other in others] == [8, 8, 8]


def test_it_goes_as_far_as_the_tokens_agree(implementation):
    pager = implementation(40, 4)
    first = pager.admit(PROMPT)
    for prompt, position in [
        ([*PROMPT, 1, 2, 3], 8),
        (PROMPT[:8], 4),
        (PROMPT[:9], 8),
        ([*PROMPT[:7], 99, 98, 97], 4),
    ]:
        assert waits(pager, prompt) == (first.id, position)
    assert waits(pager, PROMPT[:4]) is None
    assert waits(pager, [*PROMPT[:3], 99, 98]) is None
    assert waits(pager, PROMPT, namespace=b"other") is None


def test_the_first_is_the_one_that_is_named(implementation):
    pager = implementation(40, 4)
    first, second, other = pager.admit(PROMPT), pager.admit(PROMPT), pager.admit([*PROMPT[:4], 7, 7, 7, 7, 7])
    assert waits(pager, PROMPT) == (first.id, 8)
    first.release()
    assert waits(pager, PROMPT) is None, "nobody else has announced it"
    second.commit(4)
    assert waits(pager, PROMPT) == (second.id, 8)
    other.commit(4)
    assert waits(pager, [*PROMPT[:4], 7, 7, 7, 7, 7]) == (other.id, 8)


@pytest.mark.parametrize("end", ["release", "preempt", "truncate", "drop"])
def test_who_goes_away_frees_the_waiters(implementation, end):
    pager = implementation(40, 4)
    first = pager.admit(PROMPT)
    assert waits(pager, PROMPT) == (first.id, 8)
    if end == "truncate":
        first.truncate(9)
        assert waits(pager, PROMPT) == (first.id, 8), "that is still there"
        first.truncate(3)
    elif end == "drop":
        del first
        pager.take_copies()
    else:
        getattr(first, end)()
    assert waits(pager, PROMPT) is None
    admitted = pager.admit(PROMPT, wait=True)
    assert isinstance(admitted, type(pager.admit([1])))
    if end == "preempt":
        admitted.release()
        first.resume()
        assert waits(pager, PROMPT) == (first.id, 8)


def test_a_decode_step_announces_what_it_leaves_whole(implementation):
    """Blocks of one token: each commit's next token is a block to be computed, whether anybody has looked or not."""
    pager = implementation(40, 1)
    first = pager.admit([1])
    batch = pager.batch(1, 8)
    batch.add(first)
    for token in (2, 3, 4):
        batch.step().commit([token])
    assert waits(pager, [1, 2, 3, 4, 0]) == (first.id, 4)


def test_a_step_that_fills_a_block_announces_the_next_one(implementation):
    """The tokens of a later step are known already."""
    pager = implementation(40, 2)
    first = pager.admit([1, 1])
    batch = pager.batch(1, 8)
    batch.add(first)
    batch.step(2).commit([2])
    batch.step().commit([3])
    batch.step(), batch.step(2, [-1, 6])
    batch.open_steps[0].commit([5])
    assert waits(pager, [1, 1, 2, 3, 5, 6, 0]) == (first.id, 6)


def test_a_fork_announces_nothing(implementation):
    pager = implementation(40, 4)
    first = pager.admit(PROMPT)
    (child,) = first.fork(1)
    first.release()
    assert waits(pager, PROMPT) is None
    child.commit(4)
    assert waits(pager, PROMPT) == (child.id, 8)


def test_after_a_reset_or_a_forget_nobody_waits(implementation):
    pager = implementation(40, 4)
    first = pager.admit(PROMPT)
    pager.reset()
    assert waits(pager, PROMPT) is None
    second = pager.admit(PROMPT)
    assert waits(pager, PROMPT) == (second.id, 8)
    second.commit(4)
    pager.forget(PROMPT[:4])
    assert waits(pager, PROMPT) is None
    assert len(first) == 10


def test_without_a_prefix_cache_nobody_waits(implementation):
    pager = implementation(40, 4, prefix_cache=False)
    sequence = pager.admit(PROMPT)
    assert waits(pager, PROMPT) is None
    assert len(sequence) == 10


def test_a_wait_never_ends_inside_a_run_of_content(implementation):
    image = kvpager.content_tokens(bytes(32), 9).tolist()
    pager = implementation(40, 4)
    prompt = [1, 2, 3, 4, 5, *image, 6, 7]
    first = pager.admit(prompt)
    assert waits(pager, prompt) == (first.id, 4)
    assert waits(pager, [*prompt, 8, 9]) == (first.id, 16)


def test_a_prompt_that_never_fits_is_refused_and_a_full_pool_is_waited_for(implementation):
    pager = implementation(4, 4)
    first = pager.admit(PROMPT)
    with refuses(kvpager.NeverFits):
        pager.admit([*PROMPT, *range(20)], wait=True)
    assert pager.can_admit(PROMPT) is False
    assert pager.admit(PROMPT, wait=True) == (first.id, 8)
    with refuses(kvpager.OutOfBlocks):
        pager.admit([9] * 10, wait=True)
    assert pager.stats().refused_calls == 2


def test_steps_of_a_batch_move_the_announcement(implementation):
    pager = implementation(40, 4)
    batch = pager.batch(4, 8)
    first = pager.admit(PROMPT)
    batch.add(first)
    step = batch.step(4)
    assert waits(pager, PROMPT) == (first.id, 8)
    step.commit()
    assert waits(pager, PROMPT) == (first.id, 8)
    assert pager.match(PROMPT).num_tokens == 4
    batch.step(6).commit([3])
    assert waits(pager, PROMPT) is None
    assert waits(pager, [*PROMPT, 3, 4, 5]) is None
    for token in (4, 5):
        batch.step().commit([token])
    assert pager.match([*PROMPT, 3, 4, 5, 6]).num_tokens == 12


def test_wait_is_a_bool(implementation):
    pager = implementation(4, 4)
    with refuses(TypeError, "wait"):
        pager.admit([1], wait=1)

"""What the calls of a batch refuse: each with its typed error, and nothing is changed (I7, rules.md 14.6)."""

from __future__ import annotations

import array
import copy
import pickle

import numpy as np
import pytest
from implementations import admit_committed, each_with_batch, nothing_changes, refuses

import kvpager

pytestmark = each_with_batch


def scene(implementation):
    """Rows 0 and 2 in use, of 6 and 5 tokens; 4 of the first are to be written, 1 of the second is in a step."""
    pager = implementation(16, 4)
    a, b, c = pager.admit([1] * 6), pager.admit([2]), admit_committed(pager, [3] * 4)
    batch = pager.batch(4, 3, 12, buffers=3)
    for each in (a, b, c):
        batch.add(each)
    a.commit(2)
    batch.remove(b)
    step = batch.step([0, 0, 1], [9])
    return pager, batch, step, (a, b, c)


NOT_NUMBERS = {
    "floats": [1.0, 0, 0],
    "bools": [True, 0, 0],
    "numpy bools": np.array([True, False, False]),
    "float array": np.array([1.0, 0, 0]),
    "text": "100",
    "None in it": [None, 0, 0],
    "nested": [[1, 0, 0]],
    "two dimensions": np.zeros((3, 1), "i4"),
    "a set": {0, 1, 2},
    "other byte order": np.array([1, 0, 0], np.dtype("i4").newbyteorder()),
}
OUT_OF_RANGE = {
    "below -1": [0, 0, -2],
    "2^31": [0, 0, 2**31],
    "huge": [0, 0, 2**70],
    "int64 array": np.array([0, 0, 2**31]),
    "int8 array": np.array([0, 0, -128], "i1"),
}
CALLS = {
    "step": lambda batch, step, values: batch.step(values),
    "try_step": lambda batch, step, values: batch.try_step(values),
    "blocks_needed": lambda batch, step, values: batch.blocks_needed(values),
    "step tokens": lambda batch, step, values: batch.step([4, 0, 2], values),
    "reserve": lambda batch, step, values: batch.reserve(values),
    "try_reserve": lambda batch, step, values: batch.try_reserve(values),
    "fork": lambda batch, step, values: batch.fork(values, 1),
    "commit": lambda batch, step, values: step.commit(values),
    "commit num_accepted": lambda batch, step, values: step.commit(None, values),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", NOT_NUMBERS)
def test_what_is_no_list_of_integers(implementation, call, what):
    pager, batch, step, _held = scene(implementation)
    with nothing_changes(pager), refuses(kvpager.TokenTypeError):
        CALLS[call](batch, step, NOT_NUMBERS[what])
    assert pager.stats().refused_calls == 0


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_a_number_out_of_range_is_named(implementation, call, what):
    pager, batch, step, _held = scene(implementation)
    with nothing_changes(pager), refuses(kvpager.TokenError) as refused:
        CALLS[call](batch, step, OUT_OF_RANGE[what])
    assert (refused.value.position, refused.value.value) == (2, int(OUT_OF_RANGE[what][2]))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1.0, TypeError),
        (True, TypeError),
        (np.True_, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (-2, ValueError),
        (2**70, ValueError),
    ],
)
def test_one_number_for_all_rows(implementation, value, error):
    pager, batch, _step, _held = scene(implementation)
    for call in (batch.step, batch.try_step, batch.blocks_needed, batch.reserve, batch.try_reserve):
        with nothing_changes(pager), refuses(error):
            call(value)


WRONG = {
    "too few rows": lambda batch, step: batch.step([1, 0]),
    "too many rows": lambda batch, step: batch.step([1, 0, 0, 0]),
    "a negative number": lambda batch, step: batch.step([1, 0, -1]),
    "an empty row": lambda batch, step: batch.step([1, 1, 0]),
    "unknown tokens": lambda batch, step: batch.step([5, 0, 0]),
    "too few tokens": lambda batch, step: batch.step([6, 0, 0], [1]),
    "too many tokens": lambda batch, step: batch.step([6, 0, 0], [1, 2, 3]),
    "tokens that are known": lambda batch, step: batch.step([1, 0, 0], [1]),
    "a placeholder behind a known token": lambda batch, step: batch.step([5, 0, 0], [-1]),
    "a placeholder behind a draft": lambda batch, step: batch.step([0, 0, 2], [5, -1]),
    "two placeholders": lambda batch, step: batch.step([0, 0, 2], [-1, -1]),
    "more than max_tokens": lambda batch, step: batch.step([8, 0, 5], [0] * 9),
    "more than max_blocks": lambda batch, step: batch.step([11, 0, 0], [0] * 7),
    "a huge number": lambda batch, step: batch.step([2**31 - 1, 0, 0]),
    "reserve: too few rows": lambda batch, step: batch.reserve([1, 0]),
    "reserve: negative": lambda batch, step: batch.reserve([-1, 0, 0]),
    "reserve: an empty row": lambda batch, step: batch.reserve([0, 1, 0]),
    "reserve: more than max_blocks": lambda batch, step: batch.reserve([11, 0, 0]),
    "reserve: a huge number": lambda batch, step: batch.reserve(2**31 - 1),
    "commit: too few": lambda batch, step: step.commit([1, 2]),
    "commit: too many": lambda batch, step: step.commit([1, 2, 3, 4]),
    "commit: num_accepted too few": lambda batch, step: step.commit([1, 2, 3], [1, 1]),
    "commit: more accepted than drafts": lambda batch, step: step.commit([1, 2, 3], [0, 0, 2]),
    "commit: fewer accepted than none": lambda batch, step: step.commit([1, 2, 3], [0, 0, -1]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_changes_nothing(implementation, what):
    pager, batch, step, _held = scene(implementation)
    with nothing_changes(pager), refuses(ValueError) as refused:
        WRONG[what](batch, step)
    assert not isinstance(refused.value, kvpager.KvPagerError)
    assert step.commit([-1, -1, 7], [9, 9, 1]).tolist() == [False, False, True], "the step is as good as before"


def test_the_order_of_checks(implementation):
    """Open buffers, types, num_tokens, tokens, max_tokens, max_blocks, blocks; and a step's turn before its values."""
    pager, batch, step, (a, _b, c) = scene(implementation)
    with refuses(kvpager.TokenTypeError, "no"):
        batch.step([1, 1, 0], ["no"])
    with refuses(kvpager.TokenTypeError, "no"):
        step.commit([1], ["no"])
    with refuses(ValueError, "num_tokens"):
        batch.step([1, 1, 0], [1])
    with refuses(ValueError, "tokens"):
        batch.step([50, 0, 0], [1])
    with refuses(ValueError, "max_tokens"):
        batch.step([50, 0, 0], [0] * 46)
    others = [pager.admit([5] * 4) for _ in range(11)]
    with refuses(ValueError, "max_blocks"):
        batch.step([11, 0, 0], [0] * 7)
    with refuses(kvpager.OutOfBlocks):
        batch.step([10, 0, 0], [0] * 6)
    second = batch.step([0, 0, 1])
    with refuses(kvpager.StepError):
        second.commit("no")
    step.commit([0, 0, 5])
    second.commit([0, 0, 6])
    assert (c.tokens.tolist(), len(a)) == ([3] * 4 + [9, 5, 6], 6)
    assert len(others) == 11


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda values: np.array(values, "i4"),
        lambda values: np.array(values),
        lambda values: array.array("h", values),
    ],
    ids=["list", "tuple", "int32", "int64", "array"],
)
def test_integers_in_every_form(implementation, form):
    _pager, batch, step, (a, _b, c) = scene(implementation)
    assert batch.blocks_needed(form([5, 0, 1]), form([8, -1])) == 0
    second = batch.step(form([5, 0, 1]), form([8, -1]))
    assert step.commit(form([0, 0, 5]), form([0, 0, 1])).tolist() == [False, False, True]
    assert second.token_ids.tolist() == [1, 1, 1, 1, 8, 5]
    batch.reserve(form([1, 0, 1]))
    assert [child.id for child in batch.fork(form([2, 0]), np.int8(1))] == [3, 4]
    assert (len(a), len(c)) == (7, 6)


def test_handles_are_made_by_the_pager_alone(implementation):
    _pager, batch, step, _held = scene(implementation)
    for handle in (batch, step):
        with refuses(TypeError):
            type(handle)()
        with refuses(TypeError):
            pickle.dumps(handle)
        with refuses(TypeError):
            copy.copy(handle)

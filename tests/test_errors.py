"""The error tree: numbers as attributes, builtins as second bases, and a round trip through pickle."""

from __future__ import annotations

import copy
import pickle

import pytest

import kvpager

EVERY = [
    (kvpager.OutOfBlocks(5, 2, 1, 12), {"needed": 5, "free": 2, "evictable": 1, "total": 12, "rows": ()}, RuntimeError),
    (kvpager.OutOfBlocks(5, 2, 1, 12, (0, 3)), {"needed": 5, "rows": (0, 3)}, RuntimeError),
    (kvpager.OutOfBlocks(5, 2, 1, 12, reserve=3), {"needed": 5, "rows": (), "reserve": 3}, RuntimeError),
    (kvpager.NeverFits(13, 12), {"needed": 13, "usable": 12, "tier": "device"}, ValueError),
    (kvpager.NeverFits(13, 12, "host"), {"needed": 13, "usable": 12, "tier": "host"}, ValueError),
    (
        kvpager.StaleHandle(7, "released", "append"),
        {"sequence_id": 7, "state": "released", "call": "append"},
        ValueError,
    ),
    (kvpager.ConfigError("num_blocks must be 1..9, not 0"), {}, ValueError),
    (kvpager.TokenError("token at position 3 is -1", 3, -1), {"position": 3, "value": -1}, ValueError),
    (kvpager.TokenError("the prompt is empty"), {"position": None, "value": None}, ValueError),
    (kvpager.TokenTypeError("token at position 0 is 1.5", 0, 1.5), {"position": 0, "value": 1.5}, TypeError),
    (kvpager.TransferError("copy failed"), {}, RuntimeError),
    (kvpager.Poisoned(), {}, RuntimeError),
    (kvpager.ForkedProcess(), {}, RuntimeError),
    (kvpager.AllocationError("no memory for 10 blocks"), {}, MemoryError),
]

each_error = pytest.mark.parametrize(
    ("error", "attributes", "builtin"), EVERY, ids=[type(error).__name__ for error, _, _ in EVERY]
)


@each_error
def test_every_error_is_a_kvpager_error_and_a_builtin_one(error, attributes, builtin):
    assert isinstance(error, kvpager.KvPagerError)
    assert isinstance(error, builtin)


@each_error
def test_every_error_carries_its_numbers(error, attributes, builtin):
    assert {name: getattr(error, name) for name in attributes} == attributes


@each_error
@pytest.mark.parametrize(
    "through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"]
)
def test_every_error_survives_a_round_trip(error, attributes, builtin, through):
    error.add_note("seen by rank 3")
    other = through(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


@each_error
def test_the_message_is_one_line(error, attributes, builtin):
    assert str(error)
    assert "\n" not in str(error)


def test_the_message_names_the_numbers_and_the_way_out():
    assert str(kvpager.OutOfBlocks(5, 2, 1, 12, (0, 3))) == (
        "needed 5 blocks for rows 0, 3, but 2 are free and 1 evictable of 12:"
        " release or preempt a sequence, then try again"
    )
    assert str(kvpager.OutOfBlocks(5, 2, 1, 12, reserve=3)) == (
        "needed 5 blocks (3 of them the watermark's reserve), but 2 are free and 1 evictable of 12:"
        " release or preempt a sequence, then try again"
    )
    assert str(kvpager.NeverFits(13, 12)) == (
        "the request needs 13 blocks, but the whole pool has 12 usable ones: shorten it or build a larger pager"
    )


@pytest.mark.parametrize(
    ("state", "advice"),
    [("released", "admit"), ("preempted", "resume"), ("running", "only a preempted or swapped"), ("odd", "odd")],
)
def test_a_stale_handle_says_what_happened_to_it(state, advice):
    message = str(kvpager.StaleHandle(7, state, "append"))
    assert message.startswith("append refused: sequence 7 ")
    assert advice in message


def test_a_token_of_the_wrong_kind_is_both_a_value_and_a_type_error():
    assert issubclass(kvpager.TokenTypeError, kvpager.TokenError)
    assert issubclass(kvpager.TokenTypeError, ValueError)

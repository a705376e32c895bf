"""What is accepted, what is refused with which error, and that a refused call changes nothing (I7, I14)."""

from __future__ import annotations

import array
import collections
import ctypes
import gc

import numpy as np
import pytest
from implementations import admit_committed, cache, each_implementation, line, nothing_changes, refuses

import kvpager

pytestmark = each_implementation

VALUES = [0, 1, 2, 127, 5, 6, 7, 8, 9]

ACCEPTED = {
    "list": VALUES,
    "tuple": tuple(VALUES),
    "numpy scalars": [np.int64(value) for value in VALUES],
    "mixed scalars": [np.uint8(value) if value % 2 else value for value in VALUES],
    **{f"numpy {kind}": np.array(VALUES, kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")},
    "strided": np.repeat(np.array(VALUES, "i4"), 2)[::2],
    "reversed": np.array(VALUES[::-1], "i8")[::-1],
    "read-only": np.frombuffer(np.array(VALUES, "i4").tobytes(), "i4"),
    **{f"array {code}": array.array(code, VALUES) for code in "bBhHiIlLqQ"},
    "memoryview": memoryview(array.array("i", VALUES)),
    "strided memoryview": memoryview(array.array("q", [value for value in VALUES for _ in range(3)]))[::3],
    "bytes": bytes(VALUES),
    "bytearray": bytearray(VALUES),
    "another sequence": collections.UserList(VALUES),
    "ctypes": (ctypes.c_int32 * len(VALUES))(*VALUES),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_integer_lists_and_buffers_are_the_same_tokens(implementation, kind):
    pager = implementation(8, 4)
    cache(pager, VALUES)
    sequence = pager.admit(ACCEPTED[kind])
    assert (sequence.num_cached, sequence.tokens.tolist()) == (8, VALUES)
    sequence.extend(ACCEPTED[kind])
    assert sequence.tokens.tolist() == VALUES + VALUES
    assert pager.match(ACCEPTED[kind]).num_tokens == 8
    assert pager.can_admit(ACCEPTED[kind])
    assert pager.forget(ACCEPTED[kind][:4]) == 2


@pytest.mark.parametrize("value", [0, 2**30, 2**31 - 1])
def test_the_ends_of_the_range_are_tokens(implementation, value):
    pager = implementation(8, 4)
    for prompt in ([value], np.array([value], "u8"), (np.uint32(value),)):
        assert pager.admit(prompt).tokens.tolist() == [value]


OUT_OF_RANGE = {
    "negative": ([1, 2, -1], 2, -1),
    "2^31": ([2**31, 1], 0, 2**31),
    "huge": ([1, 2**70], 1, 2**70),
    "very negative": ([1, -(2**70)], 1, -(2**70)),
    "int32 array": (np.array([1, 2, 3, -7], "i4"), 3, -7),
    "uint32 array": (np.array([1, 2**32 - 1], "u4"), 1, 2**32 - 1),
    "int64 array": (np.array([1, 2**31, -1], "i8"), 1, 2**31),
    "uint64 array": (np.array([2**64 - 1], "u8"), 0, 2**64 - 1),
    "strided": (np.array([1, 9, -3, 9, -5, 9], "i4")[::2], 1, -3),
    "numpy scalar": ([1, np.int64(-1)], 1, -1),
    "int8 array": (array.array("b", [1, -128]), 1, -128),
    "first of several": ([-2, -3, 1.5], 0, -2),
}

WRONG_TYPE = {
    "float": ([1, 2.0], 1, 2.0),
    "bool": ([True, 1], 0, True),
    "numpy bool": ([1, np.True_], 1, None),
    "numpy float": ([1, np.float32(1)], 1, None),
    "None": ([None], 0, None),
    "text item": ([1, "2"], 1, "2"),
    "nested": ([1, [2]], 1, None),
    "nested tuple": ([(1, 2)], 0, None),
    "nested array": ([np.array([1, 2])], 0, None),
    "text": ("123", None, None),
    "number": (5, None, None),
    "nothing": (None, None, None),
    "generator": ((token for token in [1, 2]), None, None),
    "set": ({1, 2}, None, None),
    "float array": (np.array([1.0, 2.0]), None, None),
    "bool array": (np.array([True]), None, None),
    "complex array": (np.array([1j]), None, None),
    "object array": (np.array([1, 2], dtype=object), None, None),
    "two dimensions": (np.ones((2, 2), "i4"), None, None),
    "no dimension": (np.array(5, "i4"), None, None),
    "other byte order": (np.array([1, 2], np.dtype("i4").newbyteorder()), None, None),
    "dates": (np.array(["2024-01-01"], "M8[D]"), None, None),
    "structures": (np.zeros(2, [("token", "i4")]), None, None),
    "characters": (np.array([b"a"], "S1"), None, None),
}

PROMPT_CALLS = {
    "admit": lambda pager, sequence, tokens: pager.admit(tokens),
    "try_admit": lambda pager, sequence, tokens: pager.try_admit(tokens),
    "can_admit": lambda pager, sequence, tokens: pager.can_admit(tokens),
    "match": lambda pager, sequence, tokens: pager.match(tokens),
}
CALLS = {
    **PROMPT_CALLS,
    "forget": lambda pager, sequence, tokens: pager.forget(tokens),
    "extend": lambda pager, sequence, tokens: sequence.extend(tokens),
    "try_extend": lambda pager, sequence, tokens: sequence.try_extend(tokens),
}


def used(implementation):
    """A pager with something of everything in it, and a running sequence of 6 tokens, 5 of them committed."""
    pager = implementation(12, 4)
    cache(pager, [9] * 8)
    sequence = pager.admit([1, 2, 3, 4, 5, 6])
    sequence.commit(5)
    sequence.fork()[0].release()
    return pager, sequence


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(implementation, call, what):
    pager, sequence = used(implementation)
    tokens, position, value = OUT_OF_RANGE[what]
    with nothing_changes(pager), refuses(kvpager.TokenError, match=str(value)) as refused:
        CALLS[call](pager, sequence, tokens)
    assert not isinstance(refused.value, TypeError)
    assert (refused.value.position, refused.value.value) == (position, value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", WRONG_TYPE)
def test_a_value_of_another_type_is_named(implementation, call, what):
    pager, sequence = used(implementation)
    tokens, position, value = WRONG_TYPE[what]
    with nothing_changes(pager), refuses(kvpager.TokenTypeError) as refused:
        CALLS[call](pager, sequence, tokens)
    assert refused.value.position == position
    assert value is None or refused.value.value == value
    assert pager.stats().refused_calls == 0


@pytest.mark.parametrize("call", PROMPT_CALLS)
@pytest.mark.parametrize("empty", [[], (), np.array([], "i4"), b""], ids=["list", "tuple", "array", "bytes"])
def test_a_prompt_is_never_empty(implementation, call, empty):
    pager, sequence = used(implementation)
    with nothing_changes(pager), refuses(kvpager.TokenError, match="empty"):
        PROMPT_CALLS[call](pager, sequence, empty)


@pytest.mark.parametrize("call", ["append", "try_append"])
def test_one_token_is_checked_like_many(implementation, call):
    pager, sequence = used(implementation)
    for wrong, error in [
        (-1, kvpager.TokenError),
        (2**31, kvpager.TokenError),
        (2**70, kvpager.TokenError),
        (1.0, kvpager.TokenTypeError),
        (True, kvpager.TokenTypeError),
        ("1", kvpager.TokenTypeError),
        ([1], kvpager.TokenTypeError),
        (None, kvpager.TokenTypeError),
    ]:
        with nothing_changes(pager), refuses(error) as refused:
            getattr(sequence, call)(wrong)
        assert refused.value.position is None
    assert getattr(sequence, call)(np.int64(7)) is not None


BAD_ARGUMENTS = {
    "commit beyond len": (lambda sequence: sequence.commit(7), ValueError),
    "commit below 0": (lambda sequence: sequence.commit(-1), ValueError),
    "commit of a huge number": (lambda sequence: sequence.commit(2**70), ValueError),
    "commit of a float": (lambda sequence: sequence.commit(5.0), TypeError),
    "slots of committed": (lambda sequence: sequence.slots(4, 6), ValueError),
    "slots beyond len": (lambda sequence: sequence.slots(5, 7), ValueError),
    "slots backwards": (lambda sequence: sequence.slots(6, 5), ValueError),
    "slots below 0": (lambda sequence: sequence.slots(-1, 6), ValueError),
    "slots of a huge number": (lambda sequence: sequence.slots(5, 2**70), ValueError),
    "slots of a float": (lambda sequence: sequence.slots(5, 6.0), TypeError),
    "slots without stop": (lambda sequence: sequence.slots(5), TypeError),
    "try_slots beyond len": (lambda sequence: sequence.try_slots(5, 7), ValueError),
    "truncate to 0": (lambda sequence: sequence.truncate(0), ValueError),
    "truncate below 0": (lambda sequence: sequence.truncate(-1), ValueError),
    "truncate beyond len": (lambda sequence: sequence.truncate(7), ValueError),
    "truncate to a huge number": (lambda sequence: sequence.truncate(2**70), ValueError),
    "truncate to nothing": (lambda sequence: sequence.truncate(None), TypeError),
    "fork of 0": (lambda sequence: sequence.fork(0), ValueError),
    "fork below 0": (lambda sequence: sequence.fork(-(2**70)), ValueError),
    "fork of a float": (lambda sequence: sequence.fork(1.0), TypeError),
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_a_bad_argument_changes_nothing(implementation, what):
    pager, sequence = used(implementation)
    call, error = BAD_ARGUMENTS[what]
    with nothing_changes(pager), refuses(error):
        call(sequence)


@pytest.mark.parametrize(
    ("namespace", "error"),
    [
        ("text", TypeError),
        (None, TypeError),
        (5, TypeError),
        ([("a", b"")], TypeError),
        (("a", b""), TypeError),
        ((("a", "b"),), TypeError),
        (((b"a", b"b"),), TypeError),
        ((("a", b"b", b"c"),), TypeError),
        ((["a", b"b"],), TypeError),
        ((("", b"b"),), kvpager.ConfigError),
        ((("a b", b""),), kvpager.ConfigError),
        ((("ä", b""),), kvpager.ConfigError),
        ((("\ud800", b""),), kvpager.ConfigError),
        ((("a\n", b""),), kvpager.ConfigError),
        ((("a" * 65, b""),), kvpager.ConfigError),
        (b"x" * 65_536, kvpager.ConfigError),
        ((("a", b"x" * 65_527),), kvpager.ConfigError),
    ],
)
def test_a_bad_namespace_is_refused(implementation, namespace, error):
    pager, _ = used(implementation)
    for call in (pager.admit, pager.try_admit, pager.can_admit, pager.match, pager.forget):
        with nothing_changes(pager), refuses(error):
            call([1, 2, 3, 4], namespace=namespace)


@pytest.mark.parametrize(
    "namespace",
    [b"", b"\x00", b"x" * 65_535, (), (("a", b""),), (("A-z_0.9" * 9, b"x"), ("a", b"")), (("a", b"x" * 65_526),)],
    ids=["empty", "zero", "longest", "no pairs", "empty value", "two pairs", "longest value"],
)
def test_a_good_namespace_is_kept_as_given(implementation, namespace):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, [1] * 5, namespace=namespace)
    assert sequence.namespace == namespace
    assert type(sequence.namespace) is type(namespace)
    assert pager.match([1] * 5, namespace=namespace).num_tokens == 4
    assert f"namespace {namespace!r}; cached" in line(pager, "sequence 0")


@pytest.mark.parametrize("pin", [None, 1, "yes"])
def test_pin_is_a_bool(implementation, pin):
    pager, _ = used(implementation)
    for call in (pager.admit, pager.try_admit, pager.can_admit):
        with nothing_changes(pager), refuses(TypeError):
            call([1], pin=pin)


@pytest.mark.parametrize("identity", ["text", 5, bytearray(b"x")])
def test_an_identity_is_bytes(implementation, identity):
    pager, _ = used(implementation)
    with nothing_changes(pager), refuses(TypeError):
        pager.reset(identity)
    with refuses(TypeError):
        implementation(8, 4, identity=identity)


def test_an_identity_has_a_limit(implementation):
    pager, _ = used(implementation)
    with nothing_changes(pager), refuses(kvpager.ConfigError, match="65536"):
        pager.reset(b"x" * 65_537)
    assert len(implementation(8, 4, identity=b"x" * 65_536).identity) == 65_536


GOOD_CONFIGURATIONS = [
    {"num_blocks": 1},
    {"num_blocks": np.int64(5), "block_size": np.int32(3)},
    {"num_blocks": 2, "block_size": 1024},
    {"num_blocks": 2, "null_block": True},
    {"num_blocks": 2, "watermark": 0},
    {"num_blocks": 2, "watermark": 1},
    {"num_blocks": 2, "watermark": np.float64(0.25)},
    {"num_blocks": 2, "seed": 0},
    {"num_blocks": 2, "seed": 2**64 - 1},
]


@pytest.mark.parametrize("arguments", GOOD_CONFIGURATIONS, ids=str)
def test_a_configuration_can_be_read_back(implementation, arguments):
    pager = implementation(**arguments)
    for name, value in arguments.items():
        assert getattr(pager, name) == value
    assert pager.num_free_blocks == arguments["num_blocks"] - pager.null_block


def test_the_defaults(implementation):
    pager = implementation(8)
    assert (pager.block_size, pager.policy, pager.watermark, pager.identity) == (16, "lru", 0.0, b"")
    assert (pager.null_block, pager.prefix_cache) == (False, True)
    assert 0 <= pager.seed < 2**64
    assert pager.seed != implementation(8).seed, "drawn from the operating system"


BAD_CONFIGURATIONS = [
    ({"num_blocks": 0}, kvpager.ConfigError),
    ({"num_blocks": -1}, kvpager.ConfigError),
    ({"num_blocks": 2**31}, kvpager.ConfigError),
    ({"num_blocks": 2**70}, kvpager.ConfigError),
    ({"num_blocks": 2**30, "block_size": 1024}, kvpager.ConfigError),
    ({"num_blocks": 8.0}, TypeError),
    ({"num_blocks": "8"}, TypeError),
    ({"num_blocks": True}, TypeError),
    ({"num_blocks": 8, "block_size": 0}, kvpager.ConfigError),
    ({"num_blocks": 8, "block_size": 1025}, kvpager.ConfigError),
    ({"num_blocks": 8, "block_size": None}, TypeError),
    ({"num_blocks": 8, "policy": "fifo"}, kvpager.ConfigError),
    ({"num_blocks": 8, "policy": b"lru"}, TypeError),
    ({"num_blocks": 8, "watermark": -0.1}, kvpager.ConfigError),
    ({"num_blocks": 8, "watermark": 1.1}, kvpager.ConfigError),
    ({"num_blocks": 8, "watermark": float("nan")}, kvpager.ConfigError),
    ({"num_blocks": 8, "watermark": float("inf")}, kvpager.ConfigError),
    ({"num_blocks": 8, "watermark": "0.5"}, TypeError),
    ({"num_blocks": 8, "identity": b"x" * 65_537}, kvpager.ConfigError),
    ({"num_blocks": 8, "seed": -1}, kvpager.ConfigError),
    ({"num_blocks": 8, "seed": 2**64}, kvpager.ConfigError),
    ({"num_blocks": 8, "seed": 1.5}, TypeError),
    ({"num_blocks": 8, "null_block": 1}, TypeError),
    ({"num_blocks": 1, "null_block": True}, kvpager.ConfigError),
    ({"num_blocks": 8, "prefix_cache": None}, TypeError),
    ({"num_blocks": 8, "colour": "red"}, TypeError),
    ({}, TypeError),
]


@pytest.mark.parametrize(("arguments", "error"), BAD_CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_a_configuration_beyond_the_limits_is_refused(implementation, arguments, error):
    with refuses(error):
        implementation(**arguments)


def test_options_are_named(implementation):
    with refuses(TypeError):
        implementation(8, 4, "lru")
    pager = implementation(8, 4)
    with refuses(TypeError):
        pager.admit([1], b"tenant")


@pytest.mark.parametrize("call", CALLS)
def test_a_range_is_a_sequence_of_tokens_and_text_is_none(implementation, call):
    pager, sequence = used(implementation)
    other, twin = used(implementation)
    first = CALLS[call](pager, sequence, range(1, 5))
    second = CALLS[call](other, twin, [1, 2, 3, 4])
    assert pager.dump(full=True) == other.dump(full=True)
    assert type(first) is type(second)
    for text in ("", "12"):
        with nothing_changes(pager), refuses(kvpager.TokenTypeError):
            CALLS[call](pager, sequence, text)


class Interrupted:
    """Ctrl-C falls into the making of an error's message."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


INTERRUPTED = {
    "an item": lambda pager, sequence: pager.admit([1, Interrupted()]),
    "a token": lambda pager, sequence: sequence.append(Interrupted()),
    "a namespace": lambda pager, sequence: pager.admit([1], namespace=(Interrupted(),)),
}


@pytest.mark.parametrize("what", INTERRUPTED)
def test_an_interrupt_while_an_error_is_worded_is_not_lost(implementation, what):
    pager, sequence = used(implementation)
    with nothing_changes(pager), pytest.raises(KeyboardInterrupt):
        INTERRUPTED[what](pager, sequence)


MESSAGES = {
    "blocks": (lambda pager, sequence: type(pager)(0), "num_blocks is 0; it must be 1 to 2147483647"),
    "no blocks": (lambda pager, sequence: type(pager)(-1), "num_blocks is -1; it must be 1 to 2147483647"),
    "too many": (lambda pager, sequence: type(pager)(2**70), f"num_blocks is {2**70}; it must be 1 to 2147483647"),
    "block size": (lambda pager, sequence: type(pager)(8, 1025), "block_size is 1025; it must be 1 to 1024"),
    "watermark": (lambda pager, sequence: type(pager)(8, watermark=1.5), "watermark is 1.5; it must be 0 to 1"),
    "bool": (lambda pager, sequence: type(pager)(8, watermark=True), "watermark must be a number, not bool"),
    "policy": (lambda pager, sequence: type(pager)(8, policy="x" * 999), "policy is 'xxx"),
    "seed": (lambda pager, sequence: type(pager)(8, seed=-1), "seed is -1; it must be 0 to 18446744073709551615"),
    "identity": (lambda pager, sequence: pager.reset("text"), "identity must be bytes, not str"),
    "flag": (lambda pager, sequence: pager.admit([1], pin=1), "pin must be a bool, not int"),
    "start": (lambda pager, sequence: sequence.slots(-1, 6), "start is -1; it must be a position"),
    "stop": (lambda pager, sequence: sequence.slots(5, -1), "stop is -1; it must be a position"),
    "range": (lambda pager, sequence: sequence.slots(4, 9), "start is 4 and stop is 9; it must hold that 5 (num_"),
    "end": (lambda pager, sequence: sequence.commit(-1), "end is -1; it must be a position"),
    "end past it": (lambda pager, sequence: sequence.commit(7), "end is 7; it must be a position, 6 at most"),
    "children": (lambda pager, sequence: sequence.fork(0), "n is 0; it must be 1 to 65536"),
    "negative": (lambda pager, sequence: sequence.fork(-1), "n is -1; it must be 1 to 65536"),
    "cut": (lambda pager, sequence: sequence.truncate(7), "num_tokens is 7; it must be 1 to 6, the sequence's length"),
    "reason": (lambda pager, sequence: sequence.release("bored"), "reason is 'bored'; it must be "),
    "flat pair": (lambda pager, sequence: pager.admit([1], namespace=("a", b"b")), '(("tenant", b"a"),)'),
    "too long to print": (lambda pager, sequence: pager.admit([10**5000]), "not a value of type int that has no repr"),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_message_names_the_argument_its_value_and_its_limits(implementation, what):
    pager, sequence = used(implementation)
    call, words = MESSAGES[what]
    with nothing_changes(pager), refuses((ValueError, TypeError)) as refused:
        call(pager, sequence)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


def test_a_fork_is_bounded_by_what_its_children_copy(implementation):
    """65,536 children of a long prompt would copy gigabytes while every other call waits (rules.md 3.6)."""
    pager = implementation(16, 1024)
    sequence = pager.admit(np.ones(2**14, np.int32))
    with nothing_changes(pager), refuses(ValueError, match="1 to 16384 "):
        sequence.fork(2**14 + 1)
    assert len(sequence.fork(3)) == 3


def test_the_watermarks_share_of_what_was_needed_is_named(implementation):
    pager = implementation(10, 4, watermark=0.5)
    running = pager.admit([1] * 8)
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks, match="5 of them the watermark's reserve") as refused:
        pager.admit([2] * 16)
    assert (refused.value.needed, refused.value.reserve) == (9, 5)
    with refuses(kvpager.OutOfBlocks) as refused:
        pager.admit([2] * 36)
    assert (refused.value.needed, refused.value.reserve) == (9, 0), "without any reserve it would not fit either"
    running.release()


REFUSED = {
    "admit": lambda pager, sequence: pager.admit([1.5]),
    "try_admit": lambda pager, sequence: pager.try_admit([1], namespace="text"),
    "admit of an array": lambda pager, sequence: pager.admit(np.array([-1], np.int32)),
    "admit with a pin": lambda pager, sequence: pager.admit([1], pin=1),
    "forget": lambda pager, sequence: pager.forget([1.5]),
    "reset": lambda pager, sequence: pager.reset("text"),
    "append": lambda pager, sequence: sequence.append(-1),
    "extend": lambda pager, sequence: sequence.extend([-1]),
    "slots": lambda pager, sequence: sequence.slots(-1, 6),
    "commit": lambda pager, sequence: sequence.commit(-1),
    "fork": lambda pager, sequence: sequence.fork(-1),
    "truncate": lambda pager, sequence: sequence.truncate(-1),
    "resume": lambda pager, sequence: sequence.resume(),
    "release": lambda pager, sequence: sequence.release("bored"),
    "release, of a number": lambda pager, sequence: sequence.release(5),
}


@pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_has_released_the_dropped_handles(implementation, what):
    pager, sequence = used(implementation)
    dropped = pager.admit([7] * 9)
    free = pager.num_free_blocks
    del dropped
    gc.collect()
    for peek in (pager.match, pager.can_admit):
        with refuses(kvpager.TokenError):
            peek([-1])
    assert (pager.stats().dropped_handles, pager.num_free_blocks) == (0, free)
    with refuses((ValueError, TypeError)):
        REFUSED[what](pager, sequence)
    assert (pager.stats().dropped_handles, pager.num_free_blocks) == (1, free + 3)


def test_a_released_handle_is_asked_for_no_reason(implementation):
    pager, sequence = used(implementation)
    sequence.release()
    for reason in ("bored", 5, None):
        sequence.release(reason)
    assert pager.stats().noop_calls == 3

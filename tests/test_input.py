"""Whatever is passed in, core and reference answer alike: the same tokens, or the same error with the same numbers.

``test_reference_inputs.py`` says which answer is right for each kind of argument. Here the two are compared over many
more arguments, odd and random ones, in every call: a refused call changes nothing (I7), nothing ends in another error
than the documented ones (I14), and every error survives pickling.
"""

from __future__ import annotations

import array
import collections
import ctypes
import enum
import fractions
import mmap
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import kvpager
import kvpager.reference

DOCUMENTED = (kvpager.KvPagerError, ValueError, TypeError)


class Number(int):
    """An int of another type."""


class Kind(enum.IntEnum):
    TEXT = 3


class Index:
    """An integer by its ``__index__`` alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value!r})"


class Two(NamedTuple):
    a: int
    b: int


class Shy:
    """Something that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


class FakeList(list):  # type: ignore[type-arg]
    """A list that lies to whoever asks it politely."""

    def __iter__(self) -> Iterator[Any]:
        return iter([7, 7, 7])

    def __len__(self) -> int:
        return 99


def misaligned(dtype: str) -> np.ndarray[Any, Any]:
    values = np.arange(5, dtype=dtype)
    raw = bytearray(1) + values.tobytes()
    return np.frombuffer(raw, dtype, offset=1)


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, 8)
    memory.write(bytes(range(8)))
    return memory


# Made anew for each call: some are used up by being read.
TOKENS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2, 3, 4, 5],
    "tuple": lambda: (1, 2, 3, 4, 5),
    "empty list": list,
    "empty tuple": lambda: (),
    "subclass of list": lambda: FakeList([1, 2]),
    "named tuple": lambda: Two(1, 2),
    **{
        f"numpy {code}": lambda code=code: np.arange(5).astype(code)
        for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "f2", "f4", "f8", "c8", "S2", "U2", "O", "V4")
    },
    "longlong": lambda: np.arange(5, dtype=np.longlong),
    "intp": lambda: np.arange(5, dtype=np.intp),
    "dates": lambda: np.arange(5).astype("M8[D]"),
    "spans of time": lambda: np.arange(5).astype("m8[s]"),
    "structures": lambda: np.zeros(3, [("a", "i4"), ("b", "i2")]),
    "one field of structures": lambda: np.zeros(3, [("a", "i4"), ("b", "i2")])["a"],
    **{f"numpy >{code}": lambda code=code: np.arange(5).astype(f">{code}") for code in ("i2", "u4", "i8", "f8")},
    **{f"numpy <{code}": lambda code=code: np.arange(5).astype(f"<{code}") for code in ("i2", "u4", "i8", "f8")},
    "one byte has no order": lambda: np.arange(5).astype(">i1"),
    **{f"misaligned {code}": lambda code=code: misaligned(code) for code in ("i2", "u4", "i4", "i8", "u8", "f8")},
    "strided": lambda: np.arange(20, dtype="i4")[::4],
    "strided int64": lambda: np.arange(20)[::4],
    "reversed": lambda: np.arange(5, dtype="i4")[::-1],
    "reversed bytes": lambda: memoryview(bytes(range(5)))[::-1],
    "broadcast": lambda: np.broadcast_to(np.int32(3), (9,)),
    "read-only": lambda: np.frombuffer(np.arange(5, dtype="i4").tobytes(), "i4"),
    "column of two dimensions": lambda: np.arange(12, dtype="i4").reshape(4, 3)[:, 1],
    "two dimensions": lambda: np.ones((2, 3), "i4"),
    "one row": lambda: np.ones((1, 3), "i4"),
    "no dimension": lambda: np.array(3, "i4"),
    "masked": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "empty int32": lambda: np.array([], "i4"),
    "empty float": lambda: np.array([], "f8"),
    "empty two dimensions": lambda: np.ones((0, 3), "i4"),
    "numpy scalar": lambda: np.int32(3),
    **{f"array {code}": lambda code=code: array.array(code, [1, 2, 3]) for code in "bBhHiIlLqQfd"},
    "array of text": lambda: array.array("u", "abc"),
    "memoryview": lambda: memoryview(array.array("q", [1, 2, 3])),
    "memoryview of characters": lambda: memoryview(b"abc").cast("c"),
    "memoryview of bools": lambda: memoryview(b"\0\1").cast("?"),
    "memoryview of two dimensions": lambda: memoryview(bytes(6)).cast("B", (2, 3)),
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "mapped memory": mapped,
    **{
        f"ctypes {kind.__name__}": lambda kind=kind: (kind * 3)(1, 2, 3)
        for kind in (ctypes.c_int8, ctypes.c_uint16, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_double)
    },
    "ctypes of two dimensions": lambda: ((ctypes.c_int32 * 2) * 3)(),
    "a ctypes integer": lambda: ctypes.c_int32(3),
    "range": lambda: range(5),
    "generator": lambda: (token for token in [1, 2]),
    "iterator": lambda: iter([1, 2]),
    "set": lambda: {1, 2},
    "dict": lambda: {1: 2},
    "deque": lambda: collections.deque([1, 2]),
    "text": lambda: "123",
    "number": lambda: 5,
    "None": lambda: None,
    "shy": Shy,
    "class": lambda: int,
}

ITEMS: dict[str, Callable[[], Any]] = {
    "0": lambda: 0,
    "2^31 - 1": lambda: 2**31 - 1,
    "2^31": lambda: 2**31,
    "2^32": lambda: 2**32,
    "2^63": lambda: 2**63,
    "2^64": lambda: 2**64,
    "-1": lambda: -1,
    "-2^63 - 1": lambda: -(2**63) - 1,
    # Python refuses to print it, and an error about it must not fail for that.
    "longer than Python prints": lambda: 10**5000,
    "True": lambda: True,
    "None": lambda: None,
    "float": lambda: 1.0,
    "not a number": lambda: float("nan"),
    "complex": lambda: 1j,
    "text": lambda: "1",
    "bytes": lambda: b"1",
    "list": lambda: [1],
    "empty list": list,
    "tuple": lambda: (1, 2),
    "fraction": lambda: fractions.Fraction(2),
    "int subclass": lambda: Number(3),
    "negative int subclass": lambda: Number(-3),
    "enum": lambda: Kind.TEXT,
    **{f"numpy {kind.__name__}": lambda kind=kind: kind(3) for kind in (np.int8, np.uint16, np.int32, np.uint64)},
    "numpy -1": lambda: np.int64(-1),
    "numpy 2^64 - 1": lambda: np.uint64(2**64 - 1),
    "numpy bool": lambda: np.True_,
    "numpy float": lambda: np.float32(1),
    "numpy text": lambda: np.str_("1"),
    "array of no dimension": lambda: np.array(3),
    "array of one": lambda: np.array([3]),
    "array of two": lambda: np.array([3, 4]),
    "index": lambda: Index(3),
    "negative index": lambda: Index(-3),
    "huge index": lambda: Index(2**80),
    "index that is no integer": lambda: Index("3"),
    "shy": Shy,
    "class": lambda: int,
    "lone surrogate": lambda: "\ud800",
}

NAMESPACES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"a",
    "no pairs": lambda: (),
    "pair": lambda: (("a", b"b"),),
    "list of pairs": lambda: [("a", b"b")],
    "pair as a list": lambda: (["a", b"b"],),
    "bare pair": lambda: ("a", b"b"),
    "three of a pair": lambda: (("a", b"b", b"c"),),
    "bytes kind": lambda: ((b"a", b"b"),),
    "text value": lambda: (("a", "b"),),
    "bytearray": lambda: bytearray(b"a"),
    "bytearray value": lambda: (("a", bytearray(b"b")),),
    "memoryview": lambda: memoryview(b"a"),
    "text": lambda: "a",
    "None": lambda: None,
    "number": lambda: 3,
    "empty kind": lambda: (("", b""),),
    "kind of 64": lambda: (("a" * 64, b""),),
    "kind of 65": lambda: (("a" * 65, b""),),
    "kind with a space": lambda: (("a b", b""),),
    "kind with a newline": lambda: (("a\n", b""),),
    "kind with an umlaut": lambda: (("\u00e4", b""),),
    "kind with another script's digit": lambda: (("\u0663", b""),),
    "kind with a lone surrogate": lambda: (("\ud800", b""),),
    "longest": lambda: b"x" * 65_535,
    "too long": lambda: b"x" * 65_536,
    "longest pair": lambda: (("a", b"x" * 65_526),),
    "too long a pair": lambda: (("a", b"x" * 65_527),),
    "too many pairs": lambda: (("a", b"x"),) * 6_554,
    "good and bad": lambda: (("a", b"x"), None),
}

SETTINGS: dict[str, Callable[[Any], Any]] = {
    "num_blocks": lambda value: {"num_blocks": value},
    "block_size": lambda value: {"num_blocks": 8, "block_size": value},
    "seed": lambda value: {"num_blocks": 8, "seed": value},
    "watermark": lambda value: {"num_blocks": 8, "watermark": value},
    "policy": lambda value: {"num_blocks": 8, "policy": value},
    "identity": lambda value: {"num_blocks": 8, "identity": value},
    "null_block": lambda value: {"num_blocks": 8, "null_block": value},
    "prefix_cache": lambda value: {"num_blocks": 8, "prefix_cache": value},
}


class Used:
    """A pager of one kind with something of everything in it, and a running sequence with 5 of 6 tokens committed."""

    def __init__(self, kind: Any) -> None:
        self.pager = kind(64, 4)
        with self.pager.admit([9] * 8) as cached:
            cached.commit()
        self.sequence = self.pager.admit([1, 2, 3, 4, 5, 6])
        self.sequence.commit(5)

    def answer(self, call: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
        """What a call answers, as plain values. A refused one must change nothing, and its error must pickle."""
        before = self.pager.dump(full=True)
        try:
            found = call(self.pager, self.sequence)
        except DOCUMENTED as error:
            refusal = error.with_traceback(None)
        else:
            refusal = None
        assert self.pager.check() == []
        if refusal is not None:
            assert self.pager.dump(full=True) == before, "a refused call changed something (I7)"
            return pickled(refusal)
        if hasattr(found, "release"):
            answer = found.tokens.tolist(), found.block_ids.tolist(), found.num_cached, found.namespace
            found.release()
            return "sequence", *answer
        return "answer", found.tolist() if isinstance(found, np.ndarray) else found

    def close(self) -> None:
        self.sequence.release()
        assert self.pager.check() == []


def plain_error(error: Exception) -> tuple[Any, ...]:
    """Type and numbers; the wording of a message is each implementation's own."""
    if isinstance(error, kvpager.TokenTypeError):
        # How a value is shown is wording too, if it is none that can travel with the error.
        return type(error).__name__, error.position, type(error.value)
    if isinstance(error, kvpager.TokenError):
        return type(error).__name__, error.position, type(error.value), error.value
    if isinstance(error, kvpager.OutOfBlocks | kvpager.NeverFits | kvpager.StaleHandle):
        return type(error).__name__, error.args
    # A builtin may come as one of its own kind: a UnicodeEncodeError is a ValueError.
    kinds = (type(error),) if isinstance(error, kvpager.KvPagerError) else (ValueError, TypeError)
    return (next(kind.__name__ for kind in kinds if isinstance(error, kind)),)


def pickled(error: Exception) -> tuple[Any, ...]:
    """The numbers of an error, after it has proved that they survive pickling."""
    copy = pickle.loads(pickle.dumps(error))
    assert (plain_error(copy), str(copy)) == (plain_error(error), str(error))
    return plain_error(error)


def both(call: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    """The answer that core and reference agree on."""
    core, reference = Used(kvpager.Pager), Used(kvpager.reference.Pager)
    try:
        answers = core.answer(call), reference.answer(call)
        assert answers[0] == answers[1]
        assert core.pager.dump(full=True) == reference.pager.dump(full=True)
    finally:
        core.close()
        reference.close()
    return answers[0]


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "admit": lambda pager, sequence, tokens: pager.admit(tokens),
    "try_admit": lambda pager, sequence, tokens: pager.try_admit(tokens),
    "can_admit": lambda pager, sequence, tokens: pager.can_admit(tokens),
    "match": lambda pager, sequence, tokens: pager.match(tokens),
    "forget": lambda pager, sequence, tokens: pager.forget(tokens),
    "extend": lambda pager, sequence, tokens: sequence.extend(tokens),
    "try_extend": lambda pager, sequence, tokens: sequence.try_extend(tokens),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_of_every_kind(kind, call):
    both(lambda pager, sequence: CALLS[call](pager, sequence, TOKENS[kind]()))


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_every_kind(kind):
    """In a list behind good tokens, in a tuple before a bad one, alone in ``append``, and in an array of objects."""
    for call in CALLS.values():
        both(lambda pager, sequence, call=call: call(pager, sequence, [1, 2, ITEMS[kind]()]))
    both(lambda pager, sequence: pager.admit((ITEMS[kind](), -1)))
    both(lambda pager, sequence: sequence.append(ITEMS[kind]()))
    both(lambda pager, sequence: sequence.try_append(ITEMS[kind]()))


@pytest.mark.parametrize("kind", ITEMS)
def test_positions_of_every_kind(kind):
    """``10**5000`` and ``True`` are as little a position as ``None`` is."""
    both(lambda pager, sequence: sequence.commit(ITEMS[kind]()))
    both(lambda pager, sequence: sequence.truncate(ITEMS[kind]()))
    both(lambda pager, sequence: sequence.slots(ITEMS[kind](), 6))
    both(lambda pager, sequence: sequence.slots(5, ITEMS[kind]()))
    both(lambda pager, sequence: sequence.try_slots(5, ITEMS[kind]()))
    if kind not in ("2^31 - 1", "2^31", "2^32", "2^63", "2^64", "longer than Python prints", "huge index"):
        # The reference would make so many children.
        both(lambda pager, sequence: [child.release() for child in sequence.fork(ITEMS[kind]())])


@pytest.mark.parametrize("count", [2**31, 2**63, 2**64, 10**5000], ids=["2^31", "2^63", "2^64", "10^5000"])
def test_a_fork_into_too_many_is_refused(count):
    used = Used(kvpager.Pager)
    assert used.answer(lambda pager, sequence: sequence.fork(count)) == ("ValueError",)
    used.close()


@pytest.mark.parametrize("kind", NAMESPACES)
def test_namespaces_of_every_kind(kind):
    for call in ("admit", "try_admit", "can_admit", "match"):
        both(lambda pager, sequence, call=call: getattr(pager, call)([1, 2], namespace=NAMESPACES[kind]()))
    both(lambda pager, sequence: pager.forget([1, 2, 3, 4], namespace=NAMESPACES[kind]()))


@pytest.mark.parametrize("kind", ITEMS)
def test_other_arguments_of_every_kind(kind):
    for call in ("admit", "try_admit", "can_admit"):
        both(lambda pager, sequence, call=call: getattr(pager, call)([1, 2], pin=ITEMS[kind]()))
    both(lambda pager, sequence: pager.reset(ITEMS[kind]()))
    both(lambda pager, sequence: sequence.release(ITEMS[kind]()))


def built(kind: Any, chosen: dict[str, Any]) -> tuple[Any, ...]:
    try:
        pager = kind(**chosen)
    except DOCUMENTED as error:
        return pickled(error)
    chosen.pop("seed", None)
    read = {name: getattr(pager, name) for name in SETTINGS if name != "seed"}
    return "pager", pager.dump(full=True) if pager.num_blocks < 10_000 else pager.num_blocks, read


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_every_kind(setting, kind):
    if (setting, kind) == ("num_blocks", "2^31 - 1"):
        # The reference would build lists of so many blocks. test_interrupts.py builds such a pool.
        return
    given_settings = SETTINGS[setting](ITEMS[kind]())
    assert built(kvpager.Pager, dict(given_settings)) == built(kvpager.reference.Pager, dict(given_settings))


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 2**31, "block_size": 1},
        {"num_blocks": 2**30, "block_size": 1024},
        {"num_blocks": 1, "null_block": True},
        {"num_blocks": 2, "null_block": True},
        {"num_blocks": 8, "watermark": 1},
        {"num_blocks": 8, "watermark": 1.0000001},
        {"num_blocks": 8, "watermark": -0.0},
        {"num_blocks": 8, "watermark": float("inf")},
        {"num_blocks": 8, "policy": "slru"},
        {"num_blocks": 8, "policy": "LRU"},
        {"num_blocks": 8, "identity": b"x" * 65_536},
        {"num_blocks": 8, "identity": b"x" * 65_537},
        {"num_blocks": 8, "block_size": 1024},
        {"num_blocks": 8, "block_size": 1025},
        {"num_blocks": 0},
        {},
        {"num_blocks": 8, "colour": "red"},
    ],
    ids=lambda limits: str(limits)[:60],
)
def test_settings_at_their_limits(limits):
    assert built(kvpager.Pager, dict(limits)) == built(kvpager.reference.Pager, dict(limits))


# Anything a caller might put into a list, nested and mixed.
ANYTHING = st.recursive(
    st.integers(-3, 9)
    | st.integers()
    | st.sampled_from([2**31 - 1, 2**31, 2**30])
    | st.booleans()
    | st.none()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(sorted(ITEMS)).map(lambda kind: ITEMS[kind]()),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner),
    max_leaves=4,
)


@settings(max_examples=500)
@given(
    tokens=st.lists(st.integers(0, 3) | ANYTHING, max_size=9),
    as_tuple=st.booleans(),
    call=st.sampled_from(sorted(CALLS)),
)
def test_lists_of_anything(tokens, as_tuple, call):
    both(lambda pager, sequence: CALLS[call](pager, sequence, tuple(tokens) if as_tuple else tokens))


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=500)
@given(
    values=st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9) | st.integers(2**31 - 2, 2**31 + 2), max_size=9
    ),
    code=st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", "<i8", "f4"]),
    step=st.sampled_from([1, 2, 3, -1, -2]),
    offset=st.integers(0, 7),
    call=st.sampled_from(sorted(CALLS)),
)
def test_arrays_of_anything(values, code, step, offset, call):
    """Any integers in any width, spacing and alignment: what does not fit the width wraps, and is then judged."""
    packed = np.array(values, np.int64).astype(code)
    raw = bytearray(offset) + packed.tobytes()
    tokens = np.frombuffer(raw, code, offset=offset)[::step]
    both(lambda pager, sequence: CALLS[call](pager, sequence, tokens))


@given(raw=st.binary(max_size=24), code=st.sampled_from("bBhHiIlLqQnNfd?c"), call=st.sampled_from(sorted(CALLS)))
def test_memoryviews_of_anything(raw, code, call):
    whole = memoryview(raw)[: len(raw) // 8 * 8]
    both(lambda pager, sequence: CALLS[call](pager, sequence, whole.cast(code)))


class TestW8NamespacesDoNotCollide:
    """Fields are typed and prefixed with their length, so that no two namespaces share a key."""

    NAMESPACES: tuple[Any, ...] = (
        b"",
        b"\0",
        b"\1",
        b"a",
        b"ab",
        b"\1\1\0\0\0a\1\0\0\0b",
        b"\1\0\0\0a\1\0\0\0b",
        (),
        (("a", b""),),
        (("a", b"b"),),
        (("ab", b""),),
        (("a", b""), ("b", b"")),
        (("b", b""), ("a", b"")),
        (("a", b""), ("a", b"")),
        (("a", b"\1\0\0\0b\0\0\0\0"),),
        (("lora", b"7"),),
        (("tenant", b"7"),),
        (("lora", b"7"), ("tenant", b"7")),
        (("lora", b"77"), ("tenant", b"")),
    )

    def test_equal_tokens_are_shared_in_the_same_namespace_only(self):
        for kind in (kvpager.Pager, kvpager.reference.Pager):
            pager = kind(64, 4)
            for namespace in self.NAMESPACES:
                assert pager.match([1] * 5, namespace=namespace).num_tokens == 0, f"{namespace!r} hit another's block"
                with pager.admit([1] * 5, namespace=namespace) as sequence:
                    sequence.commit()
                assert pager.match([1] * 5, namespace=namespace).num_tokens == 4
            assert pager.stats().cached_blocks == len(self.NAMESPACES)
            assert pager.check() == []

    pairs = st.tuples(st.text("ab", min_size=1, max_size=2), st.binary(max_size=6))
    namespaces = st.binary(max_size=12) | st.lists(pairs, max_size=3).map(tuple)

    @given(one=namespaces, other=namespaces)
    def test_two_namespaces_share_only_if_they_are_equal(self, one, other):
        pager = kvpager.Pager(8, 4)
        with pager.admit([1] * 5, namespace=one) as sequence:
            sequence.commit()
            assert sequence.namespace == one
        assert (pager.match([1] * 5, namespace=other).num_tokens == 4) == (one == other)

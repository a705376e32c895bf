"""Bugs that were once in kvpager, one numbered test each, with one sentence on the bug."""

from __future__ import annotations

import enum
import pickle

import pytest

import kvpager
import kvpager.reference

BOTH = pytest.mark.parametrize("implementation", [kvpager.Pager, kvpager.reference.Pager], ids=["core", "reference"])


class Kind(str, enum.Enum):  # noqa: UP042 - StrEnum would define __str__ itself
    """Kinds that all say the same of themselves."""

    A = "tenant-a"
    B = "tenant-b"

    def __str__(self) -> str:
        return "tenant"


@BOTH
def test_r1_a_kind_is_its_text_and_not_what_str_says(implementation: type[kvpager.Pager]) -> None:
    """The core asked `str(kind)`, so two unequal namespaces shared a hit (W8)."""
    pager = implementation(16, 2)
    with pager.admit([1, 2, 3], namespace=((Kind.A, b"x"),)) as sequence:
        sequence.commit()
    assert pager.match([1, 2, 3], namespace=((Kind.B, b"x"),)).num_tokens == 0
    assert pager.match([1, 2, 3], namespace=(("tenant-a", b"x"),)).num_tokens == 2


@BOTH
def test_r2_a_deep_comb_is_drawn_in_lines_of_bounded_length(implementation: type[kvpager.Pager]) -> None:
    """Indentation grew with the depth, so the drawing grew with its square and could use up the machine."""
    pager = implementation(400, 1)
    for depth in range(1, 100):
        with pager.admit([1] * depth + [2, 3]) as sequence:
            sequence.commit()
    drawing = pager.dump()
    assert drawing == kvpager_twin(400).dump()
    assert max(map(len, drawing.splitlines())) < 300


def kvpager_twin(num_blocks: int) -> kvpager.reference.Pager:
    pager = kvpager.reference.Pager(num_blocks, 1)
    for depth in range(1, 100):
        with pager.admit([1] * depth + [2, 3]) as sequence:
            sequence.commit()
    return pager


def test_r3_errors_carry_only_what_pickles() -> None:
    """A function among the tokens travelled in the error, which then could not be sent to another process."""
    pager = kvpager.Pager(4)
    with pytest.raises(kvpager.TokenTypeError) as found:
        pager.admit([lambda: 0])  # type: ignore[list-item]
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


def test_r4_a_token_of_five_thousand_digits_is_a_token_error() -> None:
    """Showing it in the message raised a bare ValueError of the interpreter's."""
    with pytest.raises(kvpager.TokenError):
        kvpager.Pager(4).admit([10**5000])


@BOTH
def test_r5_a_handle_is_true(implementation: type[kvpager.Pager]) -> None:
    """Truth went through `len`, which a released handle refuses."""
    sequence = implementation(4).admit([1])
    sequence.release()
    assert sequence


def test_r6_the_chain_of_forgotten_nodes_does_not_grow() -> None:
    """Held nodes that were forgotten stayed in their bucket, where each later call walked past them (I13)."""
    pager = kvpager.Pager(200, 2)
    held = []
    for _ in range(50):
        sequence = pager.admit([1, 2, 3])
        sequence.commit()
        assert pager.forget([1, 2]) == 1
        held.append(sequence)
    assert pager.check() == []
    for sequence in held:
        sequence.release()
    assert pager.check() == []
    assert pager.num_free_blocks == 200


def test_r7_the_table_of_namespaces_grows_with_sequences_that_hold_no_block() -> None:
    """Preempted sequences hold a namespace and no block, so a small pool's table had chains without bound (I13)."""
    pager = kvpager.Pager(8, 16)
    waiting = []
    for number in range(2000):
        sequence = pager.admit([1], namespace=number.to_bytes(4, "little"))
        sequence.preempt()
        waiting.append(sequence)
    assert pager.check() == []
    for sequence in waiting:
        sequence.release()
    assert pager.check() == []

"""The two pagers that the same tests run against, and the few steps that most tests repeat."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvpager
import kvpager.reference

IMPLEMENTATIONS: dict[str, Any] = {"reference": kvpager.reference.Pager, "core": kvpager.Pager}

# A module's pytestmark: every test takes ``implementation`` and runs once for each pager. Most tests end with sequences
# still running, which is no mistake there, though a caller is warned of it.
each_implementation = [
    pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()),
    pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning"),
]

# The same for tests of batches, which switch on by themselves where an implementation has them.
WITH_BATCH = {name: pager for name, pager in IMPLEMENTATIONS.items() if hasattr(pager, "batch")}
each_with_batch = [
    pytest.mark.parametrize("implementation", WITH_BATCH.values(), ids=WITH_BATCH.keys()),
    each_implementation[1],
]


# The calls of a sequence, by name, for tests that try all of them: those that only a running one allows, those that end
# a preemption, and those that a preempted one allows as well.
RUNNING_CALLS: dict[str, Callable[[Any], Any]] = {
    "append": lambda sequence: sequence.append(1),
    "try_append": lambda sequence: sequence.try_append(1),
    "extend": lambda sequence: sequence.extend([1]),
    "try_extend": lambda sequence: sequence.try_extend([1]),
    "slots": lambda sequence: sequence.slots(0, 1),
    "try_slots": lambda sequence: sequence.try_slots(0, 1),
    "commit": lambda sequence: sequence.commit(),
    "fork": lambda sequence: sequence.fork(),
    "truncate": lambda sequence: sequence.truncate(1),
    "preempt": lambda sequence: sequence.preempt(),
    "block_ids": lambda sequence: sequence.block_ids,
}
RESUMES: dict[str, Callable[[Any], Any]] = {
    "resume": lambda sequence: sequence.resume(),
    "try_resume": lambda sequence: sequence.try_resume(),
}
GETTERS: dict[str, Callable[[Any], Any]] = {
    "num_preemptions": lambda sequence: sequence.num_preemptions,
    "len": len,
    "tokens": lambda sequence: sequence.tokens,
    "num_cached": lambda sequence: sequence.num_cached,
    "num_committed": lambda sequence: sequence.num_committed,
    "num_planned": lambda sequence: sequence.num_planned,
    "namespace": lambda sequence: sequence.namespace,
    "pinned": lambda sequence: sequence.pinned,
}


class Refusal:
    """The error that a call was refused with."""

    value: Any = None


@contextmanager
def refuses(error: type[BaseException], match: str = "") -> Iterator[Refusal]:
    """``pytest.raises`` that keeps no traceback, which would keep the test's handles for the garbage collector."""
    refusal = Refusal()
    try:
        yield refusal
    except error as caught:
        refusal.value = caught.with_traceback(None)
    else:
        pytest.fail(f"not refused with {error.__name__}")
    assert re.search(match, str(refusal.value)), f"{refusal.value} does not say {match!r}"


def ids(sequence: Any) -> list[int]:
    """The block table as a list."""
    found: list[int] = sequence.block_ids.tolist()
    return found


def in_batch(pager: Any, *sequences: Any, **options: Any) -> Any:
    """A batch with these sequences in its first rows."""
    batch = pager.batch(8, 8, **options)
    for sequence in sequences:
        batch.add(sequence)
    return batch


def plan(step: Any) -> tuple[list[int], list[int]]:
    """Positions and slots of a step."""
    return step.positions.tolist(), step.slot_mapping.tolist()


def admit_committed(pager: Any, tokens: Any, **how: Any) -> Any:
    """Admit a prompt and say that all its KV is written."""
    sequence = pager.admit(tokens, **how)
    sequence.commit()
    return sequence


def cache(pager: Any, tokens: Any, **how: Any) -> None:
    """Leave a prompt's full blocks behind as cached ones."""
    admit_committed(pager, tokens, **how).release()


def line(pager: Any, start: str) -> str:
    """The one line of the full dump that starts like this."""
    found: list[str] = [text for text in pager.dump(full=True).splitlines() if text.startswith(start)]
    assert len(found) == 1, f"{len(found)} lines start with {start!r}"
    return found[0]


def free_ids(pager: Any) -> str:
    """The free blocks, in the order in which they would be handed out."""
    return line(pager, "free: ").removeprefix("free: ")


@contextmanager
def nothing_changes(pager: Any) -> Iterator[None]:
    """I7: whatever happens inside leaves everything that decides later answers as it was."""
    before = pager.dump(full=True)
    yield
    assert pager.dump(full=True) == before
    assert pager.check() == []


def assert_nothing_leaked(pager: Any) -> None:
    """Every block is free or cached, every sequence is gone, and the recount agrees (I1, I2)."""
    gc.collect()
    pager.take_copies()
    stats = pager.stats()
    assert pager.check() == []
    assert stats.running_sequences == stats.preempted_sequences == stats.active_blocks == 0
    assert stats.free_blocks + stats.cached_blocks + stats.reserved_blocks == stats.total_blocks

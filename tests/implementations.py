"""The two pagers that the same tests run against, and the few steps that most tests repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator
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

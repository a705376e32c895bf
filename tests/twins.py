"""The core and its oracle side by side: every call goes to both, and nothing that they show may differ.

After each call the two must agree on the answer (ids and numbers, or the error and its numbers), on the statistics and
on the full dump, and both checkers must be silent. A call that failed must have left everything as it was (I7).
"""

from __future__ import annotations

import array
import dataclasses
import difflib
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import kvpager
import kvpager.reference

Outcome: TypeAlias = tuple[Any, ...]

# One prompt in the forms in which callers have it. The reference always gets the list.
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "uint32": lambda tokens: np.array(tokens, np.uint32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "array": lambda tokens: array.array("q", tokens),
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
}

GETTERS = ("id", "state", "num_cached", "num_committed", "num_planned", "namespace", "pinned", "block_ids", "tokens")


class Pair:
    """The two handles of one sequence."""

    def __init__(self, core: Any, reference: Any) -> None:
        self.core = core
        self.reference = reference

    @property
    def state(self) -> str:
        found: str = self.reference.state
        return found


class Twins:
    """A pager of each kind with the same settings, and the pairs of handles that they gave out."""

    def __init__(self, num_blocks: int, block_size: int, **settings: Any) -> None:
        self.core = kvpager.Pager(num_blocks, block_size, **settings)
        self.reference = kvpager.reference.Pager(num_blocks, block_size, **settings)
        self.pairs: list[Pair] = []
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.log = [f"Twins({num_blocks}, {block_size}, **{settings})"]
        self._drops_wait = False
        self._shown = self.reference.dump(full=True)
        self._compare("construction")

    # Calls.

    def admit(
        self, tokens: list[int], namespace: Any = b"", pin: bool = False, form: str = "list", call: str = "admit"
    ) -> None:
        """Admit (or try to) a prompt that ``can_admit`` was asked about first."""
        options = {"namespace": namespace, "pin": pin}
        (could,) = self.peek("can_admit", tokens, form=form, **options)[1:]
        # Dropped handles are released first in the admit, which may make room that can_admit did not see.
        drops_wait = self._drops_wait
        outcome = self.change("pager", call, tokens, form=form, **options)
        admitted = outcome[0] == "answer" and outcome[1] is not None
        assert admitted == could or (admitted and drops_wait), f"can_admit said {could}, {call}: {outcome}"

    def peek(self, call: str, tokens: list[int], form: str = "list", **options: Any) -> Outcome:
        """A call on both pagers that may change nothing."""
        before = self._shown, self.core.stats()
        outcome = self._ask(self.core, self.reference, call, (tokens,), form, options)
        self._compare(call)
        assert (self._shown, self.core.stats()) == before, f"{call} changed something (E2)"
        return outcome

    def change(self, target: Pair | str, call: str, *arguments: Any, form: str = "list", **options: Any) -> Outcome:
        """A mutating call on both pagers (``"pager"``) or on both handles of a pair."""
        before = self._shown, self._undisturbed()
        drops_waited, self._drops_wait = self._drops_wait, False
        on = (self.core, self.reference) if isinstance(target, str) else (target.core, target.reference)
        outcome = self._ask(*on, call, arguments, form, options)
        self._compare(call)
        if outcome[0] != "answer" and not drops_waited:
            assert (self._shown, self._undisturbed()) == before, f"a refused {call} changed something (I7)"
        if isinstance(target, Pair):
            self._compare_getters(target)
        return outcome

    def drop(self, pair: Pair) -> None:
        """Let the garbage collector take both handles."""
        self.log.append(f"drop {pair.reference.id}")
        live = pair.state != "released"
        self.pairs.remove(pair)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del pair.core, pair.reference
        warned = [str(each.message) for each in caught if each.category is ResourceWarning]
        assert len(warned) == 2 * live, f"warnings of a dropped handle: {warned}"
        self._drops_wait |= live
        self._compare("drop")

    def close(self) -> None:
        """End every sequence, so that the test leaves nothing to warn about."""
        for pair in self.pairs:
            self.change(pair, "release", "aborted")
        self.change("pager", "take_copies")
        stats = self.core.stats()
        assert stats.active_blocks == stats.running_sequences == stats.preempted_sequences == 0, "a leak (I1)"

    def abandon(self) -> None:
        """After a failure: no warning about handles may hide it."""
        for pair in self.pairs:
            pair.core.release()
            pair.reference.release()

    # Comparing.

    def _ask(
        self, core: Any, reference: Any, call: str, arguments: tuple[Any, ...], form: str, options: dict[str, Any]
    ) -> Outcome:
        who = f"sequence {reference.id}." if hasattr(reference, "id") else ""
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.log.append(f"{who}{call}({', '.join(given)})" + (f"  # {form}" if form != "list" else ""))
        shaped = [FORMS[form](each) if isinstance(each, list) else each for each in arguments]
        found = _try(getattr(reference, call), arguments, options)
        found_core = _try(getattr(core, call), shaped, options)
        self._adopt(found_core, found)
        outcome, outcome_core = _plain(found), _plain(found_core)
        assert outcome_core == outcome, f"{self.log[-1]}: core {outcome_core}, reference {outcome}"
        return outcome

    def _adopt(self, core: Outcome, reference: Outcome) -> None:
        """Pair the new handles of an answer. Those that only one of the two gave are released by nobody: it failed."""
        if core[0] != "answer" or reference[0] != "answer":
            return
        theirs = [each if isinstance(each, list) else [each] for each in (core[1], reference[1])]
        for one, other in zip(*theirs, strict=False):
            known = any(one is pair.core for pair in self.pairs)
            if isinstance(one, kvpager.Sequence) and isinstance(other, kvpager.reference.Sequence) and not known:
                self.pairs.append(Pair(one, other))

    def _compare(self, call: str) -> None:
        shown, self._shown = self.core.dump(full=True), self.reference.dump(full=True)
        if shown != self._shown:
            lines = difflib.unified_diff(self._shown.splitlines(), shown.splitlines(), "reference", "core", n=1)
            raise AssertionError(f"after {call} the dumps differ:\n" + "\n".join(lines))
        assert self.core.stats() == self.reference.stats(), f"after {call} the statistics differ"
        assert self.core.check() == [], f"after {call} the core's checker complains"
        assert self.reference.check() == [], f"after {call} the reference's checker complains"

    def _compare_getters(self, pair: Pair) -> None:
        for name in GETTERS:
            mine, theirs = (_plain(_try(getattr, (each, name), {})) for each in (pair.core, pair.reference))
            assert mine == theirs, f"{name} of sequence {pair.reference.id}: core {mine}, reference {theirs}"
        mine, theirs = (_plain(_try(len, (each,), {})) for each in (pair.core, pair.reference))
        assert mine == theirs, f"len of sequence {pair.reference.id}: core {mine}, reference {theirs}"

    def _undisturbed(self) -> kvpager.Stats:
        """The statistics that a failed call must leave alone: all but the count of such calls."""
        return dataclasses.replace(self.core.stats(), refused_calls=0, noop_calls=0)


def _try(call: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Outcome:
    try:
        return "answer", call(*arguments, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        # Only the numbers are kept: a traceback would keep handles alive that the caller means to drop.
        return type(error).__name__, *_numbers(error)


def _numbers(error: Exception) -> tuple[Any, ...]:
    if isinstance(error, kvpager.TokenError):
        return error.position, error.value
    if isinstance(error, kvpager.OutOfBlocks | kvpager.NeverFits | kvpager.StaleHandle):
        return error.args
    # The wording of the others is each implementation's own.
    return ()


def _plain(outcome: Outcome) -> Outcome:
    return outcome[0], *map(_plain_value, outcome[1:])


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if isinstance(value, kvpager.Sequence | kvpager.reference.Sequence):
        return "sequence", value.id
    return value

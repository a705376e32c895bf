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
    # -1, for none, has no unsigned form.
    "uint32": lambda tokens: np.array(tokens, np.int64 if -1 in tokens else np.uint32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "array": lambda tokens: array.array("q", tokens),
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
}

# Batches are compared as soon as the core has them; until then their histories run on the reference alone.
CORE_HAS_BATCHES = hasattr(kvpager.Pager, "batch")
# So are the tiers.
CORE_HAS_TIERS = hasattr(kvpager.Pager, "offload")
HANDLES: tuple[type, ...] = (
    kvpager.reference.Sequence,
    kvpager.reference.Batch,
    kvpager.reference.Step,
    *(getattr(kvpager, name) for name in ("Sequence", "Batch", "Step") if hasattr(kvpager, name)),
)
BATCH_GETTERS = ("max_seqs", "max_blocks", "max_tokens", "buffers", "num_rows")
STEP_GETTERS = ("id", "buffer", "state", "num_rows", "num_tokens", "token_ids", "block_tables", "seq_lens")
STEP_GETTERS += ("slot_mapping", "positions", "query_start_loc", "copies")

GETTERS = ("id", "state", "num_cached", "num_committed", "num_planned", "namespace", "pinned", "block_ids", "tokens")
GETTERS += ("fetch",) if CORE_HAS_TIERS else ()
GETTERS += ("num_preemptions",)


class Pair:
    """The two handles of one sequence, batch or step. Without a core to compare with, its one is None."""

    def __init__(self, core: Any, reference: Any) -> None:
        self.core = core
        self.reference = reference
        # A table for each side, of a batch, that gets nothing but the updates of its steps.
        self.mirrors: tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]] = ({}, {})

    def __repr__(self) -> str:
        return repr(self.reference)

    @property
    def state(self) -> str:
        found: str = self.reference.state
        return found


class Twins:
    """A pager of each kind with the same settings, and the pairs of handles that they gave out."""

    def __init__(self, num_blocks: int, block_size: int, alone: bool = False, **settings: Any) -> None:
        self.core = None if alone else kvpager.Pager(num_blocks, block_size, **settings)
        self.reference = kvpager.reference.Pager(num_blocks, block_size, **settings)
        self.pairs: list[Pair] = []
        self.batches: list[Pair] = []
        self.steps: list[Pair] = []
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.log = [f"Twins({num_blocks}, {block_size}, **{settings})"]
        # Drawing or checking the core brings home what its rows keep of their sequences. A stretch of calls that is to
        # find everything there is compared by its answers alone, until somebody looks again.
        self.blind = False
        self._drops_wait = False
        self._shown = self.reference.dump(full=True)
        self._compare("construction")

    # Calls.

    def admit(
        self,
        tokens: list[int],
        namespace: Any = b"",
        pin: bool = False,
        form: str = "list",
        call: str = "admit",
        **fetch: Any,
    ) -> None:
        """Admit (or try to) a prompt that ``can_admit`` was asked about first."""
        options = {"namespace": namespace, "pin": pin}
        (could,) = self.peek("can_admit", tokens, form=form, **options)[1:]
        # Dropped handles are released first in the admit, which may make room that can_admit did not see.
        drops_wait = self._drops_wait
        outcome = self.change("pager", call, tokens, form=form, **options, **fetch)
        if fetch:
            # To join a fetch takes fewer blocks, and one of its own can be kept waiting by steps.
            return
        admitted = outcome[0] == "answer" and outcome[1] is not None
        assert admitted == could or (admitted and drops_wait), f"can_admit said {could}, {call}: {outcome}"

    def peek(self, call: str, *arguments: Any, on: Pair | None = None, form: str = "list", **options: Any) -> Outcome:
        """A call on both pagers, or on both handles of a pair, that may change nothing."""
        before = self._shown, self.reference.stats()
        outcome = self._ask(
            *((on.core, on.reference) if on else (self.core, self.reference)), call, arguments, form, options
        )
        self._compare(call)
        assert (self._shown, self.reference.stats()) == before, f"{call} changed something (E2)"
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
        for pair in {target, *self.batches, *self.steps}:
            if isinstance(pair, Pair):
                self._compare_getters(pair)
        self.steps = [step for step in self.steps if step.reference.state == "open"]
        return outcome

    def batch(self, *arguments: int, **options: Any) -> Pair:
        """A new batch on both pagers."""
        self.change("pager", "batch", *arguments, **options)
        return self.batches[-1]

    def drop_batch(self, batch: Pair) -> None:
        """Let the garbage collector take both handles of a batch, and those of its steps."""
        self.log.append(f"drop {batch.reference!r}")
        self.batches.remove(batch)
        self.steps = [step for step in self.steps if step.reference._batch is not batch.reference]
        batch.core = batch.reference = None
        self._drops_wait = True
        self._compare("drop_batch")

    def drop(self, pair: Pair) -> None:
        """Let the garbage collector take both handles."""
        self.log.append(f"drop {pair.reference.id}")
        live = pair.state != "released"
        self.pairs.remove(pair)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del pair.core, pair.reference
        warned = [str(each.message) for each in caught if each.category is ResourceWarning]
        assert len(warned) == (1 if self.core is None else 2) * live, f"warnings of a dropped handle: {warned}"
        self._drops_wait |= live
        self._compare("drop")

    def close(self) -> None:
        """End every sequence, so that the test leaves nothing to warn about."""
        self.blind = False
        self._compare("the last call")
        if CORE_HAS_TIERS or self.core is None:
            self.end_plans()
        for pair in self.pairs:
            self.change(pair, "release", "aborted")
        while self.batches:
            self.drop_batch(self.batches[-1])
        self.change("pager", "take_copies")
        stats = self.reference.stats()
        assert stats.active_blocks == stats.running_sequences == stats.preempted_sequences == 0, "a leak (I1)"
        assert stats.writing_blocks == stats.quarantined_blocks == stats.swapped_sequences == 0, "a leak (I1)"
        assert stats.host_free_blocks + stats.host_cached_blocks == stats.host_total_blocks, "a leak (I1)"

    def end_plans(self) -> None:
        """End every plan, in one way or another."""
        for plan, state, _ in self.reference.plans():
            self.change("pager", {"planned": "cancel", "started": "fail", "abandoned": "reclaim"}[state], plan)

    def abandon(self) -> None:
        """After a failure: no warning about handles may hide it."""
        for pair in self.pairs:
            for handle in (pair.core, pair.reference):
                if handle is not None:
                    handle.release()

    # Plans.

    def plans(self, *states: str) -> list[kvpager.Plan]:
        """The plans that have not ended, or those of them in one of these states."""
        return [plan for plan, state, _ in self.reference.plans() if not states or state in states]

    # Comparing.

    def _ask(
        self, core: Any, reference: Any, call: str, arguments: tuple[Any, ...], form: str, options: dict[str, Any]
    ) -> Outcome:
        who = "" if reference is self.reference else f"{reference!r}."
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.log.append(f"{who}{call}({', '.join(given)})" + (f"  # {form}" if form != "list" else ""))
        theirs = [each.reference if isinstance(each, Pair) else each for each in arguments]
        found = _try(getattr(reference, call), theirs, _of_side(options, "reference"))
        outcome = _plain(found)
        if core is None:
            self._adopt(found, found)
            return outcome
        shaped = [FORMS[form](each) if isinstance(each, list) else each for each in arguments]
        shaped = [each.core if isinstance(each, Pair) else each for each in shaped]
        found_core = _try(getattr(core, call), shaped, _of_side(options, "core"))
        self._adopt(found_core, found)
        outcome_core = _plain(found_core)
        assert outcome_core == outcome, f"{self.log[-1]}: core {outcome_core}, reference {outcome}"
        return outcome

    def _adopt(self, core: Outcome, reference: Outcome) -> None:
        """Pair the new handles of an answer. Those that only one of the two gave are released by nobody: it failed."""
        if core[0] != "answer" or reference[0] != "answer":
            return
        theirs = [_handles(each) for each in (core[1], reference[1])]
        for one, other in zip(*theirs, strict=False):
            known = any(other is pair.reference for pair in self.pairs)
            if not isinstance(one, HANDLES) or not isinstance(other, HANDLES) or known:
                continue
            pair = Pair(None if one is other else one, other)
            if isinstance(other, kvpager.reference.Step):
                self._apply_updates(pair)
                self.steps.append(pair)
            else:
                (self.batches if isinstance(other, kvpager.reference.Batch) else self.pairs).append(pair)

    def _apply_updates(self, step: Pair) -> None:
        """The updates, applied to a table that had all earlier ones, make it right, whichever they are."""
        (batch,) = (each for each in self.batches if each.reference is step.reference._batch)
        for handle, mirror in zip((step.core, step.reference), batch.mirrors, strict=True):
            if handle is None:
                continue
            mirror.update({(row, column): block for row, column, block in handle.updates.tolist()})
            tables = handle.block_tables.tolist()
            for pair in self.pairs:
                row = batch.reference.row_of(pair.reference)
                if row is not None:
                    table = pair.reference.block_ids.tolist()[: batch.reference.max_blocks]
                    assert tables[row][: len(table)] == table
                    assert [mirror.get((row, column)) for column in range(len(table))] == table, "updates"

    def _compare(self, call: str) -> None:
        self._shown = self.reference.dump(full=True)
        assert self.reference.check() == [], f"after {call} the reference's checker complains"
        if self.core is None:
            return
        mine, theirs = (dataclasses.asdict(pager.stats()) for pager in (self.core, self.reference))
        assert mine == theirs, f"after {call} the statistics differ: {mine.items() ^ theirs.items()}"
        logs = self.core.preemptions(), self.reference.preemptions()
        assert logs[0] == logs[1], f"after {call} the logs differ: {logs}"
        if self.blind:
            return
        shown = self.core.dump(full=True)
        if shown != self._shown:
            lines = difflib.unified_diff(self._shown.splitlines(), shown.splitlines(), "reference", "core", n=1)
            raise AssertionError(f"after {call} the dumps differ:\n" + "\n".join(lines))
        violations = self.core.check()
        assert not violations, f"after {call} the core's checker complains: {violations}"

    def _compare_getters(self, pair: Pair) -> None:
        if pair.core is None or self.blind:
            return
        names, what = GETTERS, "sequence"
        if isinstance(pair.reference, kvpager.reference.Batch):
            names, what = BATCH_GETTERS, "batch"
        elif isinstance(pair.reference, kvpager.reference.Step):
            names, what = STEP_GETTERS, "step"
        for name in names:
            mine, theirs = (_plain(_try(getattr, (each, name), {})) for each in (pair.core, pair.reference))
            assert mine == theirs, f"{name} of {what} {pair.reference!r}: core {mine}, reference {theirs}"
        mine, theirs = (_plain(_try(len, (each,), {})) for each in (pair.core, pair.reference))
        assert mine == theirs, f"len of {what} {pair.reference!r}: core {mine}, reference {theirs}"

    def _undisturbed(self) -> kvpager.Stats:
        """The statistics that a failed call must leave alone: all but the count of such calls."""
        return dataclasses.replace(self.reference.stats(), refused_calls=0, noop_calls=0)


def _of_side(options: dict[str, Any], side: str) -> dict[str, Any]:
    """Options with the handles of one side in the place of pairs."""
    return {
        name: [getattr(each, side) if isinstance(each, Pair) else each for each in value]
        if isinstance(value, list)
        else value
        for name, value in options.items()
    }


def _handles(answer: Any) -> list[Any]:
    """Whatever in an answer may be a handle: itself, its values, or those of the second value of a pair."""
    if isinstance(answer, tuple):
        answer = answer[1]
    return answer if isinstance(answer, list) else [answer]


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
    if isinstance(value, kvpager.Plan):
        # A tuple of lists, and no array, which cannot be compared as a whole.
        sides = (value.source, value.source_ids.tolist()), (value.destination, value.destination_ids.tolist())
        return value.id, value.generation, value.kind, *sides, _plain_value(value.records)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, list | tuple):
        return [_plain_value(each) for each in value]
    if isinstance(value, kvpager.Sequence | kvpager.reference.Sequence):
        return "sequence", value.id
    if isinstance(value, kvpager.reference.Step) or (CORE_HAS_BATCHES and isinstance(value, kvpager.Step)):
        return "step", *((name, _plain(_try(getattr, (value, name), {}))) for name in STEP_GETTERS)
    if isinstance(value, HANDLES):
        return ("batch",)
    return value

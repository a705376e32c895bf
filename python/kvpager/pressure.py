"""Is the pool thrashing? One number, one state, and the concurrency that would fit.

    pressure = kvpager.Pressure(pager, window=256)
    ...
    reading = pressure.read()                        # once a step
    if reading.state != "ok":
        limit = reading.concurrency                  # so many would fit

A pool thrashes when sequences are preempted and computed again faster than work is finished. It is seen in differences
of `Pager.stats`, over the last so many readings: there is no clock, so the window is as long as the caller's steps are.
What to do about it is the caller's affair: docs/victims.md.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from .errors import ConfigError
from .types import Stats

__all__ = ["Pressure", "PressureState", "Reading", "StatsSource"]

PressureState: TypeAlias = Literal["ok", "pressure", "thrashing"]
"""How the pool is doing."""

MAX_WINDOW = 2**31 - 1
STATES: tuple[PressureState, ...] = ("ok", "pressure", "thrashing")


class StatsSource(Protocol):
    """What is read: a pager."""

    def stats(self) -> Stats: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The pool now, and what became of it over the window. Shares are of 0 to 1.

    - ``state``: "ok", "pressure" or "thrashing".
    - ``score``: what the state is made of: the greater of ``tax / max_tax`` and
      ``preemptions_per_finish / max_preemptions_per_finish``. From 1 on it is thrashing, from a quarter on pressure; a
      state ends at half of where it begins.
    - ``tax``: recomputed among all computed tokens, over the window. (What is swapped is not computed again.)
    - ``preemptions_per_finish``: preemptions and swaps for each sequence that was released as finished; if none was, as
      if there were one.
    - ``refault_share``: refaults among evicted blocks, over the window. 0 without ghosts (``num_ghost_blocks``).
    - ``refault_distance``: mean number of blocks evicted before a refault: by so many more the pool would have kept it.
    - ``active``: share of the usable blocks that somebody holds, or that are on their way between the tiers.
    - ``cached``: share that can still be hit, and can be taken.
    - ``free``: share without content.
    - ``head_room``: blocks that can be taken now: free and cached.
    - ``running``: sequences that hold device blocks.
    - ``concurrency``: so many like those that ran over the window would fit, with ``reserve`` left: at least 1.
    - ``reason``: the state in words.
    """

    state: PressureState
    score: float
    tax: float
    preemptions_per_finish: float
    refault_share: float
    refault_distance: float
    active: float
    cached: float
    free: float
    head_room: int
    running: int
    concurrency: int
    reason: str


class Pressure:
    """Reads the signal. One for each pager, and one thread at a time.

    Parameters
    ----------
    pager
        Whoever has ``stats()``.
    window
        Readings that it looks back, 1 to 2**31 - 1: with one a step, steps. Longer than a sequence's life it is slow,
        much shorter it is nervous.
    max_tax, max_preemptions_per_finish
        Where thrashing begins; above 0.
    reserve
        Share of the pool that the advice leaves to growth, 0 to below 1.

    Cost of a reading: that of `Pager.stats`, whatever the window.
    """

    def __init__(
        self,
        pager: StatsSource,
        window: int = 256,
        *,
        max_tax: float = 0.1,
        max_preemptions_per_finish: float = 0.5,
        reserve: float = 0.05,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
            raise ConfigError(f"window is {window!r}; it must be an integer, 1 to {MAX_WINDOW}")
        for name, limit in (("max_tax", max_tax), ("max_preemptions_per_finish", max_preemptions_per_finish)):
            if not 0 < limit <= sys.float_info.max:
                raise ConfigError(f"{name} is {limit!r}; it must be a finite number above 0")
        if not 0 <= reserve < 1:
            raise ConfigError(f"reserve is {reserve!r}; it must be 0 to below 1")
        self.pager = pager
        self.max_tax = max_tax
        self.max_preemptions_per_finish = max_preemptions_per_finish
        self.reserve = reserve
        self._state: PressureState = "ok"
        self._seen: deque[Stats] = deque([pager.stats()], maxlen=window + 1)
        # Of the readings in the window but the first, which only says where the differences begin.
        self._active = self._running = 0

    @property
    def state(self) -> PressureState:
        """Of the last reading."""
        return self._state

    def read(self) -> Reading:
        """Look at the pager once more."""
        seen = self._seen
        if len(seen) == seen.maxlen:
            leaving = seen[1]
            self._active -= _held(leaving)
            self._running -= leaving.running_sequences
        now = self.pager.stats()
        seen.append(now)
        self._active += _held(now)
        self._running += now.running_sequences
        before = seen[0]

        computed = now.computed_tokens - before.computed_tokens
        recomputed = now.recomputed_tokens - before.recomputed_tokens
        finished = now.finished_sequences - before.finished_sequences
        preempted = now.preemptions + now.swap_outs - before.preemptions - before.swap_outs
        evicted = now.evicted_blocks - before.evicted_blocks
        refaults = now.refaulted_blocks - before.refaulted_blocks
        distance = now.refault_distance - before.refault_distance
        # What a resume announced is computed in later steps: at the edge of a window it can be more than all of it.
        tax = min(1.0, recomputed / computed) if computed else float(recomputed > 0)
        per_finish = preempted / max(1, finished)
        score = max(tax / self.max_tax, per_finish / self.max_preemptions_per_finish)
        self._state = self._next_state(score)
        lasts = "; it ends below half of both" if self._state == "thrashing" and score < 1 else ""

        usable = now.total_blocks - now.reserved_blocks
        return Reading(
            state=self._state,
            score=score,
            tax=tax,
            preemptions_per_finish=per_finish,
            refault_share=refaults / evicted if evicted else 0.0,
            refault_distance=distance / refaults if refaults else 0.0,
            active=_held(now) / usable,
            cached=now.cached_blocks / usable,
            free=now.free_blocks / usable,
            head_room=now.free_blocks + now.evictable_blocks,
            running=now.running_sequences,
            concurrency=self._concurrency(usable),
            reason=(
                f"{self._state}: {tax:.1%} of the computed tokens were computed again (limit {self.max_tax:.1%}),"
                f" {per_finish:.2f} preemptions for each finish (limit {self.max_preemptions_per_finish:.2f}){lasts}"
            ),
        )

    def _next_state(self, score: float) -> PressureState:
        """A state begins at its threshold and ends at half of it."""
        level = STATES.index(self._state)
        begins = (0.0, 0.25, 1.0)
        while level < 2 and score >= begins[level + 1]:
            level += 1
        while level > 0 and score < begins[level] / 2:
            level -= 1
        return STATES[level]

    def _concurrency(self, usable: int) -> int:
        """How many of the mean size fit: blocks that are shared count once, for all who share them."""
        if not self._active:
            return max(1, self._running, usable)
        return max(1, int(usable * (1 - self.reserve) * self._running / self._active))


def _held(stats: Stats) -> int:
    return stats.active_blocks + stats.writing_blocks + stats.quarantined_blocks

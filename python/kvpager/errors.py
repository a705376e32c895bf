"""The errors of kvpager.

Every error derives from :class:`KvPagerError` and from the builtin that a caller would expect in its place. The
constructor arguments are the numbers themselves; they stay in ``args``, so an error survives pickling between a
scheduler and its workers, and ``repr`` shows how to build it again.
"""

# Most names say what happened rather than end in Error: they are read in an except clause.
# ruff: noqa: N818

from __future__ import annotations

from .plans import Tier

__all__ = [
    "AllocationError",
    "ConfigError",
    "ForkedProcess",
    "KvPagerError",
    "NeverFits",
    "OutOfBlocks",
    "Poisoned",
    "StaleHandle",
    "StepError",
    "TokenError",
    "TokenTypeError",
    "TransferError",
]


class KvPagerError(Exception):
    """Base of every error that kvpager raises on purpose."""


class OutOfBlocks(KvPagerError, RuntimeError):
    """The call needs more blocks than are free or evictable now. Nothing was changed.

    ``reserve`` is the part of ``needed`` that an admission must leave for the running sequences, where the watermark
    refused it; else 0. ``tier`` is where the blocks are missing.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        evictable: int,
        total: int,
        rows: tuple[int, ...] = (),
        reserve: int = 0,
        tier: Tier = "device",
    ) -> None:
        rows = tuple(rows)
        super().__init__(needed, free, evictable, total, rows, reserve, tier)
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.total = total
        self.rows = rows
        self.reserve = reserve
        self.tier = tier

    def __str__(self) -> str:
        if self.tier == "host":
            return (
                f"needed {self.needed} host blocks, but {self.free} are free and {self.evictable} evictable of"
                f" {self.total}: preempt() instead of swapping out, or try again when a swapped sequence has left"
            )
        where = f" for rows {', '.join(map(str, self.rows))}" if self.rows else ""
        reserve = f" ({self.reserve} of them the watermark's reserve)" if self.reserve else ""
        return (
            f"needed {self.needed} blocks{where}{reserve}, but {self.free} are free and {self.evictable} evictable"
            f" of {self.total}: release or preempt a sequence, then try again"
        )


class NeverFits(KvPagerError, ValueError):
    """The request is larger than the whole pool, so waiting cannot help. Nothing was changed.

    ``tier`` is where it is too large: of the host, a sequence that is to be swapped out.
    """

    def __init__(self, needed: int, usable: int, tier: Tier = "device") -> None:
        super().__init__(needed, usable, tier)
        self.needed = needed
        self.usable = usable
        self.tier = tier

    def __str__(self) -> str:
        if self.tier == "host":
            return (
                f"swapping out needs {self.needed} host blocks, but the whole host tier has {self.usable}: preempt()"
                " instead, or build a pager with more num_host_blocks"
            )
        return (
            f"the request needs {self.needed} blocks, but the whole pool has {self.usable} usable ones:"
            " shorten it or build a larger pager"
        )


class StaleHandle(KvPagerError, ValueError):
    """The sequence is in no state for this call: it was released or preempted, or it is running."""

    def __init__(self, sequence_id: int, state: str, call: str) -> None:
        super().__init__(sequence_id, state, call)
        self.sequence_id = sequence_id
        self.state = state
        self.call = call

    def __str__(self) -> str:
        what = {
            "released": "was released and holds nothing any more: admit its tokens again",
            "preempted": "was preempted and holds no blocks: resume it first",
            "swapped": "is swapped out: swap it in, or resume it, first",
            "fetching": "is being fetched: its plan must end first (complete, fail or cancel)",
            "swapping_out": "is being swapped out: its plan must end first (complete, fail or cancel)",
            "swapping_in": "is being swapped in: its plan must end first (complete, fail or cancel)",
            "running": "is running: only a preempted or swapped sequence can come back",
        }.get(self.state, f"is {self.state}")
        return f"{self.call} refused: sequence {self.sequence_id} {what}"


class StepError(KvPagerError, ValueError):
    """A step, or a sequence that an open step names, was used out of order. Nothing was changed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigError(KvPagerError, ValueError):
    """A limit of the pager's configuration, of an identity or of a namespace was passed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class TokenError(KvPagerError, ValueError):
    """A token is outside 0..2^31-1, or there is none where one is needed. Nothing was changed."""

    def __init__(self, message: str, position: int | None = None, value: object = None) -> None:
        super().__init__(message, position, value)
        self.message = message
        self.position = position
        self.value = value

    def __str__(self) -> str:
        return self.message


class TokenTypeError(TokenError, TypeError):
    """Tokens of a kind that is never accepted: floats, bools, nested lists, two dimensions, foreign byte order."""


class TransferError(KvPagerError, RuntimeError):
    """A transfer between tiers cannot be made, or failed. Where a call raises it, nothing was copied."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Poisoned(KvPagerError, RuntimeError):
    """An earlier call hit a bug inside the pager; its state cannot be trusted, so every later call is refused."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "an earlier call failed inside the pager and may have left it half changed: build a new one"


class ForkedProcess(KvPagerError, RuntimeError):
    """A pager or disk store was made before ``os.fork()`` and is used in the child, where its lock means nothing."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "this belongs to the parent process: build or open your own after os.fork(), or start workers with spawn"


class AllocationError(KvPagerError, MemoryError):
    """The operating system refused memory for the pager's own tables."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

"""Who gives way when the pool is full: ``docs/design/rules.md`` 18. Nothing here changes anything."""

from __future__ import annotations

import math
from collections import Counter, abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import OutOfBlocks
from ..types import RecoveryCost, Victim
from .inputs import as_integer, as_number, shown
from .pool import Pool
from .record import Record, num_blocks
from .sequence import Sequence
from .tiers import Tiers

if TYPE_CHECKING:
    from ..types import VictimPolicy

POLICIES: tuple[VictimPolicy, ...] = ("newest", "cheapest", "least_progress", "priority")
NUMBER_MAX = 2**31 - 1
_PICKED = {
    "newest": "came in last",
    "cheapest": "is the cheapest to bring back for what it frees",
    "least_progress": "has the least to lose",
    "priority": "has the lowest priority",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments, checked."""

    needed: int
    policy: VictimPolicy
    sequences: list[Sequence]
    is_named: bool  # the caller gave the sequences
    priorities: list[int]
    cost: RecoveryCost
    spare_after: int
    keep: int
    left_out: list[int]
    finishing: list[int | None]


def as_asked(
    needed_blocks: object,
    policy: object,
    *,
    candidates: Any,
    priorities: Any,
    cost: Any,
    spare_after: object,
    keep: object,
    left_out: Any,
    finishing: Any,
) -> Asked:
    """Types and values, in the order of the arguments."""
    needed = _number("needed_blocks", needed_blocks, 0, NUMBER_MAX)
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a str, not {type(policy).__name__}")
    as_policy = next((each for each in POLICIES if each == policy), None)
    if as_policy is None:
        raise ValueError(f"policy is {shown(policy)}; it must be one of {', '.join(POLICIES)}")
    sequences = [] if candidates is None else _items("candidates", candidates)
    for sequence in sequences:
        if not isinstance(sequence, Sequence):
            raise TypeError(f"candidates must be Sequences, not {type(sequence).__name__}")
    ranks = None if priorities is None else _items("priorities", priorities)
    if ranks is not None:
        ranks = [_number("a priority", rank, -NUMBER_MAX - 1, NUMBER_MAX) for rank in ranks]
        _one_each("priorities", ranks, candidates, sequences)
    if (ranks is not None) != (policy == "priority"):
        raise ValueError("the policy priority takes priorities, and no other does")
    recovery = _cost(cost)
    spare_after, keep = _number("spare_after", spare_after, 1, NUMBER_MAX), _number("keep", keep, 0, NUMBER_MAX)
    places = [_number("left_out", place, 0, NUMBER_MAX) for place in _items("left_out", left_out)]
    if any(place >= len(sequences) for place in places) or len(set(places)) < len(places):
        raise ValueError(f"left_out must name positions of the {len(sequences)} candidates, each once")
    ends: list[int | None] = [None] * len(sequences)
    if finishing is not None:
        ends = [
            None if end is None else _number("finishing", end, 0, NUMBER_MAX) for end in _items("finishing", finishing)
        ]
        _one_each("finishing", ends, candidates, sequences)
    return Asked(
        needed, as_policy, sequences, candidates is not None, ranks or [], recovery, spare_after, keep, places, ends
    )


def _number(name: str, value: object, low: int, high: int) -> int:
    number = as_integer(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} is {shown(number)}; it must be {low} to {high}")
    return number


def _items(name: str, values: object, expected: str = "a list or tuple") -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, abc.Sequence):
        raise TypeError(f"{name} must be {expected}, not {type(values).__name__}")
    return list(values)


def _one_each(name: str, values: list[Any], candidates: object, sequences: list[Sequence]) -> None:
    if candidates is None or len(values) != len(sequences):
        raise ValueError(f"{name} needs a value for each candidate: there are {len(sequences)}, not {len(values)}")


def _cost(cost: object) -> RecoveryCost:
    if cost is None:
        return RecoveryCost()
    expected = "a RecoveryCost, as CostModel.recovery_cost() answers"
    numbers = [as_number("cost", number) for number in _items("cost", cost, expected)]
    if len(numbers) != len(RecoveryCost._fields):
        raise ValueError(f"cost has {len(numbers)} numbers; a RecoveryCost has {len(RecoveryCost._fields)}")
    for name, number in zip(RecoveryCost._fields, numbers, strict=True):
        if not number >= 0 or (number == math.inf and name != "block"):
            raise ValueError(f"{name} of the cost is {number}; it must be a finite number, 0 or more")
    return RecoveryCost(*numbers)


class Release:
    """What the pool would be like if some sequences let go of it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lost: Counter[int] = Counter()  # holds that blocks would lose
        self.freed: set[int] = set()

    def add(self, record: Record) -> int:
        """One more lets go; how many blocks become room by it."""
        before = len(self.freed)
        loose = [block for number, block in enumerate(record.table) if not record.on_path(number)]
        for block in [*loose, *(node.block for node in record.path[-1:])]:
            self._drop(block)
        return len(self.freed) - before

    def _drop(self, block: int) -> None:
        pool, pending = self.pool, [block]
        while pending:
            block = pending.pop()
            self.lost[block] += 1
            if self.lost[block] < pool.holds[block]:
                continue
            node = pool.nodes[block]
            if node is not None and node.above is not None:
                pending.append(node.above.block)
            if block in pool.pins:
                continue
            self.freed.add(block)
            if (node is None or not node.indexed) and block in pool.copies:
                pending.append(pool.copies[block])

    def tokens(self, record: Record) -> int:
        """What the sequence would have to compute again."""
        kept = 0
        for node in record.path:
            if not node.indexed or self.lost[node.block] >= self.pool.holds[node.block]:
                break
            kept += 1
        size = self.pool.index.block_size
        return record.num_committed - min(kept, (len(record.tokens) - 1) // size) * size

    def frees(self, record: Record) -> bool:
        """Whether it holds a block that becomes room."""
        return not self.freed.isdisjoint([*record.table, *(node.block for node in record.path)])


def choose_victims(tiers: Tiers, asked: Asked, records: list[Record], total: int) -> list[Victim]:
    """The answer for these candidates."""
    pool = tiers.device
    missing = asked.needed - pool.room
    if missing <= 0:
        return []
    victims = _preempt(tiers, asked, records, missing)
    stalled = _stall(pool, asked, records, missing)
    cost = 0.0
    for victim in victims or ():
        cost += victim.cost  # in this order: `sum` rounds otherwise
    if stalled is not None and (victims is None or stalled[0] <= cost):
        cost, steps = stalled
        share = cost / len(asked.left_out)
        return [
            _victim(asked, records[place], place, "stall", 0, 0, share, f"enough others end in {steps} steps")
            for place in asked.left_out
        ]
    if victims is None:
        raise OutOfBlocks(asked.needed, len(pool.free), pool.evictable, total)
    return victims


def _victim(
    asked: Asked,
    record: Record,
    place: int,
    action: Literal["recompute", "swap", "stall"],
    blocks: int,
    tokens: int,
    cost: float,
    reason: str,
) -> Victim:
    sequence: Any = asked.sequences[place] if asked.is_named else None
    return Victim(record.id, sequence, place, action, blocks, tokens, cost, reason)


def _stall(pool: Pool, asked: Asked, records: list[Record], missing: int) -> tuple[float, int] | None:
    """What it costs to wait, and how many steps, if that is possible."""
    if not asked.left_out:
        return None
    ends = [(end, place) for place, end in enumerate(asked.finishing) if end is not None]
    release, freed = Release(pool), 0
    for end, place in sorted(each for each in ends if each[1] not in asked.left_out):
        freed += release.add(records[place])
        if freed >= missing:
            return asked.cost.row_step * end * len(asked.left_out), end
    return None


def _preempt(tiers: Tiers, asked: Asked, records: list[Record], missing: int) -> list[Victim] | None:
    """The victims, None if all that may be taken do not suffice."""
    pool, size = tiers.device, tiers.device.index.block_size
    order = sorted(range(len(records)), key=lambda place: _rank(tiers, asked, records[place], place))
    release, freed, taken = Release(pool), 0, []
    for place in order[: max(0, len(order) - asked.keep)]:
        freed += release.add(records[place])
        taken.append(place)
        if freed >= missing:
            break
    if freed < missing:
        return None
    release, held, host_room, victims = Release(pool), release, tiers.host.room, []
    for place in taken:
        record = records[place]
        if not held.frees(record):
            continue
        blocks = release.add(record)
        tokens = release.tokens(record)
        action, cost = _bring_back(tiers, asked.cost, record, tokens, host_room)
        host_room -= num_blocks(record.num_committed, size) if action == "swap" else 0
        reason = _reason(asked, record, action, blocks)
        victims.append(_victim(asked, record, place, action, blocks, tokens, cost, reason))
    return victims


def _reason(asked: Asked, record: Record, action: str, blocks: int) -> str:
    times = record.num_preemptions
    spared = f", though it was preempted {times} times" if times >= asked.spare_after else ""
    moved = ", to the host for less than computing it again" if action == "swap" else ""
    return f"{asked.policy}: it {_PICKED[asked.policy]}{spared}; frees {blocks} blocks{moved}"


def _rank(tiers: Tiers, asked: Asked, record: Record, place: int) -> tuple[float, ...]:
    """Who has the lowest goes first."""
    level = record.num_preemptions // asked.spare_after
    latest_first = (-record.entry[0], -record.entry[1])
    if asked.policy == "newest":
        return level, *latest_first
    if asked.policy == "priority":
        return asked.priorities[place] + level, *latest_first
    release = Release(tiers.device)
    blocks = release.add(record)
    tokens = release.tokens(record)
    if asked.policy == "least_progress":
        return level, tokens, *latest_first
    _, cost = _bring_back(tiers, asked.cost, record, tokens, tiers.host.room)
    return level, cost / blocks if blocks else math.inf, *latest_first


def _bring_back(
    tiers: Tiers, cost: RecoveryCost, record: Record, tokens: int, host_room: int
) -> tuple[Literal["recompute", "swap"], float]:
    """The cheaper way, and what it costs."""
    if not tokens:
        return "recompute", 0.0
    pool, size = tiers.device, tiers.device.index.block_size
    end = record.num_committed
    start = end - tokens
    pairs = end * (end + 1) // 2 - start * (start + 1) // 2
    again = max(cost.token * tokens + cost.pair * pairs + cost.cached_token * start, cost.least)
    out = num_blocks(end, size)
    move = cost.block * (out + out - start // size)
    is_quiet = not (record.open_rows or pool.copies) and pool.given.keys().isdisjoint(record.table)
    return ("swap", move) if is_quiet and out <= host_room and move <= again else ("recompute", again)

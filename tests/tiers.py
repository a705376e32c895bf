"""The few steps that most tests of the tiers repeat."""

from __future__ import annotations

from typing import Any

from implementations import each_implementation, line

# Each pager has tiers, and plans what goes to a store.
each_with_tiers = each_with_store = each_implementation


def pairs(plan: Any) -> list[tuple[int, int]]:
    """Source and destination of each block of a plan."""
    return list(zip(plan.source_ids.tolist(), plan.destination_ids.tolist(), strict=True))


def arrive(pager: Any, plan: Any) -> Any:
    """Start and complete a plan, which is answered."""
    assert pager.start(plan) is True
    assert pager.complete(plan) is True
    return plan


def offloaded(pager: Any, num_blocks: int) -> Any:
    """Offload so many of the coldest blocks, and be done with it; the plan."""
    return arrive(pager, pager.offload(num_blocks))


def swapped(pager: Any, sequence: Any) -> Any:
    """Swap a sequence out; the plan."""
    return arrive(pager, sequence.swap_out())


def on_host(pager: Any, prompt: list[int], **namespace: Any) -> int:
    """Tokens of a prompt that the host has behind what the device has."""
    found: int = pager.match(prompt, **namespace).num_host_tokens
    return found


def states(pager: Any) -> list[tuple[int, int, str, int | None]]:
    """The plans that have not ended: number, generation, state and tick."""
    return [(plan.id, plan.generation, state, tick) for plan, state, tick in pager.plans()]


def stored(pager: Any) -> str:
    """Host blocks that a store has, as a drawing says it."""
    return line(pager, "host stored: ").removeprefix("host stored: ")


def queue(pager: Any) -> str:
    """The host's queue, as a drawing says it."""
    return line(pager, "host queue lru: ").removeprefix("host queue lru: ")


def host_tree(pager: Any) -> str:
    """What a drawing says of the host's namespaces."""
    tree: str = pager.dump().split("host namespace", 1)[1]
    return tree

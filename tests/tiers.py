"""The few steps that most tests of the tiers repeat."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import IMPLEMENTATIONS, each_implementation

# Tests of tiers, and of what goes to a store, switch on by themselves where an implementation has them.
WITH_TIERS = {name: pager for name, pager in IMPLEMENTATIONS.items() if hasattr(pager, "offload")}
each_with_tiers = [
    pytest.mark.parametrize("implementation", WITH_TIERS.values(), ids=WITH_TIERS.keys()),
    each_implementation[1],
]

WITH_STORE = {name: pager for name, pager in IMPLEMENTATIONS.items() if hasattr(pager, "save")}
each_with_store = [
    pytest.mark.parametrize("implementation", WITH_STORE.values(), ids=WITH_STORE.keys()),
    each_implementation[1],
]


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

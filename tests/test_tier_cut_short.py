"""Ctrl-C in a tier's calls leaves no plan behind, no load that is waited for in vain, and no bytes that wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from test_movers_cut_short import Interrupt
from tier_support import Server, memory_store

import kvpager
from kvpager.tiers import MemoryStore

pytestmark = pytest.mark.usefixtures("watchdog")

PROMPT = list(range(100, 117))
CALLS: dict[str, Callable[[Server], object]] = {
    "save": lambda server: server.tier.save(8),
    "load": lambda server: server.tier.load(PROMPT),
    "report": lambda server: server.tier.report(),
    "wait": lambda server: server.tier.wait(5.0),
    "close": lambda server: server.tier.close(),
}


class Remote:
    """A store that may have to be asked by a thread."""

    def __init__(self, store: MemoryStore, is_local: bool) -> None:
        self._store, self.is_local = store, is_local

    def __getattr__(self, name: str):
        return getattr(self._store, name)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_step_leaves_nothing_behind(name: str, is_local: bool) -> None:
    store = memory_store()
    first = Server(store)
    first.serve(PROMPT)
    first.save_all()
    first.close()
    for nth in range(1000):
        server = Server(memory_store() if name == "save" else Remote(store, is_local))
        loading = None
        if name == "save":
            server.serve(PROMPT)
            server.carry_out(server.pager.offload(8))
        elif name != "load":
            loading = server.tier.load(PROMPT)
            time.sleep(0.002 if name == "report" else 0)
        was_interrupted = Interrupt(nth, "tier.py", "mover.py", "plans.py").strikes(
            lambda server=server: CALLS[name](server)
        )
        if name == "close":
            server.tier.close()
        assert server.tier.wait(10.0), nth
        assert server.pager.plans() == [], nth
        assert loading is None or loading.done, nth
        assert server.tier.stats()["queued_bytes"] == 0, nth
        server.close()
        if not was_interrupted:
            return
    raise AssertionError("there is always one more step")


def test_a_plan_that_somebody_else_ended_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that was cancelled in between holds nothing: what its blocks become is not theirs to store."""
    store = memory_store()
    server = Server(store)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))

    class Cancelling:
        def __init__(self, pager: kvpager.Pager) -> None:
            self.pager = pager

        def __getattr__(self, name: str):
            return getattr(self.pager, name)

        def save(self, num_blocks: int) -> kvpager.Plan | None:
            plan = self.pager.save(num_blocks)
            self.pager.cancel(plan)
            return plan

    monkeypatch.setattr(server.tier, "_pager", Cancelling(server.pager))
    server.tier.save(8)
    assert server.tier.wait(10.0)
    assert store.stats()["records"] == 0
    server.close()

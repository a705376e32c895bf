"""The tier behind the host: what is saved comes back, after restarts too, and nothing else does."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from test_movers_cut_short import Interrupt
from tier_support import BLOCK_SIZE, WIDTH, History, Server, memory_store

import kvpager
from kvpager import ConfigError, TransferError
from kvpager.movers import HostArena
from kvpager.tiers import DiskTier, MemoryStore, StoreMover, Tier

PROMPT = list(range(100, 117))  # four blocks and a token
ROW_BYTES = BLOCK_SIZE * WIDTH


class Wrapped:
    """A store with faults, and hooks to hold it up."""

    def __init__(self, store: MemoryStore, *, is_local: bool = True) -> None:
        self._store = store
        self.is_local = is_local
        self.may_write = threading.Event()
        self.may_write.set()
        self.may_read = threading.Event()
        self.may_read.set()
        self.fails: set[str] = set()

    def __getattr__(self, name: str):
        if name in self.fails:
            raise OSError(f"{name} is out of order")
        return getattr(self._store, name)

    def get_many(self, *args):
        assert self.may_read.wait(10.0)
        return self.__getattr__("get_many")(*args)

    def put_many(self, *args):
        assert self.may_write.wait(10.0)
        return self.__getattr__("put_many")(*args)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.close()


def serving(servers: list[Server], store, **options) -> Server:
    servers.append(Server(store, **options))
    return servers[-1]


def test_a_restart_finds_what_was_saved(servers):
    store = memory_store()
    first = serving(servers, store)
    assert first.serve(PROMPT) == 0
    first.save_all()
    second = serving(servers, store)
    assert second.serve(PROMPT) == 16
    assert second.serve([*PROMPT[:8], 5, 5, 5, 5, 5]) == 8
    assert second.pager.stats().loaded_blocks == 4


@pytest.mark.parametrize("is_local", [True, False])
def test_prompts_that_want_the_same_share_one_reading(servers, is_local):
    store = Wrapped(memory_store(), is_local=is_local)
    first = serving(servers, store)
    first.serve(PROMPT)
    first.save_all()
    second = serving(servers, store)
    store.may_read.clear()
    loadings = [second.tier.load(PROMPT), second.tier.load([*PROMPT, 1, 2, 3])]
    assert None not in loadings
    while None in [loading.plan for loading in loadings]:
        second.tier.report()
    store.may_read.set()
    assert second.tier.wait(10.0, loadings)
    assert loadings[0].plan == loadings[1].plan
    assert store.stats()["hits"] == 4
    assert second.serve(PROMPT, loads=False) == 16


def test_nothing_is_loaded_that_is_there_or_too_little(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    assert server.tier.load(PROMPT) is None  # on the device
    again = serving(servers, store)
    assert again.tier.load(PROMPT, min_tokens=17) is None
    assert again.tier.load([1] * 17) is None
    assert again.tier.load([1]) is None
    assert again.tier.match(PROMPT) == 16
    loading = again.tier.load(PROMPT, min_tokens=16)
    assert loading is not None
    assert again.tier.wait(10.0)
    assert loading.done
    assert again.tier.load(PROMPT) is None  # on the host


def test_a_host_without_room_loads_what_fits(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    small = serving(servers, store, num_host_blocks=3)
    assert small.serve(PROMPT) == 12


def test_a_full_write_queue_refuses_and_counts(servers):
    store = Wrapped(memory_store())
    server = serving(servers, store, max_queued_bytes=4 * ROW_BYTES)
    store.may_write.clear()
    server.serve(PROMPT)
    server.serve([7] * 9)
    while (plan := server.pager.offload(8)) is not None:
        server.carry_out(plan)
    assert len(server.tier.save(100)) == 4
    assert server.tier.save(100) is None
    assert server.tier.stats()["refused_saves"] == 1
    assert server.tier.stats()["queued_bytes"] == 4 * ROW_BYTES
    store.may_write.set()
    assert server.tier.wait(10.0)
    assert len(server.tier.save(100)) == 2
    assert server.tier.wait(10.0)
    assert store.stats()["stored"] == 6


def test_a_mover_drops_saves_that_its_queue_cannot_take(servers):
    store = Wrapped(memory_store())
    store.may_write.clear()
    host = HostArena(8, ROW_BYTES)
    server = serving(servers, memory_store())
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    plan = server.pager.save(8)
    with StoreMover(store, host, max_queued_bytes=ROW_BYTES) as mover:
        held = mover.submit(plan)
        dropped = mover.submit(plan)
        assert dropped.state == "failed"
        assert "wait to be written" in str(dropped.error)
        assert mover.num_dropped_blocks == 4
        store.may_write.set()
        assert mover.wait(10.0, [held])
        assert held.state == "done"
    with pytest.raises(TransferError, match="closed"):
        mover.submit(plan)
    server.pager.cancel(plan)


def test_reset_clears_the_store_but_for_a_new_identity(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    server.pager.reset(b"other")
    assert store.stats()["records"] == 4
    assert server.serve(PROMPT) == 0
    server.save_all()
    assert store.stats()["records"] == 8
    server.pager.reset(b"other")  # no new one
    assert store.stats()["records"] == 0
    assert server.serve(PROMPT) == 0
    server.pager.reset()
    assert serving(servers, store, identity=b"other").serve(PROMPT) == 0


def test_what_waits_to_be_written_at_a_reset_is_not_written(servers):
    store = Wrapped(memory_store())
    server = serving(servers, store)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    store.may_write.clear()
    plans = [server.tier.save(1), server.tier.save(3)]
    assert None not in plans
    waiter = threading.Timer(0.05, store.may_write.set)
    waiter.start()
    server.pager.reset()  # waits for the one that is being written
    waiter.join()
    assert store.stats()["records"] == 0
    assert server.tier.wait(10.0)
    assert store.stats()["records"] == 0


def test_forget_acts_in_the_store(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.serve([*PROMPT[:4], 1, 1, 1, 1, 1])
    server.save_all()
    assert store.stats()["records"] == 5
    server.pager.forget(PROMPT[:8])
    assert store.stats()["records"] == 2
    again = serving(servers, store)
    assert again.serve(PROMPT) == 4
    assert again.serve([*PROMPT[:4], 1, 1, 1, 1, 1]) == 8


def test_forget_drops_what_hangs_below_a_gap(servers):
    """What the store lost in between must not hide what is below it: were it saved again, that would come back."""
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    keys = server.pager.store_keys(PROMPT).keys
    lose(store, keys[1])
    server.pager.forget(PROMPT[:4])
    assert store.stats()["records"] == 0


def lose(store: MemoryStore, key: np.ndarray) -> None:
    """As eviction would."""
    record = store._records.pop(key.tobytes())
    assert record is not None


def test_forget_of_an_open_run_of_content_drops_all_of_it(servers):
    store = memory_store()
    image = kvpager.content_tokens(bytes(32), 6).tolist()
    prompt = [1, 2, 3, 4, *image, 5, 5, 9]
    server = serving(servers, store)
    server.serve(prompt)
    server.save_all()
    assert store.stats()["records"] == 3
    server.pager.forget(prompt[:8])
    again = serving(servers, store)
    assert again.serve(prompt) == 0  # the run has no key yet: the block above it goes, with all below
    server.serve([*image, 5, 5, 9])
    server.save_all()
    server.pager.forget(image[:4])
    assert store.stats()["records"] == 0


def test_a_store_that_cannot_drop_is_not_used_until_it_was_cleared(servers):
    store = Wrapped(memory_store())
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    store.fails = {"clear"}
    with pytest.raises(TransferError, match=r"out of order.*until clear"):
        server.pager.reset()
    with pytest.raises(TransferError, match="clear"):
        server.tier.load(PROMPT)
    with pytest.raises(TransferError, match="clear"):
        server.tier.save(1)
    store.fails = set()
    server.tier.clear()
    assert server.serve(PROMPT) == 0


class Meanwhile:
    """Attached before the tier: another thread loads between a change of the pager and the tier's own."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self.thread: threading.Thread | None = None

    def load(self) -> None:
        assert self.server is not None
        self.server.tier.wait(10.0, [loading] if (loading := self.server.tier.load(PROMPT)) else [])

    def on_reset(self) -> None:
        self.thread = threading.Thread(target=self.load)
        self.thread.start()
        self.thread.join(0.2)

    def on_forget(self, tokens: kvpager.Tokens, namespace: kvpager.Namespace) -> None:
        self.on_reset()


@pytest.mark.parametrize("drop", ["reset", "forget"])
def test_what_is_being_dropped_is_not_loaded_meanwhile(servers, drop):
    store, meanwhile = memory_store(), Meanwhile()
    first = serving(servers, store)
    first.serve(PROMPT)
    first.save_all()

    class Hooked(Tier):
        def __init__(self, pager, *others, **options):
            pager.attach(meanwhile)
            super().__init__(pager, *others, **options)

    meanwhile.server = serving(servers, store, make_tier=Hooked)
    meanwhile.server.reset() if drop == "reset" else meanwhile.server.forget(PROMPT[:4])
    meanwhile.thread.join()
    assert meanwhile.server.serve(PROMPT) == 0  # each byte is looked at


@pytest.mark.parametrize("drop", ["reset", "forget"])
def test_an_interrupt_at_any_step_of_a_drop_serves_nothing_that_was_dropped(servers, drop):
    """Ctrl-C may fall before the tier has done anything: then it is as stale as one whose store refused."""
    history = History()
    for nth in range(1000):
        store = memory_store()
        server = serving(servers, store, history=history)
        server.serve(PROMPT)
        server.save_all()
        call = server.reset if drop == "reset" else lambda server=server: server.forget(PROMPT[:4])
        counts = history.num_resets, len(history.forgotten)
        was_interrupted = Interrupt(nth, "tier.py", "mover.py").strikes(call)
        if (history.num_resets, len(history.forgotten)) == counts:
            # The pager's part was carried out before the interrupt fell.
            history.num_resets += drop == "reset"
            history.forgotten += [((b"model", b""), PROMPT[:4])] * (drop == "forget")
        server.tier.stale and server.tier.clear()
        again = serving(servers, store, history=history)
        assert again.serve(PROMPT) == 0
        again.close()
        servers.remove(again)
        if not was_interrupted:
            return
    raise AssertionError("there is always one more step")


@pytest.mark.parametrize("call", ["get_many", "contains_many"])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_store_that_fails_is_a_miss(servers, call, is_local):
    store = Wrapped(memory_store(), is_local=is_local)
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    store.fails = {call}
    again = serving(servers, store)
    if call == "contains_many" and is_local:
        with pytest.raises(OSError, match="out of order"):
            again.tier.load(PROMPT)
        return
    assert again.serve(PROMPT) == 0
    store.fails = set()
    assert serving(servers, store).serve(PROMPT) == 16


def test_a_write_that_fails_is_not_believed(servers):
    store = Wrapped(memory_store())
    server = serving(servers, store)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    store.fails = {"put_many"}
    assert server.tier.save(8) is not None
    assert server.tier.wait(10.0)
    assert server.pager.stats().saved_blocks == 0


def test_what_the_store_lost_above_is_saved_again(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    lose(store, server.pager.store_keys(PROMPT).keys[3])
    server.serve([*PROMPT[:16], 5, 5, 5, 5, 5])
    server.save_all()  # finds the path broken
    assert store.stats()["records"] == 3
    server.serve([*PROMPT[:16], 6, 6, 6, 6, 6])
    server.save_all()
    assert store.stats()["records"] == 5
    assert serving(servers, store).serve([*PROMPT[:16], 6, 6, 6, 6, 6]) == 20


@pytest.mark.parametrize(
    ("identity", "namespace"),
    [
        (b"other model", b"a"),
        (b"model", b"b"),
        (b"model", (("tenant", b"a"),)),
        (b"model", (("lora", b"a"),)),
        (b"modela", b""),
    ],
)
def test_w8_other_namespaces_and_models_never_share(servers, identity, namespace):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT, b"a")
    server.save_all()
    assert serving(servers, store, identity=identity).serve(PROMPT, namespace) == 0
    assert serving(servers, store).serve(PROMPT, b"a") == 16


def test_two_images_that_begin_alike_never_share(servers):
    store = memory_store()
    image = kvpager.content_tokens(bytes(32), 8).tolist()
    one, other = [1, 2, *image, 3, 3, 9], [1, 2, *image[:5], *[2**30] * 3, 3, 3, 9]
    server = serving(servers, store)
    server.serve(one)
    server.save_all()
    again = serving(servers, store)
    assert again.serve(other) == 0
    again.save_all()
    assert store.stats()["records"] == 6
    for image in (one, other):
        last = serving(servers, store)
        assert last.serve(image) == 12
        assert last.serve(other if image is one else one) == 0  # rules 9.2: the host cannot have both


def test_a_loading_that_nobody_waits_for_does_no_harm(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.save_all()
    again = serving(servers, store)
    loading = again.tier.load(PROMPT)
    plan = loading.plan
    again.pager.abandon(plan)
    assert again.tier.wait(10.0)
    assert loading.done
    assert again.pager.plans() == []
    assert again.serve(PROMPT) == 16


@pytest.mark.parametrize("how", ["abandoned", "another's"])
def test_nobody_waits_for_a_load_that_will_not_be_reported(servers, how):
    """One that its caller gave up on (the store hangs), or that another tier of this pager carries out."""
    store = memory_store()
    first = serving(servers, store)
    first.serve(PROMPT)
    first.save_all()
    hanging = Wrapped(store)
    hanging.may_read.clear()
    server = serving(servers, hanging)
    loading = server.tier.load(PROMPT)
    if how == "abandoned":
        waiting = server.tier
        server.pager.abandon(loading.plan)
    else:
        waiting = Tier(server.pager, server.host, store)
        loading = waiting.load(PROMPT)
        assert not loading.done
        hanging.may_read.set()
        assert server.tier.wait(10.0)
    assert waiting.wait(10.0, [loading])
    assert server.serve(PROMPT, loads=False) == (0 if how == "abandoned" else 16)
    hanging.may_read.set()
    waiting.close()


def test_plans_begin_by_the_clock_that_is_given(servers):
    server = serving(servers, Wrapped(memory_store()), clock=lambda: 1234)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    server.tier.store.may_write.clear()
    server.tier.save(8)
    assert [each.tick for each in server.pager.plans()] == [1234]
    server.tier.store.may_write.set()


def test_a_store_that_does_not_answer_is_not_asked_without_end(servers):
    class Silent(Wrapped):
        def contains_many(self, keys):
            assert self.may_read.wait(10.0)
            return self._store.contains_many(keys)

    store = Silent(memory_store(), is_local=False)
    store.may_read.clear()
    server = serving(servers, store)
    loadings = [server.tier.load(PROMPT) for _ in range(1030)]
    assert loadings.count(None) == 6
    assert loadings[1024:] == [None] * 6
    assert server.tier.stats()["refused_loads"] == 6
    store.may_read.set()
    assert server.tier.wait(10.0)
    assert server.tier.load(PROMPT) is not None


LIES = {
    "one for all": lambda found: np.True_,
    "a list": lambda found: found.tolist(),
    "numbers": lambda found: found.astype(np.int64),
    "which": lambda found: np.flatnonzero(found),
    "too many": lambda found: np.append(found, True),
    "too few": lambda found: found[:1],
    "a column": lambda found: found[:, None],
    "nothing": lambda found: None,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("call", ["get_many", "contains_many", "put_many"])
def test_an_answer_that_is_none_is_not_believed(servers, call, lie):
    store = memory_store()
    first = serving(servers, store)
    first.serve(PROMPT)
    first.save_all()

    class Lying(Wrapped):
        def __getattr__(self, name: str):
            answer = super().__getattr__(name)
            return (lambda *given: LIES[lie](answer(*given))) if name == call else answer

    liar = Lying(store, is_local=False)
    liar.put_many = lambda *given: Lying.__getattr__(liar, "put_many")(*given)
    server = serving(servers, liar)
    assert server.serve(PROMPT) == (16 if call == "put_many" else 0)
    server.serve([7] * 9)
    server.carry_out(server.pager.offload(8))
    if call != "get_many":
        server.tier.save(8)
        assert server.tier.wait(10.0)
        assert server.pager.stats().saved_blocks == 0


def test_a_tier_that_was_closed_refuses(servers):
    store = memory_store()
    server = serving(servers, store)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    server.tier.save(8)
    server.tier.close()
    assert store.stats()["records"] == 4  # what was queued is written
    for call in (lambda: server.tier.save(1), lambda: server.tier.load(PROMPT)):
        with pytest.raises(TransferError, match="closed"):
            call()
    server.tier.close()
    assert server.tier.report() == []


def test_closing_does_not_wait_for_ever(servers):
    store = Wrapped(memory_store())
    server = serving(servers, store)
    server.serve(PROMPT)
    server.carry_out(server.pager.offload(8))
    store.may_write.clear()
    server.tier.save(1)
    server.tier.save(3)
    timer = threading.Timer(0.3, store.may_write.set)
    timer.start()
    start = time.monotonic()
    server.tier.close(timeout=0.05)
    assert time.monotonic() - start < 5.0
    timer.join()
    assert store.stats()["records"] <= 1


def test_a_dropped_tier_ends_its_threads():
    store = memory_store()
    pager = kvpager.Pager(8, BLOCK_SIZE, num_host_blocks=8)
    tier = Tier(pager, HostArena(8, ROW_BYTES), store)
    seen = weakref.ref(tier)
    del tier
    gc.collect()
    assert seen() is None
    pager.reset()  # nothing is attached any more
    deadline = time.monotonic() + 10.0
    while any(thread.name.startswith("kvpager-store") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_does_not_fit_is_refused():
    store = memory_store()
    pager = kvpager.Pager(8, BLOCK_SIZE, num_host_blocks=8)
    with pytest.raises(ConfigError, match="8 host blocks, the arena 9"):
        Tier(pager, HostArena(9, ROW_BYTES), store)
    with pytest.raises(ConfigError, match="rows have 64 bytes, the host arena's blocks 65"):
        Tier(pager, HostArena(8, ROW_BYTES + 1), store)
    with pytest.raises(ConfigError, match="blocks of 4 tokens, the pager's have 2"):
        Tier(kvpager.Pager(8, 2, num_host_blocks=8), HostArena(8, ROW_BYTES), store)
    with pytest.raises(ConfigError, match="max_queued_bytes is 1;"):
        Tier(pager, HostArena(8, ROW_BYTES), store, max_queued_bytes=1)
    with pytest.raises(ConfigError, match="0 host blocks"):
        Tier(kvpager.Pager(8, BLOCK_SIZE), HostArena(8, ROW_BYTES), store)


def test_bad_arguments(servers):
    server = serving(servers, memory_store())
    for num_blocks in (0, -1):
        with pytest.raises(ValueError, match="num_blocks"):
            server.tier.save(num_blocks)
    for wrong in ("2", 1.5, float("nan")):
        with pytest.raises(TypeError):
            server.tier.save(wrong)
        with pytest.raises(TypeError):
            server.tier.load(PROMPT, min_tokens=wrong)
        with pytest.raises(TypeError):
            Tier(server.pager, server.host, memory_store(), max_queued_bytes=wrong)
    with pytest.raises(ValueError, match="min_tokens"):
        server.tier.load(PROMPT, min_tokens=0)
    with pytest.raises(kvpager.TokenError):
        server.tier.load([])
    with pytest.raises(kvpager.TokenError):
        server.tier.load([-1, 2])
    with pytest.raises(ValueError, match="timeout"):
        server.tier.wait(float("inf"))


def test_l16_a_disk_tier_over_restarts(tmp_path):
    """L16 at this level: what was synced is found, the limit holds, and a second pager cannot take the directory."""
    for nth in range(3):
        server = Server(tmp_path, make_tier=DiskTier, max_bytes=1 << 20)
        assert server.serve(PROMPT) == (16 if nth else 0)
        server.save_all()
        with pytest.raises(TransferError):
            DiskTier(server.pager, server.host, tmp_path, max_bytes=1 << 20)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 20
        server.close()

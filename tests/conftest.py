"""What all tests share: one seed a run, the long mode, a watchdog, and hypothesis without a stopwatch."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterator

import hypothesis
import pytest
from valkey_server import WHY_NOT, ValkeyServer, find_server

SEED = int(os.environ.get("KVPAGER_SEED", random.SystemRandom().randrange(2**32)))

# Tests that pass on an idle machine must not fail on a busy one, so no example has a deadline. A failing example prints
# the line that replays it, because the example database of another machine is not at hand.
hypothesis.settings.register_profile(
    "kvpager", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvpager")


def pytest_report_header() -> str:
    return f"kvpager: random tests start from seed {SEED}; KVPAGER_SEED={SEED} repeats them"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests out unless the caller chose by marker or named a test himself."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture
def seed() -> int:
    """The number that all of a run's random choices derive from. It is printed first, so that a failure shows it."""
    print(f"KVPAGER_SEED={SEED}")  # noqa: T201
    return SEED


@pytest.fixture
def runs() -> int | None:
    """How many random histories the caller asked for, if he did."""
    asked = os.environ.get("KVPAGER_RUNS")
    return int(asked) if asked else None


@pytest.fixture
def watchdog(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Ends the process with every thread's traceback when a test hangs: a deadlock can be ended by nothing milder.

    The watching thread is C code that needs no interpreter lock, so it works when the lock is what everybody waits for.
    """
    with capfd.disabled():
        terminal = os.dup(2)
    faulthandler.dump_traceback_later(90, exit=True, file=terminal)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(terminal)


@pytest.fixture(scope="session")
def shared_valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One for all tests; what is needed for it is looked for when the first of them asks."""
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    if find_server() is None:
        pytest.skip(WHY_NOT)
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey_server(shared_valkey_server: ValkeyServer) -> ValkeyServer:
    """A server that is empty. Not to be killed."""
    shared_valkey_server.empty()
    return shared_valkey_server

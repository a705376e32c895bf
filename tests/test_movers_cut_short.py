"""What may surround a mover's call: a fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from movers_support import LAYOUTS, SWAP_OUT, filled, plan
from pretend_device import PretendDevice

from kvpager.movers import CupyMover, CupyPool, NumpyMover, Ticket

pytestmark = pytest.mark.usefixtures("watchdog")

SECONDS = 20.0
"""Far more than anything here takes."""


def numpy_mover() -> NumpyMover:
    _, pool, host = filled(LAYOUTS[2])
    return NumpyMover(pool, host)


def cupy_mover() -> CupyMover:
    pool, _, host = filled(LAYOUTS[2])
    return CupyMover(CupyPool(pool.arrays, pool.axes, PretendDevice(1)), host)


MOVERS: dict[str, Callable[[], Any]] = {"numpy": numpy_mover, "cupy": cupy_mover}


def in_a_child(work: Callable[[], str]) -> str:
    """What `work` answers in the child of ``os.fork()``, or the error that it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            try:
                answer = work()
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    assert os.waitpid(child, 0)[1] == 0, "it hung"
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", ["numpy", "cupy"])
@pytest.mark.parametrize("is_locked", [False, True])
def test_a_mover_in_a_forked_child_says_so_and_never_hangs(name: str, is_locked: bool) -> None:
    mover = MOVERS[name]()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with mover._book.lock:
            held.set()
            go_on.wait(SECONDS)

    holder = threading.Thread(target=hold)
    if is_locked:
        holder.start()
        held.wait(SECONDS)
    calls = {
        "submit": lambda: mover.submit(plan(SWAP_OUT, [0], [0])),
        "poll": mover.poll,
        "wait": lambda: mover.wait(SECONDS),
        "close": mover.close,
        "stop": lambda: mover._dropped() if name == "numpy" else None,
    }
    try:
        answers = {name: in_a_child(lambda call=call: str(call())) for name, call in calls.items()}
    finally:
        go_on.set()
    refusal = f"TransferError: this mover belongs to the parent process, {os.getpid()}: make one after os.fork()"
    for call in ("submit", "poll", "wait"):
        assert answers[call].startswith(refusal), answers
    assert (answers["close"], answers["stop"]) == ("None", "None")
    if is_locked:
        holder.join()
    assert mover.wait(SECONDS, [mover.submit(plan(SWAP_OUT, [0], [0]))])
    mover.close()

"""What may cut a mover's call short, or surround it: Ctrl-C at any step, a fork, a close."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from movers_support import LAYOUTS, SWAP_OUT, filled, plan
from pretend_device import PretendDevice

from kvpager.movers import CupyMover, CupyPool, HostArena, NumpyMover, NumpyPool, Ticket
from kvpager.testing import FakeMover

pytestmark = pytest.mark.usefixtures("watchdog")

SECONDS = 20.0
"""Far more than anything here takes."""


def numpy_mover() -> NumpyMover:
    _, pool, host = filled(LAYOUTS[2])
    return NumpyMover(pool, host)


def fake_mover() -> FakeMover:
    _, pool, host = filled(LAYOUTS[2])
    return FakeMover(pool, host, 1, late=1)


def cupy_mover() -> CupyMover:
    pool, _, host = filled(LAYOUTS[2])
    return CupyMover(CupyPool(pool.arrays, pool.axes, PretendDevice(1)), host)


MOVERS: dict[str, Callable[[], Any]] = {"numpy": numpy_mover, "fake": fake_mover, "cupy": cupy_mover}


def copied(mover: Any) -> list[Ticket]:
    """Tickets of three plans that a mover with a thread has copied. (The others copy when they are asked.)"""
    tickets = [mover.submit(plan(SWAP_OUT, [number], [number], number)) for number in range(3)]
    if isinstance(mover, NumpyMover):
        while not all(ticket.ended for ticket in tickets):
            time.sleep(0.0001)
    return tickets


class Interrupt:
    """KeyboardInterrupt at the `nth` of those moments in a mover's own code at which Python looks for signals: when a
    function begins, and behind each call of what is not written in Python.
    """

    FILES = ("base.py", "numpy_mover.py", "cupy_mover.py", "fake_mover.py")

    def __init__(self, nth: int, *more_files: str) -> None:
        self.left = nth
        self.files = (*self.FILES, *more_files)
        self.behind_call: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if os.path.basename(frame.f_code.co_filename) not in self.files:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and self.behind_call is frame):
            self.left -= 1
            if self.left == -1:
                sys.settrace(None)
                raise KeyboardInterrupt
        is_call = event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
        self.behind_call = frame if is_call else None
        return self

    def strikes(self, call: Callable[[], Any]) -> bool:
        """True if the call was interrupted."""
        before = sys.gettrace()
        gc.disable()  # The finalizer of another mover is no place for it: nobody can catch what it raises.
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            gc.enable()
        return False


@pytest.mark.parametrize("call", ["poll", "wait"])
@pytest.mark.parametrize("name", MOVERS)
def test_an_interrupt_at_any_step_of_a_report_loses_none(name: str, call: str) -> None:
    for nth in range(1000):
        mover, seen = MOVERS[name](), []
        tickets = copied(mover)

        def look(mover: Any = mover, seen: list[Ticket] = seen) -> None:
            seen += mover.poll() if call == "poll" else mover.wait(SECONDS)

        was_interrupted = Interrupt(nth, *(["streams.py"] if name == "fake" else [])).strikes(look)
        seen += mover.wait(SECONDS)
        assert sorted(seen, key=tickets.index) == tickets, nth
        assert all(ticket.state == "done" for ticket in tickets)
        later = mover.submit(plan(SWAP_OUT, [5], [5]))
        assert mover.wait(SECONDS) == [later], f"the mover is not as good as before: {nth}"
        mover.close()
        if not was_interrupted:
            assert nth > 4
            return
    raise AssertionError("a report has no 1000 steps")


def test_signals_in_a_loop_of_calls_lose_no_report() -> None:
    """The same with real ones, wherever they fall in submit, poll and wait."""
    mover, seen, submitted = numpy_mover(), set(), 0
    interrupts, armed = 0, False
    np.unique([0])  # Imports more of NumPy, which an interrupt would leave half done.

    def interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def look(call: Callable[[], list[Ticket]]) -> None:
        # What a call has answered is the caller's: no more than that is asked.
        nonlocal armed
        tickets = call()
        armed = False
        assert not seen & set(tickets)
        seen.update(tickets)
        armed = True

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # Others have callbacks there, and nobody can catch what is raised in one.
    try:
        for turn in range(300):
            try:
                armed = True
                # Again and again, because Python overlooks a signal that reaches one of numpy's threads.
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-5 * (turn % 50), 2e-3)
                while True:
                    mover.submit(plan(SWAP_OUT, [1, 2], [3, 4], submitted))
                    submitted += 1
                    look(mover.poll)
                    look(lambda: mover.wait(0.001))
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    seen.update(mover.wait(SECONDS))
    assert interrupts == 300
    # A plan whose submit was interrupted may be under way, and is reported then.
    assert {ticket.plan.id for ticket in seen} >= set(range(submitted))
    assert all(ticket.state == "done" for ticket in seen)
    mover.close()


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


def test_nothing_is_written_once_a_numpy_mover_is_closed() -> None:
    blocks, size = 300, 1 << 18
    source = np.ones((blocks, size), np.uint8)
    for nth in (0, 7):
        host = HostArena(blocks, size)
        mover = NumpyMover(NumpyPool([source]), host)
        tickets = [mover.submit(plan(SWAP_OUT, [number], [number], number)) for number in range(blocks)]
        while not tickets[nth].ended:
            time.sleep(0.0001)
        mover.close()
        host.records[:] = 7  # somebody else's, from now on
        assert not mover._thread.is_alive()
        assert mover.poll() == tickets
        assert all(ticket.ended for ticket in tickets)
        assert (host.records == 7).all()

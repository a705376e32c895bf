"""Plans between the device and the host, on scattered pools of equal size; no byte is copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .measure import Operation

if TYPE_CHECKING:
    from .operations import Subject

TOKENS = 8192


@cache
def _pager(subject_class: type, num_blocks: int, block_size: int) -> Any:
    return subject_class(num_blocks, block_size, num_host_blocks=num_blocks)


def pager_of(subject: Subject) -> Any:
    """The pager with a host tier; one for all operations here, so that its host is in use."""
    return _pager(subject.pager_class, subject.settings.num_blocks, 16)


def carried_out(pager: Any, plan: Any) -> None:
    """The plan is complete at once."""
    pager.start(plan)
    pager.complete(plan)


def swap_out(subject: Subject) -> Operation:
    """Plan the way out of 8k tokens, of which nothing is on the host."""
    pager = pager_of(subject)

    def prepare() -> Any:
        sequence = pager.admit(subject.prompt(TOKENS))
        sequence.commit()
        return sequence

    def clean(sequence: Any, plan: Any) -> None:
        assert len(plan) == TOKENS // 16
        carried_out(pager, plan)
        sequence.release()

    return Operation(lambda sequence: sequence.swap_out(), prepare, clean)


def swap_in(subject: Subject) -> Operation:
    """Plan the way back of 8k tokens, of which nothing is on the device."""
    pager = pager_of(subject)

    def prepare() -> tuple[Any, NDArray[np.int32]]:
        prompt = subject.prompt(TOKENS)
        sequence = pager.admit(prompt)
        sequence.commit()
        carried_out(pager, sequence.swap_out())
        return sequence, prompt

    def run(state: tuple[Any, NDArray[np.int32]]) -> Any:
        return state[0].swap_in()

    def clean(state: tuple[Any, NDArray[np.int32]], plan: Any) -> None:
        carried_out(pager, plan)
        state[0].release()
        pager.forget(state[1][:16])

    return Operation(run, prepare, clean)


def offload(subject: Subject) -> Operation:
    """Plan the copy of a cold chain of 8k tokens."""
    pager = pager_of(subject)

    def prepare() -> None:
        with pager.admit(subject.prompt(TOKENS)) as sequence:
            sequence.commit()

    def clean(_: None, plan: Any) -> None:
        carried_out(pager, plan)

    return Operation(lambda _: pager.offload(TOKENS // 16), prepare, clean)


def save(subject: Subject) -> Operation:
    """Plan the way of a cold chain of 8k tokens from the host to a store, keys included."""
    pager = pager_of(subject)

    def prepare() -> None:
        for plan_more in (pager.offload, pager.save):  # What others left, first.
            while (plan := plan_more(pager.num_blocks)) is not None:
                carried_out(pager, plan)
        with pager.admit(subject.prompt(TOKENS)) as sequence:
            sequence.commit()
        carried_out(pager, pager.offload(TOKENS // 16))

    def clean(_: None, plan: Any) -> None:
        assert len(plan) == TOKENS // 16
        carried_out(pager, plan)

    return Operation(lambda _: pager.save(TOKENS // 16), prepare, clean)


def load(subject: Subject) -> Operation:
    """Plan the way of 8k tokens from a store to the host, keys included."""
    pager = pager_of(subject)

    def run(prompt: NDArray[np.int32]) -> Any:
        return pager.load(prompt, TOKENS)

    def clean(_: NDArray[np.int32], plan: Any) -> None:
        assert len(plan) == TOKENS // 16
        pager.cancel(plan)

    return Operation(run, lambda: subject.prompt(TOKENS + 1), clean)


def admit_cold(subject: Subject) -> Operation:
    """What a plan is held against: admit the same tokens, on the same pager."""
    pager = pager_of(subject)

    def clean(_: Any, sequence: Any) -> None:
        sequence.release()

    return Operation(pager.admit, lambda: subject.prompt(TOKENS), clean)


def hit(*, fetch: bool) -> Callable[[Subject], Operation]:
    """A full hit of 8k tokens on the device, with a host tier."""

    def make(subject: Subject) -> Operation:
        pager, prompt = pager_of(subject), subject.prompt(TOKENS + 1)
        with pager.admit(prompt) as sequence:
            sequence.commit()
        wish = {"fetch": True} if fetch else {}

        def run(_: None) -> Any:
            sequence = pager.admit(prompt, **wish)
            sequence.block_ids  # noqa: B018 - what an engine reads next
            return sequence

        return Operation(run, clean=lambda _, sequence: sequence.release())

    return make

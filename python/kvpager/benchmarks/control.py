"""Load control: what it costs to decide about a request while many run. The reference has none, so it is the core's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .measure import Operation

if TYPE_CHECKING:
    from .operations import Subject

BLOCK_SIZE = 16
RUNNING = 1024
PROMPT_TOKENS = 256
ANSWER_TOKENS = 1024
BLOCKS_EACH = 2 * (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE
ENDED = 1000
SAMPLES = 500


def try_admit(num_kinds: int, *, half_known: bool) -> Callable[[Subject], Operation]:
    """`Admission.try_admit` after a change of the pool, while answers of `num_kinds` kinds are on their way; of each
    second one it may be known how long it gets."""

    def make(subject: Subject) -> Operation:
        from .. import Admission, Pager

        num_running = RUNNING // subject.settings.rows_divisor
        pager = Pager(num_running * BLOCKS_EACH, BLOCK_SIZE)
        admission = Admission(pager)
        answers = subject.rng.integers(1, ANSWER_TOKENS, (3, max(ENDED, num_running))).tolist()

        def admit(number: int, expected: int | None) -> Any:
            kind = f"kind {number % num_kinds}"
            return admission.try_admit(subject.prompt(PROMPT_TOKENS), kind=kind, expected_tokens=expected)

        for number in range(ENDED):
            ended = admit(number, None)
            ended.extend(subject.prompt(answers[0][number]))
            ended.release()
        running = []
        for number in range(num_running):
            answered, more = answers[1][number], answers[2][number]
            is_known = half_known and number // num_kinds % 2 == 1
            sequence = admit(number, answered + more if is_known else None)
            sequence.commit()
            sequence.extend(subject.prompt(answered))
            running.append(sequence)
        prompt = subject.prompt(PROMPT_TOKENS)

        known = ANSWER_TOKENS // 2 if half_known else None
        # The end of each sample's sequence changes the pool, so that the next one finds out anew. It also says
        # something about how long answers get: few samples, or there would be nothing else. Who runs is not dropped.
        return Operation(
            lambda _: admission.try_admit(prompt, kind="kind 0", expected_tokens=known),
            prepare=lambda: running,
            clean=lambda _, sequence: sequence.release("aborted"),
            samples_max=SAMPLES,
        )

    return make

"""One step ahead: while the device runs a step, the host plans the next one, with placeholders for the tokens to come.

    python examples/ahead_loop.py

`batch_loop.py` waits for each step's tokens before it plans the next. Here the host never waits for what it has just
launched. It learns of a stop token one step late: the row that is planned by then is void, its commit is told so, and
what the device computed for it is thrown away. One worker thread is the device, with one stream of launches.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpager

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY, STOP = 4, 24, 50, 7
MAX_SEQS, BUDGET, NEW_TOKENS = 8, 16, 12  # positions of one step; tokens of one answer, without a stop token
MAX_LENGTH = NUM_BLOCKS * BLOCK_SIZE  # positions of one request: what the pool holds, or your model

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE)
batch = pager.batch(MAX_SEQS, max_blocks=MAX_LENGTH // BLOCK_SIZE, max_tokens=BUDGET, buffers=2)
Tokens = npt.NDArray[np.int32]


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer."""

    number: int
    prompt: list[int]
    seq: kvpager.Sequence

    def answer(self) -> list[int]:
        """Its tokens so far, without the placeholder of a step that is running."""
        return [token for token in self.seq.tokens[len(self.prompt) :].tolist() if token >= 0]


class Device:
    """KV memory and one stream. A launch reads its step's arrays when its turn comes: they stay until the commit."""

    def __init__(self) -> None:
        self.kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE))
        self.sampled = np.zeros(MAX_SEQS, np.int32)  # by row; the next launch finds the tokens of placeholders here
        self.stream = ThreadPoolExecutor(max_workers=1)

    def launch(self, step: kvpager.Step) -> Future[Tokens]:
        arrays = step.block_tables, step.seq_lens, step.slot_mapping, step.positions, step.query_start_loc
        return self.stream.submit(self.kernel, step.copies, step.token_ids, *arrays)

    def kernel(
        self,
        copies: Tokens,
        tokens: Tokens,
        tables: Tokens,
        lengths: Tokens,
        slots: npt.NDArray[np.int64],
        positions: Tokens,
        starts: Tokens,
    ) -> Tokens:
        for source, target in copies:
            self.kv[target] = self.kv[source]
        rows = np.repeat(np.arange(len(lengths)), np.diff(starts))
        tokens = np.where(tokens < 0, self.sampled[rows], tokens)
        self.kv.reshape(-1)[slots] = (tokens + 1.0) * (positions + 1.0)
        for row, length in enumerate(lengths):
            self.sampled[row] = self.kv[tables[row]].reshape(-1)[:length].sum() % VOCABULARY
        return self.sampled[: len(lengths)].copy()


def plan(running: list[Request]) -> kvpager.Step | None:
    """The next step: known tokens, and behind them one placeholder where the open step computes the last of them."""
    counts = np.zeros(batch.num_rows, np.int32)
    budget = BUDGET
    for request in running:
        seq = request.seq
        known = len(seq) - seq.num_planned
        if known == 0 and seq.num_planned < min(len(request.prompt) + NEW_TOKENS - 1, MAX_LENGTH):
            known = 1  # the token that the open step samples; the last one of an answer needs no slot
        row = batch.row_of(seq)
        counts[row] = min(known, budget)
        budget -= int(counts[row])
    if not counts.any():
        return None
    try:
        return batch.step(counts)
    except kvpager.OutOfBlocks as refused:
        counts[list(refused.rows)] = 0  # these wait; without them the step fits
    return batch.step(counts) if counts.any() else None


def serve(prompts: list[list[int]]) -> list[list[int]]:
    """Answer all prompts. An answer ends early at the greatest length; a prompt that is longer gets none."""
    waiting = deque(number for number, prompt in enumerate(prompts) if len(prompt) <= MAX_LENGTH)
    preempted: deque[Request] = deque()
    running: list[Request] = []
    launched: deque[tuple[kvpager.Step, Future[Tokens]]] = deque()
    answers: list[list[int]] = [[] for _ in prompts]
    device = Device()

    while waiting or preempted or running or launched:
        while preempted and len(running) < MAX_SEQS and preempted[0].seq.try_resume():
            running.append(preempted.popleft())
            batch.add(running[-1].seq)
        while waiting and not preempted and len(running) < MAX_SEQS and (seq := pager.try_admit(prompts[waiting[0]])):
            running.append(Request(waiting[0], prompts[waiting.popleft()], seq))
            batch.add(seq)
        if (step := plan(running)) is not None:
            launched.append((step, device.launch(step)))
        elif not launched and running:
            preempted.appendleft(running.pop())  # nobody can go on: the youngest gives its blocks back
            preempted[0].seq.preempt()
        # The step before the one just launched is over, or soon will be.
        if len(launched) == 2 or (step is None and launched):
            oldest, sampled = launched.popleft()
            applied = oldest.commit(sampled.result())
            rows = {batch.row_of(request.seq): request for request in running}
            for row in np.flatnonzero(applied):
                request = rows[int(row)]
                answer = request.answer()
                if len(answer) == NEW_TOKENS or STOP in answer or len(request.prompt) + len(answer) > MAX_LENGTH:
                    answers[request.number] = answer
                    running.remove(request)
                    request.seq.release()  # if the step that is running names it, its row is void now
    device.stream.shutdown()
    return answers


def alone(prompt: list[int]) -> list[int]:
    """The same model with KV of its own, contiguous: what the answer must be."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NEW_TOKENS and STOP not in tokens[len(prompt) :]:
        total = ((np.array(tokens) + 1.0) * (np.arange(len(tokens)) + 1.0)).sum()
        tokens.append(int(total) % VOCABULARY)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, 10).tolist()
    prompts = [system + rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 25, 20)]
    assert serve(prompts) == [alone(prompt) for prompt in prompts]
    stats = pager.stats()
    assert not pager.check()
    print(f"{len(prompts)} answers, each as if served alone; {stats.hit_rate:.0%} of the prompt tokens were cached,")
    print(f"{stats.preemptions} preemptions, {stats.recomputed_tokens} tokens computed again,", end=" ")
    print(f"{stats.evicted_blocks} blocks evicted")

"""A full pool, answered in the three places where that is done: who comes in, who gives way, what is told of it.

    python examples/admission_loop.py

`batch_loop.py` lets in whoever fits now and preempts the youngest. Here `Admission` looks ahead, `choose_victims` names
who goes, and `Pressure` and `metrics` say how the pool is doing. The "kernel" is the stand-in of `batch_loop.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpager

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 4, 24, 50
MAX_SEQS, BUDGET, NEW_TOKENS = 8, 16, 12  # positions of one step; tokens of one answer
MAX_LENGTH = NUM_BLOCKS * BLOCK_SIZE  # positions of one request: what the pool holds, or your model

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE)
batch = pager.batch(MAX_SEQS, max_blocks=MAX_LENGTH // BLOCK_SIZE, max_tokens=BUDGET, buffers=1)
admission = kvpager.Admission(pager)
pressure = kvpager.Pressure(pager, window=100)
kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE))


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer."""

    number: int
    prompt: list[int]
    seq: kvpager.Sequence | None = None  # from when it first came in; preempted while it waits again
    waited: kvpager.Wait | None = None  # its last answer: so that it is not passed over for ever


def kernel(step: kvpager.Step) -> npt.NDArray[np.int32]:
    """The forward pass, as in `batch_loop.py`."""
    for source, target in step.copies:
        kv[target] = kv[source]
    kv.reshape(-1)[step.slot_mapping] = (step.token_ids + 1.0) * (step.positions + 1.0)
    rows = zip(step.block_tables, step.seq_lens, strict=True)
    return np.array([kv[table].reshape(-1)[:length].sum() % VOCABULARY for table, length in rows], np.int32)


def let_in(waiting: deque[Request], running: dict[kvpager.Sequence, Request]) -> None:
    """Ask about each request that waits, in order. `Admission` counts blocks; rows are the loop's."""
    for request in list(waiting):
        if len(running) == MAX_SEQS:
            return
        if request.seq is None:
            answer = admission.try_admit(request.prompt, max_tokens=NEW_TOKENS, waited=request.waited)
        else:
            answer = admission.try_resume(request.seq, waited=request.waited)
        if isinstance(answer, kvpager.Wait):
            request.waited = answer  # not now; somebody behind may be smaller
            continue
        waiting.remove(request)
        if isinstance(answer, kvpager.Sequence):
            request.seq, request.waited = answer, None
            running[answer] = request
            batch.add(answer)
        elif request.seq is not None:  # Never: larger than the pool, so it gets no answer
            request.seq.release("aborted")


def plan(waiting: deque[Request], running: dict[kvpager.Sequence, Request]) -> kvpager.Step:
    """The next step. Where it does not fit the pager names who gives way, until it does."""
    while True:
        counts, budget = np.zeros(batch.num_rows, np.int32), BUDGET
        for seq in running:  # one position for who decodes, a chunk for who is in his prompt
            row = batch.row_of(seq)
            counts[row] = min(len(seq) - seq.num_planned, budget)
            budget -= int(counts[row])
        try:
            return batch.step(counts)
        except kvpager.OutOfBlocks as refused:
            # keep=0: one alone goes as well, and comes back to the cached blocks in place of its own copies.
            victim = pager.choose_victims(refused.needed, candidates=list(running), keep=0)[0]
        assert victim.sequence is not None  # one of the candidates
        victim.sequence.preempt(reason=victim.reason, cost=victim.cost)
        waiting.appendleft(running.pop(victim.sequence))


def serve(prompts: list[list[int]]) -> list[list[int]]:
    """Answer all prompts. An answer ends early at the greatest length; a prompt that is longer gets none."""
    waiting = deque(Request(number, prompt) for number, prompt in enumerate(prompts))
    running: dict[kvpager.Sequence, Request] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    while waiting or running:
        let_in(waiting, running)
        step = plan(waiting, running)
        step.commit(kernel(step))
        pressure.read()
        for seq, request in list(running.items()):
            answer = seq.tokens[len(request.prompt) :].tolist()
            if len(answer) == NEW_TOKENS or len(seq) > MAX_LENGTH:  # the last token needs no slot
                answers[request.number] = answer
                del running[seq]
                seq.release("finished")  # from these the controller learns how long answers get
    return answers


def alone(prompt: list[int]) -> list[int]:
    """The same model with KV of its own, contiguous: what the answer must be."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        total = ((np.array(tokens) + 1.0) * (np.arange(len(tokens)) + 1.0)).sum()
        tokens.append(int(total) % VOCABULARY)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, 10).tolist()
    prompts = [system + rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 25, 20)]
    assert serve(prompts) == [alone(prompt) for prompt in prompts]
    assert not pager.check()
    reading = pressure.read()
    print(f"{len(prompts)} answers, each as if served alone; {reading.reason}")
    print("Of what a scrape of /metrics would say:")
    metrics = pager.metrics(reading, labels={"model_name": "stand-in"})
    print(*(line for line in metrics.splitlines() if line.startswith("kvpager_num_")), sep="\n")

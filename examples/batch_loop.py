"""A server's loop around a batch: chunked prefill and decode in the same steps, preemption, requests that come and go.

    python examples/batch_loop.py

The "kernel" is a stand-in that yours replaces line by line: it writes one number of KV for each token, reads all of a
row's numbers back through its block table, and samples the next token from their sum. So each answer depends on every
KV entry, and the end of the script can show that none was ever wrong. `ahead_loop.py` is the same one step ahead.
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
batch = pager.batch(MAX_SEQS, max_blocks=MAX_LENGTH // BLOCK_SIZE, max_tokens=BUDGET)
kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE))


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer."""

    number: int
    prompt: list[int]
    seq: kvpager.Sequence


def kernel(step: kvpager.Step) -> npt.NDArray[np.int32]:
    """The forward pass. Rows that are still inside their prompt are sampled too; the commit ignores that."""
    for source, target in step.copies:  # copy-on-write comes before what writes
        kv[target] = kv[source]
    kv.reshape(-1)[step.slot_mapping] = (step.token_ids + 1.0) * (step.positions + 1.0)
    rows = zip(step.block_tables, step.seq_lens, strict=True)
    return np.array([kv[table].reshape(-1)[:length].sum() % VOCABULARY for table, length in rows], np.int32)


def plan(running: list[Request]) -> kvpager.Step | None:
    """The next step, the oldest requests first: one position for who decodes, a chunk for who is in his prompt."""
    counts = np.zeros(batch.num_rows, np.int32)
    budget = BUDGET
    for request in running:
        row = batch.row_of(request.seq)
        counts[row] = min(len(request.seq) - request.seq.num_planned, budget)
        budget -= int(counts[row])
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
    answers: list[list[int]] = [[] for _ in prompts]
    while waiting or preempted or running:
        # Who was preempted comes back first, then new requests, while there is room.
        while preempted and len(running) < MAX_SEQS and preempted[0].seq.try_resume():
            running.append(preempted.popleft())
            batch.add(running[-1].seq)
        while waiting and not preempted and len(running) < MAX_SEQS and (seq := pager.try_admit(prompts[waiting[0]])):
            running.append(Request(waiting[0], prompts[waiting.popleft()], seq))
            batch.add(seq)
        step = plan(running)
        if step is None:
            preempted.appendleft(running.pop())  # nobody can go on: the youngest gives its blocks back
            preempted[0].seq.preempt()
            continue
        step.commit(kernel(step))
        for request in list(running):
            answer = request.seq.tokens[len(request.prompt) :].tolist()
            if len(answer) == NEW_TOKENS or len(request.seq) > MAX_LENGTH:  # the last token needs no slot
                answers[request.number] = answer
                running.remove(request)
                request.seq.release()
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
    stats = pager.stats()
    assert not pager.check()
    print(f"{len(prompts)} answers, each as if served alone; {stats.hit_rate:.0%} of the prompt tokens were cached,")
    print(f"{stats.preemptions} preemptions, {stats.recomputed_tokens} tokens computed again,", end=" ")
    print(f"{stats.evicted_blocks} blocks evicted")

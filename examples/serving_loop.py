"""A continuous-batching loop around kvpager, small enough to read at once.

    python examples/serving_loop.py

The "model" is a stand-in that a real one can replace line by line: it writes one number of KV for each token, reads all
of them back through the block table, and picks the next token from their sum. So each answer depends on every KV
entry, and the end of the script can show that sharing, copy-on-write and preemption never served a wrong one.
"""

from __future__ import annotations

from collections import deque

import numpy as np

import kvpager

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY, NEW_TOKENS = 4, 24, 50, 12

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE)
kv = np.zeros(NUM_BLOCKS * BLOCK_SIZE)  # the pool: one number a token


def forward(seq: kvpager.Sequence) -> int:
    """Compute what is not committed yet: write its KV, say so, read all KV, sample the next token."""
    start = seq.num_committed
    slots = seq.slots(start, len(seq))
    for source, target in pager.take_copies():  # copy-on-write comes before the kernel that writes
        kv[target * BLOCK_SIZE :][:BLOCK_SIZE] = kv[source * BLOCK_SIZE :][:BLOCK_SIZE]
    positions = np.arange(len(seq))
    kv[slots] = (seq.tokens[start:] + 1.0) * (positions[start:] + 1.0)
    seq.commit()
    history = kv[seq.block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE]
    return int(history.sum()) % VOCABULARY


def serve(prompts: list[list[int]]) -> list[list[int]]:
    """Answer all prompts, as many at a time as the pool holds.

    An answer ends early when its request fills the whole pool; a prompt that not even the whole pool holds gets none.
    """
    waiting = deque(number for number, prompt in enumerate(prompts) if len(prompt) <= NUM_BLOCKS * BLOCK_SIZE)
    preempted: deque[tuple[int, kvpager.Sequence]] = deque()
    running: list[tuple[int, kvpager.Sequence]] = []
    answers: list[list[int]] = [[] for _ in prompts]
    while waiting or preempted or running:
        # Who was preempted comes back first, then new requests, while there is room.
        while preempted and preempted[0][1].try_resume():
            running.append(preempted.popleft())
        while waiting and not preempted and (seq := pager.try_admit(prompts[waiting[0]])):
            running.append((waiting.popleft(), seq))
        # One step for each, the oldest first: prefill where a sequence is new, decode where it is not.
        for number, seq in list(running):
            if seq.state == "preempted":  # it made room for an older one in this step
                continue
            token = forward(seq)
            done = len(seq) - len(prompts[number]) == NEW_TOKENS
            # The next token needs a slot. When the pool is full, the youngest gives its blocks back and waits, be it
            # this one. But one that has the pool to itself would wait for nobody: its answer ends here.
            while not done and seq.state == "running" and seq.try_append(token) is None:
                if len(running) == 1:
                    done = True
                else:
                    youngest = running.pop()
                    youngest[1].preempt()
                    preempted.appendleft(youngest)
            if done:
                answers[number] = seq.tokens[len(prompts[number]) :].tolist()
                running.remove((number, seq))
                seq.release()
    return answers


def alone(prompt: list[int]) -> list[int]:
    """The same model with KV of its own, contiguous: what the answer must be."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        history = (np.array(tokens) + 1.0) * (np.arange(len(tokens)) + 1.0)
        tokens.append(int(history.sum()) % VOCABULARY)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, 10).tolist()
    prompts = [system + rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 9, 20)]
    assert serve(prompts) == [alone(prompt) for prompt in prompts]
    stats = pager.stats()
    assert not pager.check()
    print(f"{len(prompts)} answers, each as if served alone; {stats.hit_rate:.0%} of the prompt tokens were cached,")
    print(f"{stats.preemptions} preemptions, {stats.recomputed_tokens} tokens computed again,", end=" ")
    print(f"{stats.evicted_blocks} blocks evicted")

"""Chunked prefill, several samples of one prompt by fork, and tenants that share nothing: kvpager's part of each.

    python examples/samples_and_tenants.py

Long prompts are prefilled a chunk a step, so that they do not hold up those that decode. What is committed can be hit
by others before the prompt is through. The "model" is that of `serving_loop.py`: an answer depends on every KV entry.
"""

from __future__ import annotations

import numpy as np

import kvpager

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY, CHUNK, NEW_TOKENS = 4, 100, 50, 8, 10

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE)
kv = np.zeros(NUM_BLOCKS * BLOCK_SIZE)  # the pool: one number a token


def compute(seq: kvpager.Sequence, stop: int) -> int:
    """One kernel launch: the KV of all positions below `stop` that have none. Returns the sum of the KV up to there."""
    start = seq.num_committed
    slots = seq.slots(start, stop)
    for source, target in pager.take_copies():  # copy-on-write comes before the kernel that writes
        kv[target * BLOCK_SIZE :][:BLOCK_SIZE] = kv[source * BLOCK_SIZE :][:BLOCK_SIZE]
    positions = np.arange(stop)
    kv[slots] = (seq.tokens[start:stop] + 1.0) * (positions[start:] + 1.0)
    seq.commit(stop)  # not the whole prompt: what the kernel has written, and no more
    return int(kv[seq.block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE].sum())


def prefill(seq: kvpager.Sequence) -> int:
    """Chunk by chunk, from the end of what was cached. A server would decode others between two chunks."""
    total = 0
    while seq.num_committed < len(seq):
        total = compute(seq, min(len(seq), seq.num_committed + CHUNK))
    return total


def sample(prompt: list[int], count: int, tenant: bytes) -> tuple[list[list[int]], int]:
    """`count` answers to one prompt, which is prefilled once, and how many of its tokens were cached."""
    first = pager.admit(prompt, namespace=tenant)
    cached, total = first.num_cached, prefill(first)
    # Forked when the prompt is computed: children share what is committed, and copy the partial block when they write.
    samples = [first, *first.fork(count - 1)]
    for number, seq in enumerate(samples):
        seq.append((total + number) % VOCABULARY)  # each sample begins with another token
    for _ in range(NEW_TOKENS - 1):
        for seq in samples:
            seq.append(compute(seq, len(seq)) % VOCABULARY)
    answers = [seq.tokens[len(prompt) :].tolist() for seq in samples]
    for seq in samples:
        seq.release()
    return answers, cached


def alone(prompt: list[int], number: int) -> list[int]:
    """The same sample with KV of its own, contiguous: what the answer must be."""
    tokens = list(prompt)
    for step in range(NEW_TOKENS):
        total = int(((np.array(tokens) + 1.0) * (np.arange(len(tokens)) + 1.0)).sum())
        tokens.append((total + (number if step == 0 else 0)) % VOCABULARY)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 30).tolist()
    expected = [alone(prompt, number) for number in range(3)]
    for tenant in (b"acme", b"acme", b"globex"):
        answers, cached = sample(prompt, 3, tenant)
        assert answers == expected
        print(f"{tenant.decode()}: 3 answers to one prompt of {len(prompt)} tokens, {cached} of them cached")
    assert pager.match(prompt, namespace=b"initech").num_tokens == 0
    assert not pager.check()
    stats = pager.stats()
    print(f"{stats.copies} blocks copied on write for {stats.admitted_sequences} prompts and {3 * 2} forks")

"""Embedding kvpager, as short as it gets: two prompts that share their beginning, decoded together.

python examples/minimal.py
"""

import numpy as np

import kvpager

BLOCK_SIZE, NUM_BLOCKS = 16, 1_000

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE)
batch = pager.batch(max_seqs=32, max_blocks=64)
kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE))  # your KV pool; this toy keeps one number a token


def kernel(step: kvpager.Step) -> list[int]:
    """Your forward pass: write the KV of the step's positions, read through the tables, sample for each row."""
    for source, target in step.copies:  # copy-on-write comes first
        kv[target] = kv[source]
    kv.reshape(-1)[step.slot_mapping] = (step.token_ids + 1) * (step.positions + 1)
    rows = zip(step.block_tables, step.seq_lens, strict=True)
    return [int(kv[table].reshape(-1)[:length].sum()) % 997 for table, length in rows]


# New requests: all that is in the cache already is shared, the rest is to be computed.
system = list(range(100, 140))
sequences = [pager.admit([*system, 1, 2, 3]), pager.admit([*system, 4])]
for seq in sequences:
    batch.add(seq)

# Prefill: one step for both prompts, of different lengths.
step = batch.step([len(seq) - seq.num_planned for seq in sequences])
step.commit(kernel(step))

# Decode: one position of each row a step, and one call for all of them.
for _ in range(7):
    step = batch.step()
    step.commit(kernel(step))

for seq in sequences:
    print(seq.tokens[-8:])
    seq.release()  # its blocks stay cached until their frames are needed
print(pager.match([*system, 9]).num_tokens, "tokens of the next prompt like these need no prefill")

"""How long a step takes on this machine, measured at the start: what `--inter-token-ms` is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import numpy as np

import kvpager
from kvpager.cost import Speed
from kvpager.cost.shapes import pairs

from .llama import Llama
from .pages import PagedKV

CHUNK, DEPTH, REPEATS = 32, 512, 3


def measured(model: Llama, block_size: int = 16, *, clock: Callable[[], float] = time.perf_counter) -> Speed:
    """Three kinds of step, the fastest of a few each, in a pool of their own: a token, a chunk, a chunk further on.

    Between them lie the time of a token, of a pair of tokens that attention looks at, and what every step takes beside.
    NumPy computes and reads one after the other, so there is nothing behind which a prompt could be hidden: no reading.
    A few seconds for SmolLM2.
    """
    tokens = min(CHUNK, model.config.context // 2)
    depth = min(DEPTH, model.config.context - tokens)
    num_blocks = -(-(depth + tokens) // block_size)
    pager = kvpager.Pager(num_blocks, block_size)
    pages = PagedKV(model.config, num_blocks, block_size, is_exact=model.is_exact)
    batch = pager.batch(1, num_blocks, tokens, buffers=1)
    names = count()

    def fastest(start: int, num_new: int) -> float:
        return min(seconds(start, num_new) for _ in range(REPEATS))

    def seconds(start: int, num_new: int) -> float:
        # A namespace each: no prompt is cached.
        seq = pager.admit(np.arange(start + num_new, dtype=np.int32) % 128, namespace=b"%d" % next(names))
        seq.commit(start)  # the values of what lies before do not matter here
        batch.add(seq)
        began = clock()
        step = batch.step(num_new)
        pages.begin(step)
        model.forward(step.token_ids, step.positions, pages.attend, np.array([num_new - 1]))
        step.commit()
        took = clock() - began
        seq.release()
        return took

    one, chunk, far = fastest(0, 1), fastest(0, tokens), fastest(depth, tokens)
    pair_s = max(0.0, far - chunk) / (tokens * depth)
    token_s = max(0.0, chunk - one - (pairs(0, tokens) - 1) * pair_s) / (tokens - 1)
    return Speed(
        name=f"{model.name} here",
        token_s=token_s,
        pair_s=pair_s,
        weights_s=0.0,
        kv_token_s=0.0,
        block_s=0.0,
        overhead_s=max(0.0, one - token_s - pair_s),
    )

"""The example server's loop without HTTP: a random model, and the answer that each request gets alone."""

from __future__ import annotations

import numpy as np

from examples.server.llama import Llama
from examples.server.pages import attend_each
from examples.server.requests import Request
from examples.server.scheduler import Limits, Scheduler, choose
from examples.server.tokenizer import ByteTokenizer
from kvpager.movers import NumpyMover

MODEL, TOKENIZER = Llama.random(0), ByteTokenizer()


class Asked:
    """A request and what it was told."""

    def __init__(self, prompt, max_tokens, **more):
        self.events = []
        self.request = Request(np.array(prompt, np.int32), max_tokens, self.events.append, **more)

    @property
    def texts(self):
        texts = [""] * self.request.n
        for event in self.events:
            texts[event.index] += event.text
        return texts

    @property
    def reasons(self):
        return {event.index: event.finish_reason for event in self.events if event.finish_reason}

    @property
    def is_done(self):
        return len(self.reasons) == self.request.n

    def alone(self):
        """Each sample's text, from a contiguous KV cache of its own."""
        return [alone(self.request, index) for index in range(self.request.n)]


def alone(request, index):
    config, tokens = MODEL.config, request.prompt.tolist()
    shape = (config.num_layers, len(tokens) + request.max_tokens, config.num_kv_heads, config.head_dim)
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    start, text = 0, ""

    def attend(layer, q, k, v):
        keys[layer, start : len(tokens)], values[layer, start : len(tokens)] = k, v
        q = q.reshape(len(q), config.num_kv_heads, -1, config.head_dim)
        seen = (each[layer, : len(tokens)].swapaxes(0, 1) for each in (keys, values))
        return attend_each(q, *seen).reshape(len(q), config.num_heads, -1)

    for number in range(request.max_tokens):
        new = np.arange(start, len(tokens))
        (logits,) = MODEL.forward(np.array(tokens)[new], new, attend, np.array([len(new) - 1]))
        token = choose(logits, request.temperature, (request.seed, index, number))
        if token == TOKENIZER.end_of_turn:
            break
        start = len(tokens)
        tokens.append(token)
        text += chr(token)
    return text


def a_scheduler(num_blocks=64, block_size=4, *, host_blocks=0, make_mover=NumpyMover, disk=None, **limits):
    tiers = {"host_blocks": host_blocks, "make_mover": make_mover, "disk": disk, "disk_bytes": 1 << 24}
    scheduler = Scheduler(MODEL, TOKENIZER, num_blocks, block_size, Limits(**limits), **tiers)
    # A block that is read before it is written spoils the answer for certain.
    scheduler.pages.k[:], scheduler.pages.v[:] = np.nan, np.nan
    return scheduler


def drive(scheduler, max_steps=5_000):
    """Until nobody waits. Each step leaves a sound pager."""
    for _ in range(max_steps):
        if not scheduler.is_busy:
            assert (scheduler._samples(), scheduler.pager.stats().active_blocks) == ([], 0)
            return
        scheduler.step()
        assert scheduler.pager.check() == []
    raise AssertionError(f"still busy after {max_steps} steps: {scheduler.metrics()}")


def ask(scheduler, *args, **more):
    asked = Asked(*args, **more)
    scheduler.submit(asked.request)
    return asked


def a_history(scheduler, rng, num_requests, max_tokens):
    """Requests that begin alike, with one sample or three, while the server steps. Those that are not aborted."""
    systems = [some(0, 9), some(1, 16)]
    everybody, to_abort = [], []
    for number in range(num_requests):
        prompt = np.concatenate([rng.choice(systems), some(rng.randrange(6), rng.randrange(1, 12))])
        heat = rng.choice([0.0, 0.0, 1.0])
        limit = min(rng.randrange(1, max_tokens), scheduler.max_len - len(prompt))
        asked = ask(scheduler, prompt, limit, n=rng.choice([1, 1, 1, 3]), temperature=heat, seed=number)
        (to_abort if rng.random() < 0.2 else everybody).append(asked)
        for _ in range(rng.randrange(4)):
            scheduler.step()
            assert scheduler.pager.check() == []
        if to_abort and rng.random() < 0.2:
            scheduler.abort(rng.choice(to_abort).request)
    for asked in to_abort:
        scheduler.abort(asked.request)
    return everybody


def some(seed, count):
    return np.random.default_rng(seed).integers(0, 250, count)

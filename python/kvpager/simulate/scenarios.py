"""Made-up loads, by seed. Arrivals of `mixed` and `burst` are a rhythm: `Load.at_rate` says how fast.

Lengths called log-normal have the stated median, and are 1 token at least. Token values are made up as well: prompts
share what they are said to share and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .load import Load, SystemPrompts


def thrash(seed: int, requests: int = 256) -> Load:
    """All at once, nothing shared, and answers three times as long as prompts.

    Prompts are uniform on [256, 768), answers on [768, 2304). What fits when it comes does not fit when it has grown.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    prompts, answers = rng.integers(256, 768, requests), rng.integers(768, 2304, requests)
    return _load("thrash", np.zeros(requests), prompts, answers, np.full(requests, -1), 0)


def mixed(seed: int, requests: int = 2000) -> Load:
    """Short and long requests behind one system prompt of 1,024 tokens.

    Arrivals are a Poisson process. Four of five are a question (median 100, sigma 0.8) with a short answer (150, 0.7);
    the fifth brings a document, uniform on [2048, 8192), and gets a longer one (400, 0.7). Answers end at 2,048.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    arrivals = np.cumsum(rng.exponential(1.0, requests))
    long = rng.random(requests) < 0.2
    asked = np.where(long, rng.integers(2048, 8192, requests), _log_normal(rng, 100, 0.8, requests, 4096))
    answers = np.where(long, _log_normal(rng, 400, 0.7, requests, 2048), _log_normal(rng, 150, 0.7, requests, 2048))
    return _load("mixed", arrivals, 1024 + asked, answers, np.zeros(requests, np.int64), 1024)


def burst(seed: int, requests: int = 2000) -> Load:
    """One-off prompts in bursts over a steady stream of questions behind one system prompt of 2,048 tokens.

    Every second request is one of the stream: Poisson arrivals, a question (median 60, sigma 0.8) and an answer (120,
    0.7). The others share nothing with anybody: prompts (600, 0.5), answers (120, 0.7). They come in bursts, all of one
    at the same moment; bursts begin as a Poisson process, their sizes are geometric with mean 50.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    flood = requests // 2
    stream = np.cumsum(rng.exponential(2.0, requests - flood))
    moments: list[float] = []
    clock = 0.0
    while len(moments) < flood:
        clock += rng.exponential(2.0 * 50)
        moments += [clock] * min(flood - len(moments), int(rng.geometric(1 / 50)))
    arrivals = np.concatenate([stream, moments])
    order = np.argsort(arrivals, kind="stable")
    which = np.where(order < len(stream), 0, -1)
    questions, one_offs = _log_normal(rng, 60, 0.8, requests, 2048), _log_normal(rng, 600, 0.5, requests, 4096)
    prompts = np.where(which == 0, 2048 + questions, one_offs)
    return _load("burst", arrivals[order], prompts, _log_normal(rng, 120, 0.7, requests, 2048), which, 2048)


SCENARIOS: dict[str, Callable[[int, int], Load]] = {"thrash": thrash, "mixed": mixed, "burst": burst}
REQUESTS = {"thrash": 256, "mixed": 2000, "burst": 2000}
"""How many each has unless told otherwise."""


def _log_normal(rng: np.random.Generator, median: float, sigma: float, count: int, longest: int) -> NDArray[np.int64]:
    lengths = 1 + rng.lognormal(np.log(median), sigma, count).astype(np.int64)
    return np.minimum(lengths, longest)


def _load(
    name: str,
    arrivals: NDArray[np.float64],
    prompts: NDArray[np.int64],
    answers: NDArray[np.int64],
    which: NDArray[np.int64],
    system_tokens: int,
) -> Load:
    # One value for each system prompt and one for each request: equal texts and no others have equal tokens.
    systems = [np.zeros(system_tokens, np.int32)] if system_tokens else []
    return Load(name, arrivals, prompts, answers, SystemPrompts(systems, which, prompts, 1))

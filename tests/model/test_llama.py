"""The model itself: its results do not depend on how the work is cut, and its answers do not loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .contiguous import Contiguous, Truth
from .engine import MODEL
from .llama import Llama

PROMPT = np.random.default_rng(1).integers(0, Llama.VOCABULARY, 45).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("chunk", [1, 5, 8, 13, 44])
def test_chunks_of_any_size_give_the_same_bits(chunk: int, dtype: Any) -> None:
    whole, parts = Contiguous(MODEL, dtype), Contiguous(MODEL, dtype)
    whole.extend(PROMPT)
    for start in range(0, len(PROMPT), chunk):
        parts.extend(PROMPT[start : start + chunk])
    for name in ("keys", "values"):
        assert np.array_equal(getattr(whole, name)[:, :45], getattr(parts, name)[:, :45])
    assert np.array_equal(whole.logits[:45], parts.logits[:45])


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_loop(seed: int) -> None:
    """A loop of one or two tokens would hide a wrong cache."""
    assert len(set(Truth(Llama(seed)).generate(PROMPT, 100))) > 40


def test_what_is_kept_answers_as_what_is_new() -> None:
    """The truth branches off what it knows: the same as computing it from nothing."""
    truth = Truth(MODEL)
    for tokens in (PROMPT, PROMPT[:20], [*PROMPT[:20], 7, 8], [*PROMPT, 9], [1]):
        known, new = truth.of(tokens), Contiguous(MODEL)
        new.extend(tokens)
        stop = len(tokens)
        assert known.tokens[:stop].tolist() == tokens
        assert np.array_equal(known.keys[:, :stop], new.keys[:, :stop])
        assert np.array_equal(known.logits[:stop], new.logits[:stop])


def test_every_position_counts() -> None:
    """The logits of the end change with each earlier token: no position of a cache goes unread."""
    whole = Truth(MODEL).of(PROMPT).logits[44]
    for position in range(45):
        other = [*PROMPT]
        other[position] = (other[position] + 1) % Llama.VOCABULARY
        assert not np.array_equal(Truth(MODEL).of(other).logits[44], whole)

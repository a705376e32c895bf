"""content_tokens: the test vectors, the range of its values, and its limits."""

from __future__ import annotations

import doctest
import hashlib

import numpy as np
import pytest

import kvpager
import kvpager.content


def test_the_vectors_of_the_docstring():
    failed, attempted = doctest.testmod(kvpager.content)
    assert (failed, attempted) == (0, 2)


def test_the_vectors():
    assert kvpager.content_tokens(bytes(32), 5).tolist() == [1244887938, 1217314854, 1493572829, 1777731133, 2069010176]


@pytest.mark.parametrize("n", [5, 6, 1000])
def test_the_values_are_what_the_docstring_says(n):
    digest = b"\xff" * 32
    stream = hashlib.shake_256(b"kvpager content tokens 1\0" + n.to_bytes(8, "little") + digest).digest(4 * n)
    words = [int.from_bytes(stream[at : at + 4], "little") for at in range(0, 4 * n, 4)]
    assert kvpager.content_tokens(digest, n).tolist() == [word % 2**30 + 2**30 for word in words]


def test_the_values_are_int32_in_the_upper_half():
    tokens = kvpager.content_tokens(bytes(range(32)), 10_000)
    assert tokens.dtype == np.int32
    assert tokens.shape == (10_000,)
    assert tokens.min() >= 2**30
    assert len(np.unique(tokens)) > 9_990


def test_the_number_of_tokens_enters_the_values():
    """Else an image of 5 placeholders would be the beginning of the same image with 6."""
    assert not np.array_equal(kvpager.content_tokens(bytes(32), 6)[:5], kvpager.content_tokens(bytes(32), 5))


@pytest.mark.parametrize("n", [5, 2**20])
def test_the_limits_are_allowed(n):
    assert len(kvpager.content_tokens(bytes(32), n)) == n


@pytest.mark.parametrize("n", [-1, 0, 4, 2**20 + 1])
def test_a_number_beyond_the_limits_is_refused(n):
    with pytest.raises(ValueError, match=r"n must be 5\.\.1048576"):
        kvpager.content_tokens(bytes(32), n)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_digest_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
        kvpager.content_tokens(bytes(size), 5)


def test_values_of_other_types_are_refused():
    with pytest.raises(TypeError, match="digest must be bytes, not str"):
        kvpager.content_tokens("0" * 32, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kvpager.content_tokens(bytes(32), 5.0)  # type: ignore[arg-type]

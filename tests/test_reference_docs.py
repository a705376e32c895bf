"""The examples in the docstrings of the package and of the reference are executed."""

from __future__ import annotations

import doctest

import pytest

import kvpager
import kvpager.reference


@pytest.mark.parametrize("module", [kvpager, kvpager.reference], ids=["kvpager", "reference"])
def test_the_examples_hold(module):
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 3

"""Where a convex function of whole numbers ends being negative."""

from __future__ import annotations

from collections.abc import Callable


def last_negative(f: Callable[[int], float], low: int, high: int) -> int | None:
    """The largest x of [low, high] with f(x) < 0, for a convex f; None if there is none.

    >>> last_negative(lambda x: x * x - 10, -5, 100)
    3
    >>> last_negative(lambda x: x * x, -5, 100) is None
    True
    """
    if f(high) < 0:
        return high
    # The least value: where f stops falling.
    left, right = low, high
    while left < right:
        middle = (left + right) // 2
        if f(middle + 1) < f(middle):
            left = middle + 1
        else:
            right = middle
    if f(left) >= 0:
        return None
    # f(left) < 0 <= f(high), and it rises between.
    right = high
    while right - left > 1:
        middle = (left + right) // 2
        if f(middle) < 0:
            left = middle
        else:
            right = middle
    return left

"""Least squares for two coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

APART = 1e-6
"""How far apart the directions of two points have to be, as the squared sine of the angle between them."""


def fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, that make the relative errors of ``a * x + b * y = seconds`` least, over rows (x, y, s).

    With two unknowns, the best pair with a coefficient below 0 means that the best allowed one has a 0 there.
    """
    if len(rows) < 2:
        raise ConfigError(f"{len(rows)} points cannot tell two coefficients apart: measure two lengths at least")
    # Relative errors: each row divided by its seconds. Columns scaled to length 1, as pairs outnumber tokens by far.
    xs, ys = [x / s for x, _, s in rows], [y / s for _, y, s in rows]
    x_length, y_length = sum(x * x for x in xs) ** 0.5, sum(y * y for y in ys) ** 0.5
    xs, ys = [x / x_length for x in xs], [y / y_length for y in ys]
    cosine = sum(x * y for x, y in zip(xs, ys, strict=True))
    apart = 1 - cosine * cosine
    if apart < APART:
        raise ConfigError(
            "the points are all of one kind: attention has the same share in each, so the two parts cannot be told"
            " apart. Measure a short prefill and one as long as your prompts get"
        )
    x_total, y_total = sum(xs), sum(ys)
    a, b = (x_total - cosine * y_total) / apart, (y_total - cosine * x_total) / apart
    if b < 0:
        a, b = x_total, 0.0
    elif a < 0:
        a, b = 0.0, y_total
    return a / x_length, b / y_length

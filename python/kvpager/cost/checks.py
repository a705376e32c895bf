"""Numbers that callers give, checked: a ConfigError says which one, what it was, and what it may be."""

from __future__ import annotations

import math
from numbers import Real
from operator import index

from ..errors import ConfigError


def at_least(least: int, name: str, value: object) -> int:
    """A whole number from ``least`` on."""
    try:
        whole = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}") from None
    if isinstance(value, bool) or whole < least:
        raise ConfigError(f"{name} is {value}; it must be a whole number of at least {least}")
    return whole


def number(
    name: str, value: object, *, above: float | None = None, least: float | None = None, below: float | None = None
) -> float:
    """A finite number within the limits that are given."""
    limits = [f"above {above:g}"] if above is not None else [f"at least {least:g}"] if least is not None else []
    if below is not None:
        limits.append(f"below {below:g}")
    wanted = f"a finite number {' and '.join(limits)}".rstrip()
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}")
    found = float(value)
    too_low = (above is not None and found <= above) or (least is not None and found < least)
    if too_low or (below is not None and found >= below):
        raise ConfigError(f"{name} is {value}; it must be {wanted}")
    return found

"""Lengths of sequences where there is no trace: a distribution in one word, or a file with one length a line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..traces import TraceError
from ..traces.reading import MAX_LENGTH

Lengths = NDArray[np.int64]
FORMS = "uniform:LO:HI, lognormal:MEDIAN:SIGMA, fixed:N or file:PATH"
MAX_SIGMA = 10.0


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Where lengths come from. `draw(seed, samples)` gives them; a file gives its own, all of them, in its order."""

    text: str
    _draw: Callable[[np.random.Generator, int], Lengths]

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Read a distribution, or raise a ValueError that says what one looks like."""
        kind, _, rest = text.partition(":")
        if kind == "file" and rest:
            return cls(text, lambda rng, samples: read_lengths(rest))
        parts = rest.split(":")
        if kind == "uniform" and len(parts) == 2:
            low, high = (_whole(text, part) for part in parts)
            if low > high:
                raise ValueError(f"lengths {text!r}: {low} is more than {high}")
            return cls(text, lambda rng, samples: rng.integers(low, high + 1, samples))
        if kind == "lognormal" and len(parts) == 2:
            median, sigma = _whole(text, parts[0]), _sigma(text, parts[1])
            return cls(text, lambda rng, samples: _log_normal(rng, median, sigma, samples))
        if kind == "fixed" and len(parts) == 1:
            length = _whole(text, parts[0])
            return cls(text, lambda rng, samples: np.full(samples, length, np.int64))
        raise ValueError(f"lengths {text!r}: expected {FORMS}")

    def draw(self, seed: int, samples: int) -> Lengths:
        return self._draw(np.random.Generator(np.random.PCG64(seed)), samples)


def read_lengths(path: str) -> Lengths:
    """A file of whole numbers, one a line; blank lines do not count."""
    lengths = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                if not re.fullmatch(r"[0-9]{1,10}", line.strip()) or not 1 <= int(line) <= MAX_LENGTH:
                    shown = line.strip()[:40]
                    problem = f"expected a whole number from 1 to {MAX_LENGTH}, found {shown!r}"
                    raise TraceError(path, number, None, problem)
                lengths.append(int(line))
    except UnicodeDecodeError:
        raise TraceError(path, None, None, "not UTF-8 text; expected one length a line") from None
    except OSError as error:
        raise TraceError(path, None, None, f"cannot be read: {error.strerror or error}") from None
    if not lengths:
        raise TraceError(path, None, None, "holds no length")
    return np.array(lengths, np.int64)


def _whole(text: str, part: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", part) or not 1 <= int(part) <= MAX_LENGTH:
        raise ValueError(f"lengths {text!r}: {part!r} is no whole number from 1 to {MAX_LENGTH}")
    return int(part)


def _sigma(text: str, part: str) -> float:
    if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,12})?", part) or float(part) > MAX_SIGMA:
        raise ValueError(f"lengths {text!r}: {part!r} is no number from 0 to {MAX_SIGMA:g}")
    return float(part)


def _log_normal(rng: np.random.Generator, median: int, sigma: float, samples: int) -> Lengths:
    # Rounded to the nearest, so that the median stays where it was asked for.
    drawn = np.rint(rng.lognormal(np.log(median), sigma, samples))
    return np.clip(drawn, 1, MAX_LENGTH).astype(np.int64)

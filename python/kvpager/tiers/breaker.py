"""A circuit breaker: who does not answer is left alone for a while, then asked once."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Closed: calls go through. A failure opens it: none does, for `rest_seconds`; then one, the probe, decides.

    A call that `admits` let through ends with `succeeded`, `failed` or `abandoned` (nobody knows), from whichever
    thread. Calls that were let through together may fail together; the last failure counts the time. While a probe is
    under way nobody else is let through.
    """

    def __init__(self, rest_seconds: float, clock: Callable[[], float]) -> None:
        self._rest_seconds = rest_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._open_until is not None

    def admits(self) -> bool:
        """Whether a call may be tried now."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._open_until = None
            self._probing = False

    def failed(self) -> None:
        with self._lock:
            self._open_until = self._clock() + self._rest_seconds
            self._probing = False

    def abandoned(self) -> None:
        with self._lock:
            self._probing = False

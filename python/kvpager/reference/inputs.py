"""What callers pass in, checked and turned into plain lists and bytes before anything changes."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections import abc
from typing import Any

import numpy as np

from ..errors import ConfigError, TokenError, TokenTypeError
from ..types import Namespace

TOKEN_MAX = 2**31 - 1
NAMESPACE_BYTES_MAX = 65_536
TICK_MAX = 2**63 - 1

_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_SWAPPED = (">", "!") if sys.byteorder == "little" else ("<",)


def shown(value: object) -> str:
    """A value as a message shows it: not all of a long one, and something of one that has no repr."""
    try:
        return f"{value!r:.80}"
    except Exception:
        # An integer longer than Python prints, say.
        return f"a value of type {type(value).__name__} that has no repr"


def as_token(value: object, position: int | None = None, name: str = "token", low: int = 0) -> int:
    """One token, or another number of its range, as an int."""
    if type(value) is int and low <= value <= TOKEN_MAX:
        return value
    where = "" if position is None else f" at position {position}"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TokenTypeError(f"{name}{where} must be an integer, not {shown(value)}", position, _plain(value))
    try:
        token = operator.index(value)
    except TypeError:
        # An array has __index__ and only finds out in the call that it has more than one value.
        raise TokenTypeError(f"{name}{where} must be an integer, not {shown(value)}", position, _plain(value)) from None
    if not low <= token <= TOKEN_MAX:
        raise TokenError(f"{name}{where} must be {low} to {TOKEN_MAX}, not {shown(token)}", position, token)
    return token


def as_tokens(tokens: object, name: str = "tokens", low: int = 0) -> list[int]:
    """Many tokens as a list of ints: from a sequence or any one-dimensional buffer of integers."""
    if isinstance(tokens, (list, tuple)):
        return [as_token(value, position, name, low) for position, value in enumerate(tokens)]
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        # A range, a deque: whatever says that it is a sequence. So do text and a view that was released.
        if isinstance(tokens, abc.Sequence) and not isinstance(tokens, (str, memoryview)):
            return as_tokens(tuple(tokens), name, low)
        kind = type(tokens).__name__
        raise TokenTypeError(f"{name} must be a sequence or a buffer of integers, not {kind}") from None
    return _from_buffer(view, name, low)


def as_numbers(name: str, values: object) -> list[int]:
    """An argument of a batch that has one number a row or a token: like tokens, and -1 is allowed."""
    return as_tokens(values, name, low=-1)


def as_counts(name: str, value: object) -> int | list[int]:
    """One number for all rows, or a number for each."""
    if isinstance(value, (list, tuple)):
        return as_numbers(name, value)
    if not isinstance(value, bool):
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return as_numbers(name, value)
    return as_token(value, None, name, low=-1)


def as_prompt(tokens: object) -> list[int]:
    """Tokens of a prompt, which needs at least one: the last token is always computed."""
    prompt = as_tokens(tokens)
    if not prompt:
        raise TokenError("the prompt is empty: it needs at least one token")
    return prompt


def as_position(name: str, value: object, limits: str) -> int:
    """A position or a count; whether it is within its limits is for the call to decide."""
    position = as_integer(name, value)
    if position < 0:
        raise ValueError(f"{name} is {shown(position)}; it must be {limits}")
    return position


def as_integer(name: str, value: object) -> int:
    """Anything that stands for an integer; a bool does not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    return operator.index(value)


def as_bool(name: str, value: object) -> bool:
    """Yes or no, numpy's included."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return bool(value)


def as_least(name: str, value: object) -> int:
    """A number of things of which there is at least one."""
    number = as_integer(name, value)
    if number < 1:
        raise ValueError(f"{name} is {shown(number)}; it must be 1 or more")
    return number


def as_tick(name: str, value: object) -> int:
    """A moment on the caller's clock."""
    tick = as_integer(name, value)
    if not 0 <= tick <= TICK_MAX:
        raise ValueError(f"{name} is {shown(tick)}; it must be 0 to {TICK_MAX}")
    return tick


def as_mask(name: str, values: object, length: int) -> list[bool]:
    """One yes or no for each block of a plan."""
    try:
        array = np.asarray(memoryview(values))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        if not isinstance(values, abc.Sequence) or isinstance(values, str):
            raise TypeError(f"{name} must be a sequence or a buffer of bools, not {type(values).__name__}") from None
        mask = [as_bool(f"{name}[{position}]", value) for position, value in enumerate(values)]
    else:
        if array.dtype.kind not in "biu" or array.ndim != 1:
            raise TypeError(f"{name} must be bools in one dimension, not {array.dtype} in {array.ndim}")
        mask = [value != 0 for value in array.tolist()]
    if len(mask) != length:
        raise ValueError(f"{name} needs a value for each of the plan's {length} blocks, not {len(mask)}")
    return mask


def as_number(name: str, value: object) -> float:
    """Any number; one that no float holds is infinite."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        # What C takes for a number. ``float`` would read text and bytes, too.
        return math.ldexp(value, 0)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except TypeError:
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None


def as_fraction(name: str, value: object) -> float:
    """A number of 0 to 1."""
    number = as_number(name, value)
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {shown(value)}; it must be 0 to 1")
    return number


def encode_namespace(namespace: Namespace) -> bytes:
    """The bytes that stand for a namespace. Fields are typed and length-prefixed, so that no two namespaces collide."""
    if isinstance(namespace, bytes):
        encoded = b"\x00" + namespace
    elif isinstance(namespace, tuple):
        encoded = b"\x01" + b"".join(_encode_pair(pair) for pair in namespace)
    else:
        raise TypeError(f"namespace must be bytes or a tuple of (kind, bytes) pairs, not {type(namespace).__name__}")
    if len(encoded) > NAMESPACE_BYTES_MAX:
        raise ConfigError(f"namespace must have at most {NAMESPACE_BYTES_MAX} bytes encoded, not {len(encoded)}")
    return encoded


def _encode_pair(pair: object) -> bytes:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f'namespace must hold (str, bytes) pairs, as (("tenant", b"a"),) does, not {shown(pair)}')
    kind, value = pair
    if not isinstance(kind, str) or not isinstance(value, bytes):
        raise TypeError(f'namespace must hold (str, bytes) pairs, as (("tenant", b"a"),) does, not {shown(pair)}')
    if not _KIND.fullmatch(kind):
        raise ConfigError(f"a namespace kind must be 1 to 64 ASCII letters, digits, '_', '-' or '.', not {shown(kind)}")
    fields = (kind.encode(), value)
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def _from_buffer(view: memoryview, name: str, low: int) -> list[int]:
    if view.format[:1] in _SWAPPED and view.itemsize > 1:
        raise TokenTypeError(f"{name} must have native byte order, not format {view.format!r}")
    if view.ndim != 1:
        raise TokenTypeError(f"{name} must have one dimension, not {view.ndim}")
    try:
        values = np.asarray(view)
    except (TypeError, ValueError, NotImplementedError):
        raise TokenTypeError(f"{name} must be integers, not format {view.format!r}") from None
    if values.dtype.kind not in "iu":
        raise TokenTypeError(f"{name} must be integers, not {values.dtype}")
    bad = np.flatnonzero((values < low) | (values > TOKEN_MAX))
    if bad.size:
        as_token(values[bad[0]], int(bad[0]), name, low)
    found: list[int] = values.tolist()
    return found


def _plain(value: object) -> Any:
    """A value that an error can carry through pickle, whatever the caller had passed."""
    return value if type(value) in (bool, int, float, str, type(None)) else shown(value)

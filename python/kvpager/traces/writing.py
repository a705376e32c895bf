"""Writing a token trace: all of it or nothing, and the same bytes for the same requests.

The file appears under its name when it is complete; until then it is a file beside it, so that neither an interrupt
nor a full disk leaves half a trace that a replay would take for a whole one.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from .reading import TraceError

SUFFIXES = (".jsonl", ".gz", ".xz")


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One line of a token trace."""

    timestamp_ms: int
    tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]

    def line(self) -> bytes:
        fields = {
            "timestamp": self.timestamp_ms,
            "input_length": len(self.tokens),
            "output_length": len(self.output_tokens),
            "tokens": self.tokens.tolist(),
            "output_tokens": self.output_tokens.tolist(),
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """The file that a trace would be written to, links followed, or a TraceError that says why it cannot be."""
    name = os.fspath(path)
    if name.endswith(os.sep):
        raise TraceError(name, None, None, "is the name of a folder")
    target = Path(os.path.realpath(name))
    if target.suffix not in SUFFIXES:
        raise TraceError(name, None, None, f"the name has to end in one of {', '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise TraceError(name, None, None, f"there is no folder {target.parent}")
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise _unwritable(name, error) from None
    if not stat.S_ISREG(mode):
        # Renaming over a device or a pipe would replace it by a file.
        raise TraceError(name, None, None, "is there and no regular file")
    if not force:
        raise TraceError(name, None, None, "is there already (--force replaces it)")
    return target


def write_trace(path: str | os.PathLike[str], requests: Iterable[TokenRequest], *, force: bool = False) -> int:
    """Write the requests in the order given, which has to be arrival order; returns the size of the file in bytes.

    The suffix decides the packing: `.jsonl` has none, `.gz` and `.xz` have theirs. The lines are the same on every
    machine, the packed bytes wherever the packing library is the same.
    """
    target = check_target(path, force=force)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        try:
            with unfinished.open("xb") as raw:
                with _packed(raw, target.suffix) as file:
                    for request in requests:
                        file.write(request.line())
                raw.flush()
                os.fsync(raw.fileno())
            size = unfinished.stat().st_size
            check_target(path, force=force)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(os.fspath(path), error) from None
    return size


def _unwritable(name: str, error: OSError) -> TraceError:
    return TraceError(name, None, None, f"cannot be written: {error.strerror or error}")


@contextmanager
def _packed(raw: IO[bytes], suffix: str) -> Iterator[IO[bytes] | gzip.GzipFile | lzma.LZMAFile]:
    match suffix:
        case ".gz":
            # Without a name and a time in its header, two files of the same requests are the same file.
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file:
                yield file
        case ".xz":
            with lzma.open(raw, "wb") as file:
                yield file
        case _:
            yield raw

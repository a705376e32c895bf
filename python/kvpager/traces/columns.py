"""A whole trace as numpy columns."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reading import Form, Progress, TraceError, iter_requests


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths in one flat array: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def row(self, index: int) -> NDArray[np.int32]:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def joined(self, other: Ragged) -> Ragged:
        """Each row of this followed by the same row of the other."""
        offsets = self.offsets + other.offsets
        values = np.empty(offsets[-1], np.int32)
        for part, starts in ((self, offsets[:-1]), (other, offsets[:-1] + self.lengths)):
            shift = np.repeat(starts - part.offsets[:-1], part.lengths)
            values[np.arange(len(part.values), dtype=np.int64) + shift] = part.values
        return Ragged(values, offsets)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace as columns, one entry a request, in file order, which is arrival order."""

    path: str
    form: Form
    block_size: int | None
    """Tokens a block of the id and lengths forms; in the token form what the file says, or None."""
    lines: NDArray[np.int64]
    timestamps_ms: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    service_ms: NDArray[np.float64]
    """NaN where the line has none."""
    prompts: Ragged
    """Ids of the full prompt blocks, made dense where the file's were sparse, or tokens."""
    outputs: Ragged
    has_output: NDArray[np.bool_]
    """Whether the line recorded its answer, which may well be of no blocks."""

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.timestamps_ms[-1] - self.timestamps_ms[0]) / 1000

    @property
    def num_requests(self) -> int:
        return len(self.lines)

    def error(self, index: int | None, field: str | None, problem: str) -> TraceError:
        """An error about one request of this trace, or about all of it."""
        return TraceError(self.path, None if index is None else int(self.lines[index]), field, problem)


def read_trace(path: str | os.PathLike[str], progress: Progress | None = None) -> Trace:
    """Read a whole trace. `progress(bytes_read, bytes_total)` is called now and then."""
    name = os.fspath(path)
    requests = list(iter_requests(path, progress))
    form = requests[0].form
    prompt_values, prompt_offsets = _flat([r.prompt for r in requests])
    output_values, output_offsets = _flat([r.output for r in requests])
    if form == "ids":
        prompt_values, output_values = _dense(prompt_values, output_values)
    trace = Trace(
        path=name,
        form=form,
        block_size=requests[0].block_size,
        lines=np.array([r.line for r in requests], np.int64),
        timestamps_ms=np.array([r.timestamp_ms for r in requests], np.float64),
        input_lengths=np.array([r.input_length for r in requests], np.int64),
        output_lengths=np.array([r.output_length for r in requests], np.int64),
        service_ms=np.array([math.nan if r.service_ms is None else r.service_ms for r in requests], np.float64),
        prompts=Ragged(prompt_values.astype(np.int32, copy=False), prompt_offsets),
        outputs=Ragged(output_values.astype(np.int32, copy=False), output_offsets),
        has_output=np.array([r.output is not None for r in requests], np.bool_),
    )
    if form == "ids":
        _check_chained(trace)
    return trace


def _flat(rows: list[NDArray[Any] | None]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([0 if row is None else len(row) for row in rows], out=offsets[1:])
    kept = [row for row in rows if row is not None and len(row)]
    return np.concatenate(kept) if kept else np.empty(0, np.int32), offsets


def _dense(prompts: NDArray[Any], outputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Number the ids from 0 where they are sparse (hashes, say), so that they fit int32 and index an array."""
    count = len(prompts) + len(outputs)
    if max((int(ids.max()) for ids in (prompts, outputs) if len(ids)), default=0) < max(2 * count, 2**16):
        return prompts, outputs
    both = np.concatenate([ids.astype(np.uint64) for ids in (prompts, outputs)])
    dense = np.unique(both, return_inverse=True)[1]
    return dense[: len(prompts)], dense[len(prompts) :]


def _check_chained(trace: Trace) -> None:
    """Refuse ids that follow different blocks in different places: they name contents, not prefixes.

    Such a trace would be counted differently by everything that reads it, since a prefix cache never shares a block
    whose earlier tokens differ.
    """
    chains = trace.prompts.joined(trace.outputs)
    if not len(chains.values):
        return
    before = np.empty_like(chains.values)
    before[1:] = chains.values[:-1]
    before[chains.offsets[:-1][chains.lengths > 0]] = -1
    follows = np.empty(int(chains.values.max()) + 1, np.int32)
    # Reversed, so that the first mention of an id in the file is the one that stays.
    follows[chains.values[::-1]] = before[::-1]
    wrong = np.flatnonzero(follows[chains.values] != before)
    if len(wrong):
        index = int(np.searchsorted(chains.offsets, wrong[0], side="right")) - 1
        at = int(wrong[0] - chains.offsets[index])
        full = int(trace.prompts.lengths[index])
        field = f"hash_ids[{at}]" if at < full else f"output_hash_ids[{at - full}]"
        problem = "this id came after another id in an earlier request; ids must be chained"
        raise trace.error(index, field, f"{problem} (an id stands for all tokens up to and including its block)")

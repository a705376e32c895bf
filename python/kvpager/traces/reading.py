"""Reading a trace line by line; whatever is wrong ends in one error that says where."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import KvPagerError

Form = Literal["ids", "tokens", "lengths"]
Progress = Callable[[int, int], None]

DEFAULT_BLOCK_SIZE = 512
MAX_LINE = 2**28
MAX_LENGTH = 2**31 - 1
MAX_ID = 2**64 - 1
MAX_TOKEN = 2**31 - 1


class TraceError(KvPagerError, ValueError):
    """A trace cannot be read or replayed. `path`, `line` and `field` say where, as far as that is known."""

    def __init__(self, path: str, line: int | None, field: str | None, problem: str) -> None:
        super().__init__(path, line, field, problem)
        self.path, self.line, self.field, self.problem = path, line, field, problem

    def __str__(self) -> str:
        place = self.path or "''"
        if self.line is not None:
            place += f", line {self.line}"
        return f"{place}: {self.problem}" if self.field is None else f"{place}: {self.field}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Request:
    """One checked line. `prompt` holds the ids of the full blocks (uint64) or the tokens (int32), None for lengths."""

    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    block_size: int | None
    service_ms: float | None
    prompt: NDArray[Any] | None
    output: NDArray[Any] | None
    form: Form


def iter_requests(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[Request]:
    """Yield the requests of a file one by one, each checked by itself and against the one before."""
    name = os.fspath(path)
    first = previous = None
    for line, text in _lines(name, progress):
        request = _Line(name, line, text).request()
        if first is None:
            first = request
        if request.form != first.form:
            problem = f"this request has {_FORM_WORDS[request.form]}, the first one has {_FORM_WORDS[first.form]}"
            raise TraceError(name, line, None, f"{problem}; a file holds one form only")
        if request.block_size != first.block_size:
            problem = f"found {request.block_size}, the first request has {first.block_size}; a file has one block size"
            raise TraceError(name, line, "block_size", problem)
        if previous is not None and request.timestamp_ms < previous.timestamp_ms:
            problem = f"found {request.timestamp_ms:g} after {previous.timestamp_ms:g}; a trace is in arrival order"
            raise TraceError(name, line, "timestamp", f"{problem} (sort the file by timestamp)")
        yield request
        previous = request
    if first is None:
        raise TraceError(name, None, None, "holds no request")


_FORM_WORDS = {"ids": "hash_ids", "tokens": "tokens", "lengths": "neither hash_ids nor tokens"}


class _Line:
    """One line on its way to a Request: every read of a field checks it."""

    def __init__(self, path: str, line: int, text: bytes) -> None:
        self.path, self.line = path, line
        try:
            fields = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError:
            self.fail(None, "not UTF-8 text; is this a trace?")
        except json.JSONDecodeError as error:
            self.fail(None, f"not JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            self.fail(None, f"not JSON: {error}")
        if not isinstance(fields, dict):
            self.fail(None, f"expected an object {{...}}, found {_shown(fields)}")
        self.fields: dict[str, Any] = fields

    def fail(self, field: str | None, problem: str) -> NoReturn:
        raise TraceError(self.path, self.line, field, problem) from None

    def request(self) -> Request:
        form: Form = "ids" if "hash_ids" in self.fields else "tokens" if "tokens" in self.fields else "lengths"
        if form == "ids" and "tokens" in self.fields:
            self.fail("tokens", "a request has either hash_ids or tokens, this one has both")
        timestamp = self.number("timestamp")
        service = self.number("service_ms") if "service_ms" in self.fields else None
        block_size = DEFAULT_BLOCK_SIZE if form != "tokens" else None
        if "block_size" in self.fields:
            block_size = self.integer("block_size", 1)
        prompt = output = None
        if form == "tokens":
            prompt = self.array("tokens", "i", MAX_TOKEN)
            output = self.array("output_tokens", "i", MAX_TOKEN) if "output_tokens" in self.fields else None
        # A token list is its own length; where the file states the length too, the two have to agree.
        input_length = self.length("input_length", 1, prompt)
        output_length = self.length("output_length", 0, output)
        if form == "ids":
            assert block_size is not None
            prompt, output = self.block_ids(block_size, input_length, output_length)
        return Request(
            self.line, timestamp, input_length, output_length, block_size, service, prompt, output, form=form
        )

    def block_ids(self, size: int, input_length: int, output_length: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        full, partial = divmod(input_length, size)
        ids = self.array("hash_ids", "Q", MAX_ID)
        if not full <= len(ids) <= full + (partial > 0):
            expected = f"{full}" if not partial else f"{full} or {full + 1}"
            problem = f"expected {expected} ids, found {len(ids)}"
            self.fail("hash_ids", f"{problem} (input_length {input_length}, {size} tokens a block)")
        if "output_hash_ids" not in self.fields:
            return ids[:full], None
        output = self.array("output_hash_ids", "Q", MAX_ID)
        expected_output = (input_length + output_length) // size - full
        if len(output) != expected_output:
            problem = f"expected {expected_output} ids, found {len(output)}"
            lengths = f"input_length {input_length}, output_length {output_length}"
            self.fail("output_hash_ids", f"{problem} ({lengths}, {size} tokens a block)")
        return ids[:full], output

    def length(self, field: str, least: int, values: NDArray[Any] | None) -> int:
        if values is None:
            return self.integer(field, least)
        if field in self.fields and self.integer(field, least) != len(values):
            tokens = "tokens" if field == "input_length" else "output_tokens"
            self.fail(field, f"found {self.fields[field]}, but {tokens} has {len(values)} entries")
        if len(values) < least:
            self.fail("tokens", "an empty prompt")
        return len(values)

    def value(self, field: str, expected: str) -> Any:
        if field not in self.fields:
            self.fail(field, f"missing (expected {expected})")
        return self.fields[field]

    def number(self, field: str) -> float:
        expected = "a number >= 0"
        value = self.value(field, expected)
        # bool is an int in Python; `true` in a file is a mistake all the same.
        if type(value) not in (int, float) or not (0 <= value <= 1e300):
            self.fail(field, f"expected {expected}, found {_shown(value)}")
        return float(value)

    def integer(self, field: str, least: int) -> int:
        expected = f"a whole number from {least} to {MAX_LENGTH}"
        value = self.value(field, expected)
        if type(value) is not int or not (least <= value <= MAX_LENGTH):
            self.fail(field, f"expected {expected}, found {_shown(value)}")
        return value

    def array(self, field: str, typecode: str, most: int) -> NDArray[Any]:
        values = self.fields[field]
        if not isinstance(values, list):
            self.fail(field, f"expected a list of whole numbers, found {_shown(values)}")
        # The types are looked at all at once; only a list that is wrong is gone through item by item to say where.
        if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > most):
            at, value = next((i, v) for i, v in enumerate(values) if type(v) is not int or not 0 <= v <= most)
            self.fail(f"{field}[{at}]", f"expected a whole number from 0 to {most}, found {_shown(value)}")
        return np.frombuffer(array(typecode, values), np.int32 if typecode == "i" else np.uint64)


def _shown(value: Any) -> str:
    """A value of the file as a message shows it: as JSON, cut to what fits a line."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = "a value too large to show"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _lines(path: str, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1, of a plain, gzip or xz file."""
    line = 0
    try:
        with open(path, "rb") as raw:
            # A pipe has no size and no place in it, so nothing can be said of its progress.
            total = os.fstat(raw.fileno()).st_size
            if not raw.seekable():
                progress = None
            file = _decompressed(raw, path)
            # Never more than one line in memory, and no line without end: what is no trace may be a disk, or a bomb.
            for line, text in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(text) > MAX_LINE:
                    raise TraceError(path, line, None, f"longer than {MAX_LINE:,} bytes; is this a trace?")
                if line == 1:  # what some editors put in front of UTF-8
                    text = text.removeprefix(codecs.BOM_UTF8)
                if progress is not None and line % 256 == 0:
                    progress(raw.tell(), total)
                if text and not text.isspace():
                    yield line, text
            if progress is not None:
                progress(total, total)
    except EOFError:
        raise TraceError(path, line + 1, None, "the compressed file ends too early (cut off?)") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise TraceError(path, line + 1, None, f"cannot be decompressed: {error}") from None
    except OSError as error:
        raise TraceError(path, None, None, f"cannot be read: {error.strerror or error}") from None


def _decompressed(raw: io.BufferedReader, path: str) -> BinaryIO:
    """Tell the compression by the first bytes: a file is often renamed on its way, its content is not.

    Where they say nothing the name counts, so that a broken `.xz` is called that and not bad JSON.
    """
    head = raw.peek(6)[:6]
    packed_by_content = "gz" if head.startswith(b"\x1f\x8b") else "xz" if head == b"\xfd7zXZ\x00" else None
    match packed_by_content or path.rpartition(".")[2]:
        case "gz":
            return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
        case "xz":
            return lzma.LZMAFile(raw)  # type: ignore[return-value]
        case _:
            return raw

"""Traces are read exactly, and whatever is wrong with a file is one error that says where."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager.errors import KvPagerError
from kvpager.traces import Ragged, TraceError, iter_requests, read_trace

GOOD = {"timestamp": 5, "input_length": 40, "output_length": 9, "block_size": 16, "hash_ids": [0, 1, 2]}


def write(path: Path, *requests: dict[str, Any] | str, blank: bool = False) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
    path.write_text(("\n\n" if blank else "\n").join(lines) + "\n", encoding="utf-8")
    return path


def changed(**fields: Any) -> dict[str, Any]:
    """The good request with fields replaced; a field set to `...` is taken out."""
    return {name: value for name, value in {**GOOD, **fields}.items() if value is not ...}


def test_ids_keep_full_blocks_only_whether_the_partial_one_is_listed_or_not(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, changed(hash_ids=[0, 1]), changed(input_length=32, hash_ids=[0, 1]))
    trace = read_trace(path)
    assert trace.form == "ids"
    assert trace.block_size == 16
    assert [trace.prompts.row(i).tolist() for i in range(3)] == [[0, 1], [0, 1], [0, 1]]
    assert trace.input_lengths.tolist() == [40, 40, 32]
    assert np.isnan(trace.service_ms).all()
    assert not trace.has_output.any()


def test_columns_of_all_optional_fields(tmp_path: Path) -> None:
    answered = changed(output_hash_ids=[7], service_ms=1500, more="fields are for others")
    trace = read_trace(write(tmp_path / "t.jsonl", answered, changed(timestamp=5.5, output_hash_ids=...), blank=True))
    assert trace.lines.tolist() == [1, 3]
    assert trace.timestamps_ms.tolist() == [5.0, 5.5]
    assert trace.service_ms.tolist()[0] == 1500.0
    assert trace.has_output.tolist() == [True, False]
    assert trace.outputs.row(0).tolist() == [7]
    assert trace.outputs.row(1).tolist() == []


def test_block_size_is_512_where_the_file_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", changed(block_size=..., input_length=1300, hash_ids=[3, 4, 5]))
    trace = read_trace(path)
    assert trace.block_size == 512
    assert trace.prompts.row(0).tolist() == [3, 4]


def test_large_ids_become_dense_and_stay_equal_where_they_were_equal(tmp_path: Path) -> None:
    huge = 2**64 - 1
    first = changed(hash_ids=[huge, 2**40, 5], output_hash_ids=[77])
    second = changed(hash_ids=[huge, 12], output_hash_ids=[2**33])
    trace = read_trace(write(tmp_path / "t.jsonl", first, second))
    assert trace.prompts.values.dtype == np.int32
    (a, b), (c, d) = trace.prompts.row(0).tolist(), trace.prompts.row(1).tolist()
    assert a == c
    assert len({a, b, d, *trace.outputs.values.tolist()}) == 5
    assert sorted({a, b, d, *trace.outputs.values.tolist()}) == [0, 1, 2, 3, 4]


def test_token_form(tmp_path: Path) -> None:
    first = {"timestamp": 0, "tokens": [5, 6, 2**31 - 1], "output_tokens": [8]}
    second = {"timestamp": 0, "tokens": [5], "input_length": 1, "output_length": 30}
    trace = read_trace(write(tmp_path / "t.jsonl", first, second))
    assert trace.form == "tokens"
    assert trace.block_size is None
    assert trace.prompts.row(0).tolist() == [5, 6, 2**31 - 1]
    assert trace.input_lengths.tolist() == [3, 1]
    assert trace.output_lengths.tolist() == [1, 30]
    assert trace.has_output.tolist() == [True, False]


def test_lengths_alone_are_a_trace(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 587, "output_length": 1076}))
    assert trace.form == "lengths"
    assert trace.block_size == 512


@pytest.mark.parametrize("suffix", [".jsonl", ".gz", ".xz"])
@pytest.mark.parametrize("packed", ["plain", "gzip", "xz"])
def test_compression_is_told_by_content(tmp_path: Path, suffix: str, packed: str) -> None:
    content = json.dumps(GOOD).encode() + b"\n" + json.dumps(GOOD).encode()
    pack: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "gzip": gzip.compress, "xz": lzma.compress}
    path = tmp_path / f"t{suffix}"
    path.write_bytes(pack[packed](content))
    if packed == "plain" and suffix != ".jsonl":
        with pytest.raises(TraceError, match="cannot be decompressed"):
            read_trace(path)
    else:
        assert read_trace(path).num_requests == 2


def test_requests_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "{broken")
    requests = iter_requests(path)
    assert next(requests).line == 1
    with pytest.raises(TraceError, match="line 2: not JSON"):
        next(requests)


def test_progress_counts_bytes_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[GOOD] * 600)
    seen: list[tuple[int, int]] = []
    read_trace(path, progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert len(seen) >= 3
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


BAD_LINES = [
    ("{", None, "not JSON"),
    ("[1, 2]", None, "expected an object {...}, found [1, 2]"),
    ("3", None, "expected an object {...}, found 3"),
    ("[" * 100_000, None, "not JSON"),
    ("9" * 5000, None, "not JSON"),
    (changed(timestamp=...), "timestamp", "missing (expected a number >= 0)"),
    (changed(timestamp="now"), "timestamp", 'expected a number >= 0, found "now"'),
    (changed(timestamp=True), "timestamp", "found true"),
    (changed(timestamp=-1), "timestamp", "found -1"),
    (changed(timestamp=float("nan")), "timestamp", "found NaN"),
    (changed(timestamp=float("inf")), "timestamp", "found Infinity"),
    (changed(timestamp=10**400), "timestamp", "found 1000000"),
    (changed(service_ms=None), "service_ms", "found null"),
    (changed(input_length=...), "input_length", "missing"),
    (changed(input_length=0), "input_length", "expected a whole number from 1 to 2147483647, found 0"),
    (changed(input_length=40.0), "input_length", "found 40.0"),
    (changed(input_length=2**31), "input_length", "found 2147483648"),
    (changed(output_length=-1), "output_length", "found -1"),
    (changed(output_length="9"), "output_length", 'found "9"'),
    (changed(block_size=0), "block_size", "found 0"),
    (changed(hash_ids="abc"), "hash_ids", 'expected a list of whole numbers, found "abc"'),
    (changed(hash_ids=[0, -1, 2]), "hash_ids[1]", "expected a whole number from 0 to 18446744073709551615, found -1"),
    (changed(hash_ids=[0, 1.5, 2]), "hash_ids[1]", "found 1.5"),
    (changed(hash_ids=[0, True, 2]), "hash_ids[1]", "found true"),
    (changed(hash_ids=[0, [1], 2]), "hash_ids[1]", "found [1]"),
    (changed(hash_ids=[2**64, 1]), "hash_ids[0]", "found 18446744073709551616"),
    (changed(hash_ids=[0]), "hash_ids", "expected 2 or 3 ids, found 1 (input_length 40, 16 tokens a block)"),
    (changed(hash_ids=[0, 1, 2, 3]), "hash_ids", "expected 2 or 3 ids, found 4"),
    (changed(input_length=32), "hash_ids", "expected 2 ids, found 3"),
    (changed(output_hash_ids=[8, 9]), "output_hash_ids", "expected 1 ids, found 2"),
    (changed(output_hash_ids=[None]), "output_hash_ids[0]", "found null"),
    (changed(tokens=[1]), "tokens", "a request has either hash_ids or tokens, this one has both"),
    ({"timestamp": 5, "tokens": [], "output_length": 1}, "tokens", "an empty prompt"),
    ({"timestamp": 5, "tokens": [1, 2**31], "output_length": 1}, "tokens[1]", "found 2147483648"),
    ({"timestamp": 5, "tokens": [1, 2], "input_length": 3, "output_length": 1}, "input_length", "tokens has 2 entries"),
    ({"timestamp": 5, "tokens": [1, 2]}, "output_length", "missing"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_LINES, ids=lambda v: str(v)[:40])
def test_a_bad_line_is_named(tmp_path: Path, bad: dict[str, Any] | str, field: str | None, problem: str) -> None:
    path = write(tmp_path / "t.jsonl", "", bad)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(path), 2, field)
    assert problem in error.problem
    message = str(error)
    assert message.startswith(f"{path}, line 2: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (GOOD, changed(timestamp=4), "timestamp: found 4 after 5; a trace is in arrival order"),
        (GOOD, changed(block_size=8, hash_ids=[0, 1, 2, 3, 4]), "block_size: found 8, the first request has 16"),
        (GOOD, changed(hash_ids=...), "this request has neither hash_ids nor tokens, the first one has hash_ids"),
        (GOOD, {"timestamp": 5, "tokens": [1], "output_length": 0}, "has tokens, the first one has hash_ids"),
    ],
)
def test_requests_have_to_agree(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match="line 2: ") as caught:
        read_trace(write(tmp_path / "t.jsonl", first, second))
    assert problem in str(caught.value)


def test_ids_that_are_not_chained_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, changed(hash_ids=[3, 4]), changed(hash_ids=[3, 1]))
    with pytest.raises(TraceError, match=r"line 3: hash_ids\[1\]: .* ids must be chained"):
        read_trace(path)
    path = write(tmp_path / "u.jsonl", changed(output_hash_ids=[5]), changed(hash_ids=[0, 6], output_hash_ids=[5]))
    with pytest.raises(TraceError, match=r"line 2: output_hash_ids\[0\]: .* ids must be chained"):
        read_trace(path)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    junk = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
    cut = gzip.compress(json.dumps(GOOD).encode() * 50)[:-30]
    packed = lzma.compress(b"\n".join(json.dumps(changed(service_ms=i)).encode() for i in range(500)))
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x10
    cases = {
        "missing.jsonl": (None, "cannot be read: No such file or directory"),
        "empty.jsonl": (b"", "holds no request"),
        "blank.jsonl": (b"\n  \n\n", "holds no request"),
        "empty.gz": (b"", "holds no request"),
        "junk.bin": (junk, "line 1: not UTF-8 text; is this a trace?"),
        "cut.gz": (cut, "the compressed file ends too early"),
        "cut.xz": (packed[:-40], "the compressed file ends too early"),
        "flipped.xz": (bytes(flipped), "cannot be decompressed"),
        "plain.xz": (b"{}\n", "cannot be decompressed"),
        "plain.gz": (b"{}\n", "cannot be decompressed"),
    }
    for name, (content, problem) in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert problem in str(caught.value), name
        assert str(path) in str(caught.value), name
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_the_error_is_a_value_error_and_survives_pickling(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1") as caught:
        read_trace(write(tmp_path / "t.jsonl", "{"))
    assert isinstance(caught.value, KvPagerError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line) == (str(caught.value), 1)


def test_joined_rows() -> None:
    left = Ragged(np.array([1, 2, 3], np.int32), np.array([0, 2, 2, 3]))
    right = Ragged(np.array([7, 8, 9], np.int32), np.array([0, 1, 3, 3]))
    both = left.joined(right)
    assert [both.row(i).tolist() for i in range(3)] == [[1, 2, 7], [8, 9], [3]]

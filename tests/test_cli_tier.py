"""`kvpager tier inspect` and `verify`: what they count, damage, and a writer beside them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_suite import BLOCK_SIZE, ROW_BYTES, Blocks

from kvpager.cli import main
from kvpager.tiers import DiskStore

RECORD_BYTES = 40 + 32 + 4 * BLOCK_SIZE + ROW_BYTES
Says = Callable[..., str]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    def call(*arguments: str | Path, status: int = 0) -> str:
        assert main([str(argument) for argument in arguments]) == status
        out, err = capsys.readouterr()
        return str(err if status == 2 else out + err)

    return call


def opened(path: Path) -> DiskStore:
    size = 64 + 8 * RECORD_BYTES
    return DiskStore(
        path,
        row_bytes=ROW_BYTES,
        block_size=BLOCK_SIZE,
        max_bytes=1 << 20,
        segment_bytes=size,
        identity=b"llama bf16 \xff",
        sync="never",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """20 records in 3 segments, of which one was deleted; and a file that is not the store's."""
    path = tmp_path / "store"
    with opened(path) as store:
        Blocks(store).put(range(20))
        Blocks(store).delete([17])
    (path / "notes.txt").write_text("mine")
    return path


def segment(path: Path, number: int) -> Path:
    return path / f"kvpager-{number:016x}.seg"


def spoil(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


class TestInspect:
    def test_table(self, path: Path, says: Says) -> None:
        text = says("tier", "inspect", path)
        assert f"19 records of {RECORD_BYTES} bytes (200 of KV, blocks of 4 tokens) in 3 segments" in text
        rows = [line.split() for line in text.splitlines() if line.strip().startswith("0000")]
        full = 64 + 8 * RECORD_BYTES
        assert rows[0] == ["0000000000000000", f"{full:,}", "8", "8", "0", "0", "0", "good"]
        assert rows[2] == ["0000000000000002", f"{64 + 4 * RECORD_BYTES:,}", "8", "3", "1", "0", "0", "good"]
        assert r"Identity: 'llama bf16 \xff'" in text
        assert "left alone: notes.txt" in text

    def test_json(self, path: Path, says: Says) -> None:
        result = json.loads(says("tier", "inspect", path, "--json"))
        assert (result["records"], result["deleted"], result["damaged"], result["unusable_segments"]) == (19, 1, 0, 0)
        assert bytes.fromhex(result["identity"]) == b"llama bf16 \xff"
        assert (result["row_bytes"], result["meta_bytes"], result["record_bytes"]) == (200, 48, 288)
        assert result["foreign"] == ["notes.txt"]
        ours = [file for file in path.iterdir() if file.name != "notes.txt"]
        assert result["bytes"] == sum(file.stat().st_size for file in ours)

    def test_keys_that_are_missing_or_damaged(self, path: Path, says: Says) -> None:
        segment(path, 0).with_suffix(".keys").unlink()
        spoil(segment(path, 1).with_suffix(".keys"), 50)
        result = json.loads(says("tier", "inspect", path, "--json"))
        assert [each["keys"] for each in result["segments"]] == ["missing", "damaged", "good"]
        assert result["records"] == 19
        assert "note: damaged keys of 1 segment" in says("tier", "inspect", path)

    def test_a_torn_end(self, path: Path, says: Says) -> None:
        os.truncate(segment(path, 2), 64 + 2 * RECORD_BYTES + 7)
        last = json.loads(says("tier", "inspect", path, "--json"))["segments"][2]
        # Of the blocks 16 to 19, 17 was deleted.
        assert (last["records"], last["deleted"], last["unfinished_bytes"], last["keys"]) == (1, 1, 7, "damaged")


class TestVerify:
    def test_a_whole_store(self, path: Path, says: Says) -> None:
        assert "Every record is whole." in says("tier", "verify", path)
        assert json.loads(says("tier", "verify", path, "--json"))["records"] == 19

    @pytest.mark.parametrize("at", [0, 5, 20, 50, 100, 287])
    def test_a_damaged_record(self, path: Path, says: Says, at: int) -> None:
        spoil(segment(path, 1), 64 + 3 * RECORD_BYTES + at)
        text = says("tier", "verify", path, status=1)
        assert "1 damaged record, 0 unusable segments" in text
        result = json.loads(says("tier", "verify", path, "--json", status=1))
        assert (result["records"], result["damaged"]) == (18, 1)
        with opened(path) as store:
            assert Blocks(store).get(range(20)).count(True) == 18

    def test_a_segment_that_is_none(self, path: Path, says: Says) -> None:
        segment(path, 0).write_bytes(b"no segment, though as long as the header of one. " * 2)
        assert "0 damaged records, 1 unusable segment" in says("tier", "verify", path, status=1)

    def test_a_segment_that_is_being_made(self, path: Path, says: Says) -> None:
        segment(path, 3).write_bytes(b"")
        assert "Every record is whole." in says("tier", "verify", path)

    def test_changes_nothing(self, path: Path, says: Says) -> None:
        def state() -> list[tuple[str, int, bytes]]:
            return sorted((file.name, file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir())

        segment(path, 0).with_suffix(".keys").unlink()
        spoil(segment(path, 1), 500)
        before = state()
        says("tier", "verify", path, status=1)
        says("tier", "inspect", path)
        assert state() == before

    def test_beside_a_writer(self, path: Path, says: Says) -> None:
        """What is being written, deleted or dropped is never taken for damage."""
        is_over = threading.Event()

        def writes() -> None:
            with opened(path) as store:
                blocks, turn = Blocks(store), 0
                while not is_over.is_set():
                    turn += 1
                    blocks.put(range(turn * 5, turn * 5 + 9))
                    if turn % 5 == 0:
                        blocks.delete([turn * 5])
                    if turn % 40 == 0:
                        store.clear()

        writer = threading.Thread(target=writes)
        writer.start()
        try:
            results = [json.loads(says("tier", "verify", path, "--json")) for _ in range(60)]
        finally:
            is_over.set()
            writer.join()
        assert all(result["damaged"] == result["unusable_segments"] == 0 for result in results)


class TestRefusals:
    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_no_store(self, tmp_path: Path, says: Says, command: str) -> None:
        assert "has no manifest" in says("tier", command, tmp_path, status=2)
        assert "No such file" in says("tier", command, tmp_path / "nothing", status=2)
        (tmp_path / "file").write_text("x")
        assert "Not a directory" in says("tier", command, tmp_path / "file", status=2)

    def test_a_manifest_that_is_damaged(self, path: Path, says: Says) -> None:
        spoil(path / "kvpager.manifest", 30)
        assert "kvpager.manifest is damaged" in says("tier", "verify", path, status=2)

    def test_help_without_a_command(self, says: Says) -> None:
        assert says("tier") == says("tier", "--help")

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_help_teaches(self, says: Says, command: str) -> None:
        text: Any = says("tier", command, "--help")
        assert text.count(f"  kvpager tier {command}") >= 2
        assert "--json" in text

"""The disk store as a process has it: kills, limits, others in the directory, disks that refuse.

The files themselves, byte by byte, are tested in rust/store."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from store_suite import BLOCK_SIZE, ROW_BYTES, Blocks

import kvpager
from kvpager import ConfigError, TransferError
from kvpager.tiers import DiskStore

LIMIT = 64 << 10
TESTS = Path(__file__).parent


def opened(path: Any, max_bytes: int = 1 << 20, **settings: Any) -> DiskStore:
    settings = {"row_bytes": ROW_BYTES, "block_size": BLOCK_SIZE, "sync": "never", **settings}
    return DiskStore(path, max_bytes=max_bytes, **settings)


def size_of(path: Path) -> int:
    """Bytes of all files, in whole pages, at one moment: a look during which a file came or went is not one."""
    while True:
        names = set(os.listdir(path))
        try:
            total = sum(-(-os.stat(path / name).st_size // 4096) * 4096 for name in names)
        except FileNotFoundError:
            continue
        if set(os.listdir(path)) == names:
            return total


class Watch:
    """Looks at a directory's size for as long as it is entered, as often as it can."""

    def __init__(self, path: Path) -> None:
        self.path, self.most = path, 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._is_over.is_set():
            if self.path.exists():
                self.most = max(self.most, size_of(self.path))
            time.sleep(0.0005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


class TestKills:
    def trials(self, path: Path, seed: int, count: int) -> None:
        """A writer is killed at any moment, `count` times in one directory. What it said is there must be there, unless
        newer blocks needed the room; what it said is deleted must not be; the limit holds all the time."""
        draw = random.Random(seed)
        first, deleted = 0, set[int]()
        for trial in range(count):
            where = f"KVPAGER_SEED={seed}, trial {trial}"
            sync = draw.choice(["never", "never", "segment", "always"])
            arguments = [str(path), str(LIMIT), sync, str(first), f"{seed}/{trial}"]
            writer = subprocess.Popen(
                [sys.executable, str(TESTS / "disk_writer.py"), *arguments], stdout=subprocess.PIPE, text=True
            )
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            with Watch(path) as watch:
                # After so many calls, 0 for while it opens, and at any moment of the next ones.
                said = [writer.stdout.readline() for _ in range(draw.choice([0, 1, 50, 200]))]
                time.sleep(draw.choice([0.001, 0.02]) * draw.random())
                writer.kill()
                writer.wait()
            assert watch.most <= LIMIT, where
            stored, begun = list[int](), set[int]()
            for line in said + writer.stdout.readlines():
                if not line.endswith("\n"):
                    continue  # it was killed in the middle of saying so
                call, *names = line.split()
                if call == "put":
                    stored += map(int, names)
                elif call == "deleting":
                    begun.add(int(names[0]))
                else:
                    deleted.add(int(names[0]))
            writer.stdout.close()
            with opened(path, LIMIT) as store:
                blocks = Blocks(store)
                assert size_of(path) <= LIMIT, where
                latest = [name for name in stored[-8:] if name not in begun]
                assert blocks.get(latest) == [True] * len(latest), where
                assert not any(blocks.get(sorted(deleted)[-50:])), where
                # A restart reads every byte that is there: `get` compares.
                blocks.get(range(max(0, first - 100), first + 400))
                assert store.stats()["corrupt"] == 0, where
                assert store.stats()["discarded_segments"] <= 1, where
                first = max([first, *stored]) + 10

    def test_a_killed_writer_leaves_what_it_said(self, tmp_path: Path, seed: int) -> None:
        """L16, with kills."""
        self.trials(tmp_path / "store", seed, 8)

    @pytest.mark.slow
    def test_hundreds_of_killed_writers(self, tmp_path: Path, seed: int, runs: int | None) -> None:
        self.trials(tmp_path / "store", seed, runs or 400)


class TestLimit:
    def fill(self, path: Path, total: int, limit: int, row_bytes: int) -> None:
        """Writes `total` bytes through `limit`, with a restart now and then; the directory never has more."""
        arguments = {"row_bytes": row_bytes, "max_bytes": limit}
        count = 16
        rows = np.random.default_rng(0).integers(0, 256, (count, row_bytes), np.uint8)
        keys = np.zeros((count, 32), np.uint8)
        metas = np.zeros((count, 32 + 4 * BLOCK_SIZE), np.uint8)
        ids = np.arange(count, dtype=np.int32)
        evicted, store = 0, opened(path, **arguments)
        back = np.zeros_like(rows)
        with Watch(path) as watch:
            for turn in range(total // (count * row_bytes)):
                keys[:, :16].view(np.uint64)[:] = turn * count + ids[:, None]
                rows[:, 0] = turn % 251
                assert store.put_many(keys, metas, rows, ids).all()
                assert store.get_many(keys, metas, back, ids).all()
                assert (back == rows).all()
                assert size_of(path) <= limit
                if turn % 50 == 49:
                    evicted += store.stats()["evicted"]
                    store.close()
                    store = opened(path, **arguments)
        assert watch.most <= limit
        evicted += store.stats()["evicted"]
        assert evicted * row_bytes > total - limit
        # The space is used, too, and not only kept free.
        assert store.stats()["records"] * row_bytes > limit * 0.7
        store.close()

    def test_eighty_megabytes_through_four(self, tmp_path: Path) -> None:
        """L16."""
        self.fill(tmp_path / "store", 80 << 20, 4 << 20, 20_000)

    def test_two_gigabytes_through_64_megabytes(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "store", 2 << 30, 64 << 20, 256 << 10)


class TestRestart:
    def test_blocks_outlive_the_store(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            Blocks(store).put(range(100))
        with opened(tmp_path) as store:
            assert Blocks(store).get(range(100)) == [True] * 100

    @pytest.mark.parametrize(
        ("other", "names"),
        [
            ({"identity": b"llama fp8"}, ("llama bf16", "llama fp8")),
            ({"row_bytes": 100}, ("200", "100")),
            ({"block_size": 8}, ("meta_bytes 48", "64")),
        ],
    )
    def test_blocks_of_another_kind_are_never_read(self, tmp_path: Path, other: Any, names: tuple[str, str]) -> None:
        """W8: another model, dtype, rank or block size is refused, by both names."""
        opened(tmp_path, identity=b"llama bf16").close()
        with pytest.raises(ConfigError) as refused:
            opened(tmp_path, **{"identity": b"llama bf16", **other})
        assert all(name in str(refused.value) for name in names), refused.value
        opened(tmp_path, identity=b"llama bf16").close()

    def test_an_identity_is_any_bytes(self, tmp_path: Path) -> None:
        for number, identity in enumerate([b"", b"\n\0\xff\"'", bytes(65_536)]):
            for _ in range(2):
                opened(tmp_path / str(number), identity=identity).close()
        with pytest.raises(ConfigError, match="65537 bytes; the limit is 65536"):
            opened(tmp_path / "long", identity=bytes(65_537))

    def test_what_was_deleted_stays_away(self, tmp_path: Path) -> None:
        """The tier side of forget and reset, across restarts."""
        parents = {name: name - 1 for name in range(1, 40)}
        with opened(tmp_path) as store:
            Blocks(store, parents).put(range(40))
            assert Blocks(store, parents).delete([15]) == 25
        with opened(tmp_path) as store:
            assert Blocks(store, parents).get(range(40)) == [True] * 15 + [False] * 25
            store.clear()
        with opened(tmp_path) as store:
            assert not any(Blocks(store, parents).contains(range(40)))


class TestOthers:
    def test_a_second_writer_is_told(self, tmp_path: Path) -> None:
        script = (
            "import sys; from test_disk_store import *; s = opened(sys.argv[1]); print('open', flush=True); input()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(TransferError, match=rf"in use: process {other.pid} "):
            opened(tmp_path)
        other.kill()
        other.communicate()
        with opened(tmp_path) as store:
            assert Blocks(store).put([1]) == [True]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_child_of_fork_neither_uses_nor_keeps_the_store(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        Blocks(store).put(range(3))
        asks, answers = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            said = b""
            try:
                Blocks(store).get([1])
            except kvpager.ForkedProcess:
                said = b"refused"
            finally:
                del store
                os.write(answers[1], said or b"used")
                os.read(asks[0], 1)
                os._exit(0)
        assert os.read(answers[0], 10) == b"refused"
        # The child lives on, and neither its copy of the lock nor its end matter.
        assert Blocks(store).put([5]) == [True]
        store.close()
        with opened(tmp_path) as store:
            assert Blocks(store).get([0, 1, 2, 5]) == [True] * 4
            os.write(asks[1], b"x")
            os.waitpid(child, 0)
            assert Blocks(store).put([6]) == [True]
        for end in (*asks, *answers):
            os.close(end)

    def test_a_store_that_is_dropped_warns_and_closes(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        Blocks(store).put([1])
        with pytest.warns(ResourceWarning, match="dropped without close"):
            del store
        with opened(tmp_path) as store:
            assert Blocks(store).get([1]) == [True]

    def test_foreign_files_stay(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "kvpager-cache.seg").write_text("not by that name")
        with opened(tmp_path, LIMIT) as store:
            blocks = Blocks(store)
            for turn in range(50):
                blocks.put(range(turn * 10, turn * 10 + 10))
            store.clear()
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / "kvpager-cache.seg").read_text() == "not by that name"


def in_a_process(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import resource, sys\nfrom test_disk_store import *\n{script}", *map(str, arguments)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestDisksThatRefuse:
    @pytest.fixture
    def folder(self) -> Any:
        # pytest's own folders are closed to others.
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            yield Path(folder)
            os.chmod(folder, 0o755)

    def test_a_folder_that_may_not_be_written(self, folder: Path) -> None:
        opened(folder / "store").close()
        script = """
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
for path in (sys.argv[1] + "/store", sys.argv[1] + "/new"):
    try:
        opened(path)
    except TransferError as error:
        print(error)
"""
        os.chmod(folder, 0o555)
        os.chmod(folder / "store" / "kvpager.lock", 0o444)
        os.chmod(folder / "store", 0o555)
        try:
            said = in_a_process(script, folder).splitlines()
        finally:
            os.chmod(folder / "store", 0o755)
        assert len(said) == 2
        assert all("Permission denied" in line and str(folder) in line for line in said), said

    def test_a_folder_that_may_not_be_written_any_more(self, folder: Path) -> None:
        """What is there is read and deleted; what needs a new file is dropped, and nothing is evicted for it."""
        script = """
import numpy.ma  # numpy asks for it late, when this process may not read it any more
path = Path(sys.argv[1]) / "store"
with opened(path, LIMIT, segment_bytes=1) as store:
    blocks = Blocks(store)
    names = range(30)
    assert blocks.put(names) == [True] * 30
    os.chmod(path, 0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    assert blocks.put(range(30, 40)) == [True] * 2 + [False] * 8
    assert blocks.get(range(40)) == [True] * 32 + [False] * 8
    assert blocks.delete([3, 31]) == 2
    there = [name not in (3, 31) and name < 32 for name in range(40)]
    assert blocks.get(range(40)) == there
    assert (store.stats()["evicted"], store.stats()["dropped"]) == (0, 8), store.stats()
    assert blocks.delete(range(8)) == 7, "all of a segment"
    there[:8] = [False] * 8
    assert blocks.get(range(40)) == there
    if os.getuid() == 0:
        os.seteuid(0)
    os.chmod(path, 0o755)
with opened(path, LIMIT, segment_bytes=1) as store:
    assert Blocks(store).get(range(40)) == there
    assert Blocks(store).put(range(40)) == [True] * 40
"""
        in_a_process(script, folder)

    def test_a_path_that_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(TransferError, match=r"cannot make .*file"):
            opened(tmp_path / "file")
        with pytest.raises(TransferError, match=r"cannot make .*below"):
            opened(tmp_path / "file" / "below")

    def test_a_full_disk_drops_with_a_count(self, tmp_path: Path) -> None:
        """The system lets no file grow beyond a limit: what does not fit is dropped, the rest goes on."""
        script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
with opened(sys.argv[1]) as store:
    blocks = Blocks(store)
    stored = [blocks.put([name])[0] for name in range(20)]
    assert blocks.get(range(20)) == stored == [True] * 10 + [False] * 10, stored
    assert blocks.contains(range(20)) == stored
    stats = store.stats()
    assert (stats["stored"], stats["dropped"], stats["records"]) == (10, 10, 10), stats
    assert stats["write_errors"] >= 10, stats
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert blocks.put(range(20)) == [True] * 20, "there is room again"
    assert blocks.get(range(20)) == [True] * 20
"""
        in_a_process(script, tmp_path)
        with opened(tmp_path) as store:
            assert Blocks(store).get(range(20)) == [True] * 20
            assert store.stats()["corrupt"] == 0

    def test_a_disk_that_is_full_from_the_start(self, tmp_path: Path) -> None:
        script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    opened(sys.argv[1])
except TransferError as error:
    print(error)
"""
        assert "cannot write" in in_a_process(script, tmp_path / "store")

    def test_a_folder_that_goes_away(self, tmp_path: Path) -> None:
        """Another deletes the files under a running store: what is open stays readable, and nothing crashes."""
        with opened(tmp_path / "store", LIMIT) as store:
            blocks = Blocks(store)
            blocks.put(range(20))
            shutil.rmtree(tmp_path / "store")
            assert blocks.get(range(20)) == [True] * 20
            for turn in range(30):
                blocks.put(range(turn * 10, turn * 10 + 10))
                blocks.get(range(turn * 10, turn * 10 + 10))
            assert store.stats()["write_errors"] > 0
            store.stats()


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "error", "says"),
        [
            ({"max_bytes": 4096}, ConfigError, "max_bytes is 4096"),
            ({"max_bytes": 0}, ConfigError, "max_bytes is 0"),
            ({"max_bytes": -5}, ConfigError, "max_bytes is -5"),
            ({"max_bytes": 1 << 80}, ConfigError, "max_bytes is"),
            ({"max_bytes": 1e9}, TypeError, "integer"),
            ({"segment_bytes": 0}, ConfigError, "segment_bytes is 0"),
            ({"segment_bytes": 1 << 30}, ConfigError, "max_bytes is 1048576"),
            ({"segment_bytes": 1, "max_bytes": 1 << 40}, ConfigError, "segment_bytes is 1; .* more than 512"),
            ({"sync": "sometimes"}, ConfigError, 'sync is "sometimes"'),
            ({"sync": 1}, TypeError, "sync"),
            ({"identity": "text"}, TypeError, "identity"),
            ({"path": 5}, TypeError, "path|str"),
        ],
    )
    def test_wrong_ones_are_refused_and_make_no_folder(
        self, tmp_path: Path, settings: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            opened(**{"path": tmp_path / "store", **settings})
        assert not (tmp_path / "store").exists()

    def test_segments_are_a_sixteenth_of_the_limit_unless_chosen(self, tmp_path: Path) -> None:
        for number, (settings, expected) in enumerate(
            [
                ({"max_bytes": 1 << 20}, 64 << 10),
                ({"max_bytes": 4 << 30}, 64 << 20),
                ({"max_bytes": 1 << 40}, 4 << 30),
                ({"max_bytes": 64 << 20, "segment_bytes": 1 << 20}, 1 << 20),
            ]
        ):
            with opened(tmp_path / str(number), **settings) as store:
                assert 0.9 * expected < store.segment_bytes <= expected + 64

    def test_paths_are_text_or_paths(self, tmp_path: Path) -> None:
        with opened(str(tmp_path)) as store:
            assert store.path == str(tmp_path)
            assert repr(store) == f"DiskStore({str(tmp_path)!r}, row_bytes=200, meta_bytes=48)"

    def test_a_store_of_large_rows(self, tmp_path: Path) -> None:
        with opened(tmp_path, 64 << 20, row_bytes=1_500_001) as store:
            blocks = Blocks(store)
            assert blocks.put(range(10)) == [True] * 10
            assert blocks.get(range(10)) == [True] * 10
        with opened(tmp_path, 64 << 20, row_bytes=1_500_001) as store:
            assert Blocks(store).get(reversed(range(10))) == [True] * 10

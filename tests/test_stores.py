"""What every store must answer: `kvpager.tiers.Store`, held to all of `STORES`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from store_suite import BLOCK_SIZE, META_BYTES, ROW_BYTES, STORES, UNKNOWN, Blocks, key, payload

import kvpager
from kvpager import ConfigError, TransferError
from kvpager.tiers import DiskStore, MemoryStore, Store


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = STORES[request.param](request)
    yield opened
    opened.close()


@pytest.fixture
def blocks(store: Store) -> Blocks:
    return Blocks(store)


class TestRecords:
    def test_an_empty_store_has_nothing(self, blocks: Blocks) -> None:
        assert blocks.contains(range(3)) == [False] * 3
        assert blocks.get(range(3)) == [False] * 3
        assert blocks.delete(range(3)) == 0

    def test_what_was_put_is_there(self, blocks: Blocks) -> None:
        assert blocks.put(range(50)) == [True] * 50
        assert blocks.contains(range(48, 53)) == [True, True, False, False, False]
        assert blocks.get([7, 60, 49, 0]) == [True, False, True, True]

    def test_calls_with_nothing_in_them(self, blocks: Blocks) -> None:
        assert (blocks.put([]), blocks.get([]), blocks.contains([]), blocks.delete([])) == ([], [], [], 0)

    def test_a_key_is_a_hint_and_the_meta_proves(self, blocks: Blocks) -> None:
        """W8 on the disk and beyond: equal keys with other tokens, or another parent, are never a hit."""
        blocks.put([1])
        assert blocks.contains([1]) == [True]
        assert blocks.get([1], token=5) == [False]
        other = Blocks(blocks.store, parents={1: 9})
        assert other.get([1]) == [False]
        for byte in range(META_BYTES):
            metas = blocks.metas([1])
            metas[0, byte] ^= 1
            rows = np.zeros((1, ROW_BYTES), np.uint8)
            assert not blocks.store.get_many(blocks.keys([1]), metas, rows, np.array([0], np.int32)).any(), byte

    def test_a_key_differs_in_any_byte(self, blocks: Blocks) -> None:
        blocks.put([1])
        for byte in range(32):
            keys = blocks.keys([1])
            keys[0, byte] ^= 1
            rows = np.zeros((1, ROW_BYTES), np.uint8)
            found = blocks.store.get_many(keys, blocks.metas([1]), rows, np.array([0], np.int32))
            assert not found.any(), byte

    def test_another_meta_replaces(self, blocks: Blocks) -> None:
        blocks.put([1, 2])
        assert blocks.put([1], token=5) == [True]
        assert (blocks.get([1]), blocks.get([1], token=5), blocks.get([2])) == ([False], [True], [True])

    def test_what_is_there_is_not_written_again(self, blocks: Blocks) -> None:
        blocks.put([1, 2])
        rows = np.zeros((3, ROW_BYTES), np.uint8)
        keys, metas = blocks.keys([1, 2, 3]), blocks.metas([1, 2, 3])
        rows[2] = payload(3)
        assert blocks.store.put_many(keys, metas, rows, np.arange(3, dtype=np.int32)).all()
        assert blocks.get([1, 2, 3]) == [True] * 3
        stats = blocks.store.stats()
        assert (stats["stored"], stats["present"]) == (3, 2)

    def test_the_same_block_twice_in_a_call(self, blocks: Blocks) -> None:
        assert blocks.put([1, 2, 1]) == [True] * 3
        assert blocks.get([1, 1, 2]) == [True] * 3
        assert blocks.store.stats()["records"] in (2, UNKNOWN)

    def test_rows_may_come_from_anywhere_in_an_arena(self, blocks: Blocks) -> None:
        rows = np.zeros((10, ROW_BYTES), np.uint8)
        rows[7], rows[2] = payload(1), payload(2)
        ids = np.array([7, 2], np.int32)
        assert blocks.store.put_many(blocks.keys([1, 2]), blocks.metas([1, 2]), rows, ids).all()
        assert blocks.get([2, 1]) == [True, True]

    def test_arguments_may_be_views_with_strides(self, blocks: Blocks) -> None:
        blocks.put(range(6))
        keys, metas = blocks.keys(range(6))[::2], blocks.metas(range(6))[::2]
        rows = np.zeros((6, ROW_BYTES), np.uint8)
        ids = np.arange(6, dtype=np.int32)[::2]
        rows.flags.writeable = False
        assert blocks.store.put_many(keys, metas, rows, ids).all()
        rows = rows.copy()
        assert blocks.store.get_many(keys, metas, rows, ids).all()
        assert all((rows[name] == payload(name)).all() for name in (0, 2, 4))


class TestDeletion:
    def test_a_chain_goes_from_the_given_block_down(self, blocks: Blocks) -> None:
        blocks.parents = {1: 0, 2: 1, 3: 2, 4: 1, 5: 0}
        blocks.put(range(7))
        assert blocks.delete([1]) == 4
        assert blocks.contains(range(7)) == [True, False, False, False, False, True, True]
        assert blocks.get(range(7)) == [True, False, False, False, False, True, True]

    def test_what_hangs_in_the_air_goes_too(self, blocks: Blocks) -> None:
        """Where the store lost a block, what is below may be of what is deleted: saved again, it would be found."""
        blocks.parents = {1: 0, 2: 1, 4: 3}
        blocks.put([0, 2, 3, 4])
        assert blocks.delete([0]) == 2
        assert blocks.contains(range(5)) == [False, False, False, True, True]
        assert blocks.store.delete_many(blocks.keys([])) == 0

    def test_the_given_block_need_not_be_there(self, blocks: Blocks) -> None:
        blocks.parents = {1: 0, 2: 1}
        blocks.put([1, 2])
        assert blocks.delete([0]) == 2

    def test_children_that_came_before_their_parents(self, blocks: Blocks) -> None:
        blocks.parents = {name: name - 1 for name in range(1, 20)}
        blocks.put(reversed(range(20)))
        assert blocks.delete([10, 12]) == 10
        assert blocks.contains(range(20)) == [True] * 10 + [False] * 10

    def test_what_was_deleted_can_come_back(self, blocks: Blocks) -> None:
        blocks.put([1])
        blocks.delete([1])
        assert blocks.put([1]) == [True]
        assert blocks.get([1]) == [True]

    def test_clear_deletes_everything(self, blocks: Blocks) -> None:
        blocks.put(range(30))
        blocks.store.clear()
        assert blocks.contains(range(30)) == [False] * 30
        assert blocks.store.stats()["records"] in (0, UNKNOWN)
        assert blocks.store.stats()["deleted"] == 30
        assert blocks.put(range(5)) == [True] * 5
        assert blocks.get(range(5)) == [True] * 5

    def test_a_long_chain_is_no_recursion(self, blocks: Blocks) -> None:
        blocks.parents = {name: name - 1 for name in range(1, 1500)}
        blocks.put(range(1500))
        assert blocks.delete([0]) == 1500


class TestArguments:
    @pytest.fixture
    def arguments(self, blocks: Blocks) -> dict[str, Any]:
        blocks.put([1, 2])
        return {
            "keys": blocks.keys([1, 2]),
            "metas": blocks.metas([1, 2]),
            "rows": np.zeros((4, ROW_BYTES), np.uint8),
            "row_ids": np.array([0, 1], np.int32),
        }

    WRONG: tuple[tuple[str, Callable[[Any], Any], type[Exception]], ...] = (
        ("keys", lambda keys: keys.tolist(), TypeError),
        ("keys", lambda keys: keys.tobytes(), TypeError),
        ("keys", lambda keys: keys.astype(np.int8), TypeError),
        ("keys", lambda keys: keys.reshape(-1), ValueError),
        ("keys", lambda keys: keys[:, :31], ValueError),
        ("metas", lambda metas: metas.view(np.int32), TypeError),
        ("metas", lambda metas: metas[:, :-1], ValueError),
        ("metas", lambda metas: metas[:1], ValueError),
        ("rows", lambda rows: rows.view(np.int8), TypeError),
        ("rows", lambda rows: rows.tobytes(), TypeError),
        ("rows", lambda rows: rows[:, ::-1], ValueError),
        ("rows", lambda rows: rows[:, 1:], ValueError),
        ("rows", lambda rows: np.zeros((4, ROW_BYTES + 8), np.uint8)[:, :ROW_BYTES], ValueError),
        ("rows", lambda rows: rows[0], ValueError),
        ("rows", lambda rows: rows[:1], ValueError),
        ("row_ids", lambda row_ids: row_ids.tolist(), TypeError),
        ("row_ids", lambda row_ids: row_ids.astype(np.int64), TypeError),
        ("row_ids", lambda row_ids: row_ids + 3, ValueError),
        ("row_ids", lambda row_ids: row_ids - 1, ValueError),
        ("row_ids", lambda row_ids: row_ids[:1], ValueError),
        ("row_ids", lambda row_ids: row_ids.reshape(1, 2), ValueError),
    )

    @pytest.mark.parametrize("call", ["put_many", "get_many"])
    @pytest.mark.parametrize(("name", "spoil", "error"), WRONG)
    def test_wrong_ones_are_refused_and_change_nothing(
        self, store: Store, arguments: dict[str, Any], call: str, name: str, spoil: Any, error: type[Exception]
    ) -> None:
        before = store.stats()
        arguments[name] = spoil(arguments[name])
        with pytest.raises(error, match=name.replace("_", ".").removesuffix("s")) as refused:
            getattr(store, call)(**arguments)
        assert len(str(refused.value)) < 200
        assert store.stats() == before

    def test_a_row_that_comes_twice(self, store: Store, arguments: dict[str, Any]) -> None:
        arguments["row_ids"] = np.array([3, 3], np.int32)
        with pytest.raises(ValueError, match="twice"):
            store.get_many(**arguments)
        assert store.put_many(**arguments).all()

    def test_rows_that_cannot_be_written(self, store: Store, arguments: dict[str, Any]) -> None:
        arguments["rows"].flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            store.get_many(**arguments)

    @pytest.mark.parametrize("call", ["contains_many", "delete_many"])
    def test_keys_of_the_other_calls(self, store: Store, call: str) -> None:
        with pytest.raises(TypeError, match="keys"):
            getattr(store, call)([key(1)])
        with pytest.raises(ValueError, match="keys"):
            getattr(store, call)(key(1))

    def test_a_closed_store_says_so(self, store: Store, arguments: dict[str, Any]) -> None:
        store.close()
        store.close()
        calls: list[Callable[[], Any]] = [
            lambda: store.contains_many(arguments["keys"]),
            lambda: store.get_many(**arguments),
            lambda: store.put_many(**arguments),
            lambda: store.delete_many(arguments["keys"]),
            store.clear,
        ]
        for call in calls:
            with pytest.raises(TransferError, match="is closed"):
                call()
        assert store.stats()["stored"] == 2


class TestStatistics:
    def test_they_count_records(self, blocks: Blocks) -> None:
        blocks.put(range(10))
        blocks.put([9])
        blocks.get(range(8, 13))
        blocks.delete([0])
        stats = blocks.store.stats()
        expected = {"stored": 10, "present": 1, "dropped": 0, "hits": 2, "misses": 3, "deleted": 1}
        assert {name: stats[name] for name in expected} == expected
        assert (stats["corrupt"], stats["evicted"]) == (0, 0)
        assert stats["records"] in (9, UNKNOWN)
        assert 0 < stats["bytes"] <= stats["max_bytes"] or stats["bytes"] == stats["max_bytes"] == UNKNOWN


class TestTogether:
    def test_random_calls_are_as_on_the_memory_store(self, store: Store, seed: int, runs: int | None) -> None:
        oracle = MemoryStore(ROW_BYTES, BLOCK_SIZE, 1 << 30)
        for nth in range(runs or 3):
            draw = random.Random(seed + nth)
            parents = {name: draw.randrange(40) for name in range(40)}
            twins = [Blocks(store, parents), Blocks(oracle, parents)]
            for _ in range(120):
                names = [draw.randrange(40) for _ in range(draw.randrange(1, 9))]
                call = draw.choice(
                    ["put", "put", "get", "get", "contains", "delete"] + ["clear"] * (draw.random() < 0.1)
                )
                if call == "clear":
                    store.clear()
                    oracle.clear()
                    continue
                arguments = {"token": draw.randrange(2)} if call in ("put", "get") else {}
                names = names[:1] if call == "delete" else names
                answer, expected = (getattr(twin, call)(names, **arguments) for twin in twins)
                assert answer == expected, f"KVPAGER_SEED={seed + nth}: {call} {names} {arguments}"
            ours, theirs = store.stats(), oracle.stats()
            assert ours["records"] in (theirs["records"], UNKNOWN)
            counts = ("hits", "misses", "stored", "present", "deleted", "dropped", "corrupt")
            assert {name: ours[name] for name in counts} == {name: theirs[name] for name in counts}
            store.clear()
            oracle.clear()

    def test_one_thread_reads_while_another_writes(self, store: Store, watchdog: None) -> None:
        """Whoever reads gets right bytes or none (`Blocks.get` compares them), also while others delete."""
        failures: list[BaseException] = []
        is_over = threading.Event()

        def reads() -> None:
            try:
                while not is_over.is_set():
                    Blocks(store).get(range(40))
                    Blocks(store).contains(range(40))
                    store.stats()
            except BaseException as failure:
                failures.append(failure)

        readers = [threading.Thread(target=reads) for _ in range(2)]
        for reader in readers:
            reader.start()
        blocks = Blocks(store)
        for turn in range(60):
            blocks.put(range(turn % 30, turn % 30 + 10))
            if turn % 7 == 0:
                blocks.delete([turn % 40])
            if turn % 25 == 24:
                store.clear()
        is_over.set()
        for reader in readers:
            reader.join()
        assert not failures, failures


class TestConstruction:
    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("row_bytes", 0, ConfigError),
            ("row_bytes", 2**30 + 1, ConfigError),
            ("block_size", 0, ConfigError),
            ("block_size", 1025, ConfigError),
            ("max_bytes", 10, ConfigError),
            ("row_bytes", 1.5, TypeError),
            ("block_size", "16", TypeError),
        ],
    )
    def test_sizes_have_limits(self, tmp_path: Any, name: str, value: Any, error: type[Exception]) -> None:
        sizes: dict[str, Any] = {"row_bytes": ROW_BYTES, "block_size": BLOCK_SIZE, "max_bytes": 1 << 20, name: value}
        with pytest.raises(error, match=name if error is ConfigError else None):
            MemoryStore(**sizes)
        with pytest.raises(error, match=name if error is ConfigError else None):
            DiskStore(tmp_path / "store", **sizes)
        assert not (tmp_path / "store").exists()

    def test_the_memory_store_forgets_what_was_used_longest_ago(self) -> None:
        record = 32 + META_BYTES + ROW_BYTES
        blocks = Blocks(MemoryStore(ROW_BYTES, BLOCK_SIZE, 3 * record + 1))
        assert blocks.put([1, 2, 3]) == [True] * 3
        blocks.get([1])
        assert blocks.put([4]) == [True]
        assert blocks.contains([1, 2, 3, 4]) == [True, False, True, True]
        assert blocks.put(range(10, 15)) == [False, False, True, True, True]
        assert blocks.store.stats()["evicted"] == 6

    def test_stores_are_stores(self, tmp_path: Any) -> None:
        stores: list[Store] = [MemoryStore(8, 1, 1 << 20)]
        with DiskStore(tmp_path, row_bytes=8, block_size=1, max_bytes=1 << 20) as disk:
            stores.append(disk)
            assert [(store.row_bytes, store.meta_bytes) for store in stores] == [(8, 36)] * 2
        assert issubclass(TransferError, kvpager.KvPagerError)

"""`ValkeyStore` with a real server that is killed, frozen, full and foreign, and with sockets that only pretend."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from valkey_server import WHY_NOT, ValkeyServer, find_server, free_port

import kvpager
from kvpager.tiers import KEY_BYTES, MemoryStore, ValkeyStore
from kvpager.tiers.breaker import Breaker
from kvpager.tiers.valkey import HEADER

redis = pytest.importorskip("redis", reason="the extra `redis` is not installed")
needs_server = pytest.mark.skipif(find_server() is None, reason=WHY_NOT)

ROW_BYTES, BLOCK_SIZE = 64, 4
META_BYTES = KEY_BYTES + 4 * BLOCK_SIZE
SHORT_S = 0.2
"""A timeout that tests wait for."""
PATIENT_S = 20.0
"""One that must not pass on a busy machine."""


@pytest.fixture
def server(valkey_server: ValkeyServer) -> ValkeyServer:
    return valkey_server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of the test's own."""
    with ValkeyServer(tmp_path) as server:
        yield server


@contextlib.contextmanager
def client(server: ValkeyServer) -> Iterator[Any]:
    """The bare client, to see and to spoil what is on the server."""
    with redis.Redis(port=server.port, protocol=2) as direct:
        yield direct


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_on(where: ValkeyServer | int | str, **options: Any) -> ValkeyStore:
    url = where if isinstance(where, str) else f"redis://127.0.0.1:{where if isinstance(where, int) else where.port}/0"
    options = {"row_bytes": ROW_BYTES, "block_size": BLOCK_SIZE, "timeout_seconds": PATIENT_S} | options
    return ValkeyStore(url, **options)


def records(number: int, seed: int = 0, parents: list[int] | None = None, row_bytes: int = ROW_BYTES) -> Any:
    """Keys, metas and rows of so many records; record i hangs below record parents[i] (-1: below none)."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (number, KEY_BYTES), np.uint8)
    metas = rng.integers(0, 256, (number, META_BYTES), np.uint8)
    keys[:, 0] |= 1
    metas[:, :8] = 0  # roots
    for child, parent in enumerate(parents or []):
        if parent >= 0:
            metas[child, :KEY_BYTES] = keys[parent]
    return keys, metas, rng.integers(0, 256, (number, row_bytes), np.uint8)


def ids(number: int) -> Any:
    return np.arange(number, dtype=np.int32)


def put(store: Any, keys: Any, metas: Any, rows: Any) -> list[bool]:
    answer: list[bool] = store.put_many(keys, metas, rows, ids(len(keys))).tolist()
    return answer


def get(store: Any, keys: Any, metas: Any, rows: Any) -> list[bool]:
    """What is found, after looking at the bytes of each."""
    arena = np.zeros((len(keys), store.row_bytes), np.uint8)
    found = store.get_many(keys, metas, arena, ids(len(keys)))
    assert np.array_equal(arena[found], rows[found])
    answer: list[bool] = found.tolist()
    return answer


def name(key: Any, prefix: bytes = b"kvpager:") -> bytes:
    content: bytes = prefix + key.tobytes()
    return content


@needs_server
class TestRecords:
    def test_come_back(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(5)
        with store_on(server) as store:
            assert put(store, keys[:3], metas[:3], rows[:3]) == [True] * 3
            assert store.contains_many(keys).tolist() == [True] * 3 + [False] * 2
            assert get(store, keys, metas, rows) == [True] * 3 + [False] * 2
            stats = store.stats()
            assert (stats["stored"], stats["hits"], stats["misses"]) == (3, 3, 2)
            assert (stats["errors"], stats["refused"], stats["skipped"], store.last_error) == (0, 0, 0, None)
        with client(server) as direct:
            assert set(direct.keys()) == {name(key) for key in keys[:3]}
            assert direct.strlen(name(keys[0])) == HEADER.size + META_BYTES + ROW_BYTES

    def test_rows_are_those_that_are_named(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(3)
        with store_on(server) as store:
            store.put_many(keys, metas, rows, np.array([2, 0, 1], np.int32))
            arena = np.zeros((9, ROW_BYTES), np.uint8)
            assert store.get_many(keys, metas, arena, np.array([8, 4, 6], np.int32)).all()
            assert np.array_equal(arena[[8, 4, 6]], rows[[2, 0, 1]])
            assert not arena[[0, 1, 2, 3, 5, 7]].any()

    def test_the_meta_proves(self, server: ValkeyServer) -> None:
        """A key with another meta is a miss, and is replaced when it is stored."""
        keys, metas, rows = records(1)
        others = metas.copy()
        others[0, -1] ^= 1
        with store_on(server) as store:
            put(store, keys, metas, rows)
            assert get(store, keys, others, rows) == [False]
            assert get(store, keys, metas, rows) == [True]
            assert put(store, keys, others, rows) == [True]
            assert get(store, keys, metas, rows) == [False]
            assert get(store, keys, others, rows) == [True]
            assert (store.stats()["stored"], store.stats()["corrupt"]) == (2, 0)

    def test_what_is_there_is_not_written_again(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(2)
        with store_on(server) as store:
            put(store, keys[:1], metas[:1], rows[:1])
            before = rows.copy()
            rows[0] ^= 255
            assert put(store, keys, metas, rows) == [True, True]
            rows[0] = before[0]
            assert get(store, keys, metas, rows) == [True, True]
            assert (store.stats()["stored"], store.stats()["present"]) == (2, 1)

    def test_twins_in_a_call_that_is_refused(self, own: ValkeyServer) -> None:
        """What was not stored is not present either."""
        keys, metas, rows = records(2)
        others = metas.copy()
        others[0, -1] ^= 1
        twice = (
            keys[[0, 0, 1, 0]],
            np.concatenate([metas[[0, 0, 1]], others[[0]]]),
            rows,
            np.array([0, 0, 1, 0], np.int32),
        )
        with client(own) as direct, store_on(own) as store:
            direct.config_set("maxmemory", 1)
            assert store.put_many(*twice).tolist() == [False] * 4
            direct.config_set("maxmemory", 0)
            assert store.put_many(*twice).tolist() == [True] * 4
            assert (store.stats()["stored"], store.stats()["present"], store.stats()["dropped"]) == (3, 1, 4)
            assert get(store, keys, metas, rows) == [False, True]
            assert get(store, keys, others, rows) == [True, True]

    def test_nothing_asked(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(0)
        with store_on(server) as store:
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == []
            assert store.contains_many(keys).tolist() == []
            assert store.delete_many(keys) == 0

    def test_as_a_store_in_memory(self, server: ValkeyServer, seed: int) -> None:
        """The same answers as the plain statement of the interface, in random histories."""
        rng = random.Random(seed)
        for history in range(20):
            parents = [rng.randrange(-1, at) if at else -1 for at in range(12)]
            keys, metas, rows = records(12, seed=history, parents=parents)
            other_metas = metas.copy()
            other_metas[:, -1] ^= 1
            plain = MemoryStore(ROW_BYTES, BLOCK_SIZE, 2**20)
            with store_on(server, batch_bytes=rng.choice([1, 500, 2**20])) as store:
                for _ in range(30):
                    some = rng.sample(range(12), rng.randint(1, 12))
                    proof = metas if rng.random() < 0.8 else other_metas
                    what = rng.choice(["put", "put", "get", "contains", "delete", "clear"])
                    if what == "put":
                        given = (keys[some], proof[some], rows, np.array(some, np.int32))
                        assert store.put_many(*given).tolist() == plain.put_many(*given).tolist()
                    elif what == "get":
                        asked = (keys[some], proof[some], rows[some])
                        assert get(store, *asked) == get(plain, *asked)
                    elif what == "contains":
                        assert store.contains_many(keys).tolist() == plain.contains_many(keys).tolist()
                    elif what == "delete":
                        assert store.delete_many(keys[some[:2]]) == plain.delete_many(keys[some[:2]])
                    elif rng.random() < 0.2:
                        store.clear()
                        plain.clear()
                counts, expected = store.stats(), plain.stats()
                for count in ("hits", "misses", "stored", "present", "dropped", "corrupt", "deleted"):
                    assert counts[count] == expected[count], count
                store.clear()

    def test_batches_are_bounded(self, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """At most batch_bytes of records go or come at once, and one record at least."""
        value_bytes = HEADER.size + META_BYTES + ROW_BYTES
        sizes: list[int] = []
        ask = ValkeyStore._ask

        def watched(store: ValkeyStore, commands: Any) -> list[Any]:
            answers = ask(store, commands)
            sent = sum(len(word) for command in commands for word in command if isinstance(word, bytes))
            sizes.append(max(sent - 40 * len(commands), sum(len(a) for a in answers if isinstance(a, bytes))))
            return answers

        monkeypatch.setattr(ValkeyStore, "_ask", watched)
        keys, metas, rows = records(50)
        for batch_bytes, at_most in [
            (1, value_bytes),
            (3 * value_bytes + 1, 3 * value_bytes),
            (2**20, 50 * value_bytes),
        ]:
            with store_on(server, batch_bytes=batch_bytes) as store:
                sizes.clear()
                assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [True] * 50
                assert max(sizes) == at_most
                store.clear()

    def test_large_records(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(5, row_bytes=3_000_001)
        with store_on(server, row_bytes=3_000_001) as store:
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [True] * 5


@needs_server
class TestDeletion:
    def test_takes_what_hangs_below(self, server: ValkeyServer) -> None:
        #      0 - 1 - 2 - 3
        #       \- 4 - 5          6 - 7: another root
        keys, metas, rows = records(8, parents=[-1, 0, 1, 2, 0, 4, -1, 6])
        with store_on(server) as store:
            put(store, keys, metas, rows)
            assert store.delete_many(keys[[1]]) == 3
            assert store.contains_many(keys).tolist() == [True, False, False, False, True, True, True, True]
            assert store.delete_many(keys[[0, 5, 0]]) == 3
            assert store.delete_many(keys[[0, 1]]) == 0
            assert store.delete_many(metas[[6], :KEY_BYTES]) == 2  # below a key that was never there itself
            assert store.stats()["deleted"] == 8

    def test_of_a_long_chain(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(3000, parents=list(range(-1, 2999)))
        with store_on(server) as store:
            put(store, keys, metas, rows)
            assert store.delete_many(keys[[100]]) == 2900
            assert int(store.contains_many(keys).sum()) == 100

    @pytest.mark.parametrize("prefix", [b"kvpager:", b"*", b"k?[a-c]\\^", b"\xff\x00"])
    def test_touches_its_prefix_only(self, server: ValkeyServer, prefix: bytes) -> None:
        keys, metas, rows = records(4)
        with client(server) as direct, store_on(server, key_prefix=prefix) as store:
            put(store, keys, metas, rows)
            kept = [
                b"other",
                b"kvpager:settings",
                prefix + b"x",
                b"k",
                b"kZa" + keys[0].tobytes(),
                b"x" + name(keys[0], prefix),
            ]
            for key in kept:
                direct.set(key, b"somebody's")
            with store_on(server, key_prefix=prefix + b"2") as neighbour:
                put(neighbour, keys, metas, rows)
                store.clear()
                assert not store.contains_many(keys).any()
                assert neighbour.contains_many(keys).all()
                assert neighbour.delete_many(keys) == 4
            assert sorted(direct.keys()) == sorted(kept)

    def test_is_not_done_when_it_cannot_be(self, own: ValkeyServer) -> None:
        keys, _, _ = records(1)
        with store_on(own) as store:
            own.kill()
            for call in (store.clear, lambda: store.delete_many(keys)):
                with pytest.raises(kvpager.TransferError, match="records may be left on the server, as it cannot"):
                    call()
            assert (store.stats()["errors"], store.stats()["skipped"]) == (1, 1)


@needs_server
class TestForeignValues:
    """Whatever lies under our keys: a miss, never an error, never wrong bytes; and storing heals it."""

    @pytest.mark.parametrize(
        ("spoil", "corrupt"),
        [
            (lambda value: b"", False),
            (lambda value: b"somebody else's", False),
            (lambda value: value[: HEADER.size], False),
            (lambda value: b"KVP2" + value[4:], False),
            (lambda value: value[:4] + bytes([value[4] ^ 1]) + value[5:], True),
            (lambda value: value[:8] + bytes([value[8] ^ 1]) + value[9:], False),
            (lambda value: value[:12] + bytes([value[12] ^ 1]) + value[13:], False),
            (lambda value: value[: HEADER.size] + bytes([value[HEADER.size] ^ 1]) + value[HEADER.size + 1 :], False),
            (lambda value: value[:-1] + bytes([value[-1] ^ 128]), True),
            (lambda value: value[:-ROW_BYTES] + bytes([value[-ROW_BYTES] ^ 1]) + value[1 - ROW_BYTES :], True),
            (lambda value: value[:-1], True),
            (lambda value: value + b"\0", True),
        ],
    )
    def test_bytes(self, server: ValkeyServer, spoil: Callable[[bytes], bytes], corrupt: bool) -> None:
        keys, metas, rows = records(2)
        with client(server) as direct, store_on(server) as store:
            put(store, keys, metas, rows)
            direct.set(name(keys[0]), spoil(direct.get(name(keys[0]))))
            assert get(store, keys, metas, rows) == [False, True]
            assert store.stats()["corrupt"] == corrupt
            assert store.contains_many(keys).tolist() == [not corrupt, True]  # what is damaged is deleted at once
            assert put(store, keys, metas, rows) == [True, True]
            assert get(store, keys, metas, rows) == [True, True]

    @pytest.mark.parametrize("spoil", [lambda value: value[:-1], lambda value: value + b"\0", lambda value: value[:70]])
    def test_lengths_heal_without_having_been_read(self, server: ValkeyServer, spoil: Callable[[bytes], bytes]) -> None:
        keys, metas, rows = records(1)
        with client(server) as direct, store_on(server) as store:
            put(store, keys, metas, rows)
            direct.set(name(keys[0]), spoil(direct.get(name(keys[0]))))
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [True]
            assert store.stats()["stored"] == 2

    def test_a_value_that_is_far_too_long(self, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """No more of it than a record is read."""
        lengths: list[int] = []
        ask = ValkeyStore._ask
        keys, metas, rows = records(1)

        def watched(store: ValkeyStore, commands: Any) -> list[Any]:
            answers = ask(store, commands)
            lengths.extend(len(answer) for answer in answers if isinstance(answer, bytes))
            return answers

        with client(server) as direct, store_on(server) as store:
            put(store, keys, metas, rows)
            direct.append(name(keys[0]), bytes(1_000_000))
            monkeypatch.setattr(ValkeyStore, "_ask", watched)
            assert get(store, keys, metas, rows) == [False]
            assert max(lengths) <= HEADER.size + META_BYTES + ROW_BYTES + 1

    def test_types(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(3)
        with client(server) as direct, store_on(server) as store:
            direct.rpush(name(keys[0]), b"a", b"b")
            direct.hset(name(keys[1]), b"a", b"b")
            assert store.contains_many(keys).tolist() == [True, True, False]  # a hint
            assert get(store, keys, metas, rows) == [False] * 3
            assert store.stats()["refused"] == 2
            assert "WRONGTYPE" in str(store.last_error)
            assert not store.is_resting
            assert put(store, keys, metas, rows) == [True] * 3
            assert get(store, keys, metas, rows) == [True] * 3

    def test_types_are_deleted_with_the_others(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(3, parents=[-1, 0, -1])
        with client(server) as direct, store_on(server) as store:
            put(store, keys, metas, rows)
            direct.delete(name(keys[2]))
            direct.sadd(name(keys[2]), b"a")
            assert store.delete_many(keys[[0]]) == 2
            store.clear()
            assert direct.keys() == []

    def test_records_of_another_size(self, server: ValkeyServer) -> None:
        """Two users that disagree miss each other's records."""
        keys, metas, rows = records(1)
        _, _, longer = records(1, row_bytes=96)
        with store_on(server) as store, store_on(server, row_bytes=96) as other:
            put(store, keys, metas, rows)
            assert get(other, keys, metas, longer) == [False]
            assert put(other, keys, metas, longer) == [True]
            assert get(other, keys, metas, longer) == [True]
            assert get(store, keys, metas, rows) == [False]
            assert store.stats()["corrupt"] == other.stats()["corrupt"] == 0


@needs_server
class TestRefusals:
    """Errors that the server answers with cost one record each, and nobody rests."""

    def test_out_of_memory(self, own: ValkeyServer) -> None:
        keys, metas, rows = records(64, row_bytes=100_000)
        with client(own) as direct, store_on(own, row_bytes=100_000) as store:
            direct.config_set("maxmemory", direct.info("memory")["used_memory"] + 2_000_000)
            kept = put(store, keys, metas, rows)
            assert 0 < sum(kept) < 64
            assert get(store, keys, metas, rows) == kept
            stats = store.stats()
            assert (stats["stored"], stats["dropped"], stats["refused"]) == (sum(kept), 64 - sum(kept), 64 - sum(kept))
            assert (stats["errors"], store.is_resting) == (0, False)
            assert "maxmemory" in str(store.last_error)
            direct.config_set("maxmemory", 0)
            assert put(store, keys, metas, rows) == [True] * 64

    def test_out_of_memory_with_a_policy(self, own: ValkeyServer) -> None:
        """As the documentation advises: nothing is refused, what is old goes."""
        keys, metas, rows = records(64, row_bytes=100_000)
        with client(own) as direct, store_on(own, row_bytes=100_000) as store:
            direct.config_set("maxmemory-policy", "allkeys-lru")
            direct.config_set("maxmemory", direct.info("memory")["used_memory"] + 2_000_000)
            assert put(store, keys, metas, rows) == [True] * 64
            assert 0 < sum(get(store, keys, metas, rows)) < 64

    def test_a_replica(self, own: ValkeyServer) -> None:
        keys, metas, rows = records(2)
        with client(own) as direct, store_on(own) as store:
            put(store, keys[:1], metas[:1], rows[:1])
            direct.replicaof("127.0.0.1", free_port())
            assert put(store, keys, metas, rows) == [True, False]
            assert "READONLY" in str(store.last_error).upper() or "read only" in str(store.last_error)
            assert get(store, keys, metas, rows) == [True, False]
            for call in (store.clear, lambda: store.delete_many(keys)):
                with pytest.raises(kvpager.TransferError, match="records may be left on the server"):
                    call()
            direct.replicaof("NO", "ONE")
            assert put(store, keys, metas, rows) == [True, True]

    def test_a_cluster(self, tmp_path: Path) -> None:
        """A node that serves no slot."""
        keys, metas, rows = records(2)
        with ValkeyServer(tmp_path, "--cluster-enabled", "yes") as node, store_on(node) as store:
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [False, False]
            assert store.contains_many(keys).tolist() == [False, False]
            assert (store.stats()["errors"], store.is_resting) == (0, False)
            assert "not served" in str(store.last_error)

    def test_passwords(self, own: ValkeyServer) -> None:
        keys, metas, rows = records(1)
        secret, wrong = "s3cr3t-of-ours", "wr0ng-one"
        with client(own) as direct:
            direct.config_set("requirepass", secret)
        said: list[str] = []
        for options in ({"password": wrong}, {}, {"username": "alice", "password": wrong}):
            with store_on(own, **options) as store:
                assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [False]
                assert (store.stats()["errors"], store.stats()["skipped"]) == (1, 1)
                with pytest.raises(kvpager.TransferError) as refused:
                    store.clear()
                said += [repr(store), str(store.last_error), str(refused.value)]
        with (
            store_on(own, password=secret) as by_option,
            store_on(f"redis://:{secret}@127.0.0.1:{own.port}/0") as by_url,
        ):
            assert put(by_option, keys, metas, rows) == get(by_url, keys, metas, rows) == [True]
            said += [repr(by_option), repr(by_url)]
        assert not [words for words in said if secret in words or wrong in words or "alice" in words]
        assert all(f"127.0.0.1:{own.port}" in words for words in said if words.startswith("ValkeyStore("))

    def test_a_user_who_may_not(self, own: ValkeyServer) -> None:
        keys, metas, rows = records(1)
        with client(own) as direct:
            direct.execute_command(
                "ACL", "SETUSER", "bob", "on", ">pw-of-bob", "~*", "+@all", "-scan", "-unlink", "-set"
            )
        with store_on(own, username="bob", password="pw-of-bob") as store:
            assert put(store, keys, metas, rows) == [False]
            assert not store.is_resting
            assert "set" in str(store.last_error)
            with pytest.raises(kvpager.TransferError) as refused:
                store.clear()
            assert "bob" not in f"{refused.value} {store.last_error} {store!r}"


@needs_server
class TestFailures:
    def test_killed_and_back(self, own: ValkeyServer) -> None:
        """A kill costs one failed call, then misses; after the rest one call finds out that it is back."""
        clock = Clock()
        keys, metas, rows = records(3)
        with store_on(own, clock=clock, rest_seconds=10) as store:
            assert put(store, keys, metas, rows) == [True] * 3
            own.kill()
            assert get(store, keys, metas, rows) == [False] * 3
            assert put(store, keys, metas, rows) == [False] * 3
            assert store.contains_many(keys).tolist() == [False] * 3
            assert store.is_resting
            assert (store.stats()["errors"], store.stats()["skipped"], store.stats()["dropped"]) == (1, 2, 3)
            clock.now = 11.0
            assert get(store, keys, metas, rows) == [False] * 3  # the probe: still dead
            assert (store.stats()["errors"], store.stats()["skipped"]) == (2, 2)
            own.start()
            assert get(store, keys, metas, rows) == [False] * 3  # not yet looked for
            assert store.stats()["skipped"] == 3
            clock.now = 22.0
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [True] * 3
            assert not store.is_resting

    def test_a_restart_between_two_calls_costs_nothing(self, own: ValkeyServer) -> None:
        keys, metas, rows = records(3)
        with store_on(own) as store:
            put(store, keys, metas, rows)
            own.kill()
            own.start()
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [True] * 3
            assert store.stats()["errors"] == 0

    @pytest.mark.usefixtures("watchdog")
    def test_frozen(self, own: ValkeyServer) -> None:
        """A server that stops answering costs one timeout, and answers that come too late are nobody's."""
        clock = Clock()
        keys, metas, rows = records(8)
        with store_on(own, clock=clock, rest_seconds=10, timeout_seconds=SHORT_S) as store:
            while put(store, keys, metas, rows) != [True] * 8:  # the short timeout may pass on a busy machine
                clock.now += 11
            errors = store.stats()["errors"]
            own.freeze()
            assert get(store, keys[:4], metas[:4], rows[:4]) == [False] * 4
            assert get(store, keys[4:], metas[4:], rows[4:]) == [False] * 4
            assert store.stats()["errors"] == errors + 1
            assert "Timeout" in str(store.last_error)
            own.thaw()
            for _ in range(100):
                clock.now += 11
                if get(store, keys[4:], metas[4:], rows[4:]) == [True] * 4:
                    break
            else:
                pytest.fail("it never came back")

    @pytest.mark.usefixtures("watchdog")
    def test_kills_under_two_threads(self, own: ValkeyServer, seed: int) -> None:
        """One reads, one writes, while the server dies and comes back: never an error, never wrong bytes."""
        rng = random.Random(seed)
        keys, metas, rows = records(40)
        stop, problems = threading.Event(), list[BaseException]()

        def works(work: Callable[[Any, Any, Any, Any], object]) -> None:
            try:
                while not stop.is_set():
                    work(store, keys, metas, rows)
            except BaseException as error:
                problems.append(error)

        with store_on(own, rest_seconds=0.01, batch_bytes=1000) as store:
            threads = [threading.Thread(target=works, args=(work,)) for work in (put, get)]
            for thread in threads:
                thread.start()
            for _ in range(5):
                hits = store.stats()["hits"]
                while store.stats()["hits"] == hits and not problems:
                    stop.wait(0.01)
                stop.wait(rng.random() / 20)
                own.kill()
                stop.wait(rng.random() / 20)
                own.start()
            stop.set()
            for thread in threads:
                thread.join()
            assert problems == []
            assert store.stats()["corrupt"] == 0
            assert store.stats()["errors"] >= 1


class Pretender:
    """A socket that takes connections and does to each what the test says, in a thread of its own."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            with contextlib.suppress(OSError):
                self._act(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()
        self._thread.join()


def commands(connection: socket.socket) -> Iterator[list[bytes]]:
    """What the client asks, its greeting included, until it hangs up."""
    with connection.makefile("rb") as stream, contextlib.suppress(ConnectionError):  # or resets the connection
        while (line := stream.readline()).startswith(b"*"):
            words = []
            for _ in range(int(line[1:])):
                words.append(stream.read(int(stream.readline()[1:])))
                stream.readline()
            yield words


def says_to_each_command(answer: bytes) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        for _ in commands(connection):
            connection.sendall(answer)

    return act


@pytest.mark.usefixtures("watchdog")
class TestPretenders:
    def test_silence_costs_one_timeout(self) -> None:
        """Then misses, without a connection; then one probe."""
        clock = Clock()
        keys, metas, rows = records(3)
        with (
            Pretender(lambda connection: None) as silent,
            store_on(silent.port, clock=clock, rest_seconds=10, timeout_seconds=SHORT_S) as store,
        ):
            assert put(store, keys, metas, rows) == [False] * 3
            for _ in range(20):
                assert get(store, keys, metas, rows) == [False] * 3
                assert store.contains_many(keys).tolist() == [False] * 3
            with pytest.raises(kvpager.TransferError, match="left alone for a while"):
                store.clear()
            assert silent.connections == 1
            assert (store.stats()["errors"], store.stats()["skipped"]) == (1, 41)
            clock.now = 10.0
            assert get(store, keys, metas, rows) == [False] * 3
            assert silent.connections == 2
            assert (store.stats()["errors"], store.stats()["skipped"]) == (2, 41)

    def test_an_interrupt(self) -> None:
        """The call ends with it, nobody rests, and nobody waits on that connection for what may still come."""
        keys, metas, rows = records(1)
        hung_up = threading.Event()

        def act(connection: socket.socket) -> None:
            for words in commands(connection):
                if words[0] != b"GETRANGE":
                    connection.sendall(b"+OK\r\n")
            hung_up.set()

        def interrupted(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        with Pretender(act) as silent, store_on(silent.port) as store:
            before = signal.signal(signal.SIGALRM, interrupted)
            try:
                signal.setitimer(signal.ITIMER_REAL, SHORT_S)
                with pytest.raises(KeyboardInterrupt):
                    store.get_many(keys, metas, rows, ids(1))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            assert hung_up.wait(PATIENT_S)
            assert not store.is_resting
            assert store.stats()["errors"] == 0

    def test_an_interrupt_between_two_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second answer is never read: its connection must not serve another call."""
        keys, metas, rows = records(3)
        hung_up = threading.Event()

        def act(connection: socket.socket) -> None:
            for _ in commands(connection):
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"+OK\r\n")
            hung_up.set()

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with Pretender(act) as answering, store_on(answering.port) as store:
            monkeypatch.setattr(redis.client.Pipeline, "parse_response", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get_many(keys, metas, rows, ids(3))
            assert hung_up.wait(PATIENT_S)

    def test_closed_during_a_call(self) -> None:
        """The call ends as it would have, and its connection with it."""
        keys, metas, rows = records(1)
        answers, asked, closed, hung_up = list[list[bool]](), threading.Event(), threading.Event(), threading.Event()

        def act(connection: socket.socket) -> None:
            for words in commands(connection):
                if words[0] == b"GETRANGE":
                    asked.set()
                    closed.wait(PATIENT_S)
                connection.sendall(b"+OK\r\n")
            hung_up.set()

        with Pretender(act) as slow:
            store = store_on(slow.port)
            call = threading.Thread(target=lambda: answers.append(get(store, keys, metas, rows)))
            call.start()
            assert asked.wait(PATIENT_S)
            store.close()
            closed.set()
            call.join()
            assert answers == [[False]]
            assert hung_up.wait(PATIENT_S)

    def test_nobody_there(self) -> None:
        keys, metas, rows = records(3)
        with store_on(free_port()) as store:
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [False] * 3
            assert (store.stats()["errors"], store.stats()["skipped"]) == (1, 1)
            assert store.is_resting

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"-MOVED 3999 127.0.0.1:6381\r\n", "3999 127.0.0.1:6381"),
            (b"-READONLY You can't write against a read only replica.\r\n", "read only replica"),
            (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "maxmemory"),
            (b"-NOPERM User has no permissions\r\n", "no permissions"),
        ],
    )
    def test_refusals(self, answer: bytes, words: str) -> None:
        keys, metas, rows = records(3)
        with Pretender(says_to_each_command(answer)) as refusing, store_on(refusing.port) as store:
            assert put(store, keys, metas, rows) == get(store, keys, metas, rows) == [False] * 3
            assert store.contains_many(keys).tolist() == [False] * 3
            assert words in str(store.last_error)
            assert (store.stats()["errors"], store.is_resting) == (0, False)
            with pytest.raises(kvpager.TransferError, match="records may be left") as refused:
                store.delete_many(keys)
            assert words in str(refused.value)

    @pytest.mark.parametrize("words", [b"-ERR alice (hunter2) may not", b"-NOPERM User alice", b"-WRONGPASS hunter2"])
    def test_what_a_server_says_of_credentials(self, words: bytes) -> None:
        keys, metas, rows = records(1)
        options = {"username": "alice", "password": "hunter2"}
        with (
            Pretender(says_to_each_command(words + b"\r\n")) as tell_tale,
            store_on(tell_tale.port, **options) as store,
        ):
            assert get(store, keys, metas, rows) == [False]
            assert "***" in str(store.last_error)
            with pytest.raises(kvpager.TransferError) as refused:
                store.clear()
            assert not [secret for secret in options.values() if secret in f"{refused.value} {store.last_error}"]

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"\0\0\r\n", b"-LOADING the dataset\r\n", b"*1\r\n"]
    )
    def test_nonsense(self, answer: bytes) -> None:
        keys, metas, rows = records(3)
        with (
            Pretender(says_to_each_command(answer)) as strange,
            store_on(strange.port, timeout_seconds=SHORT_S) as store,
        ):
            assert get(store, keys, metas, rows) == [False] * 3
            assert put(store, keys, metas, rows) == [False] * 3
            assert store.contains_many(keys).tolist() == [False] * 3

    @pytest.mark.parametrize("answer", [b"+OK\r\n", b":7\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*0\r\n"])
    def test_answers_to_other_questions(self, answer: bytes) -> None:
        """They are no hit, whatever they are."""
        keys, metas, rows = records(3)
        with Pretender(says_to_each_command(answer)) as strange, store_on(strange.port) as store:
            assert get(store, keys, metas, rows) == [False] * 3
            assert store.contains_many(keys).tolist() == [False] * 3
            for call in (store.clear, lambda: store.delete_many(keys)):
                with pytest.raises(kvpager.TransferError, match="records may be left on the server"):
                    call()

    def test_a_hang_up_in_the_middle(self) -> None:
        def act(connection: socket.socket) -> None:
            connection.recv(10)
            connection.sendall(b"$1000\r\nabc")
            connection.shutdown(socket.SHUT_RDWR)

        keys, metas, rows = records(3)
        with Pretender(act) as rude, store_on(rude.port) as store:
            assert get(store, keys, metas, rows) == [False] * 3
            assert store.stats()["errors"] == 1


class TestBreaker:
    def test_one_probe_at_a_time(self) -> None:
        clock = Clock()
        breaker = Breaker(10, clock)
        assert breaker.admits()
        assert breaker.admits()
        breaker.failed()
        breaker.failed()
        assert breaker.is_open
        clock.now = 9.9
        assert not breaker.admits()
        clock.now = 10.0
        assert breaker.admits()
        assert not breaker.admits()  # somebody is asking already
        breaker.failed()
        clock.now = 19.9
        assert not breaker.admits()
        clock.now = 20.0
        assert breaker.admits()
        breaker.abandoned()
        assert breaker.admits()  # nobody learned anything: the next one asks
        breaker.succeeded()
        assert breaker.admits()
        assert breaker.admits()
        assert not breaker.is_open


@needs_server
class TestProcesses:
    SCRIPT = """
import sys, numpy as np
from kvpager.tiers import ValkeyStore
url, what = sys.argv[1:]
rng = np.random.default_rng(7)
keys, metas = rng.integers(0, 256, (6, 32), np.uint8), rng.integers(0, 256, (6, 48), np.uint8)
metas[:, :8] = 0
rows, ids = rng.integers(0, 256, (6, 64), np.uint8), np.arange(6, dtype=np.int32)
with ValkeyStore(url, row_bytes=64, block_size=4, timeout_seconds=20) as store:
    if what == "put":
        print(store.put_many(keys, metas, rows, ids).tolist())
    elif what == "get":
        arena = np.zeros_like(rows)
        found = store.get_many(keys, metas, arena, ids)
        print([bool(f) and bool((a == r).all()) for f, a, r in zip(found, arena, rows)])
    else:
        print(store.delete_many(keys[:4]))
"""

    def run(self, server: ValkeyServer, what: str) -> str:
        command = [sys.executable, "-W", "error", "-c", self.SCRIPT, server.url, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    def test_share_a_server(self, server: ValkeyServer) -> None:
        """What one stores the other finds, and what one deletes is gone for the other."""
        assert self.run(server, "get") == str([False] * 6)
        assert self.run(server, "put") == str([True] * 6)
        assert self.run(server, "get") == str([True] * 6)
        assert self.run(server, "delete") == "4"
        assert self.run(server, "get") == str([False] * 4 + [True] * 2)

    def test_write_at_the_same_time(self, server: ValkeyServer) -> None:
        command = [sys.executable, "-c", self.SCRIPT, server.url, "put"]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for writer in writers:
            out, _ = writer.communicate(timeout=120)
            assert out.strip() == str([True] * 6)
        assert self.run(server, "get") == str([True] * 6)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_child_has_connections_of_its_own(self, server: ValkeyServer) -> None:
        keys, metas, rows = records(20)
        with store_on(server) as store:
            put(store, keys, metas, rows)
            if (child := os.fork()) == 0:
                status = 1
                try:
                    for _ in range(50):
                        assert all(get(store, keys, metas, rows))
                    status = 0
                finally:
                    os._exit(status)
            for _ in range(50):
                assert all(get(store, keys, metas, rows))
            assert os.waitpid(child, 0)[1] == 0


class TestArguments:
    @pytest.mark.parametrize(
        ("url", "options", "problem"),
        [
            ("redis://h", {"row_bytes": 0}, "row_bytes is 0; it must be 1 to"),
            ("redis://h", {"block_size": 1025}, "block_size is 1025"),
            ("redis://h", {"row_bytes": 2**29}, "a server takes values of at most 536870912: make blocks smaller"),
            ("redis://h", {"key_prefix": b""}, "key_prefix is b''; it must be bytes, at least one"),
            ("redis://h", {"key_prefix": "text"}, "key_prefix is 'text'; it must be bytes"),
            ("redis://h", {"timeout_seconds": 0}, "timeout_seconds is 0; it must be a number of seconds above 0"),
            ("redis://h", {"timeout_seconds": None}, "timeout_seconds is None"),
            ("redis://h", {"rest_seconds": float("inf")}, "rest_seconds is inf"),
            ("redis://h", {"batch_bytes": 0}, "batch_bytes is 0"),
            ("redis://h", {"batch_bytes": 1.5}, "batch_bytes is 1.5"),
            ("redis://h", {"socket_timeout": 1}, "socket_timeout is not the caller's to set: give timeout_seconds"),
            ("redis://h", {"decode_responses": True}, "decode_responses is not the caller's to set: records are bytes"),
            ("redis://h", {"pasword": "hunter2"}, "the client does not take one of the options pasword"),
            ("http://user:hunter2@h", {}, "url is none that the client understands: expected redis://"),
            ("redis://user:hunter2@h:port", {}, "url is none that the client understands"),
            ("redis://user:hunter2@[h", {}, "url is none that the client understands"),
            (None, {}, "url is none that the client understands"),
        ],
    )
    def test_that_cannot_work(self, url: Any, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            store_on(url or "", **options) if url else ValkeyStore(url, row_bytes=1, block_size=1)
        assert problem in str(refused.value)
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize("name", ["row_bytes", "block_size"])
    def test_that_are_no_integers(self, name: str) -> None:
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            store_on("redis://h", **{name: 1.5})

    @pytest.mark.parametrize(
        ("url", "options", "where"),
        [
            ("redis://user:hunter2@example.org:7000/3", {}, "example.org:7000"),
            ("rediss://:hunter2@example.org", {}, "example.org:6379"),
            ("unix:///run/valkey.sock", {"password": "hunter2"}, "/run/valkey.sock"),
            ("redis://example.org?socket_timeout=99&decode_responses=True", {}, "example.org:6379"),
        ],
    )
    def test_where(self, url: str, options: dict[str, Any], where: str) -> None:
        """Nobody is asked before the first call; options in the URL do not override the arguments."""
        with store_on(url, **options) as store:
            assert repr(store) == f"ValkeyStore({where!r}, row_bytes=64, block_size=4, key_prefix=b'kvpager:')"
            settings = store._client.connection_pool.connection_kwargs
            assert (settings["socket_timeout"], settings["decode_responses"]) == (PATIENT_S, False)

    def test_of_calls(self) -> None:
        keys, metas, rows = records(2)
        readonly = rows.copy()
        readonly.flags.writeable = False
        with store_on("redis://h") as store:
            for error, call in [
                (TypeError, lambda: store.contains_many([b"x"])),
                (ValueError, lambda: store.contains_many(keys[:, :-1])),
                (TypeError, lambda: store.put_many(keys, metas, rows, [0, 1])),
                (ValueError, lambda: store.put_many(keys, metas[:1], rows, ids(2))),
                (ValueError, lambda: store.put_many(keys, metas, rows, ids(2) + 1)),
                (ValueError, lambda: store.get_many(keys, metas, rows, ids(2) * 0)),
                (ValueError, lambda: store.get_many(keys, metas, readonly, ids(2))),
                (ValueError, lambda: store.delete_many(keys[0])),
            ]:
                with pytest.raises(error):
                    call()
            assert store.stats()["errors"] == 0  # nobody was asked

    def test_closed(self) -> None:
        keys, metas, rows = records(1)
        store = store_on("redis://h")
        store.close()
        store.close()
        for call in (
            lambda: store.contains_many(keys),
            lambda: get(store, keys, metas, rows),
            lambda: put(store, keys, metas, rows),
            lambda: store.delete_many(keys),
            store.clear,
        ):
            with pytest.raises(kvpager.TransferError, match="is closed"):
                call()
        assert store.stats()["hits"] == 0


class TestTheClient:
    def run(self, program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_is_imported_by_who_needs_it(self) -> None:
        assert self.run("import sys, kvpager.tiers; print('redis' in sys.modules)") == "False"

    def test_may_be_missing(self) -> None:
        program = "import sys; sys.modules['redis'] = None\nimport kvpager, kvpager.tiers\n"
        program += (
            "try: kvpager.tiers.ValkeyStore(row_bytes=1, block_size=1)\nexcept kvpager.ConfigError as e: print(e)"
        )
        assert self.run(program) == "ValkeyStore needs the client redis: pip install '.[redis]' in a clone of kvpager"


@needs_server
def test_the_code_in_the_page_runs(server: ValkeyServer) -> None:
    page = Path(__file__).parent.parent / "docs" / "valkey.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "redis://localhost:6379/0" in program
    names: dict[str, Any] = {}
    exec(compile(program.replace("redis://localhost:6379/0", server.url), page.name, "exec"), names)
    assert names["stored"].all()
    assert names["found"].all()

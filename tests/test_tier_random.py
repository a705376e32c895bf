"""Random lives of servers on one store: device, host and disk, with faults. No byte that a hit serves is ever wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tier_support import BLOCK_SIZE, WIDTH, History, Server, memory_store

import kvpager
from kvpager.tiers import DiskStore

RUNS = int(os.environ.get("KVPAGER_RUNS", "12"))
IMAGES = [kvpager.content_tokens(bytes([each]) * 32, 6).tolist() for each in range(2)]


def a_prompt(rng: random.Random) -> list[int]:
    """Few different starts, so that most prompts share some; now and then an image."""
    prompt = [rng.randrange(2)] * rng.randrange(1, 9)
    while rng.random() < 0.75:
        prompt += rng.choice([[rng.randrange(3)] * rng.randrange(1, 9), rng.choice(IMAGES)])
    return prompt[:100]


def damage(rng: random.Random, path: Path) -> None:
    """What a bad disk, or somebody with an editor, does."""
    files = [file for file in path.iterdir() if file.suffix in (".seg", ".keys")]
    if files:
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        if data and rng.random() < 0.7:
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        elif rng.random() < 0.5:
            os.truncate(file, rng.randrange(len(data) + 1))
        else:
            file.unlink()


def live(rng: random.Random, server: Server, prompts: list[list[int]]) -> int:
    """Some hundred requests; answers how many tokens were not computed."""
    cached = 0
    for _ in range(rng.randrange(20, 60)):
        what = rng.random()
        prompt = rng.choice(prompts)
        namespace = rng.choice([b"", b"", (("tenant", b"a"),)])
        if what < 0.70:
            cached += server.serve(prompt, namespace, loads=rng.random() < 0.8)
        elif what < 0.85:
            server.carry_out(server.pager.offload(rng.randrange(1, 12)))
            server.tier.save(rng.randrange(1, 12))
        elif what < 0.90:
            server.save_all()
        elif what < 0.93:
            server.tier.load(prompt, namespace=namespace)  # and nobody waits for it
        elif what < 0.95:
            for plan, state, _ in server.pager.plans():
                if state == "started" and rng.random() < 0.5:
                    server.pager.abandon(plan)
        elif what < 0.98 and len(prompt) >= BLOCK_SIZE:
            blocks = rng.randrange(1, len(prompt) // BLOCK_SIZE + 1)
            server.forget(prompt[: blocks * BLOCK_SIZE], namespace)
        elif what > 0.995:
            server.reset()
        server.tier.report()
        assert server.pager.check() == []
    return cached


@pytest.mark.parametrize("seed", range(RUNS))
def test_lives_on_one_directory(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [a_prompt(rng) for _ in range(12)]
    limit, history = rng.choice([1 << 17, 1 << 20]), History()
    for _ in range(rng.randrange(2, 6)):
        store = DiskStore(
            tmp_path,
            row_bytes=BLOCK_SIZE * WIDTH,
            block_size=BLOCK_SIZE,
            max_bytes=limit,
            sync=rng.choice(["segment", "always", "never"]),
            segment_bytes=rng.choice([1, 4096, None]),
        )
        server = Server(
            store,
            num_blocks=rng.choice([30, 60]),
            num_host_blocks=rng.choice([6, 30, 100]),
            identity=rng.choice([b"one", b"one", b"two"]),
            history=history,
        )
        live(rng, server, prompts)
        if rng.random() < 0.5:
            server.save_all()
        server.close()
        store.close()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= limit
        if rng.random() < 0.4:
            damage(rng, tmp_path)


class Faulty:
    """A store in memory that loses records, fails, and is slow to say what it has."""

    def __init__(self, rng: random.Random) -> None:
        self._store, self._rng = memory_store(1 << 14), rng
        self.is_local = rng.random() < 0.5

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def _fails(self) -> None:
        if self._rng.random() < 0.1:
            raise OSError("the store is out of order")
        if self._store._records and self._rng.random() < 0.1:
            del self._store._records[self._rng.choice(list(self._store._records))]

    def contains_many(self, keys):
        if not self.is_local:
            self._fails()
        return self._store.contains_many(keys)

    def get_many(self, *args):
        self._fails()
        return self._store.get_many(*args)

    def put_many(self, *args):
        self._fails()
        return self._store.put_many(*args)


@pytest.mark.parametrize("seed", range(RUNS))
def test_lives_on_a_faulty_store(seed: int) -> None:
    rng = random.Random(1000 + seed)
    prompts = [a_prompt(rng) for _ in range(12)]
    store, history = Faulty(random.Random(seed)), History()
    for _ in range(3):
        server = Server(store, num_blocks=60, num_host_blocks=rng.choice([6, 30, 100]), history=history)
        live(rng, server, prompts)
        server.close()


def test_lives_are_warm(tmp_path: Path) -> None:
    """The lives above are worth something only if they hit."""
    rng = random.Random(5)
    prompts = [a_prompt(rng) for _ in range(12)]
    hits, history = 0, History()
    for _ in range(6):
        options = {"row_bytes": BLOCK_SIZE * WIDTH, "block_size": BLOCK_SIZE, "max_bytes": 1 << 20}
        store = DiskStore(tmp_path, sync="never", **options)
        server = Server(store, num_blocks=60, num_host_blocks=60, history=history)
        live(rng, server, prompts)
        server.save_all()
        server.close()
        hits += store.stats()["hits"]
        store.close()
    assert hits > 20

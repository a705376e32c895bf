"""I11: the same calls give the same answers in every process, whatever the seeds of its hash tables."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import random, sys
import kvpager

pager = kvpager.Pager(60, 4, policy="slru", seed=int(sys.argv[1]))
random.seed(7)
live = []
for _ in range(800):
    namespace = random.choice([b"", b"a", (("lora", b"1"),)])
    prompt = random.choices(range(3), k=random.randint(1, 40))
    if len(live) < 6 and (seq := pager.try_admit(prompt, namespace=namespace)):
        live.append(seq)
    if live:
        seq = random.choice(live)
        seq.commit(random.randint(seq.num_committed, len(seq)))
        seq.try_append(random.randrange(3))
        if random.random() < 0.3:
            live.remove(seq)
            seq.release()
    if random.random() < 0.01:
        pager.reset()
print(pager.dump(full=True))
for seq in live:
    seq.release()
"""


def run(hash_seed: str, seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, seed]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_two_processes_draw_the_same() -> None:
    first = run("1", "1")
    assert first == run("2", "18446744073709551615")
    assert "evicted_blocks=0" not in first

"""The example server's disk: it answers after a restart with a warm prefix, and with the same tokens."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import server_support
from server_support import MODEL, a_scheduler, ask, drive, some

from examples.server.llama import Llama

PROMPT = some(3, 45)


def serve(path, *prompts, num_blocks=64, **more):
    """A server's whole life. Answers how many tokens of each prompt it did not compute."""
    scheduler = a_scheduler(num_blocks, host_blocks=64, disk=path, **more)
    asked = []
    for prompt in prompts:
        asked.append(ask(scheduler, prompt, 6))
        drive(scheduler)
    return finish(scheduler, asked)


def finish(scheduler, asked):
    assert [each.texts for each in asked] == [each.alone() for each in asked]
    scheduler.transfers.save_all()
    scheduler.transfers.close()
    assert scheduler.pager.check() == []
    assert scheduler.pager.plans() == []
    return [each.request.num_cached for each in asked]


def test_a_restart_is_warm(tmp_path):
    assert serve(tmp_path, PROMPT) == [0]
    assert serve(tmp_path, PROMPT, [*PROMPT[:24], 1, 2, 3]) == [44, 24]


def test_what_was_answered_is_there_too(tmp_path):
    scheduler = a_scheduler(64, host_blocks=64, disk=tmp_path)
    first = ask(scheduler, PROMPT, 12)
    drive(scheduler)
    finish(scheduler, [first])
    again = a_scheduler(64, host_blocks=64, disk=tmp_path)
    with_answer = ask(again, [*PROMPT, *[1] * 4], 4)
    drive(again)
    assert finish(again, [with_answer]) == [44]


def test_many_at_once_after_a_restart(tmp_path):
    prompts = [[*PROMPT[:32], *some(each, 9)] for each in range(6)]
    serve(tmp_path, *prompts)
    scheduler = a_scheduler(40, host_blocks=64, disk=tmp_path, max_seqs=4, risk=1.0)
    asked = [ask(scheduler, prompt, 20, temperature=each % 2, seed=each) for each, prompt in enumerate(prompts)]
    drive(scheduler)
    assert min(finish(scheduler, asked)) >= 32


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_disk_costs_time_only(tmp_path, seed):
    serve(tmp_path, PROMPT)
    rng = random.Random(seed)
    for path in sorted(tmp_path.glob("*.seg")):
        data = bytearray(path.read_bytes())
        for _ in range(20):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    (cached,) = serve(tmp_path, PROMPT)
    assert cached < 44


def test_another_model_starts_cold(tmp_path, monkeypatch):
    serve(tmp_path, PROMPT)
    weights = dict(MODEL.weights)
    weights["output_norm.weight"] = weights["output_norm.weight"].copy()
    weights["output_norm.weight"][0] += np.float32(0.25)
    other = Llama(MODEL.name, MODEL.config, weights)
    monkeypatch.setattr(server_support, "MODEL", other)
    assert serve(tmp_path, PROMPT) == [0]
    monkeypatch.setattr(server_support, "MODEL", MODEL)
    assert serve(tmp_path, PROMPT) == [44]


def test_a_disk_takes_a_host():
    with pytest.raises(ValueError, match="takes host blocks, too"):
        a_scheduler(64, disk="somewhere")


def test_a_disk_that_hangs_costs_a_deadline(tmp_path, monkeypatch):
    """What it does not answer is computed; other plans' deadlines are its own, on the same clock."""
    serve(tmp_path, PROMPT)
    scheduler = a_scheduler(64, host_blocks=64, disk=tmp_path, deadline_s=0.2)
    store, goes_on = scheduler.transfers.disk.store, threading.Event()
    read = store.get_many

    def hang(*given):
        assert goes_on.wait(60.0)
        return read(*given)

    monkeypatch.setattr(store, "get_many", hang)
    asked = ask(scheduler, PROMPT, 6)
    for _ in range(100_000):
        scheduler.step()
        if asked.is_done:
            break
    goes_on.set()
    assert asked.is_done
    assert scheduler.metrics()["abandoned_transfers"] == 1
    drive(scheduler)
    assert finish(scheduler, [asked]) == [0]

"""The comparison can fail: one deliberate fault each, and what is said of it.

Tokens alone would miss some of them. So K and V are compared first, then logits, and tokens last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvpager.reference
from kvpager.reference.record import Record

from .contiguous import choose
from .device import PLACEHOLDER, Device, Paged, Row
from .engine import TRUTH, Engine
from .test_histories import swarm
from .test_sharing import PROMPT, check_answer

BLOCK_SIZE = 8


def before_a_step(**how: Any) -> tuple[Engine, Any, Any]:
    """Two sequences past their prompts and a step that is planned, but has not run: its arrays can be tampered with."""
    engine = Engine(32, BLOCK_SIZE, late=True, **how)
    first, second = engine.admit(PROMPT), engine.admit(PROMPT[10:42])
    engine.step({first: 45, second: 32})
    engine.plan()
    return engine, first, second


@pytest.mark.parametrize("entries", [(0, 1), (0, 4), (3, 5)])
def test_two_table_entries_swapped(entries: tuple[int, int]) -> None:
    engine, _, _ = before_a_step()
    table = engine.open[0].rows[0].table
    table[list(entries)] = table[list(reversed(entries))]
    with pytest.raises(AssertionError, match=f"K of layer 0, position {8 * entries[0]}: "):
        engine.commit()


def test_whole_blocks_swapped_change_no_token() -> None:
    """K carries its position and attention is a sum: only bits tell. That is why K and V are compared, and first."""
    device = Device(TRUTH.model, 16, BLOCK_SIZE)
    right, swapped = np.arange(6, dtype=np.int32), np.array([3, 1, 2, 0, 4, 5], np.int32)
    device.launch([Row(PROMPT, 0, 45, right)], np.arange(45))
    row = Row([*PROMPT, 7], 45, 46, swapped)
    (logits,) = device.launch([row], np.array([45]))
    expected = TRUTH.of(row.tokens).logits[45]
    assert 0 < np.abs(logits[0] - expected).max() < 1e-4
    assert choose(logits[0]) == choose(expected)
    with pytest.raises(AssertionError, match=r"K of layer 0, position 0: something else in block 3"):
        Engine.compare_kv(_engine_with(device), row.table, row.tokens)
    with pytest.raises(AssertionError, match=r"K of layer 1, position 45: something else in block 5"):
        Engine.compare_kv(_engine_with(device), right, row.tokens)  # what was computed from them differs in a last bit


def _engine_with(device: Device) -> Engine:
    engine = Engine(16, BLOCK_SIZE)
    engine.device = device
    return engine


@pytest.mark.parametrize("block", ["foreign", "free"])
def test_one_entry_names_a_wrong_block(block: str) -> None:
    engine, _, second = before_a_step()
    engine.open[0].rows[0].table[2] = second.block_ids[1] if block == "foreign" else 31
    what = "something else" if block == "foreign" else "nothing"
    with pytest.raises(AssertionError, match=f"K of layer 0, position 16: {what} in block"):
        engine.commit()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_copy_lost(lost: int) -> None:
    """Copy-on-write of three children, of which one has only NaN below what it wrote itself."""
    engine, first, _ = before_a_step()
    engine.commit()
    children = [engine.adopt(each) for each in engine.batch.fork([0], 3)]
    launch = engine.plan(dict.fromkeys([first, *children], 1))
    assert len(launch.copies) == 3
    launch.copies = np.delete(launch.copies, lost, axis=0)
    with pytest.raises(AssertionError, match="K of layer 0, position 40: nothing in block"):
        engine.commit()


def test_a_copy_in_the_wrong_direction() -> None:
    engine, first, _ = before_a_step()
    engine.commit()
    child = engine.adopt(engine.batch.fork([0], 1)[0])
    launch = engine.plan({first: 1, child: 1})
    launch.copies = launch.copies[:, ::-1].copy()
    with pytest.raises(AssertionError, match="K of layer 0, position 40: nothing in block"):
        engine.commit()


@pytest.mark.parametrize("column", [0, 3])
def test_one_row_of_an_updated_table_is_stale(column: int) -> None:
    """An update lost: the entry is still that of the sequence that had the row before."""
    engine, first, _ = before_a_step(mirror=True, prefix_cache=False)
    engine.commit()
    waiting = engine.admit(range(40), into_batch=False)
    first.release()
    assert engine.batch.add(waiting) == 0
    launch = engine.plan({waiting: 40})
    updates = launch.step.updates
    lost = (updates[:, :2] == (0, column)).all(axis=1)
    assert lost.sum() == 1
    assert engine.stream[-1] is launch
    engine.stream[-2] = engine.patch(updates[~lost])
    with pytest.raises(AssertionError, match=f"K of layer 0, position {8 * column}: "):
        engine.commit()


@pytest.mark.parametrize("shift", [1, -1])
def test_one_slot_is_off_by_one(shift: int) -> None:
    engine, _, _ = before_a_step()
    engine.open[0].step.slot_mapping[0] += shift
    with pytest.raises(AssertionError, match=f"K of layer 0, position {45 if shift > 0 else 44}: "):
        engine.commit()


def test_a_stale_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second layer is not written: the message says which."""
    write = Paged.write

    def only_the_first(paged: Paged, layer: int, keys: Any, values: Any) -> None:
        if layer == 0:
            write(paged, layer, keys, values)
        paged.gathered.clear()

    engine, _, _ = before_a_step()
    monkeypatch.setattr(Paged, "write", only_the_first)
    with pytest.raises(AssertionError, match="K of layer 1, position 45: nothing in block"):
        engine.commit()


def test_attention_that_forgets_the_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of the first layer is right, what is computed from it is not."""
    read = Paged.read

    def short(paged: Paged, layer: int, place: int) -> tuple[Any, Any]:
        keys, values = read(paged, layer, place)
        return (keys[:-1], values[:-1]) if layer == TRUTH.model.LAYERS - 1 else (keys, values)

    engine, _, _ = before_a_step()
    monkeypatch.setattr(Paged, "read", short)
    with pytest.raises(AssertionError, match="equal KV, other logits"):
        engine.commit()


def test_kv_that_was_committed_and_never_computed() -> None:
    """The caller lies: whoever has these blocks has NaN, and so has the next who hits them."""
    engine, first, _ = before_a_step()
    engine.commit()
    first.extend(range(10))
    first.commit()
    with pytest.raises(AssertionError, match="K of layer 0, position 46: nothing in block"):
        engine.settle()
    prompt = first.tokens.tolist()
    first.release()
    second = engine.admit([*prompt, 1])
    assert second.num_cached == 56
    with pytest.raises(AssertionError, match="K of layer 0, position 46: nothing in block"):
        engine.settle()


@pytest.mark.parametrize("reset", [False, True])
def test_freed_blocks_are_poisoned(reset: bool) -> None:
    """Behind the steps that were launched before: those may still read."""
    engine, first, second = before_a_step(prefix_cache=reset)
    table = first.block_ids
    first.release()
    if reset:
        engine.pager.reset()
    engine.settle()
    assert engine.commit() == [False, True], "the released row ran, and its KV was right"
    engine.synchronise()
    assert np.isnan(engine.device.keys[:, table]).all()
    assert not np.isnan(engine.device.gather(second.block_ids, 33)[0]).any()


def test_the_token_of_another_row() -> None:
    """One step ahead, a placeholder that is filled from the wrong row: the KV is that of another token."""
    engine, _, _ = before_a_step()
    ahead = engine.plan()
    first, second = ahead.rows
    first.sources, second.sources = (
        {position: source for position in first.sources for source in second.sources.values()},
        second.sources,
    )
    engine.commit()
    with pytest.raises(AssertionError):
        engine.commit()


def test_without_a_fault_nothing_is_found() -> None:
    engine, first, second = before_a_step()
    engine.commit()
    check_answer(first, PROMPT, 2)
    check_answer(second, PROMPT[10:42], 2)
    engine.finish()


# Faults of a pager, in the plain one: the random histories have to meet them.


def _writes_to_shared_blocks(record: Record, pool: Any, start: int, stop: int) -> list[int]:
    return []


def _copies_committed_positions_only(record: Record, pool: Any, numbers: list[int], fresh: list[int]) -> list[int]:
    """What an open step writes is not copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "num_planned", property(lambda record: record.num_committed))
        return MAKE_WRITABLE(record, pool, numbers, fresh)


def _publishes_what_is_planned(record: Record, block_size: int) -> range:
    """A commit also publishes what a later step has still to compute."""
    start = len(record.path)
    if (start + 1) * block_size <= record.num_planned and PLACEHOLDER not in record.tokens[: (start + 1) * block_size]:
        return range(start, start + 1)
    return range(0)


MAKE_WRITABLE = Record.make_writable


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("unwritable", _writes_to_shared_blocks),
        ("make_writable", _copies_committed_positions_only),
    ],
)
def test_random_histories_meet_the_faults_of_a_pager(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, name, fault)
    monkeypatch.setattr(kvpager.reference.Pager, "check", lambda pager: [])  # it would see some of them at once
    with pytest.raises(AssertionError):
        swarm(seed=0, runs=100, steps=60, pager=kvpager.reference.Pager)


def test_a_block_that_is_published_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "_next_unit", _publishes_what_is_planned)
    monkeypatch.setattr(kvpager.reference.Pager, "check", lambda pager: [])
    engine = Engine(32, 4, late=True, pager=kvpager.reference.Pager)
    first = engine.admit(PROMPT)
    engine.plan({first: 4})
    engine.plan({first: 4})
    engine.commit()
    assert engine.admit(PROMPT).num_cached == 8
    with pytest.raises(AssertionError, match="K of layer 0, position 4: nothing in block"):
        engine.settle()


@pytest.mark.parametrize("what", ["copies", "updates", "slots"])
def test_random_histories_meet_the_faults_of_a_caller(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, patch, launch = Device.copy, Engine.patch, Device.launch
    if what == "copies":
        monkeypatch.setattr(Device, "copy", lambda device, pairs: copy(device, pairs[1:]))
    elif what == "updates":
        monkeypatch.setattr(Engine, "patch", lambda engine, updates: patch(engine, updates[1:]))
    else:
        monkeypatch.setattr(Device, "launch", lambda device, rows, slots: launch(device, rows, slots[::-1]))
    with pytest.raises((AssertionError, IndexError)):
        swarm(seed=0, runs=100, steps=60)

"""Arrays that the caller gives a batch: he may do anything to them, and no step writes where it must not (I10, I14).

The reference has arrays of its own for each step and takes none.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import warnings
from multiprocessing import shared_memory

import numpy as np
import pytest
from implementations import admit_committed, nothing_changes, refuses

import kvpager

SHAPES = {
    "block_tables": (2, 4, 8),
    "seq_lens": (2, 4),
    "slot_mapping": (2, 16),
    "positions": (2, 16),
    "query_start_loc": (2, 5),
}
DTYPES = {name: np.dtype(np.int64 if name == "slot_mapping" else np.int32) for name in SHAPES}
each_array = pytest.mark.parametrize("name", SHAPES)


def arrays():
    return {name: np.full(shape, 77, DTYPES[name]) for name, shape in SHAPES.items()}


@pytest.fixture
def pager():
    return kvpager.Pager(16, 4)


def batch_of(pager, given):
    return pager.batch(4, 8, 16, arrays=given)


def step_once(pager, batch, sequence):
    """One decode step; what it should have written is there."""
    step = batch.step(1, [7])
    planned = len(sequence) - 1
    assert step.positions.tolist() == [planned]
    assert step.slot_mapping.tolist() == [sequence.block_ids[planned // 4] * 4 + planned % 4]
    assert (step.seq_lens.tolist(), step.query_start_loc.tolist()) == ([planned + 1], [0, 1])
    assert step.block_tables[0, : len(sequence.block_ids)].tolist() == sequence.block_ids.tolist()
    step.commit()
    assert pager.check() == []


def in_use(pager, given):
    batch = batch_of(pager, given)
    sequence = admit_committed(pager, [1] * 5)
    batch.add(sequence)
    return batch, sequence


def test_steps_write_into_the_given_arrays(pager):
    given = arrays()
    batch, sequence = in_use(pager, given)
    step_once(pager, batch, sequence)
    step_once(pager, batch, sequence)
    assert given["positions"][:, 0].tolist() == [5, 6]
    assert given["block_tables"][1, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert given["slot_mapping"][0].tolist() == [5, *[-1] * 15]
    assert given["query_start_loc"].tolist() == [[0, 1, 1, 1, 1]] * 2
    assert given["seq_lens"].tolist() == [[6, 0, 0, 0], [7, 0, 0, 0]]


def writable(kind, size):
    """So many bytes of writable memory, and what must live for it."""
    if kind == "bytearray":
        return bytearray(size)
    if kind == "memoryview":
        return memoryview(bytearray(size))
    if kind == "array":
        return array.array("b", bytes(size))
    if kind == "mmap":
        return mmap.mmap(-1, size)
    return np.zeros(size // 4, np.int32).view()


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "array", "mmap", "view"])
@each_array
def test_any_writable_memory_will_do(pager, kind, name):
    size = int(np.prod(SHAPES[name])) * DTYPES[name].itemsize
    memory = writable(kind, size)
    if kind == "view":
        memory = memory.view(DTYPES[name])
    batch, sequence = in_use(pager, {name: memory})
    if kind in ("bytearray", "array"):
        with pytest.raises(BufferError):
            memory.extend(b"1234")
    if kind == "mmap":
        with pytest.raises(BufferError):
            memory.close()
    step_once(pager, batch, sequence)
    assert np.frombuffer(memory, np.uint8).any()


def test_shared_memory(pager):
    """Another process would see it under its name; it cannot be closed under the batch."""
    memory = shared_memory.SharedMemory(create=True, size=int(np.prod(SHAPES["block_tables"])) * 4)
    try:
        batch, sequence = in_use(pager, {"block_tables": memory.buf[: 2 * 4 * 8 * 4]})
        step_once(pager, batch, sequence)
        with pytest.raises(BufferError):
            memory.close()
        other = shared_memory.SharedMemory(memory.name)
        assert np.frombuffer(other.buf, np.int32)[:2].tolist() == [0, 1]
        other.close()
        step_once(pager, batch, sequence)
        del batch
        pager.take_copies()
    finally:
        memory.unlink()
    memory.close()


# What is refused when the batch is made.


def read_only(good):
    good.flags.writeable = False
    return good


def misaligned(good):
    return np.frombuffer(bytearray(good.nbytes + 1), good.dtype, offset=1)


BAD = {
    "read-only": read_only,
    "read-only bytes": lambda good: good.tobytes(),
    "read-only view": lambda good: memoryview(good.tobytes()),
    "too small": lambda good: good.ravel()[:-1],
    "too large": lambda good: np.zeros(good.size + 1, good.dtype),
    "nothing": lambda good: good.ravel()[:0],
    "unsigned": lambda good: good.view(good.dtype.str.replace("i", "u")),
    "other integers": lambda good: good.astype(np.int32 if good.dtype == np.int64 else np.int64),
    "floats": lambda good: good.view(np.float32 if good.itemsize == 4 else np.float64),
    "objects": lambda good: good.astype(object),
    "other byte order": lambda good: good.astype(good.dtype.newbyteorder()),
    "misaligned": misaligned,
    "misaligned bytes": lambda good: memoryview(bytearray(good.nbytes + 1))[1:],
    "every second": lambda good: np.repeat(good.ravel(), 2)[::2],
    "backwards": lambda good: good.ravel()[::-1],
    "Fortran order": lambda good: np.asfortranarray(np.zeros((2, good.size // 2), good.dtype)),
    "one value for all": lambda good: np.broadcast_to(good.ravel()[:1], good.shape),
    "a writable one value for all": lambda good: np.lib.stride_tricks.as_strided(good, good.shape, (0,) * good.ndim),
    "a list": lambda good: good.tolist(),
    "a number": lambda good: 0,
    "None": lambda good: None,
    "text": lambda good: "arrays",
    "bytes in pieces": lambda good: memoryview(bytearray(2 * good.nbytes))[::2],
}


@pytest.mark.parametrize("what", BAD)
@each_array
def test_a_bad_array_is_refused(pager, name, what):
    given = arrays()
    given[name] = BAD[what](given[name])
    others = {other: values.copy() for other, values in given.items() if other != name}
    with nothing_changes(pager), refuses(kvpager.ConfigError, name):
        batch_of(pager, given)
    assert all((given[other] == values).all() for other, values in others.items())
    assert pager.batch(1, 1).open_steps == []


@pytest.mark.parametrize("given", [{"tables": np.zeros(4, np.int32)}, {"block_tables ": bytearray(256)}])
def test_an_array_of_another_name_is_refused(pager, given):
    with nothing_changes(pager), refuses(kvpager.ConfigError, "there is no array"):
        batch_of(pager, given)


@pytest.mark.parametrize("given", [{1: bytearray(4)}, [("positions", bytearray(128))], 3, "positions"])
def test_what_is_no_dict_of_arrays_is_refused(pager, given):
    with nothing_changes(pager), refuses(TypeError):
        batch_of(pager, given)


@pytest.mark.parametrize("offset", [0, 1, 8, 31])
def test_arrays_that_overlap_are_refused(pager, offset):
    """Also where the parts of one buffer do not: one step would write into what another has given out."""
    memory = np.full(64, 77, np.int32)
    given = {"seq_lens": memory[24:32], "positions": memory[31 - offset : 63 - offset]}
    with nothing_changes(pager), refuses(ValueError, "overlap"):
        batch_of(pager, given)
    assert (memory == 77).all()


def test_one_array_for_two_is_refused(pager):
    memory = np.zeros(32, np.int64)
    with nothing_changes(pager), refuses(ValueError, "overlap"):
        batch_of(pager, {"slot_mapping": memory, "positions": memory.view(np.int32)[:32]})


def test_neighbours_in_one_piece_of_memory_do_not_overlap(pager):
    memory = np.zeros(8 + 32 + 10, np.int32)
    given = {"seq_lens": memory[:8], "positions": memory[8:40], "query_start_loc": memory[40:]}
    batch, sequence = in_use(pager, given)
    step_once(pager, batch, sequence)


# What is done to them later.


def freeze_the_batchs(_values, batch_array):
    batch_array.flags.writeable = False


def grow(values, _batch_array):
    values.resize(values.size * 1000, refcheck=False)


def shrink(values, _batch_array):
    values.resize(1, refcheck=False)


def grow_and_shrink(values, _batch_array):
    shape = values.shape
    values.resize(values.size * 10_000, refcheck=False)
    values.resize(shape, refcheck=False)


def narrow(_values, batch_array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batch_array.dtype = np.int16


def as_floats(_values, batch_array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batch_array.dtype = np.float32 if batch_array.itemsize == 4 else np.float64


def strides(_values, batch_array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batch_array.strides = (0,) * batch_array.ndim


def set_state(_values, batch_array):
    """An array of objects in the place of the integers: to write integers there would end in a crash."""
    shape = batch_array.shape
    batch_array.__setstate__((1, shape, np.dtype(object), False, [None] * batch_array.size))


SPOILED = (freeze_the_batchs, grow, shrink, narrow, as_floats, strides, set_state)


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
@each_array
def test_a_step_into_a_spoiled_array_is_refused(pager, name, spoil):
    """Nothing is written, and nothing planned."""
    given = arrays()
    batch, sequence = in_use(pager, given)
    step_once(pager, batch, sequence)
    spoil(given[name], getattr(batch, name))
    for call in (batch.step, batch.try_step):
        with nothing_changes(pager), refuses(ValueError):
            call(1, [7])
    assert batch.open_steps == []
    assert batch.blocks_needed(1, [7]) == 0
    sequence.append(7)
    sequence.commit()
    sequence.release()
    del batch
    pager.take_copies()
    assert pager.check() == []


@pytest.mark.parametrize(
    "spoil", [freeze_the_batchs, grow, shrink, narrow, set_state], ids=lambda spoil: spoil.__name__
)
def test_the_updates_of_a_spoiled_table_are_refused(pager, spoil):
    given = arrays()
    batch, sequence = in_use(pager, given)
    step = batch.step(1, [7])
    assert step.updates.tolist() == [[0, 0, 0], [0, 1, 1]]
    spoil(given["block_tables"], batch.block_tables)
    with nothing_changes(pager), refuses(ValueError):
        _ = step.updates
    assert step.commit([8]).tolist() == [True]
    assert len(sequence) == 7


@each_array
def test_an_array_resized_and_back_is_moved_or_refused(pager, name):
    """It may be where it was, by chance."""
    given = arrays()
    batch, sequence = in_use(pager, given)
    start = given[name].ctypes.data
    grow_and_shrink(given[name], None)
    if given[name].ctypes.data != start:
        with nothing_changes(pager), refuses(ValueError, "resized"):
            batch.step(1, [7])
    else:
        batch.step(1, [7]).commit()
    assert pager.check() == []
    assert len(sequence) >= 5


@pytest.mark.parametrize("spoil", [grow, shrink], ids=lambda spoil: spoil.__name__)
def test_the_owner_of_a_view_is_watched(pager, spoil):
    memory = np.zeros(100, np.int32)
    batch, _sequence = in_use(pager, {"positions": memory[10:90][:32].reshape(4, 8)})
    spoil(memory, None)
    with nothing_changes(pager), refuses(ValueError, "resized"):
        batch.step(1, [7])


@each_array
def test_what_does_not_touch_the_memory_is_no_matter(pager, name):
    """The caller's own array object may take another shape, or refuse his own writes."""
    given = arrays()
    batch, sequence = in_use(pager, given)
    given[name].flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        given[name].shape = (-1,)
        getattr(batch, name).shape = SHAPES[name]
    del given
    step_once(pager, batch, sequence)


def test_the_caller_may_write_anything_into_them(pager):
    """The pager reads nothing back but a step's updates."""
    given = arrays()
    batch, sequence = in_use(pager, given)
    for _ in range(3):
        step = batch.step(1, [7])
        for values in given.values():
            values.fill(-(2**31))
        step.commit()
    assert (sequence.tokens.tolist(), sequence.num_committed) == ([1] * 5 + [7] * 3, 8)
    assert pager.check() == []


def test_a_batchs_own_arrays_can_be_given_as_arguments(pager):
    """They are read before they are written."""
    batch, sequence = in_use(pager, None)
    batch.seq_lens[0, 0] = 1
    tokens = batch.positions[0, :1]
    tokens[0] = 9
    step = batch.step(batch.seq_lens[0, :1], tokens)
    assert (step.positions.tolist(), sequence.tokens.tolist()[-1]) == ([5], 9)
    step.commit(batch.positions[0, :1])
    assert sequence.tokens.tolist()[-1] == 5


def test_two_batches_in_the_same_arrays_harm_only_each_others_values(pager):
    given = arrays()
    one, other = batch_of(pager, given), batch_of(pager, given)
    a, b = admit_committed(pager, [1] * 5), admit_committed(pager, [2] * 5)
    one.add(a)
    other.add(b)
    steps = [one.step(1, [7]), other.step(1, [8])]
    assert steps[0].positions.tolist() == steps[1].positions.tolist() == [5]
    for step in steps:
        assert step.commit([9]).tolist() == [True]
    assert pager.check() == []


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "slot_mapping"])
def test_a_ctypes_array_that_was_resized_is_refused(name):
    """ctypes moves memory that others use; the step would write to where it was."""
    pager = kvpager.Pager(64, 4)
    kind, length = {
        "block_tables": (ctypes.c_int32, 2 * 8 * 16),
        "seq_lens": (ctypes.c_int32, 2 * 8),
        "slot_mapping": (ctypes.c_int64, 2 * 64),
    }[name]
    memory = (kind * length)()
    batch = pager.batch(8, 16, 64, arrays={name: memory})
    with pager.admit([1, 2, 3]) as sequence:
        batch.add(sequence)
        batch.step([3]).commit([5])
        ctypes.resize(memory, ctypes.sizeof(memory) * 1000)
        with nothing_changes(pager), refuses(ValueError, "resized"):
            batch.step(1)

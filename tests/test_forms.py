"""Each form, held to a plain statement of it: loops over rows and positions, from what the sequences themselves say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from implementations import IMPLEMENTATIONS

import kvpager
from kvpager import forms

BLOCK_SIZE = 4


def scene(implementation: Any, seed: int) -> tuple[Any, Any, list[Any]]:
    """A step of rows of many lengths: prefill, decode, left out, empty, with scattered blocks."""
    draw = np.random.default_rng(seed)
    pager = implementation(400, BLOCK_SIZE, seed=1)
    others = [pager.admit(draw.integers(0, 9, int(draw.integers(1, 30)))) for _ in range(20)]
    for other in others[::2]:
        other.release()
    batch = pager.batch(12, 16, 200)
    rows: list[Any] = []
    for length in (1, 3, 4, 5, 8, 17, 30, 2):
        sequence = pager.admit(draw.integers(10, 99, length))
        batch.add(sequence)
        rows.append(sequence)
    rows[4].release()
    rows[4] = None
    for other in others[1::2]:
        other.release()
    return batch, batch.step([1, 2, 4, 0, 0, 17, 12, 2]), rows


@pytest.fixture(params=[(name, seed) for name in IMPLEMENTATIONS for seed in range(4)], ids=str)
def planned(request):
    name, seed = request.param
    return scene(IMPLEMENTATIONS[name], seed)


@pytest.fixture(params=range(4))
def planned_by_the_core(request):
    return scene(kvpager.Pager, request.param)


def slot(sequence: Any, position: int) -> int:
    return int(sequence.block_ids[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def test_dense(planned):
    _batch, step, rows = planned
    form = forms.dense(step)
    queries = 0
    for row, sequence in enumerate(rows):
        length = 0 if sequence is None else sequence.num_planned
        assert form.cache_seqlens[row] == length
        assert form.cu_seqlens_q[row] == queries
        new = form.slot_mapping[queries : form.cu_seqlens_q[row + 1]].tolist()
        if sequence is not None:
            ids = sequence.block_ids.tolist()
            assert form.block_table[row].tolist() == ids + [0] * (16 - len(ids))
            assert new == [slot(sequence, position) for position in range(length - len(new), length)]
        queries += len(new)
    assert queries == step.num_tokens == len(form.slot_mapping)


def test_flashinfer(planned):
    _batch, step, rows = planned
    form = forms.flashinfer(step)
    assert form.qo_indptr.tolist() == step.query_start_loc.tolist()
    indices: list[int] = []
    for row, sequence in enumerate(rows):
        assert form.kv_indptr[row] == len(indices)
        length = 0 if sequence is None else sequence.num_planned
        pages = -(-length // BLOCK_SIZE)
        if sequence is not None:
            indices += sequence.block_ids.tolist()[:pages]
        assert form.kv_last_page_len[row] == (length - (pages - 1) * BLOCK_SIZE if length else 0)
    assert form.kv_indices.tolist() == indices
    assert form.kv_indptr[-1] == len(indices)


def test_tokens(planned):
    _batch, step, rows = planned
    form = forms.tokens(step)
    assert form.out_cache_loc.tolist() == step.slot_mapping.tolist()
    assert form.req_to_token.shape == (8, 17)
    indices: list[int] = []
    for row, sequence in enumerate(rows):
        assert form.kv_indptr[row] == len(indices)
        slots = [] if sequence is None else [slot(sequence, position) for position in range(sequence.num_planned)]
        assert form.req_to_token[row].tolist() == slots + [0] * (17 - len(slots))
        indices += slots
    assert form.kv_indices.tolist() == indices
    assert form.kv_indptr[-1] == len(indices)


def test_ragged(planned_by_the_core):
    batch, step, rows = planned_by_the_core
    form = forms.ragged(batch, step)
    assert form.num_seqs.tolist() == [8]
    assert (form.kv_lens.shape, form.page_indices.shape, form.cu_q_lens.shape) == ((12,), (12, 16), (13,))
    for row, sequence in enumerate(rows):
        length = 0 if sequence is None else sequence.num_planned
        assert form.kv_lens[row] == length
        pages = -(-length // BLOCK_SIZE)
        if sequence is not None:
            assert form.page_indices[row, :pages].tolist() == sequence.block_ids.tolist()[:pages]
    assert form.cu_q_lens[:9].tolist() == step.query_start_loc.tolist()
    assert form.cu_q_lens[9:].tolist() == [step.num_tokens] * 4
    assert form.kv_lens[8:].tolist() == [0] * 4


def test_a_form_of_nothing():
    batch = kvpager.Pager(8, BLOCK_SIZE).batch(2, 2)
    step = batch.step()
    assert [array.tolist() for array in forms.flashinfer(step)] == [[0], [0], [], []]
    assert forms.tokens(step).req_to_token.shape == (0, 0)


@pytest.mark.parametrize("form", [forms.dense, forms.flashinfer, forms.tokens])
def test_a_step_that_is_over_has_no_form(planned, form):
    _batch, step, _rows = planned
    step.cancel()
    with pytest.raises(kvpager.StepError, match="cancelled"):
        form(step)


def test_lengths_that_somebody_wrote_over_are_refused(planned_by_the_core):
    batch, step, _rows = planned_by_the_core
    batch.seq_lens[step.buffer, 0] = 1 << 30
    for form in (forms.flashinfer, forms.tokens):
        with pytest.raises(ValueError, match=r"seq_lens\[0\] is 1073741824"):
            form(step)


def test_slots_beyond_int32_are_refused():
    pager = kvpager.Pager(8, 16)
    batch = pager.batch(1, 4)
    sequence = pager.admit([1])
    batch.add(sequence)
    step = batch.step()
    batch.block_tables[0, 0, 0] = 2**27
    with pytest.raises(ValueError, match="beyond 2147483647"):
        forms.tokens(step)
    sequence.release()

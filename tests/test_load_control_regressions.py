"""Bugs that were once in load control, one numbered test each, with one sentence on the bug."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import Admission, ConfigError, Pager, Pressure, Sequence


def admitted(answer: object) -> Sequence:
    assert isinstance(answer, Sequence), answer
    return answer


def test_a1_a_kind_that_is_new_is_known_at_once() -> None:
    """Of a kind that was named since the pool changed last nothing was known: the kind before it stood in."""
    pager = Pager(1000, 4)
    admission = Admission(pager, prior_tokens=100)
    for length, kind in ((400, "long"), (0, "short")):
        for _ in range(200):
            sequence = admitted(admission.try_admit([5], kind=kind))
            sequence.extend([3] * length)
            sequence.release()
    running = [admitted(admission.try_admit([9] * 4, kind="long")) for _ in range(8)]
    at = np.array([1, 100, 399])
    assert not admission.try_admit([7] * 3600, kind="long")
    assert not admission.try_admit([7] * 3600, kind="new"), "as if its answers were short"
    shares = admission.survival(at, "new")
    running.append(pager.admit([1]))
    assert shares == pytest.approx(admission.survival(at, "new"), abs=0.02)
    assert 0.3 < shares[2] < shares[0] < 0.7
    for sequence in running:
        sequence.release()


def test_a2_a_row_that_keeps_nothing_does_not_hide_its_sequence() -> None:
    """In a batch before its first step, or after a look at its tokens, a sequence was taken for one of no tokens."""
    pager = Pager(1000, 1)
    admission = Admission(pager, prior_tokens=10_000, memory=1_000_000)
    batch = pager.batch(4, max_blocks=100)
    sequence = admitted(admission.try_admit([1, 2, 3]))
    batch.add(sequence)
    assert admission.outlook()[1][0] == pytest.approx(3)
    for tokens in (3, 1, 1, 1):
        batch.step([tokens]).commit([5])
    assert sequence.tokens.tolist() == [1, 2, 3, 5, 5, 5, 5]
    sequence.release()
    assert admission.survival(np.array([4, 5])) == pytest.approx([1.0, 0.5])


def test_a3_a_label_that_is_no_text_is_refused_where_it_is_given() -> None:
    """A lone surrogate came out in the text of the metrics, which a server then failed to send."""
    pager = Pager(8, 4)
    for value in ("\ud800", "a\udcffb"):
        with pytest.raises(ValueError, match="label model_name is"):
            pager.metrics(labels={"model_name": value})


def test_a4_a_window_or_limit_that_no_machine_holds_is_a_config_error() -> None:
    """They were an OverflowError, from another place or only at the first reading."""
    pager = Pager(8, 4)
    for window in (2**31, 2**63):
        with pytest.raises(ConfigError, match="window"):
            Pressure(pager, window)
    for name in ("max_tax", "max_preemptions_per_finish"):
        with pytest.raises(ConfigError, match=name):
            Pressure(pager, **{name: 10**400})

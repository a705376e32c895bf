"""`kvpager.Admission`: what it projects, learns and promises."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager import (
    Admission,
    Computing,
    ConfigError,
    Never,
    OutOfBlocks,
    Pager,
    Plan,
    Sequence,
    StaleHandle,
    TokenError,
    Wait,
)


def prompt(number: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens that no other number has."""
    return np.full(length, number, np.int32)


RUNNING: list[Sequence] = []


@pytest.fixture(autouse=True)
def release_all() -> Iterator[None]:
    yield
    while RUNNING:
        RUNNING.pop().release()


def admitted(answer: Sequence | Computing | Wait | Never) -> Sequence:
    """It came in; its handle is kept until the test is over."""
    assert isinstance(answer, Sequence), answer
    RUNNING.append(answer)
    return answer


def waits(answer: Sequence | Computing | Plan | Wait | Never) -> Wait:
    assert isinstance(answer, Wait), answer
    return answer


def grow(sequence: Sequence, tokens: int) -> None:
    sequence.extend([7] * tokens)
    sequence.commit()


def learn(admission: Admission, lengths: list[int], kind: str = "") -> None:
    """Answers of these lengths come and go."""
    for number, length in enumerate(lengths):
        sequence = admitted(admission.try_admit([1_000_000 + number], kind=kind))
        if length:
            grow(sequence, length)
        sequence.release()


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_it_decides_and_admits_in_one_call() -> None:
    pager = Pager(100, 4)
    admission = Admission(pager, prior_tokens=40)
    first = admitted(admission.try_admit(prompt(1, 40), namespace=b"a"))
    assert (first.namespace, len(first.block_ids), first.state) == (b"a", 10, "running")
    answer = admission.try_admit(prompt(2, 330))
    assert answer == Wait(reason="growth", needed=waits(answer).needed, available=100, passed_over=0, ticket=0)
    assert not answer
    assert waits(answer).short == waits(answer).needed - 100 > 0
    assert waits(admission.try_admit(prompt(2, 380))).reason == "blocks"
    assert (waits(admission.try_admit(prompt(2, 380))).needed, pager.stats().running_sequences) == (95, 1)


@pytest.mark.parametrize("beside", [False, True])
def test_l6_what_is_larger_than_the_pool_never_comes_in(beside: bool) -> None:
    pager = Pager(10, 4)
    admission = Admission(pager)
    if beside:
        admitted(admission.try_admit([1]))
    assert admission.try_admit(prompt(2, 41)) == Never(needed=11, usable=10)
    assert not admission.try_admit(prompt(2, 41))
    assert isinstance(admission.try_admit(prompt(3, 4)), Sequence) is not beside, "others behind it go on"


@given(st.integers(1, 40), st.integers(1, 200), st.floats(0, 1), st.integers(1, 2000))
def test_an_idle_pool_admits_all_that_fits(blocks: int, length: int, risk: float, expected: int) -> None:
    pager = Pager(blocks, 4)
    admission = Admission(pager, risk=risk, prior_tokens=10_000, patience=0)
    held = pager.admit([9], pin=True)
    held.commit()
    fits = -(-length // 4) <= blocks - 1
    if -(-length // 4) <= blocks:
        told: list[dict[str, Any]] = [{}, {"max_tokens": expected}, {"expected_tokens": expected}]
        for hints in told:
            answer = admission.try_admit(prompt(1, length), **hints)
            assert isinstance(answer, Sequence) is fits
            if isinstance(answer, Sequence):
                answer.release("aborted")


def test_i7_a_refusal_changes_nothing() -> None:
    pager = Pager(50, 4)
    admission = Admission(pager, prior_tokens=100)
    learn(admission, [3, 4])
    running = pager.admit(prompt(1, 60))
    running.commit()
    before, counted = pager.dump(full=True), pager.stats().as_dict()
    for answer in (
        admission.try_admit(prompt(2, 100)),
        admission.try_admit(prompt(2, 150)),
        admission.try_admit(prompt(2, 201)),
    ):
        assert not answer
    after = pager.stats().as_dict()
    assert (pager.dump(full=True), after.pop("refused_calls") - counted.pop("refused_calls")) == (before, 3)
    assert after == counted
    assert pager.check() == []
    running.release()


def test_l2_two_who_wait_hold_nothing_and_the_larger_comes_in_first_if_it_waits_longer() -> None:
    pager = Pager(20, 4)
    admission = Admission(pager, patience=0)
    running = admitted(admission.try_admit(prompt(1, 40), expected_tokens=4))
    free = pager.num_free_blocks
    first = waits(admission.try_admit(prompt(2, 60), expected_tokens=4))
    second = waits(admission.try_admit(prompt(3, 60), expected_tokens=4))
    assert pager.num_free_blocks == free, "nobody keeps half of what he needs"
    running.release()
    admitted(admission.try_admit(prompt(2, 60), expected_tokens=4, waited=first)).release()
    admitted(admission.try_admit(prompt(3, 60), expected_tokens=4, waited=second))
    assert pager.check() == []


def test_l15_the_last_one_alone_may_grow_to_the_whole_pool() -> None:
    pager = Pager(10, 4)
    admission = Admission(pager)
    alone = admitted(admission.try_admit(prompt(1, 4)))
    assert not admission.try_admit(prompt(2, 37))
    alone.extend([7] * 36)
    before = pager.dump(full=True)
    with pytest.raises(OutOfBlocks) as refused:
        alone.append(7)
    assert (refused.value.needed, refused.value.free, refused.value.evictable) == (1, 0, 0)
    assert pager.dump(full=True) == before


def test_e4_a_request_that_waited_a_hundred_times_counts_once() -> None:
    pager = Pager(18, 4)
    admission = Admission(pager)
    running = admitted(admission.try_admit(prompt(1, 21), expected_tokens=1))
    running.commit()
    waited = None
    for _ in range(100):
        waited = waits(admission.try_admit([*prompt(1, 20), *prompt(2, 50)], expected_tokens=4, waited=waited))
    before = pager.stats()
    assert (before.queried_tokens, before.hit_tokens) == (21, 0)
    running.release()
    admitted(admission.try_admit([*prompt(1, 20), *prompt(2, 50)], expected_tokens=4, waited=waited))
    after = pager.stats()
    assert (after.queried_tokens - before.queried_tokens, after.hit_tokens - before.hit_tokens) == (70, 20)


def test_cached_blocks_are_room() -> None:
    pager = Pager(20, 4)
    admission = Admission(pager, prior_tokens=8)
    for number in range(10):
        sequence = admitted(admission.try_admit(prompt(number, 16), expected_tokens=4))
        sequence.commit()
        sequence.release()
    assert pager.num_evictable_blocks > 15
    admitted(admission.try_admit(prompt(50, 36), expected_tokens=4))
    admitted(admission.try_admit(prompt(51, 30), expected_tokens=4))


# ---- what it projects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_projection_is_what_all_lives_give_on_average(count: int) -> None:
    """Brute force: each running sequence goes on or has ended, in all 2^n ways."""
    pager = Pager(4000, 1)
    admission = Admission(pager, risk=1.0, prior_tokens=30)
    learn(admission, [5, 9, 20, 33, 90])
    answered = [3 * number * number for number in range(count)]
    for number, length in enumerate(answered):
        grow(admitted(admission.try_admit(prompt(number, 10 + number))), length) if length else admitted(
            admission.try_admit(prompt(number, 10 + number))
        )
    steps, mean, deviation = admission.outlook()
    for at in range(20):
        later = int(steps[at])
        go_on = [
            float(np.divide(*admission.survival(np.array([length + 1 + later, length + 1])))) for length in answered
        ]
        total = square = 0.0
        for lives in itertools.product((False, True), repeat=count):
            chances = [share if alive else 1 - share for share, alive in zip(go_on, lives, strict=True)]
            probability = float(np.prod(chances))
            held = sum(10 + number + answered[number] + later for number, alive in enumerate(lives) if alive)
            total += probability * held
            square += probability * held * held
        assert mean[at] == pytest.approx(total, rel=1e-9)
        assert deviation[at] == pytest.approx(np.sqrt(max(square - total * total, 0)), rel=1e-6, abs=1e-4)


def test_shared_blocks_count_once() -> None:
    pager = Pager(1000, 1)
    admission = Admission(pager, risk=1.0)
    system = prompt(1, 100)
    first = admitted(admission.try_admit(np.append(system, prompt(2, 10))))
    first.commit()
    others = [admitted(admission.try_admit(np.append(system, prompt(3 + number, 10)))) for number in range(5)]
    assert admission.outlook()[1][0] == pytest.approx(160) == pager.stats().active_blocks
    children = first.fork(3)
    assert admission.outlook()[1][0] == pytest.approx(160)
    for sequence in (first, *others, *children):
        sequence.release("aborted")
    assert admission.outlook()[1][0] == 0


def test_who_ends_soon_makes_room_for_who_comes_now() -> None:
    """Known lengths: three blocks are free, the newcomer grows by six, and somebody gives back ten in time, or not."""
    for left, comes in ((3, True), (40, False)):
        pager = Pager(20, 4)
        admission = Admission(pager)
        admitted(admission.try_admit(prompt(1, 40), expected_tokens=left))
        answer = admission.try_admit(prompt(2, 20), expected_tokens=24)
        assert isinstance(answer, Sequence) is comes, left


def test_who_outlives_what_was_expected_is_as_any_other() -> None:
    pager = Pager(1000, 1)
    admission = Admission(pager, prior_tokens=50)
    sequence = admitted(admission.try_admit(prompt(1, 10), expected_tokens=5))
    assert admission.outlook()[1][-1] == 0
    grow(sequence, 5)
    steps, mean, _ = admission.outlook()
    assert mean[steps == 16] == pytest.approx(31)


# ---- what it learns --------------------------------------------------------------------------------------------------


def test_survival_is_kaplan_and_meiers_estimate_with_the_running() -> None:
    """Beside those seen the prior counts as one more, who ends nowhere near."""
    pager = Pager(1000, 4)
    admission = Admission(pager, prior_tokens=1_000_000, memory=1_000_000, risk=1.0)
    learn(admission, [2, 6, 9])
    for length in (3, 12):
        grow(admitted(admission.try_admit(prompt(length, 4))), length)
    cut = admitted(admission.try_admit(prompt(99, 4)))
    grow(cut, 7)
    cut.release("aborted")
    # At risk, with the prior's one: at 2 seven (2, 3, 6, 7, 9, 12), at 6 five, at 9 three.
    expected = {2: 1.0, 3: 6 / 7, 6: 6 / 7, 7: 6 / 7 * 4 / 5, 9: 6 / 7 * 4 / 5, 10: 6 / 7 * 4 / 5 * 2 / 3}
    got = admission.survival(np.array(list(expected)))
    assert got == pytest.approx(list(expected.values()), abs=1e-4)


def test_kinds_are_learned_apart_and_unknown_ones_from_all() -> None:
    pager = Pager(1000, 16)
    admission = Admission(pager)
    learn(admission, [4] * 200, "short")
    learn(admission, [200] * 200, "long")
    at = np.array([100])
    assert admission.survival(at, "short") < 0.1
    assert admission.survival(at, "long") > 0.9
    learn(admission, [100], "new")
    assert 0.3 < admission.survival(at, "new")[0] < 0.8
    with pytest.raises(ValueError, match='no request of kind "other" was seen'):
        admission.survival(at, "other")
    for number in range(60):
        admitted(admission.try_admit([5], kind=f"k{number}")).release()
    with pytest.raises(ValueError, match="one more than 64"):
        admission.try_admit([5], kind="one too many")


def test_an_answer_that_was_cut_off_or_forgotten_is_not_taken_for_a_short_one() -> None:
    pager = Pager(1000, 4)
    admission = Admission(pager, prior_tokens=100)
    for _ in range(50):
        admitted(admission.try_admit([1])).release("aborted")
    pager.admit([1, 2, 3], pin=True).release()
    assert admission.survival(np.array([50])) == pytest.approx(1.0)


def test_what_rows_of_a_batch_know_counts() -> None:
    pager = Pager(1000, 1)
    admission = Admission(pager, prior_tokens=10_000, memory=1_000_000)
    batch = pager.batch(4, max_blocks=100)
    sequence = admitted(admission.try_admit([1, 2, 3]))
    row = batch.add(sequence)
    for tokens in (3, 1, 1, 1):
        batch.step(np.array([tokens], np.int32)).commit(np.full(batch.num_rows, 5, np.int32))
    assert row == 0
    assert admission.outlook()[1][0] == pytest.approx(6) == pager.stats().active_blocks
    sequence.release()
    assert admission.survival(np.array([4, 5])) == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    "tokens", [[0, 4, 5], (0, 4, 5), np.array([0, 4, 5], np.int32), np.array([-7, 4, 5]).clip(-1)], ids=repr
)
def test_survival_takes_what_tokens_are_given_as(tokens: Any) -> None:
    pager = Pager(100, 1)
    admission = Admission(pager, memory=1_000_000)
    sequence = admitted(admission.try_admit([1, 2, 3]))
    for number in range(4):
        sequence.append(number)
    sequence.release("finished")
    shares = admission.survival(tokens)
    assert shares.dtype == np.float64
    assert shares == pytest.approx(admission.survival(np.array([0, 4, 5])))
    assert shares[0] == 1 > shares[2]


@pytest.mark.parametrize("tokens", ["4", 4, [1.5], None, np.ones(2), np.ones((1, 2), int)], ids=repr)
def test_survival_refuses_what_is_no_row_of_integers(tokens: Any) -> None:
    with pytest.raises(TypeError, match="tokens"):
        Admission(Pager(8, 4)).survival(tokens)


def test_a_row_before_its_first_step_holds_what_its_sequence_holds() -> None:
    pager = Pager(1000, 4)
    admission = Admission(pager, prior_tokens=10_000, memory=1_000_000)
    batch = pager.batch(4, max_blocks=100)
    rows = [admitted(admission.try_admit(prompt(number, 40), expected_tokens=8)) for number in range(3)]
    for sequence in rows:
        batch.add(sequence)
        rows[0].fork()[0].release("aborted")  # what was found out holds no more
        assert admission.outlook()[1][0] == pytest.approx(30, abs=1.5) == pager.stats().active_blocks


# ---- the extremes ----------------------------------------------------------------------------------------------------

OPERATIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 9)), max_size=60)


@given(OPERATIONS, st.sampled_from([0.0, 0.1, 0.5]))
def test_a_risk_of_one_is_the_watermark(operations: list[tuple[int, int, int]], watermark: float) -> None:
    plain, controlled = (Pager(30, 4, watermark=watermark, seed=0) for _ in range(2))
    admission = Admission(controlled, risk=1.0)
    running: list[tuple[Sequence, Sequence]] = []
    for what, length, which in operations:
        if what < 2:
            one, other = plain.try_admit(prompt(which, length)), admission.try_admit(prompt(which, length))
            assert (one is None) is not isinstance(other, Sequence)
            if one is not None:
                running.append((one, admitted(other)))
        elif running:
            pair = running[which % len(running)]
            if what == 2:
                for sequence in pair:
                    sequence.commit()
                    sequence.try_append(3)
            else:
                running.remove(pair)
                for sequence in pair:
                    sequence.release()
        assert plain.dump(full=True) == controlled.dump(full=True)


@given(OPERATIONS)
def test_at_a_risk_of_zero_nobody_ever_runs_out(operations: list[tuple[int, int, int]]) -> None:
    pager = Pager(30, 4)
    admission = Admission(pager, risk=0.0)
    left: dict[Sequence, int] = {}
    for what, length, which in operations:
        if what < 2:
            if -(-(length + 10 * which) // 4) > 30:
                continue
            answer = admission.try_admit(prompt(which, length), max_tokens=1 + 10 * which)
            if isinstance(answer, Sequence):
                left[answer] = 10 * which
            elif not left:
                raise AssertionError("the pool is idle")
        elif left:
            sequence = list(left)[which % len(left)]
            if what == 2:
                for _ in range(min(length, left[sequence])):
                    sequence.append(3)
                    left[sequence] -= 1
            else:
                del left[sequence]
                sequence.release()
    for sequence, more in left.items():
        if more:
            sequence.extend([3] * more)


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_nobody_who_waits_is_passed_over_for_ever() -> None:
    pager = Pager(100, 4)
    admission = Admission(pager, patience=5)
    running = [admitted(admission.try_admit(prompt(n, 20), expected_tokens=20)) for n in range(9)]
    waited: Wait | None = None
    came = 0
    for number in range(1000):
        answer = admission.try_admit(prompt(1, 320), expected_tokens=8, waited=waited)
        if isinstance(answer, Sequence):
            break
        waited = waits(answer)
        other = admission.try_admit(prompt(100 + number, 20), expected_tokens=20)
        if isinstance(other, Sequence):
            came += 1
            running.append(other)
        else:
            assert waits(other).reason in ("growth", "blocks", "turn")
        running.pop(0).release()
    else:
        raise AssertionError("it starved")
    assert waited is not None
    assert came == 5 == waited.passed_over


def test_who_is_given_up_keeps_nobody_out_from_then_on() -> None:
    pager = Pager(100, 4)
    admission = Admission(pager, patience=0)
    admitted(admission.try_admit(prompt(1, 40), expected_tokens=200))
    first = waits(admission.try_admit(prompt(2, 360), expected_tokens=90))
    gone = waits(admission.try_admit(prompt(2, 360), expected_tokens=90, waited=first))
    small = waits(admission.try_admit(prompt(3, 8), expected_tokens=9))
    assert small.reason == "turn"
    before = pager.dump(full=True), pager.stats()
    for answer in (first, gone, gone):  # any of its answers, and again
        admission.give_up(answer)
    assert (pager.dump(full=True), pager.stats()) == before
    admitted(admission.try_admit(prompt(3, 8), expected_tokens=9, waited=small))
    admission.give_up(small)  # it came in
    again = waits(admission.try_admit(prompt(2, 360), expected_tokens=90, waited=gone))
    assert (again.ticket, again.passed_over) == (first.ticket, 0)


def test_only_the_answer_of_this_admission_is_given_up() -> None:
    pager = Pager(100, 4)
    old, other = Admission(pager, risk=1.0), Admission(Pager(100, 4), risk=1.0)
    admitted(old.try_admit(prompt(1, 380)))
    admitted(other.try_admit(prompt(1, 380)))
    stale, foreign = waits(old.try_admit(prompt(2, 80))), waits(other.try_admit(prompt(2, 80)))
    assert stale == foreign, "who answered is no part of the answer"
    admission = Admission(pager, risk=1.0, patience=0)
    own = waits(admission.try_admit(prompt(2, 80)))
    waits(admission.try_admit(prompt(2, 80), waited=own))
    for wait in (stale, foreign, Wait("blocks", 1, 0, 0, own.ticket)):
        with pytest.raises(ValueError, match="the answer of another Admission"):
            admission.give_up(wait)
    with pytest.raises(ValueError, match="another Admission controls this pager now"):
        old.give_up(stale)
    for wrong in (None, own.ticket, (1, 2)):
        with pytest.raises(TypeError, match="waited must be a Wait"):
            admission.give_up(wrong)  # type: ignore[arg-type]
    assert waits(admission.try_admit(prompt(3, 8))).reason == "turn", "nobody was given up"
    admission.give_up(copy.deepcopy(own))
    admitted(admission.try_admit(prompt(3, 8)))


def test_who_gives_up_keeps_nobody_out() -> None:
    pager = Pager(100, 4)
    admission = Admission(pager, patience=0)
    admitted(admission.try_admit(prompt(1, 40), expected_tokens=200))
    gone = waits(admission.try_admit(prompt(2, 360), expected_tokens=90))
    gone = waits(admission.try_admit(prompt(2, 360), expected_tokens=90, waited=gone))
    small = waits(admission.try_admit(prompt(3, 8), expected_tokens=9))
    assert (small.reason, small.short) == ("turn", 0)
    asked = 0
    while isinstance(answer := admission.try_admit(prompt(3, 8), expected_tokens=9, waited=small), Wait):
        small, asked = answer, asked + 1
        assert asked < 10
    admitted(answer)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_room_is_kept_for_those_that_it_is_forked_into() -> None:
    pager = Pager(40, 4)
    admission = Admission(pager, risk=0)
    held = admitted(admission.try_admit(prompt(1, 6), max_tokens=1))
    # Of 10 tokens each, the last one without KV: 3 blocks, and 2 for each of the others, which share the first.
    assert waits(admission.try_admit(prompt(2, 6), max_tokens=5, samples=19)).needed == 3 + 18 * 2
    first = admitted(admission.try_admit(prompt(2, 6), max_tokens=5, samples=18))
    assert waits(admission.try_admit(prompt(3, 4), max_tokens=8)).available == 36
    first.commit()
    others = first.fork(17)
    RUNNING.extend(others)
    # Forked, each counts for itself: a copy of the block that they share, and one more.
    assert waits(admission.try_admit(prompt(3, 4), max_tokens=8)).reason == "growth"
    assert not admission.try_admit(prompt(3, 1), max_tokens=1)
    for each in (first, *others):
        each.extend([7] * 4)
        pager.take_copies()
        each.commit()
    assert pager.stats().free_blocks == 40 - 2 - 1 - 18 * 2
    held.release()
    admitted(admission.try_admit(prompt(3, 4), max_tokens=9))


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_samples_are_as_many_requests_in_the_projection(samples: int) -> None:
    """But for the prompt, which they share, and before as after the fork."""
    pager = Pager(1000, 4)
    admission = Admission(pager, risk=0.9999, prior_tokens=50)
    first = admitted(admission.try_admit(prompt(1, 40), samples=samples))
    expected = admission.outlook()[1]
    first.commit()
    first.extend([7])
    pager.take_copies()
    others = [admitted(admission.try_admit(prompt(1, 41))) for _ in range(samples - 1)]
    assert all(each.num_cached == 40 for each in others)
    # Their ends differ in what they give back: the prompt is no longer the first one's alone.
    assert admission.outlook()[1].max() == pytest.approx(expected.max(), rel=0.05)


# ---- what is computed or fetched meanwhile ---------------------------------------------------------------------------


def test_who_wants_what_is_about_to_be_computed_may_wait_for_it() -> None:
    """Whether there is room for it or not: it will need less."""
    pager = Pager(40, 4)
    admission = Admission(pager)
    first = admitted(admission.try_admit(prompt(1, 120), max_tokens=4))
    before = pager.dump(full=True), pager.stats()
    for length in (20, 120):
        answer = admission.try_admit(prompt(1, length), wait=True)
        assert answer == Computing(first.id, (length - 1) // 4 * 4)
    assert (pager.dump(full=True), pager.stats()) == before
    assert waits(admission.try_admit(prompt(1, 120))).reason == "blocks"
    first.commit()
    assert admitted(admission.try_admit(prompt(1, 120), max_tokens=4, wait=True)).num_cached == 116


def test_who_waits_for_a_prefill_keeps_its_place() -> None:
    pager = Pager(100, 4)
    admission = Admission(pager, patience=1, risk=1.0)
    first = admitted(admission.try_admit(prompt(1, 240)))
    waited = waits(admission.try_admit(prompt(2, 200)))
    assert waits(admission.try_admit(prompt(2, 200), wait=True, waited=waited)).passed_over == 0
    computes = admitted(admission.try_admit(prompt(2, 100)))
    small: Wait | None = None
    for _ in range(3):
        assert isinstance(admission.try_admit(prompt(2, 200), wait=True, waited=waited), Computing)
        small = waits(admission.try_admit(prompt(3, 4), waited=small))
        assert small.reason == "turn", "it was passed over once, and still asks"
    computes.commit()
    first.release()
    assert admitted(admission.try_admit(prompt(2, 200), wait=True, waited=waited)).num_cached == 100
    admitted(admission.try_admit(prompt(3, 4), waited=small))


@pytest.mark.parametrize("wants", [False, True])
def test_a_policy_decides_what_is_fetched(wants: bool) -> None:
    class Policy:
        def should_fetch(self, num_device_tokens: int, num_host_tokens: int, /) -> bool:
            assert (num_device_tokens, num_host_tokens) == (0, 36)
            return wants

    pager = Pager(40, 4, num_host_blocks=40)
    admission = Admission(pager)
    first = pager.admit(prompt(1, 40))
    first.commit()
    first.release()
    plan = pager.offload(40)
    assert plan is not None
    pager.start(plan)
    pager.complete(plan)
    pager.admit(prompt(2, 160)).release()
    sequence = admitted(admission.try_admit(prompt(1, 40), max_tokens=4, wait=True, fetch=Policy()))
    assert sequence.state == ("fetching" if wants else "running")
    if wants:
        assert isinstance(admission.try_admit(prompt(1, 40), wait=True, fetch=Policy()), Computing)
        joined = admitted(admission.try_admit(prompt(1, 40), max_tokens=4, fetch=Policy()))
        assert (joined.state, joined.fetch) == ("fetching", sequence.fetch)
    assert pager.check() == []


# ---- coming back -----------------------------------------------------------------------------------------------------


def test_who_was_preempted_comes_back_under_the_same_rules() -> None:
    pager = Pager(40, 4)
    admission = Admission(pager)
    first = admitted(admission.try_admit(prompt(1, 40), expected_tokens=20))
    second = admitted(admission.try_admit(prompt(2, 20), expected_tokens=20))
    first.preempt()
    assert admission.try_resume(first) is first
    with pytest.raises(StaleHandle):
        admission.try_resume(first)
    first.preempt()
    other = admitted(admission.try_admit(prompt(3, 60), expected_tokens=20))
    answer = admission.try_resume(first)
    assert waits(answer).reason == "growth"
    assert waits(admission.try_resume(first, waited=waits(answer))).ticket == waits(answer).ticket
    other.release()
    second.release()
    assert admission.try_resume(first) is first


def test_who_was_swapped_comes_back_by_a_plan() -> None:
    pager = Pager(40, 4, num_host_blocks=40)
    admission = Admission(pager)
    first = admitted(admission.try_admit(prompt(1, 40), expected_tokens=20))
    first.commit()
    plan = first.swap_out()
    pager.start(plan)
    pager.complete(plan)
    other = admitted(admission.try_admit(prompt(2, 120), expected_tokens=20))
    assert waits(admission.try_swap_in(first)).reason == "growth"
    other.release()
    back = admission.try_swap_in(first)
    assert isinstance(back, Plan)
    pager.start(back)
    pager.complete(back)
    assert pager.check() == []


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_same_calls_same_answers() -> None:
    def answers() -> list[object]:
        pager = Pager(200, 4)
        admission = Admission(pager, prior_tokens=30)
        rng = np.random.Generator(np.random.PCG64(3))
        running: list[Sequence] = []
        seen: list[object] = []
        for number in range(400):
            answer = admission.try_admit(prompt(number, int(rng.integers(1, 60))), kind="ab"[number % 2])
            if isinstance(answer, Sequence):
                running.append(answer)
                seen.append(answer.block_ids.tolist())
            else:
                seen.append(answer)
            for sequence in list(running):
                if rng.random() < 0.05 or sequence.try_append(1) is None:
                    running.remove(sequence)
                    sequence.release()
        return [*seen, *(array.tolist() for array in admission.outlook())]

    assert answers() == answers()


def test_a_pager_has_one_controller() -> None:
    pager = Pager(10, 4)
    old = Admission(pager)
    new = Admission(pager, risk=0.5, prior_tokens=7, memory=3, patience=2)
    assert (new.risk, new.prior_tokens, new.memory, new.patience) == (0.5, 7, 3, 2)
    assert repr(new) == "<kvpager.Admission risk=0.5, prior_tokens=7, memory=3, patience=2>"
    for call in (lambda: old.try_admit([1]), old.outlook, lambda: old.survival(np.array([1]))):
        with pytest.raises(ValueError, match="another Admission controls this pager now"):
            call()
    admitted(new.try_admit([1])).release()


OUTSIDE: list[tuple[str, Any]] = [
    ("risk", -0.1),
    ("risk", 1.1),
    ("risk", float("nan")),
    ("prior_tokens", 0),
    ("prior_tokens", 2**20),
    ("memory", 0),
    ("memory", 1_000_001),
    ("patience", -1),
    ("patience", 2**32),
]


@pytest.mark.parametrize(("setting", "value"), OUTSIDE)
def test_settings_have_limits(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is .*; it must be"):
        Admission(Pager(10), **{setting: value})


@pytest.mark.parametrize("setting", ["risk", "prior_tokens", "memory", "patience"])
@pytest.mark.parametrize("value", ["1", None, True])
def test_settings_are_numbers(setting: str, value: Any) -> None:
    with pytest.raises(TypeError, match=setting):
        Admission(Pager(10), **{setting: value})


def test_bad_arguments_are_named_and_change_nothing() -> None:
    pager = Pager(10, 4)
    admission = Admission(pager)
    admitted(admission.try_admit([1]))
    before = pager.dump(full=True)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "max_tokens is 0", {"max_tokens": 0}),
        (TypeError, "max_tokens must be an integer", {"max_tokens": 1.5}),
        (ValueError, "expected_tokens is -3", {"expected_tokens": -3}),
        (ValueError, "samples is 0", {"samples": 0}),
        (ValueError, "samples is 65536; it must be 1 to 65535", {"samples": 2**16}),
        (TypeError, "samples must be an integer", {"samples": "2"}),
        (TypeError, "kind must be a str", {"kind": b"x"}),
        (TypeError, "waited must be a Wait or None", {"waited": 3}),
        (TypeError, "wait must be a bool", {"wait": 1}),
        (TypeError, "fetch must be a bool, or an object with the method should_fetch", {"fetch": 1}),
        (TypeError, "namespace must be bytes", {"namespace": "x"}),
    ]
    for kind, message, arguments in bad:
        with pytest.raises(kind, match=message):
            admission.try_admit([1, 2], **arguments)
    for tokens in ([], [-1], [2**31], [1] * 39 + [2**31]):
        with pytest.raises((TokenError, ValueError)):
            admission.try_admit(tokens)
    with pytest.raises(TypeError):
        Admission(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belongs to another pager"):
        admission.try_resume(Pager(10).admit([1]))
    assert pager.dump(full=True) == before

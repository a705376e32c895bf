"""Bugs that were once in load control, one numbered test each, with one sentence on the bug."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_simulate import SPEED

from kvpager import Admission, ConfigError, Pager, Pressure, Sequence, Wait
from kvpager.diagnose.metrics import MetricsError, parse_scrape
from kvpager.simulate import SCENARIOS, Engine, EngineConfig, FirstCome, Recompute, SimulationError


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


def test_a5_a_scrape_of_what_a_pager_says_of_itself_is_read() -> None:
    """`diagnose --metrics` knew other names than those that `Pager.metrics` writes, and was silent about them."""
    pager = Pager(9, 4, null_block=True, num_host_blocks=4)
    with pager.admit([1, 2, 3, 4, 5]) as sequence:
        sequence.commit()
        sequence.preempt()
        sequence.resume()
        scrape = parse_scrape(pager.metrics(Pressure(pager).read(), labels={"model_name": '}"\\\n{a="b"'}))
    assert (scrape.preemptions, scrape.counter, scrape.running) == (1, "kvpager_num_preemptions_total", 1)
    assert (scrape.usage, scrape.num_blocks, scrape.active_blocks) == (0.25, 9, 2)
    assert (scrape.queried_tokens, scrape.hit_tokens) == (5, 0)


def test_a6_only_a_line_feed_ends_a_line_of_a_scrape() -> None:
    """What else Python takes for the end of a line may be in a label, and cut the line in two."""
    for other in "\r\x0b\x0c\x1c\x85\u2028":
        assert parse_scrape(f'vllm:num_preemptions_total{{model_name="a{other}b"}} 5\r\n').preemptions == 5


@pytest.mark.usefixtures("watchdog")
def test_a7_a_scrape_is_read_in_time_that_goes_with_its_length() -> None:
    """A line with 200,000 spaces kept the regular expression busy for hours, one of 60 MB for a minute."""
    name = "vllm:num_preemptions_total"
    for line in (
        f"{name}{' ' * 200_000}x y z",
        f"{name} 5 {'1' * 200_000}x",
        f'{name}{{"{"x" * 200_000}',
        "a" * 200_000,
    ):
        with pytest.raises(MetricsError, match="line 1: expected"):
            parse_scrape(line)
    assert parse_scrape(f'{name}{{m="{"x" * 2_000_000}"}} 5').preemptions == 5


def test_a8_numbers_that_count_nothing_are_not_known() -> None:
    """Negative and infinite sums became evidence, and a pool of 1e300 blocks a traceback."""
    some = "vllm:num_requests_running 1\n"
    for line in ("preemptions -5", "preemptions 1e308\nkvpager_preemptions 1e308"):
        assert parse_scrape(f"{some}kvpager_{line}").preemptions is None
    for total in ("1e300", "-5", "0.5", "0"):
        scrape = parse_scrape(f"{some}kvpager_total_blocks {total}\nkvpager_active_blocks 5")
        assert scrape.num_blocks is None
        assert scrape.usage is None or scrape.usage < 1e-9
    for number in ("1_0", "\u0661\u0662"):
        with pytest.raises(MetricsError, match="line 1"):
            parse_scrape(f"kvpager_preemptions {number}")


class Lying(FirstCome):
    """An admission policy and a victim policy that answer what they are told."""

    def __init__(self, admits: Any = None, victim: Any = None) -> None:
        self.admits, self.victim = admits, victim

    def admit(self, engine: Engine, request: Any) -> Any:
        return engine.enter(request) if self.admits is None else self.admits(engine)

    def choose(self, engine: Engine, left_out: int) -> Any:
        return self.victim(engine)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Lying(lambda engine: Wait("blocks", 1, 0, 0, 0)), "answers Wait.* for request 0: expected what Engine.enter"),
        (Lying(lambda engine: True), "answers True for request 0"),
        (Lying(lambda engine: engine.pager.admit([1, 2])), "answers <kvpager.Sequence 0: running, 2 tokens"),
        (Lying(victim=lambda engine: None), "answers None: expected Stall, Swap or Recompute"),
        (Lying(victim=lambda engine: engine.running[0]), "answers Request.*: expected Stall"),
        (Lying(victim=lambda engine: Recompute(engine.waiting[0])), "which does not run"),
    ],
)
@pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning")
def test_a9_a_policy_that_answers_nonsense_is_named(policy: Any, message: str) -> None:
    """It was a TypeError or an AttributeError somewhere in the engine, or a simulation of other requests."""
    load = SCENARIOS["thrash"](0, 60)
    with pytest.raises(SimulationError, match=message):
        Engine(load, EngineConfig(num_blocks=400), SPEED, policy, policy).run()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a10_who_is_asked_about_less_often_than_others_does_not_starve(every: int) -> None:
    """Two questions about another in between ended its turn: a stream of small requests passed it for ever."""
    pager = Pager(100, 4)
    admission = Admission(pager, patience=5)
    running = [admitted(admission.try_admit([n] * 20, expected_tokens=20)) for n in range(9)]
    large: Wait | None = None
    small: Wait | None = None
    came = 0
    for number in range(200):
        if number % every == 0:
            answer = admission.try_admit([1] * 320, expected_tokens=8, waited=large)
            if isinstance(answer, Sequence):
                running.append(answer)
                break
            assert isinstance(answer, Wait)
            large = answer
        other = admission.try_admit([100 + number] * 20, expected_tokens=20, waited=small)
        small = other if isinstance(other, Wait) else None
        if isinstance(other, Sequence):
            came += 1
            running.append(other)
        if len(running) > 8 or number % 4 == 0:
            running.pop(0).release()
    else:
        raise AssertionError(f"it starved: {came} came in before it")
    assert came <= 5 + every
    for sequence in running:
        sequence.release()


def test_a11_a_kind_is_a_short_name() -> None:
    """Names of any length were remembered, 64 of them, and came back whole in errors."""
    admission = Admission(Pager(10, 4))
    admitted(admission.try_admit([1], kind="\u00fc" * 200)).release()
    for call in (
        lambda: admission.try_admit([1], kind="x" * 201),
        lambda: admission.survival(np.array([1]), "x" * 201),
    ):
        with pytest.raises(ValueError, match="kind has 201 characters; it must have 200 at most"):
            call()


def test_a12_at_a_risk_of_zero_blocks_that_others_hold_count_once() -> None:
    """A second request behind a held prefix had to wait for the room of the prefix once more."""
    pager = Pager(100, 4)
    admission = Admission(pager, risk=0.0)
    first = admitted(admission.try_admit([1] * 240, max_tokens=9))
    first.commit()
    second = admitted(admission.try_admit([1] * 240, max_tokens=140))
    # 61 blocks are held, 35 are promised to the second and 2 to the first.
    assert not admission.try_admit([2] * 9, max_tokens=1)
    third = admitted(admission.try_admit([2] * 8, max_tokens=1))
    second.release()
    for sequence in (first, third):
        sequence.release()


def test_a13_at_a_risk_of_zero_an_expectation_that_was_outlived_is_no_limit() -> None:
    """Who got longer than was expected of him was taken to need nothing more, and his room was given away."""
    pager = Pager(20, 4)
    admission = Admission(pager, risk=0.0)
    with admitted(admission.try_admit([1] * 40, expected_tokens=8)) as first:
        first.extend([3] * 8)
        admitted(admission.try_admit([2] * 4, max_tokens=1)).release()
        first.append(3)
        assert not admission.try_admit([2] * 4, max_tokens=1)


def test_a14_who_comes_back_shares_what_others_hold() -> None:
    """A preempted sequence whose prefix somebody else held was taken to need all of it anew, and waited."""
    pager = Pager(100, 4)
    admission = Admission(pager)
    first = admitted(admission.try_admit([1] * 240, max_tokens=2))
    first.commit()
    second = admitted(admission.try_admit([1] * 244, max_tokens=2))
    second.commit()
    first.preempt()
    assert admission.try_resume(first) is first
    for sequence in (first, second):
        sequence.release()


def test_r1_what_was_found_out_of_an_older_pool_is_not_taken_for_now() -> None:
    """Who came into an idle pool was added to what had been found out before all others left."""
    pager = Pager(300, 4)
    admission = Admission(pager)
    old = [admitted(admission.try_admit([number] * 80, expected_tokens=200)) for number in (1, 2)]
    admission.outlook()
    for sequence in old:
        sequence.release()
    alone = admitted(admission.try_admit([3] * 8, expected_tokens=40))
    _, blocks, _ = admission.outlook()
    assert blocks[0] < 10
    beside = admitted(admission.try_admit([4] * 500, expected_tokens=40))
    alone.release()
    beside.release()


def test_r2_samples_that_were_forked_are_not_to_come_any_more() -> None:
    """A parent that was forked before its first token was still counted with all its samples to come."""
    pager = Pager(400, 4)
    admission = Admission(pager)
    parent = admitted(admission.try_admit(np.arange(40), expected_tokens=40, samples=5))
    parent.commit()
    _, before, _ = admission.outlook()
    children = parent.fork(4)
    _, after, _ = admission.outlook()
    assert after.max() == pytest.approx(before.max(), rel=0.1)
    for sequence in [parent, *children]:
        sequence.release()


def test_r3_at_a_risk_of_zero_forks_keep_room_for_the_copy_of_the_block_that_they_share() -> None:
    """Each but the last writes into a block of its own, which nobody had counted."""
    pager = Pager(8, 4)
    admission = Admission(pager, risk=0)
    parent = admitted(admission.try_admit([1] * 5, max_tokens=3))
    parent.commit()
    children = parent.fork(2)
    assert not admission.try_admit([2] * 20, max_tokens=1)
    for sequence in (parent, *children):
        sequence.append(3)
        sequence.append(3)
        sequence.release()


def test_r4_who_is_asked_about_rarely_keeps_his_count() -> None:
    """Passed over as often as may be, and not asked about for 8 rounds, he was forgotten and began anew, each time."""
    pager = Pager(100, 4)
    admission = Admission(pager, risk=1.0, patience=3)
    held = admitted(admission.try_admit([1] * 200))
    large: Wait | None = None
    passed_over, came = [], []
    for _ in range(4):
        asked = admission.try_admit([2] * 240, waited=large)
        assert isinstance(asked, Wait)
        large = asked
        passed_over.append(large.passed_over)
        small: Wait | None = None
        came_now = []
        for number in range(20):
            answer = admission.try_admit([3] * 8, waited=small)
            small = answer if isinstance(answer, Wait) else None
            if small is None:
                admitted(answer).release()
                came_now.append(number)
        came.append(came_now)
    # At first nobody knows that he comes back. Then the first three pass, and for 8 rounds no other; he may have gone.
    assert came[1][:3] == [0, 1, 2]
    assert came[1][3] > 10
    assert came[2][0] == came[3][0] > 8, "he is there again, and has waited enough"
    assert passed_over == [0, 0, len(came[1]), len(came[1]) + len(came[2])]
    held.release()

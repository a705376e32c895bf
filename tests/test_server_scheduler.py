"""The example server's loop without HTTP: a random model, small pools, each answer held to one computed alone.

What is told to clients is compared token by token: the random model's tokenizer writes one character a token.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from server_support import MODEL, TOKENIZER, Asked, a_history, a_scheduler, ask, drive, some

import kvpager
from examples.server.llama import Llama
from examples.server.pages import PagedKV
from examples.server.requests import Failed, NeverFitsError, OverloadedError, Request
from examples.server.scheduler import Scheduler, choose
from examples.server.speed import measured
from examples.server.tokenizer import AnswerText, ByteTokenizer
from kvpager.cost import Speed, Work


@pytest.mark.parametrize("num_blocks", [12, 16, 24, 200])
def test_every_answer_is_what_it_is_alone_whatever_else_runs(num_blocks, seed):
    """Shared prefixes, samples, chunks, rows left out, preemption, aborts: all at once, in small and ample pools."""
    rng = random.Random(f"{seed} {num_blocks}")
    scheduler = a_scheduler(num_blocks, max_seqs=rng.choice([3, 5]), prefill_budget=rng.choice([3, 8, 64]))
    everybody = a_history(scheduler, rng, 40, max_tokens=30)
    drive(scheduler)
    for asked in everybody:
        assert asked.texts == asked.alone()
    stats = scheduler.pager.stats()
    assert stats.hit_tokens > 0
    assert stats.copies > 0
    if num_blocks <= 16:
        assert stats.preemptions > 0
    if num_blocks == 200:
        assert stats.preemptions == 0


def test_the_pool_and_the_answers_hold_through_preemption():
    scheduler = a_scheduler(20, max_seqs=4, risk=1.0)
    asked = [ask(scheduler, some(each, 10), 40) for each in range(6)]
    drive(scheduler)
    metrics = scheduler.metrics()
    assert metrics["pager_preemptions"] > 0
    assert metrics["rows_left_out"] > 0
    assert [each.texts for each in asked] == [each.alone() for each in asked]


def test_nobody_makes_room_for_all_others():
    scheduler = a_scheduler(20, max_seqs=4, risk=1.0)
    for each in range(4):
        ask(scheduler, some(each, 10), 40)
    seen = set()
    while scheduler.is_busy:
        scheduler.step()
        times = [sample.seq.num_preemptions for sample in scheduler._samples()]
        seen |= set(times)
        assert max(times, default=0) - min(times, default=0) <= 3, "spared after two"
    assert max(seen) > 1
    assert all(each.reason.startswith("newest: it came in last") for each in scheduler.pager.preemptions())


@pytest.mark.parametrize(("num_blocks", "n"), [(20, 1), (60, 4)])
def test_who_would_not_find_room_to_grow_is_not_let_in(num_blocks, n):
    """What the tests above preempt for, at a risk of 1, waits at none."""
    scheduler = a_scheduler(num_blocks, max_seqs=16, risk=0.0)
    asked = [ask(scheduler, some(each, 10), 40, n=n, temperature=1.0) for each in range(6)]
    scheduler.step()
    assert len(scheduler.running) == n
    assert {each.waited.reason for each in scheduler.waiting} == {"growth"}
    drive(scheduler)
    assert scheduler.metrics()["pager_preemptions"] == 0
    assert [each.texts for each in asked] == [each.alone() for each in asked]


@pytest.mark.parametrize("scan", [0, 8])
def test_a_small_one_passes_a_large_one_though_not_for_ever(scan):
    scheduler = a_scheduler(20, max_seqs=8, risk=1.0, scan=scan)
    scheduler.admission = kvpager.Admission(scheduler.pager, risk=1.0, patience=2)
    running = ask(scheduler, some(0, 36), 8)
    scheduler.step()
    large = ask(scheduler, some(1, 50), 2)
    scheduler.step()
    small = [ask(scheduler, some(each, 4), 2) for each in range(2, 6)]
    scheduler.step()
    came = {sample.request for sample in scheduler.running}
    assert came == {running.request, *(each.request for each in small[: 2 if scan else 0])}
    drive(scheduler)
    assert [each.texts for each in (large, *small)] == [each.alone() for each in (large, *small)]


def test_who_hangs_up_while_he_waits_keeps_nobody_out():
    scheduler = a_scheduler(20, max_seqs=8, risk=1.0)
    scheduler.admission = kvpager.Admission(scheduler.pager, risk=1.0, patience=0)
    ask(scheduler, some(0, 36), 30)
    scheduler.step()
    large = ask(scheduler, some(1, 50), 2)
    for _ in range(2):
        scheduler.step()
    small = ask(scheduler, some(2, 4), 2)
    scheduler.step()
    assert small.request.waited.reason == "turn"
    scheduler.abort(large.request)
    scheduler.step()
    assert small.events
    drive(scheduler)


def test_who_hangs_up_while_he_is_preempted_keeps_nobody_out():
    scheduler = a_scheduler(20, max_seqs=4, risk=1.0)
    asked = [ask(scheduler, some(each, 10), 40) for each in range(4)]
    waiting = []
    for _ in range(200):
        scheduler.step()
        if waiting := [each for each in scheduler.preempted if each.waited is not None]:
            break
    sample = waiting[0]
    given_up = []
    scheduler.admission = SimpleNamespace(
        give_up=given_up.append, **{name: getattr(scheduler.admission, name) for name in ("try_admit", "try_resume")}
    )
    waited = sample.waited
    scheduler.abort(sample.request)
    scheduler.step()
    assert given_up == [waited]
    drive(scheduler)
    assert sum(each.is_done for each in asked) == 3


def test_samples_that_share_a_block_need_more_than_the_pool_has():
    """Twelve samples of a prompt of three blocks each want a copy of its last one."""
    scheduler = a_scheduler(8, max_seqs=12)
    asked = ask(scheduler, some(0, 10), 12, n=12, temperature=1.0)
    drive(scheduler)
    assert asked.texts == asked.alone()
    assert scheduler.metrics()["pager_preemptions"] > 0


def test_who_sat_out_comes_before_who_waits():
    scheduler = a_scheduler(6, max_seqs=3, risk=1.0)
    first, second = ask(scheduler, some(0, 9), 8), ask(scheduler, some(1, 7), 6)
    for _ in range(4):
        scheduler.step()
    third = ask(scheduler, some(2, 12), 2)
    for _ in range(2):
        scheduler.step()
    # The first sat out two steps, for want of a fourth block. Those of the second are free now: enough for the third.
    assert (len(first.texts[0]), scheduler.counters.rows_left_out, second.is_done) == (4, 2, True)
    scheduler.step()
    assert (len(first.texts[0]), third.events) == (5, [])
    drive(scheduler)
    assert (scheduler.metrics()["pager_preemptions"], third.texts) == (0, third.alone())


def test_who_waits_is_admitted_when_all_who_sat_out_are_gone():
    scheduler = a_scheduler(6, max_seqs=2, risk=1.0)
    running = [ask(scheduler, some(0, 9), 8), ask(scheduler, some(1, 7), 12)]
    for _ in range(5):
        scheduler.step()
    assert scheduler.counters.rows_left_out > 0
    for each in running:
        scheduler.abort(each.request)
    later = ask(scheduler, some(2, 12), 2)
    drive(scheduler, max_steps=10)
    assert later.is_done


def test_the_oldest_prompt_is_computed_first_in_whatever_row_it_is():
    scheduler = a_scheduler(prefill_budget=8)
    _, older, younger = ask(scheduler, some(0, 8), 1), ask(scheduler, some(1, 40), 2), ask(scheduler, some(2, 40), 2)
    for _ in range(2):
        scheduler.step()
    rows = [scheduler.batch.row_of(sample.seq) for sample in scheduler.running]
    assert [sample.request for sample in scheduler.running] == [older.request, younger.request]
    assert rows == [1, 0]
    while not older.events:
        assert scheduler.running[1].seq.num_planned == 0
        scheduler.step()
    drive(scheduler)


def test_a_sequence_alone_may_hold_blocks_twice_and_still_comes_through():
    """It follows blocks published before, and holds its own: preempted and resumed, it holds each once."""
    scheduler = a_scheduler(10, risk=1.0)
    first = ask(scheduler, some(3, 8), scheduler.max_len - 8)
    drive(scheduler)
    again = ask(scheduler, some(3, 8), scheduler.max_len - 8)
    drive(scheduler)
    assert first.texts == again.texts == first.alone()
    assert scheduler.metrics()["pager_preemptions"] > 0


def test_equal_prompts_at_once_cost_one_prefill():
    scheduler = a_scheduler(max_seqs=8, prefill_budget=8)
    prompt = some(5, 41)
    asked = [ask(scheduler, prompt, 5) for _ in range(6)]
    drive(scheduler)
    assert [each.request.num_cached for each in asked] == [0] + [40] * 5
    # The prompt once, its last token again for each of the others, and all but the last token of each answer.
    assert scheduler.counters.computed_tokens == 41 + 5 * 1 + 6 * (len(asked[0].texts[0]) - 1)
    assert {each.texts[0] for each in asked} == {asked[0].alone()[0]}


def test_a_prompt_that_waits_for_another_goes_on_when_that_is_aborted():
    scheduler = a_scheduler(prefill_budget=4)
    first, second = ask(scheduler, some(5, 41), 5), ask(scheduler, some(5, 41), 5)
    scheduler.step()
    assert [sample.request for sample in scheduler.running] == [first.request]
    scheduler.abort(first.request)
    drive(scheduler)
    assert second.texts == second.alone()
    assert not first.events


def test_tenants_share_nothing():
    scheduler = a_scheduler()
    asked = [ask(scheduler, some(5, 20), 3, namespace=tenant) for tenant in (b"a", b"b", b"a")]
    drive(scheduler)
    assert [each.request.num_cached for each in asked] == [0, 0, 16]


def test_a_long_prompt_does_not_hold_up_who_decodes():
    scheduler = a_scheduler(prefill_budget=8)
    talking = ask(scheduler, some(1, 8), 20)
    scheduler.step()
    long = ask(scheduler, some(2, 80), 4)
    for number in range(2, 12):
        computed = scheduler.counters.computed_tokens
        scheduler.step()
        assert len(talking.texts[0]) == number
        assert scheduler.counters.computed_tokens - computed == 1 + 8
    assert len(long.texts[0]) == 1
    drive(scheduler)


class TestTheTimeBetweenTokens:
    """A step takes 2 ms, 1 ms for each token, and 10 us for each pair that attention looks at; or so it is believed."""

    SPEED = Speed(
        name="believed", token_s=0.001, pair_s=0.00001, weights_s=0, kv_token_s=0, block_s=0, overhead_s=0.002
    )

    def a_scheduler(self, inter_token_s, **limits):
        scheduler = a_scheduler(inter_token_s=inter_token_s, prefill_budget=64, **limits)
        scheduler.speed = self.SPEED
        return scheduler

    def steps(self, scheduler):
        """Until all is answered: of each step, how many wrote, tokens computed beside, what it took, as is believed."""
        seen = []
        step = scheduler._step

        def noted(samples, counts):
            pairs_of = [
                (int(n), each.seq.num_planned, each.num_missing) for n, each in zip(counts, samples, strict=True)
            ]
            writers = [start + 1 for _, start, missing in pairs_of if missing == 1]
            work = Work.writing(len(writers), sum(writers))
            for count, start, missing in pairs_of:
                work = work.with_prompt(start, count) if count and missing > 1 else work
            seen.append((len(writers), work.tokens - len(writers), self.SPEED.step_s(*work)))
            return step(samples, counts)

        scheduler._step = noted
        drive(scheduler)
        return seen

    def test_a_long_prompt_is_cut_while_somebody_writes(self):
        scheduler = self.a_scheduler(0.012)
        talking = ask(scheduler, some(1, 8), 40)
        scheduler.step()
        long = ask(scheduler, some(2, 90), 4)
        steps = self.steps(scheduler)
        beside = [step for step in steps if step[0] and step[1]]
        assert len(beside) > 10
        assert sum(step[1] for step in beside) in (89, 90)  # its last token may come by itself
        # As many as fit, to the token; the further a prompt has got the fewer.
        assert all(0.010 < took < 0.012 + 1e-9 for _, _, took in beside[:-1])
        assert beside[0][1] > beside[-2][1]
        assert [talking.texts, long.texts] == [talking.alone(), long.alone()]

    def test_nobody_who_writes_is_nobody_who_is_held_up(self):
        scheduler = self.a_scheduler(0.012)
        long = ask(scheduler, some(2, 90), 4)
        assert [step[1] for step in self.steps(scheduler) if step[1]] == [64, 26]
        assert long.texts == long.alone()

    def test_two_prompts_share_the_time_and_who_is_cut_is_the_last(self):
        scheduler = self.a_scheduler(0.012)
        talking = ask(scheduler, some(1, 8), 30)
        scheduler.step()
        asked = [ask(scheduler, some(2, 5), 2), ask(scheduler, some(3, 40), 2), ask(scheduler, some(4, 40), 2)]
        scheduler.step()
        planned = [sample.seq.num_planned for sample in scheduler.running]
        assert (planned[1], planned[3]) == (5, 0)
        assert 0 < planned[2] < 8
        drive(scheduler)
        assert [each.texts for each in (talking, *asked)] == [each.alone() for each in (talking, *asked)]

    def test_a_prompt_goes_on_where_the_target_cannot_be_met(self):
        scheduler = self.a_scheduler(0.000001)
        talking = ask(scheduler, some(1, 8), 60)
        scheduler.step()
        long = ask(scheduler, some(2, 30), 2)
        steps = self.steps(scheduler)
        assert [step[1] for step in steps if step[0] and step[1]] == [1] * 29
        assert [talking.texts, long.texts] == [talking.alone(), long.alone()]

    def test_without_a_target_the_budget_alone_cuts_and_nothing_is_measured(self):
        assert a_scheduler().speed is None
        scheduler = self.a_scheduler(None)
        ask(scheduler, some(1, 8), 20)
        scheduler.step()
        ask(scheduler, some(2, 90), 4)
        assert [step[1] for step in self.steps(scheduler) if step[1]] == [64, 26]

    def test_what_a_step_takes_is_measured(self):
        now = 0.0

        class Timed:
            """Takes what SPEED says, and computes nothing. Every third step is held up by something else."""

            name, config, is_exact, steps = "timed", MODEL.config, True, 0

            def forward(self, tokens, positions, attend, wanted):
                nonlocal now
                self.steps += 1
                now += TestTheTimeBetweenTokens.SPEED.step_s(len(tokens), int((positions + 1).sum()), 0)
                now += 0.1 * (self.steps % 3 == 0)

        found = measured(Timed(), clock=lambda: now)
        for name in ("token_s", "pair_s", "overhead_s", "weights_s", "kv_token_s"):
            assert getattr(found, name) == pytest.approx(getattr(self.SPEED, name), abs=1e-9)

    def test_a_real_clock_gives_a_speed(self):
        assert a_scheduler(inter_token_s=0.05).speed.step_s(1, 1, 1) > 0

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_target_is_a_time(self, seconds):
        with pytest.raises(ValueError, match="a time between tokens of"):
            a_scheduler(inter_token_s=seconds)


def test_samples_share_the_prompts_blocks():
    scheduler = a_scheduler(block_size=4)
    asked = ask(scheduler, some(1, 21), 6, n=4, temperature=1.0, seed=7)
    scheduler.step()
    tables = [sample.seq.block_ids.tolist() for sample in scheduler.running]
    assert len(tables) == 4
    assert len({tuple(table) for table in tables}) == 1
    scheduler.step()
    tables = [sample.seq.block_ids.tolist() for sample in scheduler.running]
    assert len({tuple(table[:5]) for table in tables}) == 1
    assert len({table[5] for table in tables}) == 4
    drive(scheduler)
    assert scheduler.counters.computed_tokens == 21 + sum(len(text) - 1 for text in asked.texts)
    assert asked.texts == asked.alone()
    assert len(set(asked.texts)) == 4


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_an_abort_frees_everything_at_any_moment(steps):
    scheduler = a_scheduler(16, max_seqs=4, prefill_budget=4, risk=1.0)
    asked = [ask(scheduler, some(each, 10), 30, n=1 + each % 2) for each in range(6)]
    for _ in range(steps):
        scheduler.step()
    for each in asked:
        scheduler.abort(each.request)
        scheduler.abort(each.request)
    scheduler.step()
    assert not scheduler.is_busy
    assert scheduler.pager.stats().active_blocks == 0
    assert scheduler.pager.check() == []


def test_an_abort_at_all_moments_meets_every_state():
    """What the test above passes through."""
    scheduler = a_scheduler(16, max_seqs=4, prefill_budget=4, risk=1.0)
    for each in range(6):
        ask(scheduler, some(each, 10), 30, n=1 + each % 2)
    seen = set()
    for _ in range(40):
        scheduler.step()
        metrics = scheduler.metrics()
        seen |= {name for name in ("waiting", "running", "preempted") if metrics[name]}
    assert seen == {"waiting", "running", "preempted"}


def test_what_never_fits_is_refused_with_the_numbers():
    scheduler = a_scheduler(11, max_seqs=4)
    assert scheduler.max_len == 40
    for prompt, limit, n, message in [
        (40, None, 1, "prompt has 40 tokens; prompt and answer together can have 40"),
        (30, 11, 1, "30 tokens of prompt and 11 of answer are more than the 40 .* ask for 10"),
        (30, 5, 5, "n is 5; this server computes 4"),
    ]:
        with pytest.raises(NeverFitsError, match=message):
            ask(scheduler, some(0, prompt), limit, n=n)
    assert not scheduler.is_busy
    assert Scheduler(MODEL, TOKENIZER, 1000, 4).max_len == MODEL.config.context
    with pytest.raises(ValueError, match="2 or more"):
        Scheduler(MODEL, TOKENIZER, 1, 4)


def test_the_largest_that_fits_is_answered():
    scheduler = a_scheduler(11, max_seqs=4)
    asked = ask(scheduler, some(0, 39), None)
    drive(scheduler)
    assert asked.request.max_tokens == 1
    assert asked.reasons == {0: "length"}


def test_a_full_queue_refuses():
    scheduler = a_scheduler(max_waiting=2)
    for _ in range(2):
        ask(scheduler, [1, 2], 3)
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        ask(scheduler, [1, 2], 3)
    drive(scheduler)
    ask(scheduler, [1, 2], 3)
    drive(scheduler)


def test_the_end_of_turn_ends_an_answer_and_is_not_shown():
    tokenizer = ByteTokenizer()
    free = Asked(some(0, 10), 20)
    text = free.alone()[0]
    tokenizer.end_of_turn = ord(text[7])
    at = text.index(text[7])
    scheduler = Scheduler(MODEL, tokenizer, 64, 4)
    asked = ask(scheduler, some(0, 10), 20)
    drive(scheduler)
    assert asked.texts == [text[:at]]
    assert asked.reasons == {0: "stop"}
    assert asked.request.num_sampled == at + 1


def test_a_stop_string_ends_an_answer_where_it_begins():
    text = Asked(some(0, 10), 20).alone()[0]
    scheduler = a_scheduler()
    stopped = ask(scheduler, some(0, 10), 20, stop=("never this", text[5:8]))
    almost = ask(scheduler, some(0, 10), 20, stop=(text[18:20] + "!", text[5:8] + "!"))
    drive(scheduler)
    assert (stopped.texts, stopped.reasons, stopped.request.num_sampled) == ([text[:5]], {0: "stop"}, 8)
    assert (almost.texts, almost.reasons) == ([text], {0: "length"})


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["ab", "c"], ["bc"], ["a", ""]),
        (["a", "a", "b"], ["aab"], ["", "", ""]),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""]),
        (["x", "<en", "d", "!>"], ["<end>"], ["x", "", "", "<end!>"]),
        (["one STOP two"], ["two", "STOP"], ["one "]),
        (["", "ab"], [], ["", "ab"]),
    ],
)
def test_text_that_may_begin_a_stop_string_is_held_back(pieces, stop, shown):
    text = AnswerText(lambda token: pieces[token], stop)
    assert [text.push(token)[0] for token in range(len(pieces))] == shown


def test_the_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.25, 1e-30], np.float32))
    drawn = np.bincount([choose(logits, 1.0, (seed, 0, 0)) for seed in range(4000)], minlength=4)
    assert np.abs(drawn / 4000 - [0.5, 0.25, 0.25, 0]).max() < 0.04
    sharp = [choose(logits, 0.05, (seed, 0, 0)) for seed in range(200)]
    assert set(sharp) == {0}
    assert choose(logits, 0, (0, 0, 0)) == 0


def test_the_fast_way_gives_nearly_the_same_scores():
    """Two sequences, two chunks: the second reads what the first wrote."""
    scores = []
    for is_exact in (True, False):
        model = Llama.random(0, is_exact=is_exact)
        pager = kvpager.Pager(8, 4)
        pages = PagedKV(model.config, 8, 4, is_exact=is_exact)
        batch = pager.batch(2, 8, 64, buffers=1)
        seqs = [pager.admit(some(each, 11)) for each in range(2)]
        for seq in seqs:
            batch.add(seq)
        for count in (5, 6):
            step = batch.step(count)
            pages.begin(step)
            scores.append(model.forward(step.token_ids, step.positions, pages.attend, np.arange(2 * count)))
            step.commit()
        for seq in seqs:
            seq.release()
    for exact, fast in zip(scores[:2], scores[2:], strict=True):
        assert np.abs(exact - fast).max() < 1e-3


def test_a_bug_in_the_model_ends_every_request_and_refuses_more(monkeypatch):
    scheduler = a_scheduler()
    told = threading.Event()
    failures = []

    def on_event(event):
        if isinstance(event, Failed):
            failures.append(event)
            if len(failures) == 2:
                told.set()

    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    monkeypatch.setattr(MODEL, "forward", lambda *_: 1 / 0)
    for _ in range(2):
        scheduler.submit(Request(np.array([1, 2, 3], np.int32), 4, on_event))
    scheduler.start()
    assert told.wait(30)
    scheduler.close()
    assert [type(error) for error in raised] == [ZeroDivisionError]
    assert "division by zero" in failures[0].message
    with pytest.raises(OverloadedError, match="the scheduler failed"):
        ask(scheduler, [1], 1)
    assert scheduler.pager.stats().active_blocks == 0


def test_closing_tells_who_is_not_done():
    scheduler = a_scheduler()
    asked = ask(scheduler, [1, 2, 3], 200)
    scheduler.step()
    scheduler.start()
    scheduler.close()
    assert asked.events[-1] == Failed("the server stops")
    assert scheduler.pager.stats().active_blocks == 0
    assert scheduler.pager.check() == []

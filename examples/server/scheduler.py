"""The serving loop: who is admitted, what each step computes, who makes room when the pool is full.

One thread runs it and is the only one that calls kvpager for the sequences. `submit`, `abort` and `metrics` may be
called from any thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import kvpager
from kvpager.cost import Speed, Work
from kvpager.metrics import family
from kvpager.movers import HostArena, Mover, NumpyMover, NumpyPool
from kvpager.tiers import DiskTier

from .llama import Floats, Llama
from .pages import PagedKV
from .requests import Delta, Failed, NeverFitsError, OverloadedError, Request, Sample
from .speed import measured
from .tokenizer import AnswerText, ChatTokenizer
from .transfers import Transfers


@dataclass
class Counters:
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    rows_left_out: int = 0
    fetched_tokens: int = 0


@dataclass
class Limits:
    """What fits: rows, prompt tokens computed a step, requests that wait."""

    max_seqs: int = 8
    prefill_budget: int = 128
    max_waiting: int = 256
    # How long a step with somebody who writes should take: prompts are cut to that. None: by the prefill budget alone.
    inter_token_s: float | None = None
    # The probability of running out of blocks that admission takes. Requests that are passed over in a step, at most.
    risk: float = 0.28
    scan: int = 8
    # Of the host tier: how long a copy may take, and cold blocks that are copied at a time.
    deadline_s: float = 10.0
    offload_blocks: int = 16
    # Of bringing a victim back, in seconds, measured for SmolLM2 on one core. For GPUs: `CostModel.recovery_cost`.
    cost: kvpager.RecoveryCost = kvpager.RecoveryCost(0.02, block=0.00012, row_step=0.02)  # noqa: RUF009 - immutable


@dataclass
class _Inbox:
    """What other threads ask for, until the loop takes it."""

    submitted: list[Request] = field(default_factory=list)
    aborted: list[Request] = field(default_factory=list)
    closed_for: str | None = None  # why


class Scheduler:
    def __init__(
        self,
        model: Llama,
        tokenizer: ChatTokenizer,
        num_blocks: int,
        block_size: int = 16,
        limits: Limits | None = None,
        *,
        host_blocks: int = 0,
        disk: Path | None = None,
        disk_bytes: int = 1 << 30,
        make_mover: Callable[[NumpyPool, HostArena], Mover] = NumpyMover,
    ) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits or Limits()
        self.pager = kvpager.Pager(
            num_blocks,
            block_size,
            identity=model.identity() if disk else model.name.encode(),
            num_host_blocks=host_blocks,
        )
        # A sequence alone in the pool may hold one block twice: its own, and an equal one that was published earlier.
        self.max_len = min(model.config.context, (num_blocks - 1) * block_size)
        if self.limits.prefill_budget < 1:
            raise ValueError(f"a prefill budget of {self.limits.prefill_budget} computes no prompt: it takes 1 or more")
        target = self.limits.inter_token_s
        if target is not None and not 0 < target < math.inf:
            raise ValueError(f"a time between tokens of {target} seconds: it must be finite and above 0")
        if self.max_len < 1:
            raise ValueError(f"a pool of {num_blocks} block serves nothing: it takes 2 or more")
        self.admission = kvpager.Admission(self.pager, risk=self.limits.risk)
        self.batch = self.pager.batch(
            self.limits.max_seqs,
            -(-self.max_len // block_size),
            self.limits.max_seqs + self.limits.prefill_budget,
            buffers=1,
        )
        self.speed: Speed | None = measured(model, block_size) if target is not None else None
        self.pages = PagedKV(model.config, num_blocks, block_size, is_exact=model.is_exact)
        mover, tier = None, None
        if disk and not host_blocks:
            raise ValueError("blocks go to the disk through the host: a disk tier takes host blocks, too")
        if host_blocks:
            pool = self.pages.pool()
            host = HostArena(host_blocks, pool.layout.bytes_per_block)
            clock = Transfers.clock_ms
            tier = DiskTier(self.pager, host, disk, max_bytes=disk_bytes, clock=clock) if disk else None
            mover = make_mover(pool, host)
        self.transfers = Transfers(
            self.pager, mover, tier, deadline_s=self.limits.deadline_s, offload_blocks=self.limits.offload_blocks
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Sample] = []  # oldest first
        self.preempted: list[Sample] = []  # oldest first; they come back from the host, or are computed again
        self.moving: dict[Sample, str] = {}  # by the state in which a transfer put their sequences
        self.counters = Counters()
        self.pressure = kvpager.Pressure(self.pager)
        self.reading = self.pressure.read()  # the newest, for who looks at the server
        self._is_short = False  # the last step did not fit: nobody else comes in
        self._wake = threading.Condition()
        self._inbox = _Inbox()
        # A daemon, because a second Ctrl-C waits for nothing.
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # From any thread

    def submit(self, request: Request) -> None:
        room = self.max_len - len(request.prompt)
        if room < 1:
            raise NeverFitsError(
                f"the prompt has {len(request.prompt)} tokens; prompt and answer together can have {self.max_len} here"
            )
        if request.max_tokens is None:
            request.max_tokens = room
        if request.max_tokens > room:
            raise NeverFitsError(
                f"{len(request.prompt)} tokens of prompt and {request.max_tokens} of answer are more than the"
                f" {self.max_len} that they can have here: ask for {room} or fewer"
            )
        if request.n > self.limits.max_seqs:
            raise NeverFitsError(f"n is {request.n}; this server computes {self.limits.max_seqs} answers at once")
        with self._wake:
            if self._inbox.closed_for:
                raise OverloadedError(self._inbox.closed_for)
            if len(self.waiting) + len(self._inbox.submitted) >= self.limits.max_waiting:
                raise OverloadedError(f"{self.limits.max_waiting} requests wait already")
            request.number = self.counters.requests
            self.counters.requests += 1
            self._inbox.submitted.append(request)
            self._wake.notify()

    def abort(self, request: Request) -> None:
        """The client is gone. Nothing happens to a request that has ended."""
        with self._wake:
            self._inbox.aborted.append(request)
            self._wake.notify()

    def gauges(self) -> dict[str, int]:
        now = {"waiting": len(self.waiting), "running": len(self.running)}
        return now | {"preempted": len(self.preempted), "moving": len(self.moving)}

    def metrics(self) -> dict[str, int]:
        pager = {f"pager_{name}": value for name, value in self.pager.stats().as_dict().items()}
        return self.gauges() | vars(self.counters) | vars(self.transfers.counters) | pager

    def exposition(self) -> str:
        """The server's numbers and the pager's, in the text form of Prometheus."""
        counters = vars(self.counters) | vars(self.transfers.counters)
        families = [
            *(family(f"kvpager_server_{name}", "gauge", "Now.", [({}, n)]) for name, n in self.gauges().items()),
            *(family(f"kvpager_server_{name}_total", "counter", "So far.", [({}, n)]) for name, n in counters.items()),
        ]
        return "".join(families) + self.pager.metrics(self.reading, labels={"model_name": self.model.name})

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._wake:
            self._inbox.closed_for = self._inbox.closed_for or "the server stops"
            self._wake.notify()
        self._thread.join()

    # The loop

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self.is_busy or self._inbox.closed_for):
                        self._wake.wait()
                    if self._inbox.closed_for:
                        break
                self.step()
        except Exception as error:
            with self._wake:
                self._inbox.closed_for = f"the scheduler failed: {error!r}"
            raise
        finally:
            self._fail_all()

    @property
    def is_busy(self) -> bool:
        asked = self._inbox.submitted or self._inbox.aborted or self.waiting
        return bool(asked or self._samples() or self.transfers.are_under_way)

    def _samples(self) -> list[Sample]:
        return [*self.running, *self.preempted, *self.moving]

    def step(self) -> None:
        """One round: take in, admit, compute, sample."""
        self._take_in()
        self._land()
        self._admit()
        planned = self._plan()
        if planned is None:
            self.transfers.wait()
        else:
            self._compute(*planned)
        self.transfers.offload()
        self.transfers.save()
        self.reading = self.pressure.read()

    def _compute(self, step: kvpager.Step, due: list[tuple[int, Sample]]) -> None:
        self.pages.begin(step)
        last = step.query_start_loc[1:] - 1
        wanted = last[[row for row, _ in due]]
        logits = self.model.forward(step.token_ids, step.positions, self.pages.attend, wanted)
        self.counters.steps += 1
        self.counters.computed_tokens += step.num_tokens
        step.commit()  # the KV is written: from now on full blocks can be hit
        for (row, sample), scores in zip(due, logits, strict=True):
            for each in [sample, *self._fork(row, sample)]:
                self._give(each, scores)

    def _take_in(self) -> None:
        with self._wake:
            submitted, aborted = self._inbox.submitted, self._inbox.aborted
            self._inbox.submitted, self._inbox.aborted = [], []
        for request in submitted:
            request.loading = self.transfers.load(request.prompt, request.namespace)
        self.waiting.extend(submitted)
        for request in aborted:
            samples = [sample for sample in self._samples() if sample.request is request]
            self.counters.aborted += bool(samples) or request in self.waiting
            for sample in samples:
                self._end(sample, "aborted")
            if request in self.waiting:
                self.waiting.remove(request)
                self._give_up(request.waited)

    def _land(self) -> None:
        """Whose transfer has ended goes on, from wherever it is now."""
        self.transfers.poll()
        for sample, before in list(self.moving.items()):
            seq, request = sample.seq, sample.request
            if seq.state == before:
                continue
            del self.moving[sample]
            if before == "swapping_out" and seq.state == "running":
                seq.preempt(reason="its copy to the host failed")  # but the room is wanted
            sample.is_lost = before == "swapping_in" and seq.state != "running"
            if seq.state != "running":
                self._put(sample, self.preempted)
                continue
            self._enter(sample)
            if before == "fetching":
                self.counters.fetched_tokens += seq.num_cached - request.num_cached
                request.num_cached = seq.num_cached

    def _admit(self) -> None:
        """Whoever made room comes back first, then who waits, in order. Who finds no blocks may be passed over, as long
        as the controller's patience lasts; who finds no row may not.
        """
        if self._is_short:
            return
        for sample in list(self.preempted):
            self._bring_back(sample)
        # Those samples of a request that are still to be forked have their rows reserved.
        rows = sum(1 if each.request.is_forked else each.request.n for each in self._samples())
        passed_over = 0
        for request in list(self.waiting):
            if rows + request.n > self.limits.max_seqs or passed_over > self.limits.scan:
                return
            if request.loading and not request.loading.done:
                continue  # the disk is asked meanwhile
            if self._let_in(request):
                rows += request.n
            else:
                passed_over += request.waited is not None

    def _let_in(self, request: Request) -> bool:
        answer = self.admission.try_admit(
            request.prompt,
            max_tokens=request.max_tokens,
            samples=request.n,
            namespace=request.namespace,
            wait=True,
            fetch=self.transfers.is_open,
            waited=request.waited,
        )
        if isinstance(answer, kvpager.Computing):
            return False  # a running prefill is about to compute more of this prompt: it will be a hit
        assert not isinstance(answer, kvpager.Never)  # `submit` refuses what is larger than the pool
        if isinstance(answer, kvpager.Wait):
            request.waited = answer
            return False
        self.waiting.remove(request)
        request.num_cached = answer.num_cached
        self._enter(Sample(request, 0, answer, AnswerText(self.tokenizer.decoder(), request.stop)), answer.fetch)
        return True

    def _bring_back(self, sample: Sample) -> None:
        is_on_host = sample.seq.state == "swapped" and self.transfers.is_open and not sample.is_lost
        back = self.admission.try_swap_in if is_on_host else self.admission.try_resume
        answer = back(sample.seq, waited=sample.waited)
        assert not isinstance(answer, kvpager.Never)
        sample.waited = answer if isinstance(answer, kvpager.Wait) else None
        if sample.waited is None:
            self.preempted.remove(sample)
            self._enter(sample, answer if isinstance(answer, kvpager.Plan) else None)

    def _enter(self, sample: Sample, plan: kvpager.Plan | None = None) -> None:
        """It runs, when the copy that it needs has ended."""
        if plan is not None:
            self._move(sample, plan)
        else:
            self.batch.add(sample.seq)
            self._put(sample, self.running)

    def _move(self, sample: Sample, plan: kvpager.Plan) -> None:
        self.transfers.begin(plan)
        self.moving[sample] = sample.seq.state

    def _put(self, sample: Sample, samples: list[Sample]) -> None:
        samples.append(sample)
        samples.sort(key=lambda sample: sample.age)

    def _plan(self) -> tuple[kvpager.Step, list[tuple[int, Sample]]] | None:
        """The step that fits, and of which rows it computes all that is missing: these get their next token."""
        self._is_short = False
        while self.running:
            self.batch.condense()  # no empty rows below the last
            samples = sorted(self.running, key=lambda sample: self.batch.row_of(sample.seq) or 0)
            counts = self._counts(samples)
            try:
                return self._step(samples, counts)
            except kvpager.OutOfBlocks as error:
                refused, self._is_short = error, True
            victim = self._victim(samples, counts, refused)
            if victim is None:
                counts[list(refused.rows)] = 0
                self.counters.rows_left_out += len(refused.rows)
                return self._step(samples, counts) if counts.any() else None
            self._make_room(samples[victim.candidate_index], victim)
        return None

    def _victim(
        self, samples: list[Sample], counts: NDArray[np.int32], refused: kvpager.OutOfBlocks
    ) -> kvpager.Victim | None:
        """Who makes room, and how. None: the rows without a block sit out, as others end soon or room is on its way."""
        if "swapping_out" in self.moving.values():
            return None
        try:
            # One at a time: when it has gone, less is needed. (Samples that share a block may need more than there is.)
            first, *_ = self.pager.choose_victims(
                min(refused.needed, refused.total),
                candidates=[each.seq for each in samples],
                cost=self.limits.cost if self.transfers.is_open else None,
                keep=0,  # alone in the pool, a sequence may hold blocks twice: computed again, it holds each once
                left_out=refused.rows,
                # Who has no share in the step gets no nearer to its end.
                finishing=[each.num_left if count else None for each, count in zip(samples, counts, strict=True)],
            )
        except kvpager.OutOfBlocks:
            return None  # the rest is held by what moves
        return None if first.action == "stall" else first

    def _make_room(self, sample: Sample, victim: kvpager.Victim) -> None:
        self.running.remove(sample)
        if victim.action == "swap" and (self.running or self.moving):  # else it finds again what it gives back
            self._move(sample, sample.seq.swap_out(reason=victim.reason, cost=victim.cost))
        else:
            sample.seq.preempt(reason=victim.reason, cost=victim.cost)
            self._put(sample, self.preempted)

    def _step(self, samples: list[Sample], counts: NDArray[np.int32]) -> tuple[kvpager.Step, list[tuple[int, Sample]]]:
        due = [(row, sample) for row, sample in enumerate(samples) if counts[row] == sample.num_missing]
        # The tokens behind the known ones: those sampled last, of rows that get as far.
        new = [sample.pending for _, sample in due if sample.pending is not None]
        return self.batch.step(counts, new), due

    def _counts(self, samples: list[Sample]) -> NDArray[np.int32]:
        """Positions of each row: one where it decodes, a chunk where it prefills, the oldest first in the budget."""
        writing = [each for each in samples if each.num_missing == 1]
        work = Work.writing(len(writing), sum(each.seq.num_planned + 1 for each in writing))
        counts = np.zeros(len(samples), np.int32)
        budget = self.limits.prefill_budget
        for row in sorted(range(len(samples)), key=lambda row: samples[row].age):
            missing, start = samples[row].num_missing, samples[row].seq.num_planned
            if missing == 1:
                counts[row] = 1
            elif budget:
                chunk = min(missing, budget, self._chunk(work, start) if writing else budget)
                counts[row], work = chunk, work.with_prompt(start, chunk)
                budget = budget - chunk if chunk == missing else 0  # who is cut is the last
        return counts

    def _chunk(self, work: Work, start: int) -> int:
        """Tokens of a prompt, behind `start`, that fit beside `work` into the time between tokens: 1 at least."""
        most, target_s = self.limits.prefill_budget, self.limits.inter_token_s
        if self.speed is None or target_s is None:
            return most
        return self.speed.prompt_tokens(work, start, target_s=target_s, most=most)

    def _fork(self, row: int, sample: Sample) -> list[Sample]:
        """The other samples of a prompt that is computed: they share its blocks, and copy the last one on write."""
        request = sample.request
        if request.is_forked or request.n == 1:
            return []
        request.is_forked = True
        seqs = self.batch.fork([row], request.n - 1)
        children = [
            Sample(request, index, seq, AnswerText(self.tokenizer.decoder(), request.stop))
            for index, seq in enumerate(seqs, start=1)
        ]
        self.running = sorted([*self.running, *children], key=lambda sample: sample.age)
        return children

    def _give(self, sample: Sample, logits: Floats) -> None:
        """The next token of a sample, to it and to the client."""
        request = sample.request
        token = choose(logits, request.temperature, (request.seed, sample.index, sample.num_tokens))
        sample.pending = token
        sample.num_tokens += 1
        request.num_sampled += 1
        self.counters.generated_tokens += 1
        is_end = token == self.tokenizer.end_of_turn
        text, is_stopped = ("", False) if is_end else sample.text.push(token)
        is_longest = sample.num_tokens == request.max_tokens
        finish_reason = "stop" if is_end or is_stopped else "length" if is_longest else None
        if finish_reason:
            text += "" if is_stopped else sample.text.held
            self._end(sample, "finished")
        request.on_event(Delta(sample.index, text, finish_reason))

    def _end(self, sample: Sample, reason: Literal["finished", "aborted"]) -> None:
        sample.seq.release(reason)  # takes it out of the batch, too; its full blocks stay cached
        self._give_up(sample.waited)
        if self.moving.pop(sample, None) is None:
            (self.running if sample in self.running else self.preempted).remove(sample)

    def _give_up(self, waited: kvpager.Wait | None) -> None:
        """Who will not be asked about any more keeps nobody out."""
        if waited is not None:
            self.admission.give_up(waited)

    def _fail_all(self) -> None:
        samples = self._samples()
        for request in {*self._inbox.submitted, *self.waiting, *(sample.request for sample in samples)}:
            request.on_event(Failed(self._inbox.closed_for or "the scheduler failed"))
        self._inbox.submitted.clear()
        self.waiting.clear()
        for sample in samples:
            self._end(sample, "aborted")
        self.transfers.save_all()
        self.transfers.close()


def choose(logits: Floats, temperature: float, seed: tuple[int, int, int]) -> int:
    """The best token, or one drawn by its probability. The draw depends on the seed alone: not on what else runs."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    total = weights.cumsum()
    drawn = np.searchsorted(total, np.random.default_rng(seed).random() * total[-1], side="right")
    return min(int(drawn), len(total) - 1)

"""A continuous-batching engine without a model: it drives a real pager, and a clock of its own.

A step, in this order:

1. What has arrived joins the end of the queue; copies that are over are reported.
2. Requests that run take part in the order in which they were let in: a token for who writes an answer, then prompts
   with all that is known and not computed, as long as the step's tokens last. How many tokens of a prompt a step takes
   the chunk policy says; one that is cut is the last. They take the blocks for them. Where these do not fit, the victim
   policy is asked until they do. Who loses his blocks goes to the front of the queue.
3. If all fitted, nobody had to give way and no prompt was cut, requests are let in from the front of the queue while
   tokens and rows last, and take part at once. One that does not come in keeps those behind it out, unless the
   admission policy scans on.
4. The clock moves by what the step takes. Who computed all that is known of him has one token more. Who has his whole
   answer leaves; his full blocks stay cached.

A request takes the blocks of its whole prompt when it is let in, and one more whenever its answer needs it. If nobody
can take part there is no step, and the clock moves to the next arrival or the end of the next copy.

Blocks of a victim that is swapped are free when its copy is over; until then the rows that do not fit are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import Pager, Plan, Sequence
from ..cost import Speed, Work
from ..errors import ConfigError, KvPagerError, NeverFits, OutOfBlocks
from .chunks import Chunk, Fixed
from .link import Link
from .load import Load
from .policies import Admission, FirstCome, Recompute, Stall, Swap, Victims
from .record import Recorder, Result
from .rows import Request, Rows

Progress = Callable[[int, int], None]


class SimulationError(KvPagerError):
    """A policy left the engine with nothing to do although there is work, or answered what is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The pool and the limits of an engine. What a `Pager` is made of is checked by the pager."""

    num_blocks: int = 3999
    block_size: int = 16
    max_running: int = 256
    """Requests that run at once."""
    max_step_tokens: int = 8192
    """Tokens that a step computes."""
    num_host_blocks: int = 0
    eviction: str = "lru"
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= 65_536:
            raise ConfigError(f"max_running is {self.max_running}: expected 1 to 65,536")
        if not 1 <= self.max_step_tokens <= 2**24:
            raise ConfigError(f"max_step_tokens is {self.max_step_tokens}: expected 1 to 16,777,216")


class Engine:
    """One run of a load. Policies look at it, and call `enter`; all else only the engine changes."""

    def __init__(
        self,
        load: Load,
        config: EngineConfig,
        speed: Speed,
        admission: Admission | None = None,
        victims: Victims | None = None,
        chunk: Chunk | None = None,
    ) -> None:
        self.load, self.config, self.speed = load, config, speed
        self.admission: Admission = FirstCome() if admission is None else admission
        self.victims: Victims = self.admission.victims if victims is None else victims
        self.chunk: Chunk = Fixed() if chunk is None else chunk
        self.pager = Pager(
            config.num_blocks,
            config.block_size,
            policy=config.eviction,
            watermark=self.admission.watermark,
            prefix_cache=config.prefix_cache,
            num_host_blocks=config.num_host_blocks,
            seed=0,
        )
        self.now_s = 0.0
        self.waiting: deque[Request] = deque()
        needed = load.blocks_needed(config.block_size)
        longest = int(np.argmax(needed))
        if needed[longest] > config.num_blocks:
            raise ConfigError(
                f"request {longest} of {load.name} needs {needed[longest]:,} blocks of {config.block_size} tokens"
                f" before it ends and would never fit in a pool of {config.num_blocks:,}"
            )
        self._batch = self.pager.batch(
            config.max_running, max_blocks=int(needed[longest]), max_tokens=config.max_step_tokens, buffers=1
        )
        self._rows = Rows(config.max_running, config.block_size)
        self._link = Link(speed.block_s)
        self._arrivals: list[float] = load.arrivals_s.tolist()
        self._arrived = self._finished = 0
        self._in_step = False  # every row that runs got its last token in the step before, just now
        self._spent = False  # some prompt of the step that is being planned had to be cut
        self.record = Recorder(load.num_requests)

    # What policies look at, and what they call.

    @property
    def running(self) -> list[Request]:
        """In the order in which they were let in. Do not change the list."""
        return self._rows.requests

    @property
    def num_running(self) -> int:
        """Requests that hold blocks of the device: those that run, and those on their way to the host or back."""
        return len(self._rows) + len(self._link.copies)

    @property
    def num_finished(self) -> int:
        """Requests that have their whole answers."""
        return self._finished

    @property
    def num_planned_rows(self) -> int:
        """Rows that take part in the step that is being planned."""
        return int(np.count_nonzero(self._rows.counts))

    @property
    def running_tokens(self) -> int:
        """Known tokens of those who run, prompts that are not through included: what their steps will read."""
        moving = sum(copy.request.num_tokens for copy in self._link.copies)
        return int(self._rows.known[self._rows.order].sum()) + moving

    @property
    def writing(self) -> Work:
        """Those rows of the step that is being planned that write their answers."""
        return self._rows.work(writing=True)

    @property
    def planned(self) -> Work:
        """The step that is being planned, so far."""
        return self._rows.work()

    @property
    def available_blocks(self) -> int:
        """Free and cached blocks. Those who run have taken theirs for the step that is being planned."""
        return self.pager.num_free_blocks + self.pager.num_evictable_blocks

    @property
    def promised_blocks(self) -> int:
        """Blocks that those who run will take in addition, if each answer gets as long as it may."""
        moving = (copy.request for copy in self._link.copies)
        on_the_way = sum(self.most_blocks(r) - -(-r.num_tokens // self.config.block_size) for r in moving)
        return self._rows.promised_blocks() + on_the_way

    def most_blocks(self, request: Request) -> int:
        """Blocks that a request holds in the end, if its answer gets as long as it may."""
        return self._rows.most_blocks(request)

    def enter(self, request: Request) -> Sequence | Plan | None:
        """Ask the pager for the blocks of a request: an admit, a resume or a swap-in. None if there is no room."""
        if request.sequence is None:
            return self.pager.try_admit(request.prompt)
        if request.sequence.state == "swapped":
            return request.sequence.try_swap_in()
        return request.sequence.try_resume()

    # The run.

    def run(self, progress: Progress | None = None) -> Result:
        """Serve all requests; `progress(finished, total)` is called now and then. Once only."""
        total = self.load.num_requests
        every, shown = max(1, total // 500), 0
        while self._finished < total:
            self._arrive()
            self._end_copies()
            if not self._decode_on() and not self.step():
                self._wait()
            if progress is not None and self._finished - shown >= every:
                shown = self._finished
                progress(shown, total)
        return self._result()

    def _arrive(self) -> None:
        load = self.load
        while self._arrived < load.num_requests and self._arrivals[self._arrived] <= self.now_s:
            index = self._arrived
            self._arrived += 1
            self.waiting.append(
                Request(
                    index,
                    self._arrivals[index],
                    int(load.input_lengths[index]),
                    load.most_tokens(index),
                    answer_tokens=int(load.output_lengths[index]),
                    texts=load.texts,
                )
            )

    def _wait(self) -> None:
        """Nothing could be done: the next thing that happens is an arrival or the end of a copy."""
        moments = [self._link.copies[0].end_s] if self._link.copies else []
        if not moments and self.waiting:
            request = self.waiting[0]
            raise SimulationError(
                f"{self.admission.name} lets nobody in although nothing runs: request {request.index} of"
                f" {request.num_tokens:,} tokens waits, {self.available_blocks:,} of {self.config.num_blocks:,} blocks"
                " are free or cached"
            )
        if self._arrived < self.load.num_requests:
            moments.append(self._arrivals[self._arrived])
        self.now_s = max(self.now_s, min(moments))
        self._in_step = False

    # A step.

    def step(self) -> bool:
        """Plan, let in, compute. False if there was nothing to do; a victim that gave way is something."""
        rows = self._rows
        rows.plan_writing(self.config.max_step_tokens)
        self._spent = False
        for row in rows.prompts():
            self._take_chunk(row)
        fits, changed = self._make_room()
        if fits and not changed:
            changed = self._let_in()
        if rows.counts.any():
            self._compute()
            return True
        return changed

    def _make_room(self) -> tuple[bool, bool]:
        """Take the blocks that the planned rows need. Whether all fit, and whether somebody gave way."""
        counts, gave_way = self._rows.counts, False
        while self.running:
            try:
                self._batch.reserve(counts[: self._batch.num_rows])
                return True, gave_way
            except OutOfBlocks as refused:
                short = list(refused.rows)
            # While a victim is on its way to the host nobody else has to go.
            moving = self._link.swaps_out
            answer = Stall() if moving else self.victims.choose(self, len(short))
            if not isinstance(answer, Stall | Swap | Recompute):
                raise SimulationError(f"{self.victims.name} answers {answer!r:.80}: expected Stall, Swap or Recompute")
            if isinstance(answer, Stall):
                if not moving and len(short) == self.num_planned_rows:
                    raise SimulationError(f"{self.victims.name} leaves out all {len(short)} rows of a step")
                counts[short] = 0
                self.record.stalled_rows += len(short)
                self._batch.reserve(counts[: self._batch.num_rows])
                return False, gave_way
            if answer.request not in self.running:
                raise SimulationError(f"{self.victims.name} names {answer.request!r:.80}, which does not run")
            gave_way = True
            # Swapped only if somebody can go on meanwhile.
            if not (isinstance(answer, Swap) and len(self.running) > 1 and self._swap_out(answer.request)):
                self._preempt(answer.request)
        return True, gave_way

    def _checked(self, request: Request, entry: object) -> Sequence | Plan | None:
        """What an admission policy answered, if it can be an answer."""
        if isinstance(entry, Sequence):
            is_its = entry is request.sequence or (request.sequence is None and self._batch.row_of(entry) is None)
            if is_its and entry.state == "running" and len(entry) == request.num_tokens:
                return entry
        elif entry is None or (isinstance(entry, Plan) and request.sequence is not None):
            return entry
        raise SimulationError(
            f"{self.admission.name} answers {entry!r:.80} for request {request.index}: expected what Engine.enter"
            " answers, or None"
        )

    def _let_in(self) -> bool:
        """From the front of the queue, as long as tokens and rows last. Whether anybody came in."""
        self.admission.arrange(self)
        waiting = self.waiting
        came = place = 0
        while place < len(waiting) and not self._is_spent() and self.num_running < self.config.max_running:
            request = waiting[place]
            if not self.chunk.room_for(self, request):
                break
            entry = self._checked(request, self.admission.admit(self, request))
            if entry is None:
                place += 1
                if place > self.admission.scan:
                    break
                continue
            del waiting[place]
            came += 1
            if isinstance(entry, Plan):
                self._copy(entry, request)
                continue
            self._start(request, entry)
            self._take_chunk(request.row)
        return came > 0

    def _is_spent(self) -> bool:
        """Whether the step that is being planned takes no more prompts."""
        return self._spent or int(self._rows.counts.sum()) >= self.config.max_step_tokens

    def _take_chunk(self, row: int) -> None:
        """A prompt takes part in the step with as much as that takes."""
        if self._is_spent():
            return
        rows = self._rows
        start = int(rows.planned[row])
        wanted = int(rows.known[row]) - start
        left = self.config.max_step_tokens - int(rows.counts.sum())
        count = min(wanted, left, self.chunk.prompt_tokens(self, start))
        rows.counts[row] = count
        self._spent = count < wanted

    def _compute(self) -> None:
        """The step itself: time passes, tokens come, whoever has them all leaves."""
        rows = self._rows
        taking_part = rows.order[rows.counts[rows.order] > 0]
        counts = rows.counts[taking_part]
        num_rows, work = self._batch.num_rows, rows.work()
        step = self._batch.step(rows.counts[:num_rows])
        rows.recall()
        step.commit(rows.next_token[:num_rows])
        ends = rows.planned[taking_part] + counts
        rows.planned[taking_part] = ends
        self._pass(len(taking_part), work)
        self._answer(taking_part[ends == rows.known[taking_part]])

    def _answer(self, answering: NDArray[np.int64]) -> None:
        """These rows have one token more."""
        rows = self._rows
        begun = ~np.isnan(rows.last_s[answering])
        self.record.gaps.add_each(self.now_s - rows.last_s[answering[begun]])
        for row in answering[~begun].tolist():
            request = rows.in_row[row]
            self.record.ttft_s[request.index] = self.now_s - request.arrival_s
        rows.known[answering] += 1
        rows.left[answering] -= 1
        rows.last_s[answering] = self.now_s
        self.record.output_tokens += len(answering)
        self._in_step = len(answering) == len(rows)
        for row in answering[rows.left[answering] == 0].tolist():
            self._finish(rows.in_row[row])

    def _decode_on(self) -> bool:
        """Steps in which all rows write and nobody leaves, comes in, or finds no block. Whether there were any.

        They are what `step` would do, without looking at each row.
        """
        rows, count = self._rows, len(self._rows)
        if not count or not self._in_step or self._link.copies or count > self.config.max_step_tokens:
            return False
        if not rows.plan_one_each():
            return False
        some_wait = bool(self.waiting) and count < self.config.max_running
        last = int(rows.left[rows.order].min()) - 1
        until = self._arrivals[self._arrived] if self._arrived < self.load.num_requests else np.inf
        self._spent = False
        counts, following = rows.counts[: self._batch.num_rows], rows.next_token[: self._batch.num_rows]
        context = int(rows.known[rows.order].sum())
        done = 0
        while done < last and self.now_s < until:
            if some_wait:
                if not self._batch.try_reserve(counts):
                    break
                if self._let_in():
                    self._compute()
                    return True
            if (step := self._batch.try_step(counts)) is None:
                break
            rows.recall()
            step.commit(following)
            before = self.now_s
            self._pass(count, Work.writing(count, context))
            self.record.gaps.add(self.now_s - before, count)
            self.record.output_tokens += count
            rows.advance(self.now_s)
            context += count
            done += 1
        return done > 0

    def _pass(self, rows: int, work: Work) -> None:
        """A step takes its time."""
        seconds = self.speed.step_s(*work)
        self.now_s += seconds
        free, cached = self.pager.num_free_blocks, self.pager.num_evictable_blocks
        active = self.config.num_blocks - free - cached
        self.record.step(self.now_s, seconds, rows, work.tokens, active, cached, free, len(self.waiting))

    # Coming and going.

    def _start(self, request: Request, sequence: Sequence) -> None:
        """A request that has its blocks gets a row."""
        if request.sequence is None:
            assert request.texts is not None
            request.sequence, request.made = sequence, None
            request.answer = request.texts.answer(request.index)
            self.record.queried_tokens += len(sequence)
        # What it had is found again, or computed again; it may also find more: others went on where it stopped.
        again = request.committed - sequence.num_planned
        self.record.recomputed_tokens += max(0, again)
        self.record.hit_tokens += max(0, -again)
        self._rows.add(request, self._batch.add(sequence))
        self._in_step = False

    def _finish(self, request: Request) -> None:
        assert request.sequence is not None
        self._rows.remove(request)
        self._finished += 1
        self.record.finished_s[request.index] = self.now_s
        self.admission.finished(self, request)
        request.sequence.release()

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        self._give_way(request)
        request.sequence.preempt()
        self.waiting.appendleft(request)
        self.admission.preempted(self, request)

    def _give_way(self, request: Request) -> None:
        self._rows.remove(request)
        request.num_preemptions += 1
        self.record.preemptions += 1
        self.record.preemptions_max = max(self.record.preemptions_max, request.num_preemptions)

    def _swap_out(self, request: Request) -> bool:
        """Send a victim to the host; False if there is no room."""
        assert request.sequence is not None
        if not self.config.num_host_blocks:
            return False
        try:
            plan = request.sequence.swap_out()
        except (OutOfBlocks, NeverFits):
            return False
        self._give_way(request)
        self.record.swaps += 1
        self._copy(plan, request)
        self.admission.preempted(self, request)
        return True

    def _copy(self, plan: Plan, request: Request) -> None:
        if self.pager.start(plan):
            self._link.begin(plan, request, self.now_s)
        else:  # nothing to copy: it has ended
            self._arrive_from(request)

    def _end_copies(self) -> None:
        while (copy := self._link.next_ended(self.now_s)) is not None:
            self.pager.complete(copy.plan)
            self._arrive_from(copy.request)

    def _arrive_from(self, request: Request) -> None:
        """A copy is over: the request runs again, or waits on the host."""
        assert request.sequence is not None
        if request.sequence.state == "running":
            self._start(request, request.sequence)
        else:
            self.waiting.appendleft(request)

    def _result(self) -> Result:
        load, config = self.load, self.config
        return self.record.result(
            num_blocks=config.num_blocks,
            load=load.name,
            admission=self.admission.name,
            victims=self.victims.name,
            chunk=self.chunk.name,
            requests=load.num_requests,
            seconds=self.now_s - self._arrivals[0],
            useful_tokens=load.useful_tokens,
            lower_bound_steps=-(-load.block_steps(config.block_size) // config.num_blocks),
        )

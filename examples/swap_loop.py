"""Two answers to a step that does not fit: a victim is computed again later, or swapped to the host and back.

    python examples/swap_loop.py

Recompute: the youngest gives its blocks back at once, and the step fits now. What it had is computed a second time when
it comes back. Swap: its blocks are copied to the host first, and are free when that is over. Until then the rows that
found no block are left out, and the others go on: nothing is computed twice. `batch_loop.py` is the same loop without
a host; `examples/server` adds prefixes that come back from the host, and what to do when a copy fails or never ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import kvpager
from kvpager.movers import HostArena, NumpyMover, NumpyPool, Ticket

BLOCK_SIZE, NUM_BLOCKS, HOST_BLOCKS, VOCABULARY = 4, 24, 40, 50
MAX_SEQS, BUDGET, NEW_TOKENS = 8, 16, 12  # positions of one step; tokens of one answer
MAX_LENGTH = NUM_BLOCKS * BLOCK_SIZE  # positions of one request: what the pool holds, or your model

pager = kvpager.Pager(NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=HOST_BLOCKS)
batch = pager.batch(MAX_SEQS, max_blocks=MAX_LENGTH // BLOCK_SIZE, max_tokens=BUDGET)
kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE))
pool = NumpyPool([kv])
host = HostArena(HOST_BLOCKS, pool.layout.bytes_per_block)


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer."""

    number: int
    prompt: list[int]
    seq: kvpager.Sequence


def kernel(step: kvpager.Step) -> npt.NDArray[np.int32]:
    """The forward pass. Rows that are still inside their prompt are sampled too; the commit ignores that."""
    pool.copy_blocks(step.copies)
    kv.reshape(-1)[step.slot_mapping] = (step.token_ids + 1.0) * (step.positions + 1.0)
    rows = zip(step.block_tables, step.seq_lens, strict=True)
    return np.array([kv[table].reshape(-1)[:length].sum() % VOCABULARY for table, length in rows], np.int32)


@dataclass
class Loop:
    """Who is where: in the batch, out of it, or between the two, one at a time. The oldest come first."""

    mover: NumpyMover
    swaps: bool
    running: list[Request] = field(default_factory=list)
    out: deque[Request] = field(default_factory=deque)
    moving: Request | None = None
    left_out: bool = False  # rows of the last step wait for room: nobody comes in before they go on

    def enter(self, request: Request) -> None:
        batch.add(request.seq)
        self.running.append(request)

    def move(self, request: Request, plan: kvpager.Plan) -> None:
        pager.start(plan)
        self.mover.submit(plan)  # between two steps: what it copies is written, and nobody reads where it writes
        self.moving = request

    def land(self, tickets: list[Ticket]) -> None:
        """The transfer is over, if there is a ticket."""
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error
            pager.complete(ticket.plan)
            if (request := self.moving) is not None:
                self.moving = None
                self.enter(request) if request.seq.state == "running" else self.out.appendleft(request)

    def come_back(self) -> None:
        """Whoever is out, while there is room: by a copy if it was swapped, else it is computed again."""
        while self.out and not (self.moving or self.left_out):
            request = self.out[0]
            if request.seq.state == "swapped":
                if (plan := request.seq.try_swap_in()) is None:
                    return
                self.move(request, plan)
            elif request.seq.try_resume() is None:
                return
            else:
                self.enter(request)
            self.out.popleft()

    def make_room(self) -> None:
        """The youngest leaves. It is swapped only if somebody goes on meanwhile, and the host has room."""
        request = self.running.pop()
        try:
            if self.swaps and self.running:
                self.move(request, request.seq.swap_out())
                return
        except (kvpager.OutOfBlocks, kvpager.NeverFits):
            pass
        request.seq.preempt()
        self.out.appendleft(request)

    def plan(self) -> kvpager.Step | None:
        """The next step: one position for who decodes, a chunk for who is in his prompt."""
        while self.running:
            counts = np.zeros(batch.num_rows, np.int32)
            budget = BUDGET
            for request in self.running:
                row = batch.row_of(request.seq)
                counts[row] = min(len(request.seq) - request.seq.num_planned, budget)
                budget -= int(counts[row])
            try:
                step = batch.step(counts)
                self.left_out = False
                return step
            except kvpager.OutOfBlocks as refused:
                counts[list(refused.rows)] = 0  # without these the step fits
            if self.moving is not None:
                self.left_out = True
                return batch.step(counts) if counts.any() else None
            self.make_room()
        self.left_out = False
        return None


def serve(prompts: list[list[int]], swaps: bool = True) -> list[list[int]]:
    """Answer all prompts. An answer ends early at the greatest length; a prompt that is longer gets none."""
    waiting = deque(number for number, prompt in enumerate(prompts) if len(prompt) <= MAX_LENGTH)
    answers: list[list[int]] = [[] for _ in prompts]
    with NumpyMover(pool, host) as mover:
        loop = Loop(mover, swaps)
        while waiting or loop.running or loop.out or loop.moving:
            loop.land(mover.poll())
            loop.come_back()
            while waiting and not (loop.out or loop.moving or loop.left_out) and len(loop.running) < MAX_SEQS:
                if (seq := pager.try_admit(prompts[waiting[0]])) is None:
                    break
                loop.enter(Request(waiting[0], prompts[waiting.popleft()], seq))
            step = loop.plan()
            if step is None:
                if loop.moving:
                    loop.land(mover.wait(1.0))  # nobody can go on before that
                continue
            step.commit(kernel(step))
            for request in list(loop.running):
                answer = request.seq.tokens[len(request.prompt) :].tolist()
                if len(answer) == NEW_TOKENS or len(request.seq) > MAX_LENGTH:  # the last token needs no slot
                    answers[request.number] = answer
                    loop.running.remove(request)
                    request.seq.release()
    return answers


def alone(prompt: list[int]) -> list[int]:
    """The same model with KV of its own, contiguous: what the answer must be."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        total = ((np.array(tokens) + 1.0) * (np.arange(len(tokens)) + 1.0)).sum()
        tokens.append(int(total) % VOCABULARY)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    for swaps in (False, True):
        before = pager.stats()
        prompts = [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 25, 20)]
        assert serve(prompts, swaps) == [alone(prompt) for prompt in prompts]
        assert not pager.check()
        now = pager.stats()
        print(f"{'swap' if swaps else 'recompute'}: {len(prompts)} answers, each as if served alone;", end=" ")
        print(f"{now.preemptions - before.preemptions} preemptions, {now.swap_outs - before.swap_outs} swaps,", end=" ")
        print(f"{now.recomputed_tokens - before.recomputed_tokens} tokens computed again")

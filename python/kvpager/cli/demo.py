"""`kvpager demo`: what paging, sharing and eviction gain, and what a call costs, all measured while you wait."""

from __future__ import annotations

from dataclasses import dataclass

import click

from .. import Pager, reference
from ..workload import ChatWorkload, chat_workload
from .options import json_option, seed_option
from .output import Bar, print_json, print_table, print_text
from .serving import Memory, Paged, Reserved, Served, Server, clock_us

SLOTS = 65_536
BLOCK_SIZE = 16
MAX_CONTEXT = 4096
CHATS_PER_STEP = 0.5
# A little room for growth: without it, what was just admitted is soon preempted.
WATERMARK = 0.01
CALLS = ["admit", "refuse a prompt", "commit a prompt", "append a token", "refuse a token", "commit a token", "release"]
"""In the order of a request's life, whichever came first."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to use the same memory, and what it made of the same chats."""

    key: str
    words: str
    memory: Memory
    served: Served

    def as_dict(self) -> dict[str, object]:
        stats = self.memory.pager.stats() if isinstance(self.memory, Paged) else None
        return {
            "scheme": self.key,
            "running_mean": round(self.served.running_mean, 2),
            "running_max": self.served.running_max,
            "wasted_slots_mean": round(self.served.wasted_mean, 2),
            "prefilled_tokens": self.memory.computed(),
            "steps": self.served.steps,
            "preemptions": self.served.preemptions,
            "evicted_blocks": stats.evicted_blocks if stats else 0,
            "hit_rate": round(stats.hit_rate, 4) if stats else 0.0,
        }


@click.command(short_help="What paging, sharing and eviction gain, measured.")
@click.option("--chats", type=click.IntRange(100, 5000), default=300, help="Conversations in the workload.")
@seed_option
@json_option
def demo(chats: int, seed: int, as_json: bool) -> None:
    """Serve the same chats four times from the same memory, and show what each idea gains.

    A seeded workload of conversations that share system prompts runs against memory for 65,536 tokens: with a
    contiguous reservation of the longest context for each request; with pages; with pages whose prefixes are shared
    while somebody runs on them; and with shared prefixes kept after that, until their blocks are needed. There is no
    model: a step gives every running request one token. The last scheme then runs once more on the pure-Python
    reference, which has to hand out the same blocks, to compare the time per call.

    \b
    Examples:
      kvpager demo
      kvpager demo --chats 1000 --seed 7
      kvpager demo --json | python -m json.tool
    """
    workload = chat_workload(seed, num_chats=chats, chats_per_step=CHATS_PER_STEP, max_context=MAX_CONTEXT)
    num_blocks = SLOTS // BLOCK_SIZE
    compiled = Paged(Pager(num_blocks, BLOCK_SIZE, watermark=WATERMARK))
    plain = Paged(reference.Pager(num_blocks, BLOCK_SIZE, watermark=WATERMARK))
    unshared = Paged(Pager(num_blocks, BLOCK_SIZE, watermark=WATERMARK, prefix_cache=False))
    transient = Paged(Pager(num_blocks, BLOCK_SIZE, watermark=WATERMARK), keep=False)
    plan: list[tuple[str, str, Memory]] = [
        ("reserved", "reserve the longest context", Reserved(SLOTS, MAX_CONTEXT)),
        ("paged", "pages", unshared),
        ("shared", "pages, prefixes shared while in use", transient),
        ("kept", "pages, prefixes kept until evicted", compiled),
    ]
    with Bar(quiet=as_json) as bar:
        schemes = [
            Scheme(key, words, memory, Server(workload, memory).run(bar.stage(words))) for key, words, memory in plan
        ]
        Server(workload, plain).run(bar.stage("the same on the reference"))
    same = (compiled.answers, compiled.pager.stats()) == (plain.answers, plain.pager.stats())
    if as_json:
        _print_json(workload, schemes, compiled, plain, same=same)
    else:
        _print(workload, schemes, compiled, plain, same=same)


def _calls(compiled: Paged, plain: Paged) -> list[dict[str, object]]:
    ours, theirs = compiled.times.mean_us(), plain.times.mean_us()
    return [
        {
            "call": name,
            "count": count,
            "kvpager_us": round(mean, 3),
            "reference_us": round(theirs[name][1], 3),
            "ratio": round(theirs[name][1] / mean, 1),
        }
        for name, (count, mean) in sorted(ours.items(), key=lambda item: CALLS.index(item[0]))
    ]


def _print_json(workload: ChatWorkload, schemes: list[Scheme], compiled: Paged, plain: Paged, *, same: bool) -> None:
    print_json(
        "demo",
        seed=workload.seed,
        pool={"slots": SLOTS, "block_size": BLOCK_SIZE, "max_context": MAX_CONTEXT, "watermark": WATERMARK},
        workload={
            "chats": len(workload.chats),
            "requests": workload.num_requests,
            "system_prompts": workload.num_system_prompts,
            "prompt_tokens": workload.prompt_tokens,
            "answer_tokens": workload.answer_tokens,
        },
        schemes=[scheme.as_dict() for scheme in schemes],
        calls=_calls(compiled, plain),
        clock_us=round(clock_us(), 3),
        same_answers=same,
    )


def _print(workload: ChatWorkload, schemes: list[Scheme], compiled: Paged, plain: Paged, *, same: bool) -> None:
    requests = workload.num_requests
    print_table(
        f"{len(workload.chats)} chats over {workload.num_system_prompts} system prompts, seed {workload.seed}:"
        f" {requests:,} requests, on average {workload.prompt_tokens / requests:,.0f} tokens in and"
        f" {workload.answer_tokens / requests:,.0f} out.\n"
        f"Memory for {SLOTS:,} tokens; the longest context is {MAX_CONTEXT:,}.",
        ["memory", "requests at once", "unused slots each", "tokens prefilled", "steps for all"],
        [
            (
                scheme.words,
                f"{scheme.served.running_mean:,.1f}",
                f"{scheme.served.wasted_mean:,.1f}",
                f"{scheme.memory.computed():,}",
                f"{scheme.served.steps:,}",
            )
            for scheme in schemes
        ],
    )
    reserved, paged, shared, kept = schemes
    evicted = compiled.pager.stats().evicted_blocks
    print_text(
        f"Paging:   {_ratio(paged, reserved)} as many requests at once, for none holds room it does not use.\n"
        f"Sharing:  {_ratio(shared, paged)} again, and {_saved(shared, paged)} of the prefill saved.\n"
        f"Eviction: {_saved(kept, paged)} of the prefill saved, for what finished stays until its blocks are needed"
        f" ({evicted:,} were).\n"
    )
    print_table(
        f"Mean time per call in the last scheme, with kvpager.reference on the same calls. Taking the time costs"
        f" {clock_us():.2f} us\na call and is in all of them (kvpager bench measures without).",
        ["call", "calls", "kvpager us", "reference us", "ratio"],
        [
            (
                str(row["call"]),
                f"{row['count']:,}",
                f"{row['kvpager_us']:,.2f}",
                f"{row['reference_us']:,.2f}",
                f"{row['ratio']:,.1f}x",
            )
            for row in _calls(compiled, plain)
        ],
    )
    print_text(
        "Both handed out the same blocks and counted the same."
        if same
        else "The two handed out DIFFERENT blocks: this is a bug, please report it with the seed."
    )


def _ratio(scheme: Scheme, other: Scheme) -> str:
    return f"{scheme.served.running_mean / other.served.running_mean:.1f}x"


def _saved(scheme: Scheme, other: Scheme) -> str:
    return f"{1 - scheme.memory.computed() / other.memory.computed():.0%}"

"""`kvpager generate`: seeded token traces, as files for the other commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..traces import Progress, TokenRequest, check_target, write_trace
from ..workload import KINDS, Kind, arrivals, token_requests
from .options import json_option, seed_option
from .output import Bar, counted, print_json, print_table, print_text, printable


def token_range(text: str) -> tuple[int, int]:
    """Two lengths in one word: `200:800`."""
    low, _, high = text.partition(":")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and len(low + high) < 20):
        raise click.BadParameter(f"{text!r}: expected LO:HI in tokens, such as 200:800")
    return int(low), int(high)


COUNT = click.IntRange(1, 10_000_000)
TOKENS = click.FloatRange(0, 1_000_000, min_open=True)
CHOICES: dict[str, tuple[Any, str, str]] = {
    "sessions": (COUNT, "N", "Chats, agent sessions; for burst and varfront, requests."),
    "rate": (click.FloatRange(1e-6, 1_000_000), "R", "Sessions that begin in a second, on average."),
    "systems": (click.IntRange(1, 10_000), "N", "System prompts; the second most popular is half as popular."),
    "system": (token_range, "LO:HI", "Tokens of a system prompt, uniform."),
    "turns": (click.FloatRange(1, 10_000), "MEAN", "Turns of a chat, or tool calls of a session; geometric."),
    "question": (TOKENS, "MEDIAN", "Tokens of a question, or of an agent's task; log-normal, sigma 0.8."),
    "answer": (TOKENS, "MEDIAN", "Tokens of an answer, or of a tool call; log-normal, sigma 0.7."),
    "result": (TOKENS, "MEDIAN", "Tokens of a tool's result; log-normal, sigma 1."),
    "think": (click.FloatRange(0, 1_000_000), "SECONDS", "Mean time from an answer to the next turn; exponential."),
    "burst": (click.FloatRange(1, 1_000_000), "MEAN", "One-off prompts in a burst; geometric."),
    "one_off": (TOKENS, "MEDIAN", "Tokens of a one-off prompt; log-normal, sigma 0.5."),
    "front": (click.IntRange(0, 10_000), "N", "Variable tokens in front of the system prompt; 0 leaves them out."),
    "max_context": (click.IntRange(1, 1_000_000), "N", "Tokens that no prompt with its answer exceeds."),
}


def _defaults(name: str) -> str:
    """The default of an option: one, or one for each kind that has it."""
    found: dict[str, str] = {}
    for kind in KINDS.values():
        for field in fields(kind):
            if field.name == name:
                value = field.default
                found[kind.name] = ":".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
    if len(found) == len(KINDS) and len(set(found.values())) == 1:
        return found[next(iter(KINDS))]
    return ", ".join(f"{kind} {value}" for kind, value in found.items())


def _choice_options(command: Any) -> Any:
    for name, (kind, metavar, text) in reversed(CHOICES.items()):
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, name, type=kind, metavar=metavar, help=f"{text}  [default: {_defaults(name)}]")(
            command
        )
    return command


@dataclass(slots=True)
class Summary:
    """What went into the file, counted while it was written."""

    prompts: list[int]
    outputs: list[int]
    last_ms: int = 0

    def count(self, requests: Iterator[TokenRequest], total: int, progress: Progress) -> Iterator[TokenRequest]:
        for request in requests:
            yield request
            self.prompts.append(len(request.tokens))
            self.outputs.append(len(request.output_tokens))
            self.last_ms = request.timestamp_ms
            progress(len(self.prompts), total)

    def as_dict(self) -> dict[str, object]:
        return {
            "requests": len(self.prompts),
            "seconds": self.last_ms / 1000,
            "prompt_tokens": sum(self.prompts),
            "output_tokens": sum(self.outputs),
            "input_length": _spread(self.prompts),
            "output_length": _spread(self.outputs),
        }


def _spread(lengths: list[int]) -> dict[str, float]:
    return {
        "mean": round(float(np.mean(lengths)), 1),
        "median": float(np.median(lengths)),
        "max": max(lengths),
    }


@click.command(short_help="Seeded token traces: chats, agents, bursts, a variable front.")
@click.argument("kind", type=click.Choice(list(KINDS)), metavar="KIND")
@click.option(
    "-o", "--output", type=click.Path(path_type=str), required=True, metavar="FILE", help="The file to write."
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--requests", type=COUNT, metavar="N", help="Write the first N requests only.  [default: all]")
@_choice_options
@seed_option
@json_option
def generate(kind: str, output: str, force: bool, requests: int | None, seed: int, as_json: bool, **given: Any) -> None:
    """Write a made-up request trace with the tokens themselves, for replay, blocksize, and your own programs.

    KIND is one of:

    \b
      chat      chats over shared system prompts; a turn repeats all that was said before it
      agent     agent sessions: a task, then tool calls that make one context longer and longer
      burst     half of the requests steady on hot system prompts, half one-off prompts in bursts
      varfront  a long shared system prompt behind a few variable tokens (a request id, the time)

    FILE ends in .jsonl, .gz or .xz and gets one JSON object a line, in arrival order: timestamp (ms), input_length,
    output_length, tokens, output_tokens. The same seed gives the same file. It appears when it is complete.

    Sessions begin as a Poisson process. A later turn arrives when the answer before it is complete (prefill at 10,000
    tokens a second, then 20 ms a token) and the thinking time, or the tool's, is over. Prompts that share a system
    prompt begin with equal tokens; all other tokens are uniform over 32,000 values.

    \b
    Examples:
      kvpager generate chat -o chat.jsonl.xz
      kvpager generate agent -o agent.jsonl.gz --sessions 50 --max-context 65536 --seed 7
      kvpager generate burst -o burst.jsonl --systems 1 --burst 200 --json
      kvpager generate varfront -o front.jsonl; kvpager generate varfront --front 0 -o plain.jsonl
          what a request id in front of the system prompt costs: compare the two with kvpager blocksize
    """
    shape = _shape(KINDS[kind], {name: value for name, value in given.items() if value is not None})
    check_target(output, force=force)
    with Bar(quiet=as_json) as bar:
        bar.stage("making up")
        chats = shape.chats(seed)
        order = arrivals(chats)[:requests]
        summary = Summary([], [])
        counted = summary.count(token_requests(chats, order), len(order), bar.stage("writing"))
        size = write_trace(output, counted, force=force)
    if as_json:
        print_json(
            "generate",
            kind=kind,
            seed=seed,
            shape=asdict(shape),
            path=output,
            bytes=size,
            **summary.as_dict(),
        )
    else:
        _print(output, kind, seed, size, summary)


def _shape(kind: type[Kind], given: dict[str, Any]) -> Kind:
    """The kind with the options that were given; an option it does not know is refused, not ignored."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            options = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise click.UsageError(f"--{name.replace('_', '-')} means nothing to {kind.name}, which has {options}")
    try:
        return kind(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _print(output: str, kind: str, seed: int, size: int, summary: Summary) -> None:
    print_table(
        f"{printable(Path(output).name)}: {kind}, seed {seed}: {counted(len(summary.prompts), 'request')} in"
        f" {summary.last_ms / 1000:,.0f} seconds, {size:,} bytes.",
        ["tokens", "all", "mean", "median", "longest"],
        [
            (name, f"{sum(lengths):,}", f"{np.mean(lengths):,.0f}", f"{np.median(lengths):,.0f}", f"{max(lengths):,}")
            for name, lengths in (("prompts", summary.prompts), ("answers", summary.outputs))
        ],
    )
    name = shlex.quote(printable(output))
    print_text(f"Next: kvpager replay {name}, or kvpager blocksize {name}")

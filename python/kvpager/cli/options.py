"""Options that commands share, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..replay import PoolSize
from ..replay.runs import MAX_BLOCKS
from .plots import FORMATS, check_plot_path

F = TypeVar("F", bound=Callable[..., Any])


def comma_list(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """The callback of an option that takes several values in one word: `lru,slru`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any] | None:
        if value is None:
            return None
        try:
            parsed = [parse(part) for part in value.split(",")]
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None
        # Twice the same would be run twice and drawn over itself.
        return list(dict.fromkeys(parsed))

    return convert


def one_of(what: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """A parser that accepts the choices only."""

    def parse(text: str) -> str:
        if text.strip() not in choices:
            raise ValueError(f"{what} {text.strip()!r}: expected one of {', '.join(choices)}")
        return text.strip()

    return parse


def percent(text: str) -> PoolSize:
    """A pool size given as a share."""
    return _pool_size(text, "percent", "a share above 0%, such as 2.5% (--blocks takes numbers of blocks)")


def blocks(text: str) -> PoolSize:
    """A pool size given in blocks."""
    return _pool_size(text, "blocks", f"a number of blocks from 1 to {MAX_BLOCKS}, such as 4096 (--sizes takes shares)")


def _pool_size(text: str, kind: str, expected: str) -> PoolSize:
    try:
        size = PoolSize.parse(text)
    except ValueError:
        size = None
    if size is None or getattr(size, kind) is None:
        raise ValueError(f"pool size {text.strip()!r}: expected {expected}")
    return size


def _checked_plot(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    # Before the work: nobody wants to learn after a minute that the picture cannot be written.
    if value is not None:
        check_plot_path(value)
    return value


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")(command)


def seed_option(command: F) -> F:
    seed = click.IntRange(0, 2**63 - 1)
    text = "Seed of everything random; the same seed gives the same workload anywhere."
    return click.option("--seed", type=seed, default=0, help=text)(command)


def plot_option(command: F) -> F:
    path = click.Path(path_type=Path)
    text = f"Draw the result into this file ({', '.join(FORMATS)}); needs the extra plot: pip install '.[plot]'."
    return click.option("--plot", type=path, metavar="FILE", callback=_checked_plot, help=text)(command)

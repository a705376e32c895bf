"""`kvpager cost`: swap a sequence or compute it again, fetch a prefix or compute it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import click

from ..cost import (
    DEVICES,
    LINKS,
    MODELS,
    CostModel,
    Decision,
    Dtype,
    ModelShape,
    parse_device,
    parse_link,
    parse_seconds,
    read_config,
)
from ..errors import ConfigError
from .cost_plot import plot_costs
from .options import json_option, plot_option
from .output import print_json, print_table, print_text, printable

LADDER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Lengths of the table, as multiples of --tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One length: a sequence that may be preempted, and a hit of as many tokens."""

    tokens: int
    kv_bytes: float
    preempt: Decision
    fetch: Decision
    attention_seconds: float


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """The callback of an option whose text ``parse`` reads."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except ConfigError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return convert


def model_shape(text: str) -> ModelShape:
    """A name of the table, or the path of a model's config.json."""
    if text.strip().lower() in MODELS:
        return MODELS[text.strip().lower()]
    if not text.endswith(".json"):
        raise ConfigError(f"model {text!r}: expected one of {', '.join(MODELS)}, or a path to a model's config.json")
    return read_config(Path(text))


def point(text: str) -> tuple[int, int, float]:
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10}):(.+)", text.strip())
    if found is None:
        raise ConfigError(f"{text.strip()!r}: expected START:TOKENS:TIME, such as 0:4096:95ms")
    return int(found[1]), int(found[2]), parse_seconds(found[3])


def points(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[tuple[int, int, float]]:
    try:
        return [point(text) for text in value]
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A share, with or without a percent sign."""
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?%?", value.strip()):
        raise click.BadParameter(f"{value.strip()!r}: expected a share such as 50%", ctx, param)
    return float(value.strip().removesuffix("%")) / 100


@click.command(short_help="Swap or recompute, fetch or recompute: seconds of each, and from which length on.")
@click.option(
    "--model",
    "shape",
    default="llama-3.1-8b",
    metavar="MODEL",
    callback=parsed(model_shape),
    help="A name, or a path to a model's config.json.",
)
@click.option(
    "--gpu",
    "device",
    default="h100",
    metavar="GPU",
    callback=parsed(parse_device),
    help="A name, or a dense peak such as 400TFLOP/s.",
)
@click.option(
    "--link",
    default="25GB/s",
    metavar="LINK",
    callback=parsed(parse_link),
    help="What blocks move over: a name, or a speed such as 25GB/s.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 2**26), default=4000, metavar="N", help="Length of the sequence, or of the hit."
)
@click.option(
    "--cached", type=click.IntRange(0), default=0, metavar="N", help="Its first tokens that stay cached on the device."
)
@click.option(
    "--on-host", type=click.IntRange(0), default=0, metavar="N", help="Its first tokens that need not be copied out."
)
@click.option(
    "--block-size", type=click.IntRange(1, 1024), default=16, metavar="N", help="Tokens a block: blocks move whole."
)
@click.option("--kv-dtype", type=click.Choice(get_args(Dtype)), default="bf16", help="Type of the KV.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="bf16", help="Type that the matrices compute in.")
@click.option(
    "--utilisation", metavar="SHARE", callback=share, help="Share of the peak that prefill reaches.  [default: 65%]"
)
@click.option(
    "--load", metavar="SHARE", default="0%", callback=share, help="Share of the GPU that others use meanwhile."
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 4096),
    default=1,
    metavar="N",
    help="Tensor-parallel GPUs, each with a link of its own.",
)
@click.option(
    "--latency",
    metavar="TIME",
    callback=parsed(parse_seconds),
    help="What each piece costs beside its bytes, such as 10us.  [default: 0]",
)
@click.option(
    "--pieces", type=click.IntRange(1, 2**20), default=1, metavar="N", help="Pieces that a block is copied in."
)
@click.option("--alone", is_flag=True, help="A prefill reads all weights for itself: no other step runs with it.")
@click.option(
    "--point",
    "measured",
    multiple=True,
    metavar="POINT",
    callback=points,
    help="A measured prefill, START:TOKENS:TIME; two or more replace GPU and utilisation.",
)
@click.option(
    "--list", "listing", is_flag=True, help="Print the models, GPUs and links that have a name, with sources."
)
@plot_option
@json_option
def cost(
    shape: ModelShape,
    device: Any,
    link: Any,
    tokens: int,
    cached: int,
    on_host: int,
    block_size: int,
    kv_dtype: Dtype,
    dtype: Dtype,
    utilisation: float | None,
    load: float,
    ranks: int,
    latency: float | None,
    pieces: int,
    alone: bool,
    measured: list[tuple[int, int, float]],
    listing: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare moving KV with computing it again: seconds of each, and the length from which on moving pays.

    A victim of preemption can be swapped (its blocks out over the link, and back) or dropped and computed again by a
    prefill. A prefix that a lower tier has can be fetched (one way) or computed.

    \b
    seconds to move       blocks x (bytes of a block / link speed + pieces x latency), out and back counted singly
    seconds to recompute  operations of the prefill / (peak x utilisation x ranks), through what --load leaves
    operations            2 for each weight that a token meets, and attention: 2 x (key + value width) for each layer,
                          head and pair of a token and one before it, so that it grows with the square of the length
    break-even            the length from which on moving is never dearer: at one token less, computing is cheaper

    Peaks and shapes are published numbers (--list); 65% is an assumption. Measure two prefills of your own engine, a
    short and a long one, and give them with --point: then only the link is left to believe.

    \b
    Examples:
      kvpager cost --model llama-3.1-8b --link 25GB/s --tokens 4000
          the textbook case
      kvpager cost --model llama-2-7b --plot cost.png
          without grouped-query attention, KV is four times as large
      kvpager cost --link nvme --latency 100us --load 50%
          a disk, while the GPU is half taken
      kvpager cost --latency 5us --pieces 64
          a mover that copies each layer's keys and values singly
      kvpager cost --point 0:512:13ms --point 0:8192:240ms --json
      kvpager cost --model deepseek-v3 --gpu h200 --ranks 8 --dtype fp8
    """
    if listing:
        _list(as_json)
        return
    if cached >= tokens:
        raise click.UsageError(f"--cached {cached}: of {tokens} tokens none is left to move or to compute")
    if on_host > tokens:
        raise click.UsageError(f"--on-host {on_host}: the sequence has {tokens} tokens")
    if utilisation is not None:
        device = replace(device, utilisation=utilisation)
    model = CostModel(
        shape=shape.with_kv(kv_dtype),
        device=device,
        link=link if latency is None else replace(link, seconds_per_piece=latency),
        block_size=block_size,
        dtype=dtype,
        load=load,
        ranks=ranks,
        pieces_per_block=pieces,
        alone=alone,
    )
    if measured:
        model = model.calibrate(measured)
    lengths = sorted({round(tokens * step) for step in LADDER} | {tokens})
    rows = [_row(model, length, cached, on_host) for length in lengths if length > cached]
    asked = _row(model, tokens, cached, on_host)
    title = _title(model, cached, on_host, len(measured))
    if plot is not None:
        plot_costs(model, tokens, cached, on_host, title, plot)
    if as_json:
        _print_json(model, rows, asked, cached, on_host, plot)
    else:
        _print(title, rows, asked, cached)


def _row(model: CostModel, tokens: int, cached: int, on_host: int) -> Row:
    return Row(
        tokens,
        tokens * model.shape.kv_bytes_per_token,
        model.preempt(tokens, num_cached=cached, num_host_tokens=min(on_host, tokens)),
        model.fetch(cached, tokens),
        model.attention_seconds(cached, tokens),
    )


def _title(model: CostModel, cached: int, on_host: int, num_points: int) -> str:
    gpus = model.device.name if model.ranks == 1 else f"{model.ranks} {model.device.name}"
    how = f"on {gpus} in {model.dtype} at {_percent(model.device.utilisation)} of its peak"
    if model.rates is not None:
        how = f"as measured at {num_points} points"
    name = printable(model.shape.name.rpartition("/")[2])
    parts = [f"{name} {how}: {model.link.name}, blocks of {model.block_size} tokens"]
    if model.load:
        parts.append(f"{_percent(model.load)} of the GPU is others'")
    if cached:
        parts.append(f"{cached:,} tokens stay cached")
    if on_host:
        parts.append(f"{on_host:,} tokens are on the host")
    return "; ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return (
        f"{milliseconds:,.0f}"
        if milliseconds >= 1000
        else f"{milliseconds:,.1f}"
        if milliseconds >= 10
        else f"{milliseconds:.2f}"
    )


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000 or unit == "GiB":
            break
        number /= 1024
    return f"{number:,.1f} {unit}"


def _print(title: str, rows: list[Row], asked: Row, cached: int) -> None:
    columns = ["tokens", "KV", "swap, ms", "fetch, ms", "recompute, ms", "of it attention", "a victim", "a hit"]
    cells = [
        [
            f"{'> ' if row.tokens == asked.tokens else ''}{row.tokens:,}",
            _size(row.kv_bytes),
            _ms(row.preempt.move_seconds),
            _ms(row.fetch.move_seconds),
            _ms(row.preempt.recompute_seconds),
            f"{row.attention_seconds / row.preempt.recompute_seconds:.1%}",
            row.preempt.action,
            row.fetch.action,
        ]
        for row in rows
    ]
    print_table(title, columns, cells, left=0)
    print_text(_sentence("A victim", "swap", asked.preempt, cached))
    print_text(_sentence("A hit", "fetch", asked.fetch, cached))


def _sentence(whose: str, way: str, decision: Decision, cached: int) -> str:
    at = decision.break_even_tokens
    tokens = "tokens" if not cached else "tokens behind the cached ones"
    if at is None:
        when = f"At no length does the {way} pay."
    elif at == 1:
        when = f"The {way} pays at every length."
    else:
        when = f"From {at:,} {tokens} on the {way} is never dearer."
    return f"{whose}: {decision.action}, {_ms(decision.margin_seconds)} ms less. {when}"


def _decision(decision: Decision) -> dict[str, object]:
    return asdict(decision) | {"margin_seconds": decision.margin_seconds}


def _print_json(model: CostModel, rows: list[Row], asked: Row, cached: int, on_host: int, plot: Path | None) -> None:
    def flat(row: Row) -> dict[str, object]:
        return asdict(row) | {"preempt": _decision(row.preempt), "fetch": _decision(row.fetch)}

    print_json(
        "cost",
        model=asdict(model.shape) | {"kv_bytes_per_token": model.shape.kv_bytes_per_token},
        device=asdict(model.device),
        link=asdict(model.link),
        dtype=model.dtype,
        block_size=model.block_size,
        load=model.load,
        ranks=model.ranks,
        pieces_per_block=model.pieces_per_block,
        alone=model.alone,
        calibrated=model.rates is not None,
        seconds_per_token=model.seconds_per_token,
        seconds_per_pair=model.seconds_per_pair,
        tokens=asked.tokens,
        cached=cached,
        on_host=on_host,
        asked=flat(asked),
        rows=[flat(row) for row in rows],
        plot=None if plot is None else str(plot),
    )


def _list(as_json: bool) -> None:
    if as_json:
        print_json("cost", **{name: [asdict(each) for each in table.values()] for name, table in _TABLES})
        return
    models = [
        [
            shape.name,
            f"{shape.params / 1e9:,.1f}",
            f"{shape.layer_params / 1e9:,.1f}",
            f"{shape.kv_bytes_per_token / 1024:,.1f}",
            f"{shape.flops_per_pair / 1e6:,.2f}",
        ]
        for shape in MODELS.values()
    ]
    columns = ["model", "10^9 parameters", "of them a token meets", "KiB of KV a token", "10^6 operations a pair"]
    print_table("Models (--model)", columns, models)
    devices = [
        [
            device.name,
            f"{device.bf16_flops / 1e12:,.0f}",
            "-" if device.fp8_flops is None else f"{device.fp8_flops / 1e12:,.0f}",
            "-" if device.bytes_per_second is None else f"{device.bytes_per_second / 1e12:,.2f}",
        ]
        for device in DEVICES.values()
    ]
    print_table("GPUs (--gpu)", ["GPU", "TFLOP/s bf16", "TFLOP/s fp8", "TB/s of memory"], devices)
    print_table(
        "Links (--link)",
        ["link", "GB/s one way"],
        [[link.name, f"{link.bytes_per_second / 1e9:,.1f}"] for link in LINKS.values()],
    )
    for _, table in _TABLES:
        for each in table.values():
            print_text(f"{each.name}: {each.source}")


_TABLES: tuple[tuple[str, dict[str, Any]], ...] = (("models", MODELS), ("devices", DEVICES), ("links", LINKS))

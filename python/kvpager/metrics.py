"""A pager's numbers in the text form of Prometheus, under the names that LLM servers use.

``Pager.metrics()`` answers the text; `CONTENT_TYPE` goes with it. The stems are those of vLLM where it has the same
thing (docs/victims.md has the table), so that a dashboard needs another prefix and little else. Gauges are what is now,
counters (``_total``) what has been since the pager was made. Nothing is kept here, and no library is needed: the text
is a few lines for each number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from .pressure import STATES, Reading
from .types import Stats

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "exposition", "family"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["gauge", "counter"]
Samples = Iterable[tuple[Mapping[str, str], float]]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Metric(NamedTuple):
    """One family: its name without the prefix, and where its value comes from."""

    name: str
    kind: Kind
    help: str
    value: Callable[[Stats], float]


def _usage(stats: Stats) -> float:
    return 1 - (stats.free_blocks + stats.cached_blocks) / (stats.total_blocks - stats.reserved_blocks)


METRICS: tuple[Metric, ...] = (
    Metric("kv_cache_usage_perc", "gauge", "Share of the blocks that somebody holds; 1 is all.", _usage),
    Metric("num_requests_running", "gauge", "Sequences that hold blocks.", lambda s: s.running_sequences),
    Metric("num_requests_preempted", "gauge", "Sequences that wait to be resumed.", lambda s: s.preempted_sequences),
    Metric("num_requests_swapped", "gauge", "Sequences on the host.", lambda s: s.swapped_sequences),
    Metric("admitted_requests_total", "counter", "Admitted sequences.", lambda s: s.admitted_sequences),
    Metric("request_success_total", "counter", "Sequences released as finished.", lambda s: s.finished_sequences),
    Metric("prefix_cache_queries_total", "counter", "Tokens of admitted prompts.", lambda s: s.queried_tokens),
    Metric("prefix_cache_hits_total", "counter", "Tokens of them that were found.", lambda s: s.hit_tokens),
    Metric("computed_tokens_total", "counter", "Tokens whose KV was written.", lambda s: s.computed_tokens),
    Metric("recomputed_tokens_total", "counter", "Tokens lost to preemption.", lambda s: s.recomputed_tokens),
    Metric("num_preemptions_total", "counter", "Preemptions by recompute.", lambda s: s.preemptions),
    Metric("num_swap_outs_total", "counter", "Preemptions by swap.", lambda s: s.swap_outs),
    Metric("num_swap_ins_total", "counter", "Sequences that came back from the host.", lambda s: s.swap_ins),
    Metric("evicted_blocks_total", "counter", "Cached blocks that gave up their frame.", lambda s: s.evicted_blocks),
    Metric("refaulted_blocks_total", "counter", "Evicted blocks asked for again.", lambda s: s.refaulted_blocks),
    Metric("refault_distance_blocks_total", "counter", "Blocks evicted in between.", lambda s: s.refault_distance),
    Metric("offloaded_blocks_total", "counter", "Blocks copied to the host's cache.", lambda s: s.offloaded_blocks),
    Metric("fetched_blocks_total", "counter", "Blocks that came back for an admit.", lambda s: s.fetched_blocks),
    Metric("refused_calls_total", "counter", "Calls for which blocks were missing.", lambda s: s.refused_calls),
)
"""Those with one value each. `exposition` adds blocks by state, and what a `Reading` says."""


def exposition(
    stats: Stats,
    reading: Reading | None = None,
    *,
    prefix: str = "kvpager",
    labels: Mapping[str, str] | None = None,
    block_size: int | None = None,
) -> str:
    """The text. ``labels`` go with every sample (``model_name``, say); ValueError for names that Prometheus
    refuses, and for values that are no UTF-8; TypeError for a ``reading`` or ``labels`` that are none.

    With a ``block_size`` there is a sample of 1 whose labels are the sizes of the pool.
    """
    if not isinstance(reading, Reading | None):
        raise TypeError(f"reading must be a Reading, as Pressure.read() answers, not {type(reading).__name__}")
    if not isinstance(labels, Mapping | None):
        raise TypeError(f"labels must be a mapping of names to values, not {type(labels).__name__}")
    common = dict(labels or {})
    lines = [
        family(f"{prefix}_{name}", kind, text, [({}, value(stats))], labels=common)
        for name, kind, text, value in METRICS
    ]
    blocks = [
        ({"tier": tier, "state": state}, getattr(stats, f"{start}{state}_blocks"))
        for tier, start in (("device", ""), ("host", "host_"))
        for state in ("free", "cached", "active", "writing", "quarantined")
        if tier == "device" or stats.host_total_blocks
    ]
    lines.append(family(f"{prefix}_blocks", "gauge", "Blocks by tier and state.", blocks, labels=common))
    if block_size is not None:
        sizes = {"block_size": str(block_size), "num_gpu_blocks": str(stats.total_blocks)}
        lines.append(
            family(f"{prefix}_cache_config_info", "gauge", "1: its labels count.", [(sizes, 1)], labels=common)
        )
    if reading is not None:
        lines += _of_reading(reading, prefix, common)
    return "".join(lines)


def _of_reading(reading: Reading, prefix: str, labels: Mapping[str, str]) -> list[str]:
    states = [({"state": state}, float(state == reading.state)) for state in STATES]
    gauges = (
        ("pressure_score", "What the state is made of; thrashing begins at 1.", reading.score),
        ("recompute_tax", "Recomputed among computed tokens, over the window.", reading.tax),
        ("preemptions_per_finish", "Over the window.", reading.preemptions_per_finish),
        ("concurrency_advice", "So many running sequences would fit.", reading.concurrency),
    )
    return [
        family(f"{prefix}_pressure_state", "gauge", "1 for the state that the pool is in.", states, labels=labels),
        *(family(f"{prefix}_{name}", "gauge", text, [({}, value)], labels=labels) for name, text, value in gauges),
    ]


def family(name: str, kind: Kind, text: str, samples: Samples, *, labels: Mapping[str, str] | None = None) -> str:
    """One family of samples, each with labels of its own."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a metric: letters, digits, _ and :, no digit first")
    about = text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {about}\n# TYPE {name} {kind}\n"]
    for own, value in samples:
        lines.append(f"{name}{_labels({**(labels or {}), **own})} {_number(value)}\n")
    return "".join(lines)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = []
    for name, value in labels.items():
        if not _LABEL.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a label: letters, digits and _, no digit and no __ first")
        text = str(value)
        if _SURROGATE.search(text):
            raise ValueError(f"label {name} is {text[:80]!a}; it must be text that UTF-8 can hold")
        pairs.append(f'{name}="{text.translate(_ESCAPES)}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"

"""What a server says of itself: one or two scrapes in Prometheus' text format.

Read are the names of kvpager's own servers and of vLLM; others are passed over. Of several engines or models counts are
added up, and shares averaged.

| here | vLLM, and `Pager.metrics` | fields of kvpager's `Stats` |
|---|---|---|
| usage | `kv_cache_usage_perc` (older: `gpu_cache_usage_perc`) | active / total blocks |
| preemptions | `num_preemptions_total` | `preemptions` |
| waiting, running | `num_requests_waiting`, `num_requests_running` | `waiting`, `running` (the example server's) |
| queried, hit tokens | `prefix_cache_queries_total`, `prefix_cache_hits_total` | `queried_tokens`, `hit_tokens` |
| active, cached blocks | `blocks{tier="device",state="cached"}` (kvpager only) | `active_blocks`, `cached_blocks` |
| TTFT, ITL | `time_to_first_token_seconds`, `inter_token_latency_seconds` (vLLM only) | - |
| pool | labels `num_gpu_blocks`, `block_size` of `cache_config_info` | `total_blocks` |

Names of kvpager may begin with `kvpager_server_pager_`, `kvpager_server_`, `kvpager_` or `kvpager:`, and may end in
`_total`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import KvPagerError

MAX_BYTES = 2**26
MAX_BLOCKS = 2**31 - 1
# Nothing is given back, so that the time goes with the length whatever is in a line. OpenMetrics has fractions of a
# second, and exemplars behind a #.
SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*+)\s*+"
    r"(?:\{(?P<labels>(?:[^\"}]++|\"(?:\\.|[^\"\\]++)*+\")*+)\}\s*+)?+"
    r"(?P<value>(?<=[\s}])\S++)(?:\s++-?[0-9.]++)?+(?:\s++#.*+)?+"
)
LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+"((?:\\.|[^"\\]++)*+)"')
OWN = re.compile(r"kvpager(_server_pager_|_server_|_|:)(?P<rest>.*?)(_total)?")

SUMS = {
    "preemptions": (
        *("vllm:num_preemptions_total", "vllm:num_preemptions"),
        *("kvpager num_preemptions", "kvpager preemptions"),
    ),
    "waiting": ("vllm:num_requests_waiting", "kvpager waiting", "kvpager num_requests_waiting"),
    "running": ("vllm:num_requests_running", "kvpager running", "kvpager num_requests_running"),
    "queried_tokens": (
        *("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        *("vllm:prefix_cache_queries", "kvpager prefix_cache_queries", "kvpager queried_tokens"),
    ),
    "hit_tokens": (
        *("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        *("vllm:prefix_cache_hits", "kvpager prefix_cache_hits", "kvpager hit_tokens"),
    ),
    "active_blocks": ("kvpager active_blocks",),
    "cached_blocks": ("kvpager cached_blocks",),
    "total_blocks": ("kvpager total_blocks",),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_count": ("vllm:time_to_first_token_seconds_count",),
    "itl_s": ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
    "itl_count": ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
}
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "kvpager kv_cache_usage_perc")
BLOCKS = "kvpager blocks"
"""With labels: a sample for each tier and state."""
CONFIG = ("vllm:cache_config_info", "kvpager cache_config_info")
COUNTERS = ("preemptions", "queried_tokens", "hit_tokens", "ttft_s", "ttft_count", "itl_s", "itl_count")


class MetricsError(KvPagerError, ValueError):
    """A scrape cannot be read, or does not go with the other one."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look at a server; None for what it does not say."""

    path: str
    usage: float | None = None
    """Share of the pool that requests hold. Cached blocks nobody holds do not count."""
    preemptions: float | None = None
    waiting: float | None = None
    running: float | None = None
    queried_tokens: float | None = None
    hit_tokens: float | None = None
    active_blocks: float | None = None
    cached_blocks: float | None = None
    total_blocks: float | None = None
    ttft_s: float | None = None
    ttft_count: float | None = None
    itl_s: float | None = None
    itl_count: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    counter: str = "preemptions"
    """What the server calls its count of preemptions."""


@dataclass(frozen=True, slots=True)
class Server:
    """Two scrapes, the earlier one first, or one."""

    first: Scrape | None
    last: Scrape

    @property
    def preemptions(self) -> float | None:
        """Between the scrapes, or since the server's start where there is one."""
        return self._grown("preemptions")

    @property
    def hit_rate(self) -> float | None:
        return _ratio(self._grown("hit_tokens"), self._grown("queried_tokens"))

    @property
    def ttft_mean_s(self) -> float | None:
        return _ratio(self._grown("ttft_s"), self._grown("ttft_count"))

    @property
    def itl_mean_s(self) -> float | None:
        return _ratio(self._grown("itl_s"), self._grown("itl_count"))

    @property
    def cached_share(self) -> float | None:
        return _ratio(self.last.cached_blocks, self.last.total_blocks)

    def _grown(self, name: str) -> float | None:
        now = getattr(self.last, name)
        before = None if self.first is None else getattr(self.first, name)
        return None if now is None else float(now) - (before or 0.0)

    def on_preemptions(self) -> str:
        """The server's own numbers, as a sentence that goes on after another."""
        parts = []
        if self.preemptions is not None:
            since = "since its start" if self.first is None else "between the two scrapes"
            parts.append(f"{self.last.counter} grew by {self.preemptions:,.0f} {since}")
        if self.last.usage is not None:
            parts.append(f"usage is {self.last.usage:.0%}")
        for name, number in (("run", self.last.running), ("wait", self.last.waiting)):
            if number is not None:
                parts.append(f"{number:,.0f} {name}")
        if self.ttft_mean_s is not None:
            parts.append(f"the first token takes {self._from_to('ttft', 1, 's')}")
        if self.itl_mean_s is not None:
            parts.append(f"the next ones {self._from_to('itl', 1000, 'ms')}")
        return f" The server agrees: {', '.join(parts)}." if self.preemptions and parts else ""

    def _from_to(self, name: str, factor: float, unit: str) -> str:
        """A mean, and what it was before the first scrape."""
        now = getattr(self, f"{name}_mean_s")
        text = f"{factor * now:,.1f} {unit} on average"
        if self.first is None:
            return text
        before = _ratio(getattr(self.first, f"{name}_s"), getattr(self.first, f"{name}_count"))
        return text if before is None else f"{text} ({factor * before:,.1f} before)"

    def as_dict(self) -> dict[str, Any]:
        derived = ("preemptions", "hit_rate", "ttft_mean_s", "itl_mean_s", "cached_share")
        return {
            "scrapes": [asdict(scrape) for scrape in (self.first, self.last) if scrape is not None],
            **{name: getattr(self, name) for name in derived},
        }


def read_server(paths: Sequence[str | os.PathLike[str]]) -> Server:
    """One scrape, or two, the earlier one first."""
    scrapes = [read_scrape(path) for path in paths]
    if not 1 <= len(scrapes) <= 2:
        raise MetricsError(f"{len(scrapes)} scrapes: expected one, or two of the same server")
    if len(scrapes) == 1:
        return Server(None, scrapes[0])
    first, last = scrapes
    for name in COUNTERS:
        before, now = getattr(first, name), getattr(last, name)
        if before is not None and now is not None and now < before:
            raise MetricsError(
                f"{last.path}: {name} fell from {before:,.0f} to {now:,.0f}: the earlier scrape comes first, and"
                " between the two the server must not have been restarted"
            )
    return Server(first, last)


def read_scrape(path: str | os.PathLike[str]) -> Scrape:
    """Read one file; a MetricsError says what is wrong with it, or that it holds nothing that is known here."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MetricsError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise MetricsError(f"{name}: longer than {MAX_BYTES:,} bytes; is this a scrape?")
    try:
        return parse_scrape(content.decode("utf-8-sig"), name)
    except UnicodeDecodeError:
        raise MetricsError(f"{name}: not UTF-8 text; expected Prometheus' text format") from None


def parse_scrape(text: str, path: str = "scrape") -> Scrape:
    """Read the text of a scrape."""
    values: dict[str, list[float]] = {}
    called: dict[str, str] = {}
    labels: dict[str, str] = {}
    # Only a line feed ends a line: what else `splitlines` takes for an end may be in a label.
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = SAMPLE.fullmatch(line)
        value = None if found is None else _float(found["value"])
        if found is None or value is None:
            raise MetricsError(f"{path}, line {number}: expected `name{{labels}} value`, found {line[:40]!r}")
        own = dict(LABEL.findall(found["labels"] or ""))
        for known in known_names(found["name"], own):
            values.setdefault(known, []).append(value)
            called[known] = found["name"]
            if known in CONFIG:
                labels = own
    fields: dict[str, Any] = {}
    for field, names in SUMS.items():
        name = next((name for name in names if name in values), "")
        # What is no count at all is not known.
        if name and all(value >= 0 for value in values[name]) and math.isfinite(total := sum(values[name])):
            fields[field] = total
            if field == "preemptions":
                fields["counter"] = called[name]
    shares = next((values[name] for name in USAGE if name in values), None)
    if shares and all(0 <= share <= 1 for share in shares):
        fields["usage"] = sum(shares) / len(shares)
    elif fields.get("total_blocks") and fields.get("active_blocks", math.inf) <= fields["total_blocks"]:
        fields["usage"] = fields["active_blocks"] / fields["total_blocks"]
    if 1 <= fields.get("total_blocks", 0) <= MAX_BLOCKS:
        fields["num_blocks"] = int(fields["total_blocks"])
    for field, label in (("num_blocks", "num_gpu_blocks"), ("block_size", "block_size")):
        if re.fullmatch(r"[1-9][0-9]{0,8}", labels.get(label, "")):
            fields[field] = int(labels[label])
    if not fields:
        raise MetricsError(f"{path}: holds no metric that is known here (those of kvpager's servers and of vLLM are)")
    return Scrape(path, **fields)


def known_names(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    """What a sample counts as."""
    own = OWN.fullmatch(name)
    known = name if own is None else f"kvpager {own['rest']}"
    if known != BLOCKS:
        return (known,)
    on_device = labels.get("tier", "device") == "device"
    return (f"kvpager {labels.get('state')}_blocks", "kvpager total_blocks") if on_device else ()


def _float(text: str) -> float | None:
    """A number as Go writes it; Python would read more."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None

"""Swap or recompute, fetch or recompute: what each costs, in seconds.

    seconds to swap      = blocks out x block's time + blocks back x block's time
    a block's time       = its bytes / link bandwidth + pieces x latency of a piece
    seconds to recompute = (a x tokens + b x pairs + c x cached tokens) / (1 - load)

`a` is the linear part of a prefill, `b` attention's: each token meets each one before it, and itself. `c` is 0 but for
MLA. They come from `ModelShape` and `Device`, or from `CostModel.calibrate`. The choice between the two ways is that of
Kwon et al. 2023 (vLLM, arXiv 2309.06180, section 4.5); that paper measured it, this computes it.

What the pager moves is what its rules say (docs/design/rules.md, 16.5): whole blocks; out what the host lacks, back
what the device no longer has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

from ..errors import ConfigError
from .checks import at_least, number
from .crossing import last_negative
from .devices import Device, Link, parse_device, parse_link
from .fit import fit
from .shapes import DTYPE_BYTES, MODELS, Dtype, ModelShape, pairs, span

Way = Literal["swap", "fetch"]
MAX_TOKENS = 2**31 - 1
"""Tokens of the longest sequence that break-evens look at, and the answer of `fetch_min_tokens` for never."""


class Rates(NamedTuple):
    """Seconds of a prefill on one rank of an idle device, as measured: the coefficients of `CostModel.calibrate`."""

    seconds_per_token: float
    seconds_per_pair: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What is cheaper, and by how much."""

    action: Literal["swap", "fetch", "recompute"]
    move_seconds: float
    """Of the swap, out and back, or of the fetch."""
    recompute_seconds: float
    move_bytes: float
    """Over one rank's link."""
    break_even_tokens: int | None
    """Tokens behind the cached ones from which on moving is never dearer; 1: always; None: never."""

    @property
    def margin_seconds(self) -> float:
        """What the action saves against the other one."""
        return abs(self.move_seconds - self.recompute_seconds)


class Positions(Protocol):
    """What `should_swap` reads of a sequence: `kvpager.Sequence` has it."""

    @property
    def num_committed(self) -> int: ...
    @property
    def num_cached(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds to move and to recompute the KV of one sequence. A value: ``dataclasses.replace`` makes a variant.

    >>> model = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
    >>> decision = model.preempt(4000)
    >>> decision.action, round(1000 * decision.move_seconds), round(1000 * decision.recompute_seconds)
    ('swap', 42, 93)
    """

    shape: ModelShape
    device: Device
    link: Link
    block_size: int = 16
    dtype: Dtype = "bf16"
    """What the matrices compute in, which need not be the type of the KV."""
    load: float = 0.0
    """Share of the device that others use meanwhile, 0 to below 1: a recompute takes 1 / (1 - load) as long. Calls
    that take ``load`` override it."""
    ranks: int = 1
    """Tensor-parallel devices: each computes its share and moves its KV over a link of its own, at the same time."""
    pieces_per_block: int = 1
    """Copies that move one block: 1 if a block's bytes lie together on both sides, twice the layers if each layer's
    keys and values are arrays of their own and nothing gathers them."""
    alone: bool = False
    """True: a prefill runs in a step of its own and reads all weights for itself, so it takes at least as long as
    that. False: it rides in a step that reads them anyway."""
    rates: Rates | None = None
    """Measured, in place of what shape and device predict."""

    def __post_init__(self) -> None:
        for name in ("block_size", "ranks", "pieces_per_block"):
            at_least(1, name, getattr(self, name))
        number("load", self.load, least=0, below=1)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
        if self.dtype == "fp8" and self.device.fp8_flops is None:
            raise ConfigError(f"device {self.device.name} has no fp8: compute in bf16")
        if self.rates is not None:
            for name, value in self.rates._asdict().items():
                number(name, value, least=0)
            if not any(self.rates):
                raise ConfigError("both rates are 0: a prefill takes time")

    @classmethod
    def of(cls, model: str | ModelShape, device: str | Device, link: str | Link, **options: Any) -> Self:
        """By name, or by value: ``CostModel.of("llama-3.1-8b", "h100", "25GB/s", load=0.5)``."""
        if isinstance(model, str):
            if model.lower() not in MODELS:
                raise ConfigError(f"model {model!r}: expected one of {', '.join(MODELS)}, or a ModelShape")
            model = MODELS[model.lower()]
        device = parse_device(device) if isinstance(device, str) else device
        link = parse_link(link) if isinstance(link, str) else link
        return cls(shape=model, device=device, link=link, **options)

    # What one token, one pair, one block takes.

    @property
    def flops_per_second(self) -> float:
        """What all ranks together reach in a prefill."""
        peak = self.device.fp8_flops if self.dtype == "fp8" else self.device.bf16_flops
        assert peak is not None
        return peak * self.device.utilisation * self.ranks

    @property
    def seconds_per_token(self) -> float:
        """`a`: the linear part."""
        if self.rates is not None:
            return self.rates.seconds_per_token
        return self.shape.flops_per_token / self.flops_per_second

    @property
    def seconds_per_pair(self) -> float:
        """`b`: attention's part."""
        if self.rates is not None:
            return self.rates.seconds_per_pair
        return self.shape.flops_per_pair / self.flops_per_second

    @property
    def seconds_per_cached_token(self) -> float:
        """`c`: what MLA expands again. It keeps its proportion to the linear part when that was measured."""
        return self.seconds_per_token * self._expanded

    @property
    def _expanded(self) -> float:
        return self.shape.flops_per_cached_token / self.shape.flops_per_token

    @property
    def least_prefill_seconds(self) -> float:
        """Of a prefill that runs alone: one look at every weight."""
        if not self.alone or self.device.bytes_per_second is None:
            return 0.0
        return self.shape.params * DTYPE_BYTES[self.dtype] / (self.device.bytes_per_second * self.ranks)

    @property
    def bytes_per_block(self) -> float:
        """One rank's bytes of a block. MLA keeps the whole vector on every rank."""
        shares = 1 if self.shape.latent is not None else min(self.ranks, self.shape.kv_heads)
        return self.block_size * self.shape.kv_bytes_per_token / shares

    def block_seconds(self, link: Link | None = None) -> float:
        """One block, one way."""
        link = link or self.link
        return self.bytes_per_block / link.bytes_per_second + self.pieces_per_block * link.seconds_per_piece

    # What a sequence takes.

    def prefill_seconds(self, start: int, end: int, *, load: float | None = None) -> float:
        """Computing tokens [start, end) behind ``start`` cached ones."""
        span(start, end)
        return self._prefill(start, end, self._share(load))

    def attention_seconds(self, start: int, end: int, *, load: float | None = None) -> float:
        """What of `prefill_seconds` is attention, the part that grows with the square."""
        span(start, end)
        return self.seconds_per_pair * pairs(start, end) / self._share(load)

    def swap_seconds(self, num_tokens: int, *, num_cached: int = 0, num_host_tokens: int = 0) -> float:
        """Out and back of the first ``num_tokens`` tokens; see `preempt`."""
        self._within(num_tokens, num_cached, num_host_tokens)
        return self._blocks("swap", num_cached, num_tokens, num_host_tokens) * self.block_seconds()

    def fetch_seconds(self, start: int, end: int, *, link: Link | None = None) -> float:
        """Tokens [start, end) from the tier behind ``link``, one way."""
        span(start, end)
        return self._blocks("fetch", start, end) * self.block_seconds(link)

    def preempt(
        self, num_tokens: int, *, num_cached: int = 0, num_host_tokens: int = 0, load: float | None = None
    ) -> Decision:
        """How to make room by a sequence with ``num_tokens`` computed tokens: swap it out and back, or compute again.

        The first ``num_cached`` tokens will still be cached on the device when it comes back (others hold them, say):
        they are neither computed again nor copied back. The first ``num_host_tokens`` are on the host already and are
        not copied out. ``load`` is what the device does for others when the sequence comes back.
        """
        self._within(num_tokens, num_cached, num_host_tokens)
        return self._decide("swap", num_cached, num_tokens, num_host_tokens, self.link, self._share(load))

    def fetch(self, start: int, end: int, *, link: Link | None = None, load: float | None = None) -> Decision:
        """A hit on a lower tier: fetch tokens [start, end) over ``link`` (the model's by default), or compute them."""
        span(start, end)
        return self._decide("fetch", start, end, 0, link or self.link, self._share(load))

    def break_even_tokens(
        self,
        way: Way = "swap",
        *,
        start: int = 0,
        num_host_tokens: int = 0,
        link: Link | None = None,
        load: float | None = None,
    ) -> int | None:
        """The least number of tokens behind ``start`` cached ones from which on moving is never dearer than computing.

        1: it never is. None: it still is at `MAX_TOKENS`. Exact, blocks that are moved whole included: at one token
        less, computing is cheaper. Where attention is slow to weigh in, this is where it does.
        """
        if way not in ("swap", "fetch"):
            raise ConfigError(f"way is {way!r}; expected swap or fetch")
        at_least(0, "start", start)
        at_least(0, "num_host_tokens", num_host_tokens)
        return self._break_even(way, start, num_host_tokens, link or self.link, self._share(load))

    # The policy: answers that admission and preemption can use as they are.

    def fetch_min_tokens(
        self,
        link: Link | None = None,
        *,
        start: int = 0,
        block_size: int | None = None,
        load: float | None = None,
    ) -> int:
        """For ``admit(..., fetch=True, fetch_min_tokens=...)``: fewer tokens are computed rather than fetched.

        ``start``: tokens that the device has (`match` knows), 0 if you do not ask. `MAX_TOKENS` if fetching never pays.
        """
        model = self if block_size is None else replace(self, block_size=block_size)
        found = model.break_even_tokens("fetch", start=start, link=link, load=load)
        return MAX_TOKENS if found is None else found

    def should_fetch(
        self, num_device_tokens: int, num_host_tokens: int, *, link: Link | None = None, load: float | None = None
    ) -> bool:
        """Whether a hit is worth its copy: the two numbers of `kvpager.PrefixMatch` (host tokens behind the device's).

        A few microseconds; `fetch` says more and takes longer.
        """
        start = at_least(0, "num_device_tokens", num_device_tokens)
        end = start + at_least(0, "num_host_tokens", num_host_tokens)
        move = self._blocks("fetch", start, end) * self.block_seconds(link)
        return end > start and move <= self._prefill(start, end, self._share(load))

    def should_swap(
        self, sequence: Positions, *, num_cached: int | None = None, num_host_tokens: int = 0, load: float | None = None
    ) -> bool:
        """Whether ``swap_out`` beats ``preempt`` for this victim.

        What it found cached when it was admitted (its ``num_cached``) is taken to stay cached, since others share it;
        ``num_cached=0`` says that nothing will. What of it is on the host the sequence does not know: the caller may.
        """
        num_tokens = sequence.num_committed
        cached = min(sequence.num_cached if num_cached is None else num_cached, num_tokens)
        move = self.swap_seconds(num_tokens, num_cached=cached, num_host_tokens=min(num_host_tokens, num_tokens))
        return num_tokens > cached and move <= self._prefill(cached, num_tokens, self._share(load))

    # Measured in place of predicted.

    def calibrate(self, points: Iterable[tuple[int, int, float]], *, load: float = 0.0) -> Self:
        """The model with its prefill fitted to measured ``(start, tokens, seconds)``.

        Least squares of the relative errors over `a` and `b`, neither below 0 (`c` keeps its proportion to `a`). Two
        points at least, and of different lengths or starts, so that the two parts can be told apart: a short one and
        one as long as your prompts get. ``load``: what the device did for others while they were measured. The points
        hold for as many ranks as the model has.
        """
        share = 1 - number("load", load, least=0, below=1)
        rows = []
        for point in points:
            if len(point) != 3:
                raise ConfigError(f"point {point!r}: expected (start, tokens, seconds)")
            start, tokens = at_least(0, "start", point[0]), at_least(1, "tokens", point[1])
            seconds = number("seconds", point[2], above=0) * share
            rows.append((tokens + self._expanded * start, float(pairs(start, start + tokens)), seconds))
        return replace(self, rates=Rates(*fit(rows)))

    def calibrate_run(
        self,
        prefill: Callable[[int, int], object],
        lengths: Iterable[tuple[int, int]],
        *,
        repeats: int = 3,
        load: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """`calibrate` with points measured here: ``prefill(start, tokens)`` is run for each of ``lengths``.

        It has to return when the device is done. Each is run once to warm up, then ``repeats`` times; the fastest
        counts.
        """
        at_least(1, "repeats", repeats)
        points = []
        for start, tokens in lengths:
            prefill(start, tokens)
            fastest = math.inf
            for _ in range(repeats):
                began = clock()
                prefill(start, tokens)
                fastest = min(fastest, clock() - began)
            points.append((start, tokens, fastest))
        return self.calibrate(points, load=load)

    # Unchecked.

    def _share(self, load: float | None) -> float:
        """What is left of the device."""
        return 1 - (self.load if load is None else number("load", load, least=0, below=1))

    def _within(self, num_tokens: int, num_cached: int, num_host_tokens: int) -> None:
        at_least(0, "num_tokens", num_tokens)
        for name, value in (("num_cached", num_cached), ("num_host_tokens", num_host_tokens)):
            if at_least(0, name, value) > num_tokens:
                raise ConfigError(f"{name} is {value}, but the sequence has {num_tokens} tokens")

    def _prefill(self, start: int, end: int, share: float) -> float:
        if start == end:
            return 0.0
        a = self.seconds_per_token
        seconds = a * (end - start) + self.seconds_per_pair * pairs(start, end) + a * self._expanded * start
        return max(seconds, self.least_prefill_seconds) / share

    def _blocks(self, way: Way, start: int, end: int, num_host_tokens: int = 0) -> int:
        """Blocks that move, out and back counted singly."""
        size = self.block_size
        blocks = -(-end // size)
        back = max(0, blocks - start // size)
        return back if way == "fetch" else back + max(0, blocks - num_host_tokens // size)

    def _decide(self, way: Way, start: int, end: int, host: int, link: Link, share: float) -> Decision:
        blocks = self._blocks(way, start, end, host)
        move, recompute = blocks * self.block_seconds(link), self._prefill(start, end, share)
        return Decision(
            action=way if end > start and move <= recompute else "recompute",
            move_seconds=move,
            recompute_seconds=recompute,
            move_bytes=blocks * self.bytes_per_block,
            break_even_tokens=self._break_even(way, start, host, link, share),
        )

    def _break_even(self, way: Way, start: int, host: int, link: Link, share: float) -> int | None:
        """The end of the longest sequence that is cheaper to compute, and one more.

        A block's copy is due with its first token, so within a block computing only gets dearer against it, and only
        first tokens need looking at. Over them the difference is convex, from the last block on the host on and up to
        it: `last_negative` finds the end of the part below 0 in some sixty looks.
        """
        size, block = self.block_size, self.block_seconds(link)

        def saved(end: int) -> float:
            return self._prefill(start, end, share) - self._blocks(way, start, end, host) * block

        def saved_by_first(number: int) -> float:
            return saved(max(start, number * size) + 1)

        first, kink, last = start // size, host // size - 1, (MAX_TOKENS - 1) // size
        found = last_negative(saved_by_first, max(first, kink), last)
        if found is None and kink > first:
            found = last_negative(saved_by_first, first, kink)
        if found is None:
            return 1
        end = last_negative(saved, max(start, found * size) + 1, min((found + 1) * size, MAX_TOKENS))
        assert end is not None
        return None if end == MAX_TOKENS else end + 1 - start

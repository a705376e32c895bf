"""Devices that compute and links that move bytes: tables, and words such as ``25GB/s``.

Peaks are those of dense matrices, as the makers print them. What prefill reaches of them is `UTILISATION` unless you
say better: an assumption, to be replaced by `CostModel.calibrate` with a few points that you measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError
from .checks import number

UTILISATION = 0.65
"""Share of the dense peak that a prefill reaches. An assumption between two public numbers: the best attention kernel
reaches 0.75 on an H100 (FlashAttention-3, arXiv 2407.08608), and "How to Scale Your Model" (Austin et al. 2025, part 8)
reckons with 0.4 for a whole prefill on TPUs."""

COPY_SHARE = 0.8
"""Share of a PCIe link's wire speed that large copies from pinned memory reach. An assumption: it makes the usual
25 GB/s of PCIe 4.0 x16 out of 31.5."""


@dataclass(frozen=True, slots=True)
class Device:
    """What computes: one of them, however many ranks there are."""

    name: str
    bf16_flops: float
    """Operations a second of dense bf16 matrices, a multiplication and an addition counted as two."""
    fp8_flops: float | None
    """The same for fp8; None where the device has none."""
    bytes_per_second: float | None
    """Bandwidth of its own memory; None where that is never in the way."""
    utilisation: float = UTILISATION
    """Share of the peak that prefill reaches."""
    source: str = ""

    def __post_init__(self) -> None:
        number("bf16_flops", self.bf16_flops, above=0)
        if self.fp8_flops is not None:
            number("fp8_flops", self.fp8_flops, above=0)
        if self.bytes_per_second is not None:
            number("bytes_per_second", self.bytes_per_second, above=0)
        if number("utilisation", self.utilisation, above=0) > 1:
            raise ConfigError(f"utilisation is {self.utilisation}; it is a share of the peak, at most 1")


@dataclass(frozen=True, slots=True)
class Link:
    """What moves blocks between the device and a tier, the same speed either way.

    Out and back do not overlap, so one direction's bandwidth counts. ``seconds_per_piece`` is what each piece costs
    beside its bytes: 0 in the table, since a mover that keeps many pieces in flight hides it. Where yours does not, or
    on the way to a disk or another machine, say what you measured.
    """

    name: str
    bytes_per_second: float
    seconds_per_piece: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        number("bytes_per_second", self.bytes_per_second, above=0)
        number("seconds_per_piece", self.seconds_per_piece, least=0)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 312e12, None, 2.039e12, source="NVIDIA A100 80GB SXM datasheet"),
        Device("h100", 989.4e12, 1978.9e12, 3.35e12, source="NVIDIA H100 SXM5 datasheet, without sparsity"),
        Device("h200", 989.4e12, 1978.9e12, 4.8e12, source="NVIDIA H200 SXM datasheet, without sparsity"),
        Device("b200", 2250e12, 4500e12, 8e12, source="NVIDIA DGX B200 datasheet, one of eight, without sparsity"),
        Device("l40s", 362.05e12, 733e12, 0.864e12, source="NVIDIA L40S datasheet, without sparsity"),
        Device("mi300x", 1307.4e12, 2614.9e12, 5.3e12, source="AMD Instinct MI300X datasheet, without sparsity"),
    )
}

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("pcie3", COPY_SHARE * 15.75e9, source="PCIe 3.0 x16: 8 GT/s x 16 x 128/130, 80% reached (assumed)"),
        Link("pcie4", COPY_SHARE * 31.51e9, source="PCIe 4.0 x16: 16 GT/s x 16 x 128/130, 80% reached (assumed)"),
        Link("pcie5", COPY_SHARE * 63.02e9, source="PCIe 5.0 x16: 32 GT/s x 16 x 128/130, 80% reached (assumed)"),
        Link("nvlink-c2c", 450e9, source="NVIDIA GH200 datasheet: 900 GB/s, both directions together"),
        Link("nvme", COPY_SHARE * 7.88e9, source="a disk on PCIe 4.0 x4: 16 GT/s x 4 x 128/130, 80% reached (assumed)"),
        Link("100gbe", 12.5e9, source="Ethernet, 100 Gbit/s on the wire"),
        Link("25gbe", 3.125e9, source="Ethernet, 25 Gbit/s on the wire"),
    )
}

_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_NUMBER = r"(?P<number>[0-9]{1,15}(\.[0-9]{1,15})?)\s*"
_BYTES = re.compile(_NUMBER + r"(?P<scale>[kmgt]i?|)(?P<unit>b|bit)/s", re.IGNORECASE)
_FLOPS = re.compile(_NUMBER + r"(?P<scale>[gtp])flops?(/s)?", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(?P<scale>ns|us|µs|ms|s)")
_SECONDS_OF = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str, seconds_per_piece: float | None = None) -> Link:
    """A name of `LINKS`, or a speed: ``25GB/s``, ``24 GiB/s``, ``100Gbit/s``. A ConfigError lists what there is.

    ``seconds_per_piece`` overrides what the name has.

    >>> parse_link("100Gbit/s").bytes_per_second
    12500000000.0
    """
    known = LINKS.get(text.strip().lower())
    found = _BYTES.fullmatch(text.strip())
    if known is not None:
        name, speed, latency, source = known.name, known.bytes_per_second, known.seconds_per_piece, known.source
    elif found is not None:
        scale = found["scale"].lower()
        speed = float(found["number"]) * (_SCALE[scale] if scale in _SCALE else _BINARY[scale])
        speed /= 8 if found["unit"].lower() == "bit" else 1
        name, latency, source = text.strip(), 0.0, "given"
    else:
        raise ConfigError(f"link {text.strip()!r}: expected one of {', '.join(LINKS)}, or a speed such as 25GB/s")
    return Link(name, speed, latency if seconds_per_piece is None else seconds_per_piece, source)


def parse_device(text: str) -> Device:
    """A name of `DEVICES`, or a peak: ``400TFLOP/s``, of any type, with a memory that is never in the way.

    A ConfigError lists what there is.
    """
    if (known := DEVICES.get(text.strip().lower())) is not None:
        return known
    if (found := _FLOPS.fullmatch(text.strip())) is None:
        known_names = ", ".join(DEVICES)
        raise ConfigError(f"device {text.strip()!r}: expected one of {known_names}, or a peak such as 400TFLOP/s")
    peak = float(found["number"]) * _SCALE[found["scale"].lower()]
    return Device(text.strip(), peak, peak, None, source="given")


def parse_seconds(text: str) -> float:
    """``10us`` -> 1e-05."""
    if (found := _SECONDS.fullmatch(text.strip())) is None:
        raise ConfigError(f"time {text.strip()!r}: expected seconds with a unit, such as 10us, 0.5ms or 2s")
    return float(found["number"]) * _SECONDS_OF[found["scale"]]

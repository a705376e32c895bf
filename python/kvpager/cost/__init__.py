"""Swap or recompute, fetch or recompute: what each costs on your model, device and link.

    from kvpager.cost import CostModel

    model = CostModel.of("llama-3.1-8b", "h100", "25GB/s", load=0.5)
    model.preempt(len(victim), num_cached=victim.num_cached)         # a Decision: action, seconds of each, break-even
    pager.admit(prompt, fetch=True, fetch_min_tokens=model.fetch_min_tokens())
    if model.should_swap(victim):
        carry_out(victim.swap_out())
    else:
        victim.preempt()

`shapes` counts what a model keeps and computes, `devices` has the hardware, `model` compares; `step` says how long a
step takes, and how many prompt tokens fit into one. Predictions are as good as their assumptions; `CostModel.calibrate`
replaces the largest of them by a few points that you measured. The pager itself never asks: which of two ways to take
is the caller's policy.
"""

from .devices import DEVICES, LINKS, UTILISATION, Device, Link, parse_device, parse_link, parse_seconds
from .model import MAX_TOKENS, CostModel, Decision, Positions, Rates, Way
from .shapes import DTYPE_BYTES, MODELS, Dtype, Experts, Latent, ModelShape, read_config
from .step import OVERHEAD_S, Speed, Work

__all__ = [
    "DEVICES",
    "DTYPE_BYTES",
    "LINKS",
    "MAX_TOKENS",
    "MODELS",
    "OVERHEAD_S",
    "UTILISATION",
    "CostModel",
    "Decision",
    "Device",
    "Dtype",
    "Experts",
    "Latent",
    "Link",
    "ModelShape",
    "Positions",
    "Rates",
    "Speed",
    "Way",
    "Work",
    "parse_device",
    "parse_link",
    "parse_seconds",
    "read_config",
]

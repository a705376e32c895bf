"""What a diagnosis is made of: findings with their evidence, and what was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .case import Measures, Setting

Severity = Literal["high", "medium", "low"]
State = Literal["found", "nothing found", "not looked at"]

KINDS = ("varying-front", "block-size", "thrashing", "limit", "scan", "cache-as-free")
"""What is looked for, in this order."""
HIGH, MEDIUM = 0.10, 0.02


@dataclass(frozen=True, slots=True)
class Effect:
    """The same requests without the change and with it."""

    before: Measures
    after: Measures

    @property
    def saved_share(self) -> float:
        """Of the tokens that are computed now, those that need not be: what findings are ordered by."""
        return 1 - self.after.computed_tokens / self.before.computed_tokens if self.before.computed_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"saved_share": self.saved_share, "before": asdict(self.before), "after": asdict(self.after)}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, the numbers that say so, what to change, and what a replay made of the change."""

    kind: str
    text: str
    """The evidence in words."""
    numbers: dict[str, Any]
    """The evidence as numbers."""
    change: str
    base: Setting
    """What the effect is measured against: as it is, but where another change has to come first."""
    setting: Setting
    """The same with this change."""
    effect: Effect
    also: dict[str, Setting] = field(default_factory=dict)
    """Other ways to the same end, by name."""

    @property
    def severity(self) -> Severity:
        share = self.effect.saved_share
        return "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "severity": self.severity,
            "text": self.text,
            "numbers": self.numbers,
            "change": self.change,
            "base": asdict(self.base),
            "setting": asdict(self.setting),
            "effect": self.effect.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Look:
    """One thing that was looked for, and what came of it."""

    kind: str
    state: State
    text: str


def nothing(kind: str, text: str) -> Look:
    return Look(kind, "nothing found", text)


def unseen(kind: str, text: str) -> Look:
    return Look(kind, "not looked at", text)

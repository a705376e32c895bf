"""Whom to let in: searches for the watermark and the limit with which nobody is preempted; and who needs none."""

from __future__ import annotations

from dataclasses import replace

from ..simulate import Adaptive
from .case import Case, Setting

RISK = Adaptive().risk
"""What `kvpager.Admission` takes unless told otherwise."""
MAX_RUNNING = 256
"""A limit that is none, unless there was a higher one."""
WATERMARKS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def watermark_that_stops(case: Case, setting: Setting) -> Setting | None:
    """The smallest of some watermarks with which nobody is preempted."""
    tried = (replace(setting, watermark=share) for share in WATERMARKS if share > setting.watermark)
    return next((one for one in tried if not case.preempts(one)), None)


def limit_that_stops(case: Case, setting: Setting) -> Setting:
    """A limit with which nobody is preempted while one more has somebody preempted. One alone never is."""
    return _between(case, setting, 1, min(setting.max_running, case.blocks(setting)))


def limit_with_room(case: Case, setting: Setting) -> Setting:
    """A higher limit where this one leaves room: up to four times as many, still without anybody preempted."""
    most = min(4 * setting.max_running, case.blocks(setting), case.trace.num_requests)
    if most <= setting.max_running or case.preempts(setting):
        return setting
    highest = replace(setting, max_running=most)
    return _between(case, setting, setting.max_running, most) if case.preempts(highest) else highest


def _between(case: Case, setting: Setting, fits: int, too_many: int) -> Setting:
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if case.preempts(replace(setting, max_running=middle)):
            too_many = middle
        else:
            fits = middle
    return replace(setting, max_running=fits)


def controlled(setting: Setting) -> Setting:
    """`kvpager.Admission` in place of limit and watermark: it has no number to find."""
    return replace(setting, risk=RISK, watermark=0.0, max_running=max(setting.max_running, MAX_RUNNING))


def best_that_stops(case: Case, setting: Setting) -> Setting:
    """Of the two the one that is through first."""
    settings = [one for one in (watermark_that_stops(case, setting), limit_that_stops(case, setting)) if one]
    return min(settings, key=lambda one: case.run(one).seconds)

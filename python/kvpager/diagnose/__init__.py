"""What is wrong with a load and the engine that serves it, with evidence from the load itself, and what to change.

    from kvpager.cost import CostModel
    from kvpager.diagnose import Case, diagnose
    from kvpager.simulate import Speed
    from kvpager.traces import read_trace

    speed = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
    case = Case(read_trace("trace.jsonl"), block_size=128, num_blocks=700, speed=speed, max_running=64)
    for finding in diagnose(case).findings:
        print(finding.kind, finding.text, finding.change)

A finding is a function of one file that looks at a `Case` and answers with a `Finding`, or with a `Look` that says why
there is none. It counts as one only if a run of the same requests with its change comes out better; `Finding.effect` is
that run beside the one without. `case` says how runs are made, `report` in which order things are looked at.
"""

from .case import Case, Measures, Setting
from .finding import KINDS, Effect, Finding, Look
from .metrics import MetricsError, Scrape, Server, parse_scrape, read_scrape, read_server
from .report import Diagnosis, Row, diagnose
from .shared_text import Group, moved_behind, varying_fronts

__all__ = [
    "KINDS",
    "Case",
    "Diagnosis",
    "Effect",
    "Finding",
    "Group",
    "Look",
    "Measures",
    "MetricsError",
    "Row",
    "Scrape",
    "Server",
    "Setting",
    "diagnose",
    "moved_behind",
    "parse_scrape",
    "read_scrape",
    "read_server",
    "varying_fronts",
]

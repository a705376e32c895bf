"""Request traces: one JSON object a line, plain, gzip or xz, read into numpy columns and checked on the way.

A trace comes in one of three forms; its first request decides which, and a file holds one form only:

- *ids*: `hash_ids` names the prompt's blocks. Ids are chained: equal ids mean equal tokens up to and including that
  block. The id of a partial last block may be there or not; a partial block is never shared, so it is not kept.
- *tokens*: `tokens` is the prompt itself, `output_tokens` the answer where it is known.
- *lengths*: neither. All prompts differ, nothing can hit; such a trace asks only about load.

Whatever is wrong with a file ends in one `TraceError` that names the file, the line, the field and what was found. A
reader that guessed would make a replay count something else than the file says.
"""

from .columns import Ragged, Trace, read_trace
from .reading import Form, Progress, Request, TraceError, iter_requests
from .writing import TokenRequest, check_target, write_trace

__all__ = [
    "Form",
    "Progress",
    "Ragged",
    "Request",
    "TokenRequest",
    "Trace",
    "TraceError",
    "check_target",
    "iter_requests",
    "read_trace",
    "write_trace",
]

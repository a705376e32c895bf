"""What each call costs, measured: the operations, the floors they are held against, and the table of goals.

`kvpager bench` prints this table. The operations can be taken one by one, for other harnesses:

    from kvpager.benchmarks import OPERATIONS, Subject, best_ns

    subject = Subject.core()
    print(best_ns(OPERATIONS["hit_8k"](subject)))
"""

from .measure import Operation, best_ns, floors
from .operations import OPERATIONS, Settings, Subject
from .rss import bytes_per_cached_block
from .table import ROWS, Row, measure_rows

__all__ = [
    "OPERATIONS",
    "ROWS",
    "Operation",
    "Row",
    "Settings",
    "Subject",
    "best_ns",
    "bytes_per_cached_block",
    "floors",
    "measure_rows",
]

"""The pager in plain Python: the specification, the oracle of the random tests, and the baseline of the benches.

It has the API of :mod:`kvpager` and follows ``docs/design/rules.md`` word by word, block by block, with dictionaries
and lists. The compiled core must give the same block ids, numbers and errors. Unlike the core it is meant for one
thread, and ``dump``, ``check``, ``reset`` and ``forget`` walk everything there is.

>>> from kvpager import reference
>>> pager = reference.Pager(num_blocks=8, block_size=4)
>>> with pager.admit([1, 2, 3, 4, 5]) as first:
...     first.commit()
>>> second = pager.admit([1, 2, 3, 4, 9])
>>> second.num_cached, second.block_ids.tolist()
(4, [0, 1])
>>> second.release()
"""

from .batch import Batch
from .pager import Pager
from .sequence import Sequence
from .step import Step

__all__ = ["Batch", "Pager", "Sequence", "Step"]

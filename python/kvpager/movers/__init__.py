"""Movers: they copy the blocks that a plan names, and never touch the pager.

The pager plans, a mover copies, and the caller tells the pager what the mover says::

    plan = ...                                     # the pager's: which blocks go where
    ticket = mover.submit(plan, after=...)         # starts once the compute work before it is done
    for ticket in mover.poll():                    # every loop: what has ended
        if ticket.state == "done":
            pager.complete(ticket.plan)
        else:
            pager.fail(ticket.plan, done=ticket.done)

A pool is arrays and the axis that counts blocks (:class:`NumpyPool`, :class:`CupyPool`), the host's side one mapping
with a record a block (:class:`HostArena`). :class:`NumpyMover` copies in host memory; :class:`CupyMover` between a GPU
and pinned host memory, with cupy and without torch. :class:`Mover` is what to write for any other device, and
``kvpager.testing.FakeMover`` what to test a server's ordering with.
"""

from ..plans import Plan, PlanKind, Tier
from .arena import HostArena
from .base import Mover, Ticket, TicketState
from .cupy_mover import CupyMover
from .cupy_pool import CupyPool
from .layout import Layout, Share
from .memory import Memory, describe
from .numpy_mover import NumpyMover, NumpyPool

__all__ = [
    "CupyMover",
    "CupyPool",
    "HostArena",
    "Layout",
    "Memory",
    "Mover",
    "NumpyMover",
    "NumpyPool",
    "Plan",
    "PlanKind",
    "Share",
    "Ticket",
    "TicketState",
    "Tier",
    "describe",
]

"""Stand-ins for tests of a server that embeds kvpager, none of which needs a GPU."""

from .fake_mover import FakeAfter, FakeMover
from .streams import FakeEvent, FakeStream

__all__ = ["FakeAfter", "FakeEvent", "FakeMover", "FakeStream"]

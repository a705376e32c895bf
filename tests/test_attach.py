"""Tiers that are attached to a pager hear of what they have to drop."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from implementations import admit_committed, cache, nothing_changes, refuses
from tiers import each_with_store

from kvpager import ConfigError, TokenError

pytestmark = each_with_store


class Tier:
    """Notes what it hears, and how much the pager had cached by then."""

    def __init__(self, pager):
        self.pager = pager
        self.heard = []

    def on_reset(self):
        self.heard.append(("reset", self.pager.stats().cached_blocks))

    def on_forget(self, tokens, namespace):
        self.heard.append((list(tokens), namespace, self.pager.stats().cached_blocks))


def test_it_hears_of_each_forget_when_that_is_done(implementation):
    """Whether the pager had something of it or not: the store may have it."""
    pager = implementation(8, 4)
    tier = Tier(pager)
    with nothing_changes(pager):
        pager.attach(tier)
    cache(pager, [1] * 9)
    assert pager.forget([1] * 8) == 1
    assert pager.forget(np.full(4, 7), namespace=(("tenant", b"a"),)) == 0
    assert tier.heard == [([1] * 8, b"", 1), ([7] * 4, (("tenant", b"a"),), 1)]


def test_it_hears_of_a_reset_that_leaves_the_identity_as_it_is(implementation):
    pager = implementation(8, 4, identity=b"old")
    tier = Tier(pager)
    pager.attach(tier)
    for identity, times in ((None, 1), (b"old", 2), (b"new", 2), (b"new", 3), (b"", 3)):
        cache(pager, [1] * 5)
        pager.reset(identity)
        assert tier.heard == [("reset", 0)] * times


def test_it_hears_nothing_of_what_is_refused(implementation):
    pager = implementation(8, 4)
    tier = Tier(pager)
    pager.attach(tier)
    for call, error in (
        (lambda: pager.forget([1] * 3), ValueError),
        (lambda: pager.forget([-1] * 4), TokenError),
        (lambda: pager.forget([1] * 4, namespace="text"), TypeError),
        (lambda: pager.reset("text"), TypeError),
        (lambda: pager.reset(bytes(65_537)), ConfigError),
    ):
        with refuses(error):
            call()
    assert tier.heard == []


def test_what_it_raises_comes_through_and_all_is_done(implementation):
    class Broken(Tier):
        def on_reset(self):
            raise OSError("the disk is gone")

        def on_forget(self, tokens, namespace):
            raise OSError("the disk is gone")

    pager = implementation(8, 4)
    tier = Broken(pager)
    pager.attach(tier)
    cache(pager, [1] * 9)
    with refuses(OSError):
        pager.forget([1] * 8)
    assert pager.stats().cached_blocks == 1
    with refuses(OSError):
        pager.reset()
    assert pager.stats().cached_blocks == 0


def test_a_pager_does_not_keep_its_tiers(implementation):
    pager = implementation(8, 4)
    first, second = Tier(pager), Tier(pager)
    pager.attach(first)
    pager.attach(second)
    heard = first.heard
    del first
    gc.collect()
    pager.reset()
    assert (heard, second.heard) == ([], [("reset", 0)])


def test_what_is_no_tier_is_refused(implementation):
    class Slotted:
        """No weak reference to it can be made."""

        __slots__ = ()

        def on_reset(self):
            pass

        def on_forget(self, tokens, namespace):
            pass

    pager = implementation(8, 4)
    sequence = admit_committed(pager, [1] * 5)
    with nothing_changes(pager):
        for wrong in (None, 1, "text", object(), sequence, Slotted()):
            with refuses(TypeError):
                pager.attach(wrong)


def test_who_has_a_lock_brings_nothing_meanwhile(implementation):
    class Locked(Tier):
        def __init__(self, pager):
            super().__init__(pager)
            self.lock = threading.RLock()

        def on_reset(self):
            super().on_reset()
            others = threading.Thread(target=self.look)
            others.start()
            others.join()

        def on_forget(self, tokens, namespace):
            self.on_reset()

        def look(self):
            self.heard.append(self.lock.acquire(blocking=False))

    pager = implementation(8, 4)
    tier = Locked(pager)
    pager.attach(tier)
    pager.reset()
    pager.forget([1] * 4)
    with refuses(ConfigError):
        pager.reset(bytes(65_537))
    assert tier.heard == [("reset", 0), False] * 2
    tier.look()
    assert tier.heard[-1]
    tier.lock.release()
    outside = threading.Thread(target=tier.look)
    outside.start()
    outside.join()
    assert tier.heard[-1]


def test_all_hear_and_who_fails_is_stale(implementation):
    class Broken(Tier):
        stale = None

        def on_reset(self):
            raise KeyboardInterrupt

        def on_forget(self, tokens, namespace):
            raise OSError("the disk is gone")

    pager = implementation(8, 4)
    broken, fine = Broken(pager), Tier(pager)
    pager.attach(broken)
    pager.attach(fine)
    for call, error in ((lambda: pager.forget([1] * 4), OSError), (pager.reset, KeyboardInterrupt)):
        with pytest.raises(error) as raised:
            call()
        assert broken.stale is raised.value
    assert fine.heard == [([1] * 4, b"", 0), ("reset", 0)]
    assert not hasattr(fine, "stale")

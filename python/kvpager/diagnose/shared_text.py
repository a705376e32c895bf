"""Text that prompts share and a prefix cache does not find, because something that varies stands in front of it.

How it is found, without comparing all prompts with each other:

1. *Fingerprints.* Every run of 32 tokens has a hash; one in 16 is kept, chosen by the hash, so that equal text has
   equal fingerprints wherever it stands. With each goes a hash of all tokens up to its end.
2. A fingerprint in n prompts behind d different beginnings is text that is computed d times and could be once. In
   prompts that share it as a prefix, d is 1.
3. Prompts that have the first such fingerprint in common, rare ones passed over, are a group. Some pairs of a group are
   compared token by token: where they begin to differ, where the shared text begins, and how long it is.

Hashes only choose what to compare: what is shared is compared as tokens, and what it is worth is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..traces import Ragged, Trace

GRAM = 32
EVERY = 16
MIN_SHARED = 64
"""Tokens; a shorter text is a phrase."""
MIN_PROMPTS = 3
RARE = 8
"""A fingerprint is passed over if some other one of the prompt is in more than so many times as many prompts."""
MAX_PAIRS = 200
CHUNK_TOKENS = 2_000_000

Tokens = NDArray[np.int32]
Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that share a text behind a front that varies."""

    members: NDArray[np.int64]
    """Requests, in their order."""
    front: int
    """The first position at which they differ."""
    starts: NDArray[np.int64]
    """Where the shared text begins in each of them."""
    text: Tokens

    @property
    def front_tokens(self) -> int:
        """Tokens that vary, as most of them have it."""
        return int(np.median(self.starts)) - self.front


def varying_fronts(prompts: Ragged) -> list[Group]:
    """The groups of a token trace, the largest first."""
    anchors = _anchors(prompts)
    order = np.argsort(anchors.keys, kind="stable")
    ends = np.flatnonzero(np.diff(anchors.keys[order])) + 1
    found = (_group(prompts, anchors.requests[mine], anchors.places[mine]) for mine in np.split(order, ends))
    groups = [group for group in found if group is not None]
    return sorted(groups, key=lambda group: (-len(group.members), int(group.members[0])))


def moved_behind(trace: Trace, groups: list[Group]) -> Trace:
    """The trace with what varies behind the text that is shared: a, front, text, rest becomes a, text, front, rest."""
    values = trace.prompts.values.copy()
    for group in groups:
        for index, start in zip(group.members.tolist(), group.starts.tolist(), strict=True):
            begin = int(trace.prompts.offsets[index])
            prompt = trace.prompts.row(index)
            length = _common(prompt[start:], group.text)
            if start <= group.front or length < MIN_SHARED:
                continue
            front = prompt[group.front : start]
            values[begin + group.front : begin + group.front + length] = prompt[start : start + length]
            values[begin + group.front + length : begin + start + length] = front
    return replace(trace, prompts=Ragged(values, trace.prompts.offsets))


@dataclass(frozen=True, slots=True)
class _Anchors:
    """Of each request its first fingerprint that many others have behind another beginning."""

    keys: NDArray[np.uint64]
    requests: NDArray[np.int64]
    places: NDArray[np.int64]


def _anchors(prompts: Ragged) -> _Anchors:
    parts = list(_fingerprints(prompts))
    keys, before, requests, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    # A text that a prompt holds several times counts where it stands first.
    order = np.lexsort((places, requests, keys))
    keys, before, requests, places = keys[order], before[order], requests[order], places[order]
    again = np.zeros(len(keys), np.bool_)
    again[1:] = (keys[1:] == keys[:-1]) & (requests[1:] == requests[:-1])
    keys, before, requests, places = keys[~again], before[~again], requests[~again], places[~again]
    _, number, prompts_of = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.lexsort((before, number))
    other = np.ones(len(keys), np.bool_)
    other[1:] = (number[order][1:] != number[order][:-1]) | (before[order][1:] != before[order][:-1])
    beginnings_of = np.bincount(number[order][other], minlength=len(prompts_of))
    behind = (prompts_of[number] >= MIN_PROMPTS) & (beginnings_of[number] >= 2)
    keys, requests, places, popular = keys[behind], requests[behind], places[behind], prompts_of[number][behind]
    # One that begins with the end of a front (the last digit of a time) is shared by those of the same end only.
    most = np.zeros(len(prompts.offsets), np.int64)
    np.maximum.at(most, requests, popular)
    common = popular * RARE >= most[requests]
    keys, requests, places = keys[common], requests[common], places[common]
    order = np.lexsort((places, requests))
    first = np.unique(requests[order], return_index=True)[1]
    chosen = order[first]
    return _Anchors(keys[chosen], requests[chosen], places[chosen])


def _fingerprints(prompts: Ragged) -> Iterator[tuple[Hashes, Hashes, Numbers, Numbers]]:
    """Hash, hash of all tokens up to its end, request and place of every fingerprint, some requests at a time."""
    first, offsets = 0, prompts.offsets
    while first < len(offsets) - 1:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + CHUNK_TOKENS, side="right")) - 1)
        rows = slice(first, last)
        lengths = prompts.lengths[rows]
        values = prompts.values[offsets[first] : offsets[last]].astype(np.uint64)
        begins = np.repeat(offsets[first:last] - offsets[first], lengths)
        places = np.arange(len(values), dtype=np.int64) - begins
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(values ^ (places.astype(np.uint64) << 32)))])
        grams = _mixed(values)
        width = 1
        while width < GRAM:
            grams[:-width] = grams[:-width] * np.uint64(0x9E3779B97F4A7C15 + 2 * width) + grams[width:]
            width *= 2
        grams = _mixed(grams)
        whole = places + GRAM <= np.repeat(lengths, lengths)
        at = np.flatnonzero(whole & (grams % np.uint64(EVERY) == 0))
        requests = np.repeat(np.arange(first, last, dtype=np.int64), lengths)[at]
        yield grams[at], sums[at + GRAM] - sums[begins[at]], requests, places[at]
        first = last


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of splitmix64: near values become far ones."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _group(prompts: Ragged, members: NDArray[np.int64], places: NDArray[np.int64]) -> Group | None:
    if len(members) < MIN_PROMPTS:
        return None
    # Shuffled: neighbours in time may have nearly the same front, and clocks come round.
    mixed = np.random.Generator(np.random.PCG64(0)).permutation(len(members))
    pairs = mixed[: 2 * min(MAX_PAIRS, len(members) // 2)].reshape(-1, 2)
    fronts, lefts, rights = [], [], []
    for one, other in pairs.tolist():
        a, b = prompts.row(int(members[one])), prompts.row(int(members[other]))
        at_a, at_b = int(places[one]), int(places[other])
        fronts.append(_common(a, b))
        lefts.append(_common(a[:at_a][::-1], b[:at_b][::-1]))
        rights.append(_common(a[at_a:], b[at_b:]))
    # Two fronts may begin alike, and some prompts have none: the position is the one where a tenth of pairs differ.
    front = int(np.sort(fronts)[len(fronts) // 10])
    left, right = int(np.median(lefts)), int(np.median(rights))
    starts = places - left
    if int(np.median(starts)) <= front or left + right < MIN_SHARED:
        return None
    model = int(pairs[int(np.argmax(np.array(rights) >= right)), 0])
    text = prompts.row(int(members[model]))[starts[model] : starts[model] + left + right]
    return Group(members, front, starts, text)


def _common(a: Tokens, b: Tokens) -> int:
    """Tokens in which two texts agree from their beginning on."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(np.argmax(differ)) if differ.any() else length

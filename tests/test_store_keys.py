"""What blocks are called in a store: digests made by hand here, with hashlib and nothing of the pager's (rule 17.1)."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from implementations import admit_committed, nothing_changes, refuses
from tiers import each_with_store

import kvpager
from kvpager import ConfigError, TokenError, TokenTypeError, content_tokens

pytestmark = each_with_store

IMAGE = 2**30  # the first content token


def i32(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def root(block_size: int = 4, identity: bytes = b"", namespace: bytes = b"\x00") -> bytes:
    """Of a namespace as rule 13 encodes it."""
    lengths = struct.pack("<I", block_size), struct.pack("<Q", len(identity))
    return bytes(8) + sha256(b"\x00kvpager" + lengths[0] + lengths[1] + identity + namespace).digest()[:24]


def rows(array: Any) -> list[bytes]:
    return [row.tobytes() for row in array]


def test_each_block_has_the_digest_of_all_before_it(implementation):
    pager = implementation(4, 4)
    keys, metas = pager.store_keys([1, 2, 3, 4, 5, 6, 7, 8, 2**30 - 1, 0, 0, 0, 9])
    first = sha256(b"\x01" + root() + i32(1, 2, 3, 4)).digest()
    second = sha256(b"\x01" + first + i32(5, 6, 7, 8)).digest()
    third = sha256(b"\x01" + second + i32(2**30 - 1, 0, 0, 0)).digest()
    assert rows(keys) == [first, second, third]
    assert rows(metas) == [root() + i32(1, 2, 3, 4), first + i32(5, 6, 7, 8), second + i32(2**30 - 1, 0, 0, 0)]


def test_the_digests_of_this_version(implementation):
    """Were one to change, no store would know what an older version saved."""
    pager = implementation(4, 4, identity=b"llama-3.1-8b bf16")
    (key,), (meta,) = pager.store_keys([1, 2, 3, 4], namespace=(("tenant", b"a"),))
    assert meta.tobytes()[:32].hex() == "0000000000000000b27a3b5f480ba1164bcb1bc23d13264a9b464276a24b7090"
    assert key.tobytes().hex() == "064240d62216141c8305abecea181c61b24e1a8d67c00f365bd51db245ca9890"
    image = content_tokens(bytes(32), 6).tolist()
    keys = pager.store_keys([1, 2, *image])[0]
    assert len(keys) == 0
    keys = pager.store_keys([1, 2, *image, 3, 3, 3, 3])[0]
    assert [row.hex()[:16] for row in rows(keys)] == ["6ea2b8697b791942", "a0bfdce134dbc221", "7ec55b0d3b27ac88"]


def test_a_run_of_content_tokens_is_in_each_of_its_keys(implementation):
    """Three blocks, with the text on both sides of the run in the first and the last."""
    pager = implementation(4, 4)
    text, image = [1, 2, 3, 4], [5, IMAGE, IMAGE, IMAGE + 1, *[IMAGE] * 4, IMAGE + 2, 6, 7, 8]
    keys, metas = pager.store_keys([*text, *image, 9, 9, 9, 9])
    above = sha256(b"\x01" + root() + i32(*text)).digest()
    whole = sha256(b"\x02" + above + i32(*image)).digest()
    unit = [sha256(b"\x03" + whole + struct.pack("<I", number)).digest() for number in range(3)]
    behind = sha256(b"\x01" + unit[2] + i32(9, 9, 9, 9)).digest()
    assert rows(keys) == [above, *unit, behind]
    assert rows(metas) == [
        root() + i32(*text),
        above + i32(*image[:4]),
        unit[0] + i32(*image[4:8]),
        unit[1] + i32(*image[8:]),
        unit[2] + i32(9, 9, 9, 9),
    ]


def test_two_runs_that_meet_in_a_block_are_one_unit(implementation):
    pager = implementation(4, 4)
    tokens = [1, 1, IMAGE, IMAGE, IMAGE, 1, IMAGE, IMAGE, IMAGE, 1, 1, 1]
    keys = pager.store_keys([*tokens, 1])[0]
    whole = sha256(b"\x02" + root() + i32(*tokens)).digest()
    assert rows(keys) == [sha256(b"\x03" + whole + struct.pack("<I", number)).digest() for number in range(3)]


def test_a_run_within_a_block_is_no_unit_of_its_own(implementation):
    pager = implementation(4, 4)
    keys = pager.store_keys([1, IMAGE, IMAGE, 1, IMAGE, IMAGE, IMAGE, 1])[0]
    first = sha256(b"\x01" + root() + i32(1, IMAGE, IMAGE, 1)).digest()
    assert rows(keys) == [first, sha256(b"\x01" + first + i32(IMAGE, IMAGE, IMAGE, 1)).digest()]


@pytest.mark.parametrize(
    ("namespace", "encoded"),
    [
        (b"", b"\x00"),
        (b"tenant-a", b"\x00tenant-a"),
        ((), b"\x01"),
        ((("lora", b"7"),), b"\x01\x04\x00\x00\x00lora\x01\x00\x00\x007"),
        ((("a", b""), ("b", b"xy")), b"\x01\x01\0\0\0a\0\0\0\0\x01\0\0\0b\x02\0\0\0xy"),
    ],
)
def test_namespaces(implementation, namespace, encoded):
    pager = implementation(4, 4)
    keys, metas = pager.store_keys([1, 2, 3, 4], namespace=namespace)
    top = root(namespace=encoded)
    assert rows(keys) == [sha256(b"\x01" + top + i32(1, 2, 3, 4)).digest()]
    assert rows(metas) == [top + i32(1, 2, 3, 4)]


def test_the_identity_is_that_of_the_moment(implementation):
    pager = implementation(4, 4, identity=b"old weights")
    before = pager.store_keys([1, 2, 3, 4])
    pager.reset()
    assert rows(pager.store_keys([1, 2, 3, 4]).keys) == rows(before.keys)
    pager.reset(b"new weights")
    after = pager.store_keys([1, 2, 3, 4])
    tops = root(identity=b"old weights"), root(identity=b"new weights")
    assert [rows(each.metas) for each in (before, after)] == [[top + i32(1, 2, 3, 4)] for top in tops]
    assert [rows(each.keys) for each in (before, after)] == [
        [sha256(b"\x01" + top + i32(1, 2, 3, 4)).digest()] for top in tops
    ]


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
def test_the_block_size_is_part_of_it(implementation, block_size):
    pager = implementation(4, block_size)
    keys, metas = pager.store_keys([7] * (2 * block_size))
    block, top = i32(*[7] * block_size), root(block_size)
    first = sha256(b"\x01" + top + block).digest()
    assert rows(keys) == [first, sha256(b"\x01" + first + block).digest()]
    assert rows(metas) == [top + block, first + block]


def test_the_arrays(implementation):
    pager = implementation(4, 4)
    for num_tokens, num_blocks in ((1, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        found = pager.store_keys([1] * num_tokens)
        assert isinstance(found, kvpager.StoreKeys)
        assert (found.keys.shape, found.metas.shape) == ((num_blocks, 32), (num_blocks, 48))
        for array in found:
            assert array.dtype == np.uint8
            assert array.flags.c_contiguous
            assert not array.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "num_blocks"),
    [
        ([1] * 8, 2),
        ([1] * 7 + [IMAGE], 1),  # what follows may belong to the image
        ([1] * 4 + [IMAGE] * 4, 1),
        ([1] * 3 + [IMAGE] * 5, 0),
        ([1] * 7 + [IMAGE, 1], 2),
        ([1] * 7 + [IMAGE, IMAGE], 1),
        ([1] * 3 + [IMAGE] * 6, 0),
        ([1] * 3 + [IMAGE] * 6 + [1], 0),
        ([1] * 3 + [IMAGE] * 6 + [1] * 3, 3),
        ([1] * 4 + [IMAGE] * 2, 1),
        ([IMAGE] * 4, 0),
        ([1, 1, IMAGE, IMAGE, IMAGE, 1, 1, IMAGE, IMAGE, 1], 0),  # cut back into an earlier run, and once more
    ],
)
def test_no_key_of_a_part_of_a_run(implementation, tokens, num_blocks):
    assert len(implementation(4, 4).store_keys(tokens).keys) == num_blocks


def test_more_tokens_leave_the_keys_of_those_before_them_alone(implementation):
    pager = implementation(4, 4)
    tokens = [1, 2, 3, IMAGE, IMAGE, 4, 4, 4, 5, 5, 5, 5, IMAGE, IMAGE, IMAGE, IMAGE, 6]
    whole = rows(pager.store_keys(tokens).keys)
    assert len(whole) == 4
    for stop in range(1, len(tokens)):
        part = rows(pager.store_keys(tokens[:stop]).keys)
        assert part == whole[: len(part)]


def test_it_is_asked_like_match_and_changes_nothing(implementation):
    pager = implementation(4, 4)
    sequence = admit_committed(pager, [1] * 5)
    wrong = [
        ([], {}, TokenError),
        ([-1], {}, TokenError),
        ([2**31], {}, TokenError),
        ([1.0], {}, TokenTypeError),
        ("text", {}, TokenTypeError),
        ([1], {"namespace": "text"}, TypeError),
        ([1], {"namespace": (("a b", b""),)}, ConfigError),
    ]
    with nothing_changes(pager):
        for tokens, how, error in wrong:
            with refuses(error):
                pager.match(tokens, **how)
            with refuses(error):
                pager.store_keys(tokens, **how)
        lists = rows(pager.store_keys([1] * 9).keys)
        for form in (tuple([1] * 9), np.ones(9, np.int64), np.ones(18, np.uint32)[::2]):
            assert rows(pager.store_keys(form).keys) == lists
        del sequence
        assert len(pager.store_keys([1] * 9).keys) == 2  # a peek releases no dropped handle
    assert pager.stats().dropped_handles == 0


TOKENS = st.lists(st.sampled_from([0, 1, 256, IMAGE, IMAGE + 1]), min_size=1, max_size=12)
PLACES = st.tuples(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([b"", b"\x00", b"a", b"a\x00", bytes(32)]),
    st.sampled_from([b"", b"\x00", b"a", b"\x00a", (), (("a", b""),), (("a", b"\x00"),), (("a", b""), ("a", b""))]),
    TOKENS,
)


def blocks_of(block_size: int, tokens: list[int], num_blocks: int) -> list[tuple[tuple[int, ...], int]]:
    """What the content of each block depends on: its place in a piece that ends in no run, and all up to its end."""
    found: list[tuple[tuple[int, ...], int]] = []
    for number in range(num_blocks):
        end = number + 1
        while end < num_blocks and min(tokens[end * block_size - 1 : end * block_size + 1]) >= IMAGE:
            end += 1
        found.append((tuple(tokens[: end * block_size]), number))
    return found


@settings(max_examples=60)
@given(places=st.lists(PLACES, min_size=2, max_size=30))
def test_no_two_blocks_have_one_key_and_no_block_two(implementation, places):
    """Whatever differs: the weights, the size, the tenant, a token, or the rest of an image."""
    meant: dict[bytes, Any] = {}
    called: dict[Any, bytes] = {}
    proved: dict[bytes, bytes] = {}
    for block_size, identity, namespace, tokens in places:
        pager = implementation(2, block_size, identity=identity)
        keys, metas = map(rows, pager.store_keys(tokens, namespace=namespace))
        for key, meta, block in zip(keys, metas, blocks_of(block_size, tokens, len(keys)), strict=True):
            what = block_size, identity, namespace, block
            assert meant.setdefault(key, what) == what
            assert called.setdefault(what, key) == key
            assert proved.setdefault(key, meta) == meta

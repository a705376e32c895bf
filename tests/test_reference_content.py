"""Runs of content tokens are hit and published whole or not at all (rules.md 9)."""

from __future__ import annotations

from implementations import admit_committed, cache, each_implementation, ids, line

pytestmark = each_implementation

CAT = [2**30 + value for value in range(6)]
DOG = [*CAT[:4], 2**31 - 2, 2**31 - 1]  # agrees with the first four tokens

# With blocks of 4: the run takes the positions 6..11, so the boundary 8 lies inside it and 12 does not.
WITH_CAT = [1, 2, 3, 4, 5, 6, *CAT, 7, 7, 7, 7]
WITH_DOG = [1, 2, 3, 4, 5, 6, *DOG, 7, 7, 7, 7]


def path(sequence, pager):
    return line(pager, f"sequence {sequence.id}: ").split("; ")[6].removeprefix("path ")


def test_the_same_content_hits_whole(implementation):
    pager = implementation(20, 4)
    cache(pager, WITH_CAT)
    assert pager.match([*WITH_CAT, 8]).num_tokens == 16
    assert pager.match(WITH_CAT).num_tokens == 12


def test_a_hit_is_cut_back_to_the_block_that_holds_the_runs_start(implementation):
    pager = implementation(20, 4)
    cache(pager, WITH_CAT)
    assert pager.match(WITH_DOG).num_tokens == 4
    assert pager.admit(WITH_DOG).num_cached == 4
    # The cap of len - 1 can fall into a run as well.
    assert pager.match(WITH_CAT[:12]).num_tokens == 4
    assert pager.match(WITH_CAT[:9]).num_tokens == 4


def test_cutting_back_repeats_where_it_lands_in_an_earlier_run(implementation):
    pager = implementation(20, 4)
    # Runs at 2..5 and 7..9: both boundaries 4 and 8 lie inside one.
    prompt = [1, 2, *CAT[:4], 3, *CAT[:3], 4, 4, 4]
    cache(pager, prompt)
    assert pager.match(prompt).num_tokens == 12
    other = [*prompt[:8], CAT[5], 4, 4, 4, 4]
    assert pager.match(other).num_tokens == 0


def test_a_boundary_right_before_a_run_lies_not_inside_it(implementation):
    pager = implementation(20, 4)
    cache(pager, [1, 2, 3, 4, *CAT, 5, 5])
    assert pager.match([1, 2, 3, 4, *DOG, 5, 5]).num_tokens == 4


def test_publishing_waits_for_the_whole_run(implementation):
    pager = implementation(20, 4)
    sequence = pager.admit(WITH_CAT)
    indexed = {}
    for end in (4, 8, 11, 12, 16):
        sequence.commit(end)
        indexed[end] = path(sequence, pager)
    assert indexed == {4: "0", 8: "0", 11: "0", 12: "0-2", 16: "0-3"}


def test_a_run_at_the_end_of_the_tokens_is_published_up_to_there(implementation):
    """The boundary at len lies inside no run, so what follows the last token does not matter yet."""
    pager = implementation(20, 4)
    sequence = admit_committed(pager, [1, 2, 3, 4, 5, 6, *CAT[:2]])
    assert path(sequence, pager) == "0-1"


def test_nothing_is_published_below_a_part_of_another_content(implementation):
    pager = implementation(20, 4)
    cache(pager, WITH_CAT)
    dog = admit_committed(pager, WITH_DOG)
    assert path(dog, pager) == "0", "the index holds block 1 of the cat, which agrees, but not the next"
    assert pager.match(WITH_DOG).num_tokens == 4
    assert pager.check() == []


def test_a_later_commit_looks_again(implementation):
    pager = implementation(20, 4)
    cache(pager, WITH_CAT)
    dog = admit_committed(pager, WITH_DOG)
    assert pager.forget(WITH_CAT[:8]) == 3
    dog.commit()
    assert path(dog, pager) == "0", "a commit that says nothing new does nothing"
    dog.append(7)
    dog.commit()
    assert path(dog, pager) == "0", "nor does one that fills no block"
    dog.extend([7] * 3)
    dog.commit()
    assert path(dog, pager) == "0 4-6 1"
    assert ids(dog) == [0, 4, 5, 6, 1]
    assert pager.match(WITH_DOG).num_tokens == 12


def test_a_whole_run_is_followed(implementation):
    pager = implementation(20, 4)
    first, second = pager.admit(WITH_CAT), pager.admit(WITH_CAT)
    first.commit()
    second.commit()
    assert path(second, pager) == "0-3"
    assert ids(second) == [4, 5, 6, 7]


def test_what_lies_behind_a_waiting_run_waits_too(implementation):
    pager = implementation(20, 4)
    cache(pager, WITH_CAT[:12])
    dog = admit_committed(pager, WITH_DOG)
    assert path(dog, pager) == "0"
    dog.extend([9] * 4)
    dog.commit()
    assert path(dog, pager) == "0"


def test_a_forgotten_block_keeps_its_whole_run_unpublished(implementation):
    """A block is indexed once (7.4), so a run that needs a forgotten one cannot be published whole: none of it is."""
    pager = implementation(20, 4)
    parent = pager.admit([*CAT[:5], *CAT[:3], 7])
    (child,) = parent.fork()
    parent.commit()
    assert child.slots(0, 1).tolist() == [12]
    assert ids(child) == [3, 1, 2]
    assert pager.forget(CAT[:4]) == 2
    child.commit()
    assert path(child, pager) == "-", "block 3 is new, but block 1 behind it was forgotten"
    assert pager.check() == []

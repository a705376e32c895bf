"""The chat workload is the same for the same seed, and has the shape its documentation states."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager.workload import ChatWorkload, chat_workload


def make(seed: int = 0, num_chats: int = 400, max_context: int = 4096) -> ChatWorkload:
    return chat_workload(seed, num_chats=num_chats, chats_per_step=0.5, max_context=max_context)


def test_a_seed_is_a_workload() -> None:
    one, same, other = make(3), make(3), make(4)
    prompts = [[chat.prompt(len(chat.turns) - 1).tolist() for chat in load.chats] for load in (one, same, other)]
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]
    # Pinned: a change of numpy or of the order of draws would change every table in the documentation unseen.
    assert (one.num_requests, one.prompt_tokens, one.answer_tokens) == (1583, 1_749_201, 240_366)


@pytest.mark.parametrize("max_context", [1024, 4096])
def test_prompts_grow_by_what_was_said_and_stay_within_the_context(max_context: int) -> None:
    load = make(max_context=max_context)
    for chat in load.chats:
        assert chat.turns
        assert chat.turns[0].think_steps == 0
        said = chat.system_prompt
        for number, turn in enumerate(chat.turns):
            said = np.concatenate([said, turn.question])
            assert np.array_equal(chat.prompt(number), said)
            assert len(said) + len(turn.answer) <= max_context
            assert len(turn.question) >= 1
            assert len(turn.answer) >= 1
            said = np.concatenate([said, turn.answer])


def test_the_documented_distributions() -> None:
    load = make(num_chats=3000)
    systems = {id(chat.system_prompt): len(chat.system_prompt) for chat in load.chats}
    assert len(systems) == load.num_system_prompts == 8
    assert all(200 <= length <= 800 for length in systems.values())
    starts = [chat.start_step for chat in load.chats]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(3000 / 0.5, rel=0.1)
    counts = sorted((sum(id(chat.system_prompt) == key for chat in load.chats) for key in systems), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.2)
    questions = [len(turn.question) for chat in load.chats for turn in chat.turns]
    answers = [len(turn.answer) for chat in load.chats for turn in chat.turns]
    assert np.median(questions) == pytest.approx(40, rel=0.1)
    assert np.median(answers) == pytest.approx(120, rel=0.1)
    assert np.mean([len(chat.turns) for chat in load.chats]) == pytest.approx(4, rel=0.1)


def test_refused() -> None:
    with pytest.raises(ValueError, match="at least one chat"):
        chat_workload(0, num_chats=0, chats_per_step=1)
    with pytest.raises(ValueError, match="a rate above 0"):
        chat_workload(0, num_chats=1, chats_per_step=float("nan"))
    with pytest.raises(ValueError, match="max_context 100: at least 1024"):
        chat_workload(0, num_chats=1, chats_per_step=1, max_context=100)

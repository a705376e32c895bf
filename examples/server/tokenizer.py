"""Text to tokens and back. What a user writes never becomes a control token: those are put in by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import tokenizers

Decode: TypeAlias = Callable[[int], str]
"""Takes an answer's tokens one by one; returns the text that each adds, "" while a character is incomplete."""


class ChatTokenizer(Protocol):
    end_of_turn: int

    def chat(self, messages: list[tuple[str, str]]) -> list[int]:
        """The prompt that asks for the next answer to messages (role, content)."""
        ...

    def decoder(self) -> Decode: ...


class GgufTokenizer:
    """The byte-level BPE of a GGUF file, with the ChatML template."""

    DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def __init__(self, keys: Mapping[str, Any]) -> None:
        tokens = keys["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in keys["tokenizer.ggml.merges"]]
        ids = {token: number for number, token in enumerate(tokens)}
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True) if kind == 3]
        self._tokenizer.add_special_tokens(control)
        self._tokenizer.encode_special_tokens = True  # "<|im_end|>" in a text stays text
        self._start, self.end_of_turn = ids["<|im_start|>"], ids["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def chat(self, messages: list[tuple[str, str]]) -> list[int]:
        if messages[0][0] != "system":
            messages = [("system", self.DEFAULT_SYSTEM), *messages]
        prompt = []
        for role, content in messages:
            prompt += [self._start, *self.encode(f"{role}\n{content}"), self.end_of_turn, *self.encode("\n")]
        return [*prompt, self._start, *self.encode("assistant\n")]

    def decoder(self) -> Decode:
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


class ByteTokenizer:
    """For the random model of 256 tokens: a token is a byte. Control tokens are bytes that UTF-8 never has."""

    _START, _END = 0xFE, 0xFF
    end_of_turn = _END

    def chat(self, messages: list[tuple[str, str]]) -> list[int]:
        prompt = []
        for role, content in messages:
            prompt += [self._START, *f"{role}\n{content}".encode(), self._END]
        return [*prompt, self._START]

    def decoder(self) -> Decode:
        return chr  # random bytes are no UTF-8: one character each shows every token


class AnswerText:
    """The text of an answer, up to a stop string. What may turn out to begin one is held back."""

    def __init__(self, decode: Decode, stop: Iterable[str]) -> None:
        self.decode, self.stop, self.held = decode, tuple(stop), ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string came."""
        self.held += self.decode(token)
        ends = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if ends:
            return self.held[: min(ends)], True
        begun = [size for stop in self.stop for size in range(1, len(stop)) if self.held.endswith(stop[:size])]
        shown = len(self.held) - max(begun, default=0)
        text, self.held = self.held[:shown], self.held[shown:]
        return text, False

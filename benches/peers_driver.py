"""kvpager driven by the harness that drives unmodified peers with the same operations.

The harness (`harness.py`, `side_by_side.py` and a driver a peer) is not part of this repository; put its folder on
PYTHONPATH:

    PYTHONPATH=PEERS python side_by_side.py --peers DIR --rounds 3 \\
        --add 'kvpager=python benches/peers_driver.py' --add 'kvpager-list=python benches/peers_driver.py --prompt list'

admit   = Pager.admit
publish = Sequence.commit
finish  = Sequence.release
step    = one `Batch.step` and one `Step.commit` for all sequences; the tokens are given as a list

The last table of a run of this file, with date and machine, stands in docs/performance.md.
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np

import kvpager


class Ours(harness.Peer):  # type: ignore[misc]  # the harness is not typed
    name, version = "kvpager", kvpager.__version__

    @staticmethod
    def add_arguments(ap: Any) -> None:
        ap.add_argument("--prompt", choices=["array", "list"], default="array", help="what prompts are given as")

    def __init__(self, args: Any) -> None:
        self.as_array = args.prompt == "array"
        self.input_type = "int32 array" if self.as_array else "list[int]"
        self.note = "tokens are compared; decode is a step and a commit of a batch"

    def open(self, num_blocks: int, block_tokens: int) -> None:
        self.pager = kvpager.Pager(num_blocks=num_blocks, block_size=block_tokens)
        self.usable_blocks = num_blocks

    def prompt(self, tokens: list[int]) -> Any:
        return np.array(tokens, np.int32) if self.as_array else tokens

    def admit(self, prompt: Any) -> kvpager.Sequence:
        return self.pager.admit(prompt)

    def publish(self, seq: kvpager.Sequence) -> None:
        seq.commit()

    def block_ids(self, seq: kvpager.Sequence) -> Any:
        return seq.block_ids

    def finish(self, seq: kvpager.Sequence) -> None:
        seq.release()

    def start_decode(self, seqs: list[kvpager.Sequence]) -> None:
        self.batch = self.pager.batch(len(seqs), max_blocks=4096)
        for seq in seqs:
            seq.append(1)
            self.batch.add(seq)

    def step(self, seqs: list[kvpager.Sequence], tokens: list[int]) -> None:
        # The blocks for these tokens are taken by the next step, as in a server's loop.
        self.batch.step().commit(tokens)

    def hit_tokens(self, seq: kvpager.Sequence) -> int:
        return seq.num_cached

    def cached_blocks(self) -> int:
        return self.pager.stats().cached_blocks


if __name__ == "__main__":
    harness.main(Ours)

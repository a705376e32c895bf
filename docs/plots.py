"""Draw the pictures of the documentation: `python docs/plots.py [FOLDER]`, into docs/img unless told otherwise.

Each is what a command draws with `--plot`, with fewer colours, so that it is small enough for the repository.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from PIL import Image

from kvpager.cli import main

CURVE = (
    "first-come,watermark:5%,limit:40,watermark:20%,limit:32,reserve"  # the pools of these are drawn
    ",watermark:1%,watermark:2%,watermark:10%,watermark:30%,limit:36,limit:42,limit:44,limit:48,limit:64"
)
AHEAD = (
    "first-come,watermark:5%,adaptive,known"  # the pools of these are drawn
    ",watermark:1%,watermark:2%,watermark:10%,watermark:20%,watermark:30%,limit:36,limit:40,limit:42,limit:44,limit:48"
    ",adaptive:1%,adaptive:2%,adaptive:5%,adaptive:10%,adaptive:50%,adaptive:75%"
)
PICTURES = {
    "fragmentation.png": ["fragmentation"],
    "prefix.png": ["prefix"],
    "cost.png": ["cost", "--model", "llama-2-7b"],
    "load-control.png": ["simulate", "thrash", "--policy", CURVE],
    "admission.png": ["simulate", "thrash", "--policy", AHEAD],
}
COLOURS = 32


def draw(folder: Path) -> None:
    for name, command in PICTURES.items():
        path = folder / name
        with contextlib.redirect_stdout(io.StringIO()):
            status = main([*command, "--plot", str(path)])
        if status:
            raise SystemExit(status)
        with Image.open(path) as picture:
            # Without dithering: it would roughen every area of one colour.
            reduced = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
        sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "img")

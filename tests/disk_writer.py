"""A process that writes to a store until it is killed, and says what it has done: one line a call, after the call.

python disk_writer.py PATH MAX_BYTES SYNC FIRST_NAME SEED
"""

from __future__ import annotations

import random
import sys

from store_suite import BLOCK_SIZE, ROW_BYTES, Blocks

from kvpager.tiers import DiskStore


def main() -> None:
    path, max_bytes, sync, first, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    draw = random.Random(seed)
    say = sys.stdout.write
    say("ready\n")
    sys.stdout.flush()
    with DiskStore(path, row_bytes=ROW_BYTES, block_size=BLOCK_SIZE, max_bytes=max_bytes, sync=sync) as store:  # type: ignore[arg-type]
        blocks = Blocks(store)
        name = first
        while True:
            count = draw.randrange(1, 6)
            names = range(name, name + count)
            stored = blocks.put(names)
            name += count
            say(f"put {' '.join(str(each) for each, is_there in zip(names, stored, strict=True) if is_there)}\n")
            if draw.random() < 0.1:
                gone = draw.randrange(first, name)
                say(f"deleting {gone}\n")
                sys.stdout.flush()
                blocks.delete([gone])
                say(f"deleted {gone}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

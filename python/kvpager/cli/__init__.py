"""The command `kvpager`. Its libraries come with the extra `cli`; everything else of the package works without them."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 for bad input after one line that says what is wrong."""
    try:
        from .app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        # A library that is there but broken is somebody else's error and should look like one.
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        sys.stderr.write(f'kvpager: the command line needs {library}: pip install "kvpager[cli]"\n')
        return 2

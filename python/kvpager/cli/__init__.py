"""The command `kvpager`. Its libraries come with the extra `cli`; everything else of the package works without them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    0; 2 for bad input, after one line that says what is wrong; 1 if the output cannot be written; 130 if interrupted.
    """
    if sys.stderr is None:  # closed by whoever started this: then nobody is told anything
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("kvpager: standard output is closed\n")
        return 1
    try:
        from .app import run

        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\nkvpager: interrupted\n")
        return 130
    except ModuleNotFoundError as error:
        # A library that is there but broken is somebody else's error and should look like one.
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        sys.stderr.write(f"kvpager: the command line needs {library}: pip install '.[cli]' in a clone of kvpager\n")
        return 2

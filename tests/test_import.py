"""`import kvpager` is light: numpy and the standard library, none of the extras."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import numpy
before = set(sys.modules)
import kvpager
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - {"kvpager"} - set(sys.stdlib_module_names) - {"numpy"}))
"""


def test_nothing_of_the_extras_is_imported() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_this_build_is_optimised_and_named() -> None:
    import kvpager

    assert kvpager.build_info()["debug"] is False
    assert kvpager.build_info()["version"] == kvpager.__version__

"""`python -m kvpager`, for where the script `kvpager` is not on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

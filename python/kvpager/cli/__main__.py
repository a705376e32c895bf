"""`python -m kvpager.cli`, for where the script is not on the path."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())

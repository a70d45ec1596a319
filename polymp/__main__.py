"""`python -m polymp`: the command line."""

import sys

from polymp.cli import main

if __name__ == "__main__":
    sys.exit(main())

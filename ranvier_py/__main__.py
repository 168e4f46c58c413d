"""`python -m ranvier_py` is `ranvier`."""

import sys

from ranvier_py.cli import main

if __name__ == "__main__":
    sys.exit(main())

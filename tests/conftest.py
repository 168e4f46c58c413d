"""Holds for all tests."""

import os
import sys

# Tests start hundreds of processes of ours. With bytecode written, only the first one of them compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

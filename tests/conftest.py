"""Holds for all tests: what is left out of `make test`, and that bytecode is written."""

import os
import sys

import pytest

# Tests start hundreds of processes of ours. With bytecode written, only the first one of them compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes seconds of a core is for CI, and for who wants it."""
    if "WHOLE_SUITE" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes seconds of a core: .ci/run runs it, as WHOLE_SUITE=1 does"))

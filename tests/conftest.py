"""Holds for all tests: what is left out of `make test`, that bytecode is written, and that an example may take long."""

import os
import sys

import pytest
from hypothesis import settings

# Tests start hundreds of processes of ours. With bytecode written, only the first one of them compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests see is not for the settings of who runs them.
for name in [name for name in os.environ if name.upper().startswith("RANVIER_") and name != "RANVIER_SOAK"]:
    del os.environ[name]

# A busy machine is no counter-example.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes seconds of a core is for CI, and for who wants it."""
    if "WHOLE_SUITE" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes seconds of a core: .ci/run runs it, as WHOLE_SUITE=1 does"))

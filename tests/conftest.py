"""Holds for all tests: what is left out of `make test`, what comes first, bytecode, and how long examples may take."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from ranvier_py.io.logs import line_handlers
from tests import house
from tests.examples import examples

# Tests start hundreds of processes of ours. With bytecode written, only the first one of them compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests see is not for the settings of who runs them.
for name in [name for name in os.environ if name.upper().startswith("RANVIER_") and name != "RANVIER_SOAK"]:
    del os.environ[name]

# A busy machine is no counter-example.
settings.register_profile("any machine", deadline=None, max_examples=examples(100))
settings.load_profile("any machine")


FIRST = ("test_tidy.py", "test_live_members.py")
"""Their tests share something that takes seconds to make. Workers steal from the end of the list, and each made it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes seconds of a core is for CI, and for who wants it."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    if "WHOLE_SUITE" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes seconds of a core: .ci/run runs it, as WHOLE_SUITE=1 does"))


exempt = gc.freeze


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no collection of garbage shall look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # at the end of a replay in this process they would be looked through again
    gc.freeze = lambda: None  # a node that starts in this process would exempt itself, and be kept when it is gone


@pytest.fixture(scope="module", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """A million nodes, which every collection of garbage in a later test would look through."""
    yield
    for kept in (house.nodes_of, house.tree_of):
        kept.cache_clear()
    gc.collect()
    exempt()  # libraries that its tests were the first to import


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """For tests that set up logs in this process: others find them as they were."""
    root, ours = logging.getLogger(), logging.getLogger("ranvier_py")
    switches = {name: getattr(logging, name) for name in vars(logging) if name.startswith(("log", "raise"))}
    handlers, levels, hook = list(root.handlers), (root.level, ours.level), sys.unraisablehook
    yield
    logging.captureWarnings(False)
    sys.unraisablehook = hook
    for handler in line_handlers():
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    for name, value in switches.items():
        setattr(logging, name, value)

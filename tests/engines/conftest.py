"""Tests against engines, in environments of their own, which `make test-engines` makes. Elsewhere all of them skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.environments import is_ready

HERE = Path(__file__).parent
WANTED = "TEST_ENGINES"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(*names): needs these environments; run by make test-engines")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        names = [name for mark in item.iter_markers("engines") for name in mark.args]
        if not os.environ.get(WANTED):
            item.add_marker(pytest.mark.skip(reason="make test-engines runs it"))
        elif missing := [name for name in names if not is_ready(name)]:
            item.add_marker(pytest.mark.skip(reason=f"no environment for {', '.join(missing)}"))

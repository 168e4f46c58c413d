"""The chart's values, and what Helm makes of them. Who renders is skipped where there is no Helm (`make helm`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.pages.helm import CHART, program, rendered
from tests.deploy.deployed import Object, loaded

needs_helm = pytest.mark.skipif(program("helm") is None, reason="helm is not here: make helm")
needs_kubectl = pytest.mark.skipif(program("kubectl") is None, reason="kubectl is not here: make helm")

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
BY_NAME = {path.stem: path for path in VALUES}


@cache
def chart_of(name: str, *words: str, release: str = "fleet") -> tuple[Object, ...]:
    """What the chart makes of a file of values. Nobody may change it."""
    return tuple(loaded(rendered("--values", str(BY_NAME[name]), *words, release=release)))


def of_kind(objects: tuple[Object, ...], kind: str) -> Object:
    (only,) = [each for each in objects if each["kind"] == kind]
    return only


def defaults() -> Object:
    (found,) = loaded(CHART / "values.yaml")
    assert isinstance(found, dict)
    return found


def leaves(values: Object, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of each value that is no table with entries."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def at(values: Any, path: tuple[str, ...]) -> Any:
    """The value at a path; None if there is none."""
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values

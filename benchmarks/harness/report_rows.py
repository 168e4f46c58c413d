"""A row of the page of results, and how rows are made of the entries of a result file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Result = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the page: what was measured, the figure, and the goal. Without a goal `met` is None."""

    question: str
    figure: str
    goal: str = ""
    met: bool | None = None


def rows(
    items: Iterable[Result], question: str, figure: str, goal: str = "", met: Callable[[Result], bool] | None = None
) -> Iterator[Row]:
    """Yield a row for each item, whose members fill in the templates `question` and `figure`."""
    for each in items:
        yield Row(question.format_map(each), figure.format_map(each), goal, met(each) if met else None)


def named(items: Mapping[str, Result]) -> list[Result]:
    return [{"name": name, **each} for name, each in items.items()]

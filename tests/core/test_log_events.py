"""One table of events, held against all places that log, and against docs/logs.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.pages.logs_page import logs_page
from ranvier_py.core.log_events import EVENTS, INFO, event
from ranvier_py.core.routing.wanted.found_backend import SourceName
from tests import house

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS = {"log", "logger", "own_log"}
MADE_LATER = {"more"}  # fields that the table does not name: any event may have them
RESERVED = {"time", "level", "logger", "event", "node", "worker", "traceback"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of the package that logs, or makes an event, with its place."""
    for path in house.files("ranvier_py"):
        text = path.read_text()
        if "log_events import" in text or "getLogger(" in text:
            for call in house.nodes_of(path):
                if isinstance(call, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", call


def log_calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each call of a logger: where it stands, at which level, and what it logs."""
    for where, call in calls():
        of = call.func
        is_logger = isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id in LOGGERS
        if is_logger and of.attr in LEVELS | {"log"}:
            yield where, of.attr, call


def events() -> Iterator[tuple[str, str, str, set[str]]]:
    """Yield each event that is made: where, its name or a pattern of names, its level if that is there, its fields."""
    levels = {id(argument): of for _, of, call in log_calls() for argument in call.args}
    for where, call in calls():
        if isinstance(call.func, ast.Name) and call.func.id == "event" and call.args:
            fields = {each.arg or "**" for each in call.keywords}
            for name in names_of(call.args[0]):
                yield where, name, levels.get(id(call), ""), fields


def names_of(argument: ast.expr) -> list[str]:
    """Return the names that an expression may have, as patterns."""
    if isinstance(argument, ast.Constant):
        return [re.escape(argument.value)]
    if isinstance(argument, ast.IfExp):
        return [*names_of(argument.body), *names_of(argument.orelse)]
    if isinstance(argument, ast.JoinedStr):
        parts = [re.escape(each.value) if isinstance(each, ast.Constant) else r"\w+" for each in argument.values]
        return ["".join(parts)]
    return [r"engine_events\.snapshot_\w+"] if isinstance(argument, ast.Name) else [r".*"]


def test_whatever_is_logged_is_an_event_of_the_table() -> None:
    """No sentence: its values would be lost among words."""
    free = []
    for where, of, call in log_calls():
        logged = call.args[1 if of == "log" else 0]
        is_event = isinstance(logged, ast.Call) and isinstance(logged.func, ast.Name) and logged.func.id == "event"
        if not is_event and not (isinstance(logged, ast.Name) and logged.id == "found"):  # a LogEvent, by its type
            free.append(where)
    assert free == []


def test_each_place_that_logs_gives_the_fields_of_its_event_at_its_level() -> None:
    used, wrong = set(), []
    for where, pattern, level, fields in events():
        called = {name: row for name, row in EVENTS.items() if re.fullmatch(pattern, name)}
        found = {name: row for name, row in called.items() if "**" in fields or fields - MADE_LATER == {*row.fields}}
        used |= {*found}
        if not found:
            wrong.append(
                f"{where}: no event {pattern} has {sorted(fields)}, but {[row.fields for row in called.values()]}"
            )
        for name, row in found.items():
            given = "error" if level == "exception" else level
            if given not in ("", "log") and given not in row.levels.split(", "):
                wrong.append(f"{where}: {name} is {row.levels}, not {given}")
    assert wrong == []
    assert sorted(EVENTS.keys() - used) == []


def test_no_field_hides_what_every_line_has() -> None:
    assert [name for name, row in EVENTS.items() if RESERVED & {*row.fields}] == []


def test_what_somebody_may_have_to_look_at_is_a_warning() -> None:
    warnings = ("member.died", "member.renamed", "pool.silent", "engine.hangs", "control.refused", "access.refused")
    assert {EVENTS[name].levels for name in warnings} == {"warning"}
    assert EVENTS["member.left"].levels == INFO


@pytest.mark.parametrize(("by", "end"), [("", ""), ("me", " (ordered by me)")])
def test_a_terminal_shows_an_event_as_a_sentence(by: str, end: str) -> None:
    assert (
        str(event("backend.added", engine="a", url="http://a", weight=0.5, by=by))
        == f"backend.added a http://a weight 0.5{end}"
    )


def test_lists_defaults_and_what_was_not_logged_are_shown() -> None:
    assert str(event("config.refused", cause="SIGHUP", problems=["a", "b"])).endswith("as before: a; b")
    reloaded = event("config.reloaded", cause="SIGHUP", applied=["x", "y"], restart_needed=[])
    assert str(reloaded) == "config.reloaded by SIGHUP: applied x, y; restart needed for nothing"
    assert str(event("unexpected.error", place="polls", more=2)).endswith("in polls (2 more since the last line)")
    assert str(event("node.stopped")) == "node.stopped"


def test_a_value_of_several_named_parts_is_shown_as_one() -> None:
    assert str(event("backends.source_failing", source=SourceName("file"), why="x")).startswith(
        "backends.source_failing file, which"
    )


def test_a_value_with_braces_or_brackets_stays_as_it_is() -> None:
    assert str(event("config.note", note="{key} [table] %s")) == "config.note {key} [table] %s"


def test_the_page_lists_all_events() -> None:
    ((path, text),) = logs_page().items()
    assert path.read_text() == text, "run `make pages`"

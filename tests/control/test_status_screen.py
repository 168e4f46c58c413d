"""The status as a terminal shows it: nothing wider, nothing longer, the worst first, and each engine within reach."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.control.status_screen import SORTS, Looked, page, pressed, screen
from tests.house import ROOT


def engine(number: int, **more: Any) -> dict[str, Any]:
    return {
        "name": f"engine-{number}",
        "url": f"http://10.0.0.{number}:8000",
        "state": "ok",
        "models": ["lab-model"],
        "level": "exact",
        "why": "",
        "load": number % 7,
        "in_flight": 0,
        "running": number % 5,
        "waiting": number % 3,
        "tokens_per_s": 1234.5 * number,
        "hit_share": (number % 11) / 11,
        "predicted_tokens": 98_765 * number,
        "cached_tokens": 98_000 * number,
        "weight": 1.0,
        "draining": False,
        **more,
    }


def found(kind: str, about: str, severity: str = "degraded", since_s: float = 12.0) -> dict[str, Any]:
    what = f"engine {about} does not answer: its port refuses connections"
    whom, remedy = "requests for lab-model go to other engines", "See whether its process runs and its port is open."
    command = f"curl -m 5 http://{about}:8000/health"
    names = ("kind", "severity", "what", "about", "since_s", "whom", "remedy", "command")
    return dict(zip(names, (kind, severity, what, about, since_s, whom, remedy, command), strict=True))


def status(engines: int, *findings: dict[str, Any], peers: int = 0) -> dict[str, Any]:
    names = ("name", "state", "address", "public", "release", "rtt_ms", "silent_s", "since_s", "routes")
    member = ("alive", "10.0.1.1:7946", "10.0.1.1:8080", "0.1.0", 0.41, 0.2, 80.0, True)
    return {
        "node": "node-1",
        "release": "0.1.0",
        "ready": True,
        "reason": "",
        "severity": findings[0]["severity"] if findings else "well",
        "findings": [*findings],
        "dropped": 0,
        "engines": [engine(number) for number in range(engines)],
        "peers": [dict(zip(names, (f"node-{each + 2}", *member), strict=True)) for each in range(peers)],
        "requests": {"policy": "affinity", "predicted_share": 0.61, "cached_share": 0.6},
    }


DEAD = [found("engine_down", f"engine-{number}") for number in (3, 7, 9)]


@pytest.mark.parametrize("engines", [0, 8, 64])
@pytest.mark.parametrize("rows", [12, 24, 50])
@pytest.mark.parametrize("peers", [0, 2, 31])
def test_a_screen_fits_into_its_terminal_and_shows_the_worst_and_engines(engines: int, rows: int, peers: int) -> None:
    lines = screen(status(engines, *DEAD, peers=peers), "http://127.0.0.1:9180", Looked(), 80, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("DEGRADED  node-1 0.1.0, ready; 3 engine_down")
    text = "\n".join(lines)
    assert "3 engine_down: engine-3, engine-7, engine-9" in text
    assert "do: See whether" in text
    if engines:
        assert len(re.findall(r"(?m)^[> ] engine-\d", text)) >= min(engines, rows - 16 if rows > 20 else 2)
        assert f" of {engines} by trouble" in lines[-1]


def test_a_page_counts_every_kind_of_finding_at_its_head_in_as_many_lines_as_that_takes() -> None:
    kinds = [f"kind_of_a_finding_{number}" for number in range(9)]
    found = [{**DEAD[0], "kind": kind, "about": ""} for kind in kinds]
    lines = page(status(1, *found), "http://127.0.0.1:9180")
    head = " ".join(map(str.strip, lines[: lines.index("")]))
    assert [kind for kind in kinds if f"1 {kind}" in head] == kinds
    assert max(map(len, lines)) <= 80


def test_a_page_has_every_engine_in_one_line_of_80_columns_and_every_finding_with_its_remedy() -> None:
    lines = page(status(64, *DEAD, found("cache_level", "estimated", "notice"), peers=3), "http://a:1")
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("engine-") for line in lines) == 64
    assert sum(line.startswith("node-") for line in lines) == 3
    text = "\n".join(lines)
    assert "DEGRADED  engine_down, 12 s" in text
    assert "(also engine-7," in text
    assert "$ curl -m 5 http://engine-3:8000/health" in text
    assert text.index("engine_down") < text.index("NOTICE    cache_level")
    assert not page(status(8), "http://a:1")[0].startswith("DEGRADED")


@pytest.mark.parametrize(
    ("peers", "size"), [(0, "1 engine, 1 in flight, 0 peers;"), (1, "1 engine, 1 in flight, 1 peer;"), (2, "2 peers;")]
)
def test_one_of_a_kind_is_named_as_one(peers: int, size: str) -> None:
    assert size in page({**status(0, peers=peers), "engines": [engine(1)]}, "http://a:1")[1]


def shown(looked: Looked, engines: int = 64) -> list[str]:
    lines = screen(status(engines, *DEAD), "http://a:1", looked, 80, 24)
    return [line.split()[1 if line.startswith(">") else 0] for line in lines if re.match(r"[> ] engine-", line)]


def test_keys_reach_every_engine_sort_filter_and_open_one() -> None:
    looked, seen = Looked(), set[str]()
    for _ in range(64):
        seen |= {*shown(looked)}
        pressed(looked, "j")
    assert seen == {f"engine-{number}" for number in range(64)}
    pressed(looked, "g")
    assert shown(looked)[0] == "engine-0"
    pressed(looked, "G")
    assert shown(looked)[-1] == "engine-63"
    for _ in SORTS:
        pressed(looked, "s")
        assert shown(looked)
    assert looked.sort == "trouble"
    for key in ("/", *"engine-63", "x", "backspace", "enter"):
        pressed(looked, key)
    assert shown(looked) == ["engine-63"]
    pressed(looked, "e")
    text = "\n".join(screen(status(64, *DEAD), "http://a:1", looked, 80, 24))
    assert "http://10.0.0.63:8000" in text
    for key in ("x", "escape"):
        pressed(looked, key)
    assert len(shown(looked)) > 5
    pressed(looked, "v")
    assert "touches" in "\n".join(screen(status(64, *DEAD), "http://a:1", looked, 80, 24))
    pressed(looked, "j")
    pressed(looked, "?")
    assert "sort:" in "\n".join(screen(status(64), "http://a:1", looked, 80, 24))
    pressed(looked, "j")
    pressed(looked, "q")
    assert looked.over


KEYS = [*"jkgGse/?vhx ", "enter", "escape", "backspace", "up", "down", "pageup", "pagedown"]


@given(st.lists(st.sampled_from(KEYS), max_size=60), st.integers(0, 40), st.integers(12, 60), st.integers(40, 120))
def test_whatever_is_typed_a_screen_fits(keys: list[str], engines: int, rows: int, width: int) -> None:
    looked = Looked()
    for key in keys:
        pressed(looked, key)
        lines = screen(status(engines, *DEAD, peers=5), "http://a:1", looked, width, rows)
        assert len(lines) <= rows
        assert max(map(len, lines)) <= width


def test_nothing_that_a_node_answers_plays_with_the_terminal() -> None:
    bad = "\x1b[2J\r\n"
    words = {"what": bad * 3, "remedy": bad, "command": bad, "whom": bad}
    answer = status(1, {**found("engine_down", bad), **words}, peers=1)
    answer |= {"node": bad, "reason": bad, "ready": False}
    answer["engines"][0] |= {"name": bad, "state": bad, "level": bad, "why": bad, "url": bad, "models": [bad]}
    answer["peers"][0] |= {"name": bad, "address": bad, "release": bad}
    opened = Looked(engine=True)
    screens = [screen(answer, "a", looked, 80, 24) for looked in (Looked(), opened, Looked(verdict=True))]
    for lines in (page(answer, "http://a:1"), *screens):
        assert not {"\x1b", "\r", "\n"} & {*"".join(lines)}


@pytest.mark.parametrize(
    ("name", "states", "shown"),
    [
        ("w1", ["draining", "tokenizer"], f"{'w1':<11} drained tokenizer "),
        ("10.0.0.12:8000", ["draining", "down"], f"{'10.0.0.12:8000':<16} drained down "),
        ("a.long.name.of.an.engine:8000", ["draining", "reuses_nothing"], "a.long.name.… drained no cac… "),
        ("w1", ["leaving"], "w1                  leaving   "),
        ("w1", ["down", "tokenizer"], "w1                  down      "),
    ],
)
def test_what_was_done_with_an_engine_and_the_worst_that_is_wrong_with_it_are_both_shown(
    name: str, states: list[str], shown: str
) -> None:
    answer = status(1)
    answer["engines"] = [engine(1, name=name, state=states[-1], states=states)]
    for lines in (page(answer, "http://a:1"), screen(answer, "http://a:1", Looked(), 80, 24)):
        (line,) = [line for line in lines if line.removeprefix("> ").startswith(name[:3])]
        assert line.removeprefix("> ").startswith(shown), line
        assert max(map(len, lines)) <= 80
        assert line.removeprefix("> ").index("exact") == 30


def pictured(engines: int) -> list[dict[str, Any]]:
    """So many engines, the dead ones first, as a node sorts them."""
    rows = [engine(number) for number in range(engines)]
    dead = [{**row, "state": "down", "states": ["down"]} for row in rows if row["name"] in DEAD_NAMES]
    return [*dead, *(row for row in rows if row["name"] not in DEAD_NAMES)]


DEAD_NAMES = ("engine-3", "engine-7", "engine-9")


def test_the_documents_show_a_page_of_eight_engines_and_a_screen_of_64() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    whole = {**status(8, *DEAD[:2], peers=2), "engines": pictured(8)}
    many = {**status(64, *DEAD, peers=2), "engines": pictured(64)}
    for lines in (page(whole, "http://a:1"), screen(many, "http://a:1", Looked(), 80, 24)):
        shown = "\n".join(line.rstrip() for line in lines).strip()
        assert f"```text\n{shown}\n```" in text, shown

"""`ranvier status` as a user has it: arguments in, output and exit code out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ranvier_py import __version__, cli
from ranvier_py.commands import exit_codes, run_status
from ranvier_py.control.status_page import NodeStatus, divergence, status_page
from tests.fake_control import BACKEND, KEY, STATUS, FakeControl
from tests.pages import PageServer, serving


@pytest.fixture
def control() -> Iterator[PageServer]:
    with serving(FakeControl) as place:
        yield place


@pytest.mark.parametrize(("severity", "code"), [("well", 0), ("notice", 0), ("degraded", 1), ("down", 2)])
def test_the_exit_code_of_status_is_how_the_node_is(
    severity: str, code: int, control: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "severity", severity)
    assert cli.main(["status", "--control", control.url]) == code
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{severity.upper()}  n1 {__version__}, not ready: no")
    assert cli.main(["status", "--json", "--control", control.url]) == code
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize("flags", [["--wach"], ["--sort", "none"], ["--engine", "none"], ["--interval-s", "x"]])
def test_a_wrong_command_line_of_status_is_no_state_of_a_node(flags: list[str], control: PageServer) -> None:
    try:
        code: object = cli.main(["status", "--control", control.url, *flags])
    except SystemExit as ended:
        code = ended.code
    assert code == exit_codes.EXIT_STATUS_UNKNOWN


def test_one_engine_is_shown_in_full(control: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--engine", "a", "--control", control.url]) == exit_codes.EXIT_OK
    assert "url               http://a:1" in capsys.readouterr().out


def test_status_is_one_page_about_the_node(
    control: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL_KEY", KEY)
    assert cli.main(["status", "--all", "--control", control.url]) == exit_codes.EXIT_OK
    assert {key for _, key, _ in control.asked} == {f"Bearer {KEY}"}
    assert capsys.readouterr().out.splitlines() == [
        f"WELL  n1 {__version__}, not ready: no backend can be asked",
        "1 engine, 0 in flight, 0 peers; policy affinity, predicted 88%, cached -",
        "",
        "",
        "ENGINE              STATE     CACHE      RUN/WAIT   TOK/S  HITS    PRED/COUNT",
        "a                   down      exact           1/0       -   50%         12/11",
        "",
        f"{control.url}  not ready: no backend can be asked",
        "",
        "Backends",
        "  name  url         health   draining  weight  probe_ms",
        "  a     http://a:1  healthy  no             1         -",
        "",
        "Engine caches",
        "  name  level  role    applied  gaps  blocks",
        "  a     exact  reader       12     1      90",
        "  routes  confirmed=7",
        "",
        "Predictions against answers",
        "  name  precision  answers  biases",
        "  a          0.98       40  salt",
        "  route_precision  0.98",
        "  asking           asked=3 own=1",
        "  polls            probes=7",
        "",
        "Routes and requests",
        "  rows             3",
        "  decisions        holder=5",
        "  predicted_share  0.875",
    ]


def test_a_node_that_restarts_is_watched_on(
    control: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who watches a roll should not have to begin again with each node. One that never answered is a mistake."""
    asked, rounds = run_status.asked, iter(range(4))

    def pause(_: float) -> None:
        now = next(rounds)
        if now == 3:
            raise KeyboardInterrupt
        monkeypatch.setattr(run_status, "asked", away if now == 0 else asked)

    def away(*_: Any, **__: Any) -> Any:
        raise exit_codes.CommandError(f"{control.url} can't be reached: refused", exit_codes.EXIT_UNREACHABLE)

    monkeypatch.setattr(run_status.time, "sleep", pause)
    assert cli.main(["status", "--watch", "--control", control.url]) == exit_codes.EXIT_OK
    sent = capsys.readouterr().out
    assert (sent.count("ENGINE "), sent.count("can't be reached")) == (3, 1)
    monkeypatch.setattr(run_status, "asked", away)
    assert cli.main(["status", "--watch", "--control", control.url]) == exit_codes.EXIT_STATUS_UNKNOWN


@pytest.mark.parametrize(("given", "waited_s"), [("0.5", 0.5), ("-3", 0.1), ("nan", 0.1), ("inf", 86_400.0)])
def test_status_can_be_watched_until_it_is_interrupted(
    given: str,
    waited_s: float,
    control: PageServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_status.time, "sleep", pause)
    assert cli.main(["status", "--watch", "--interval-s", given, "--control", control.url]) == exit_codes.EXIT_OK
    assert pauses == [waited_s] * 3
    assert capsys.readouterr().out.count("ENGINE ") == 3


def test_status_shows_who_the_peers_are_and_what_was_stated() -> None:
    member = {"name": "b", "state": "suspect", "address": "10.0.0.2:7946", "incarnation": 3, "routes": False}
    cluster = {
        "name": "a",
        "address": "10.0.0.1:7946",
        "incarnation": 1,
        "members": [member],
        "topics": {"routes": {"sent": {"packets": 7, "bytes": 700}, "received": {"packets": 8, "bytes": 800}}},
        "routes": {"announced": 5, "dropped": 0},
        "route_sync": {},
        "facts": {},
        "sessions": {"replay": 2},
        "lag_ms": {"p50": 21.5, "p99": 48.0},
        "bytes_per_s": {"datagram": {"sent": 150.5, "received": 149.0}},
        "refused": {"tag": 4},
    }
    page = status_page(NodeStatus("n", True, "", [], {}, cluster, divergence(b"\0" * 16, b"\0" * 15 + b"\1")))
    assert "Cluster: a at 10.0.0.1:7946, incarnation 1" in page
    assert "suspect" in page
    assert "routes             7         700                 8             800" in page
    assert "announced=5" in page
    assert "dropped" not in page
    assert "p50=21.5 p99=48" in page
    assert re.search(r"datagram +150\.5 +149$", page, re.MULTILINE)
    assert "tag=4" in page
    assert "1 of 2 buckets differ" in page


def test_tables_with_other_buckets_can_not_be_compared() -> None:
    assert "not comparable" in divergence(b"\0" * 16, b"\0" * 8)


def test_nothing_a_node_answers_can_play_with_the_terminal() -> None:
    page = status_page(NodeStatus("n", True, "", [{"name": "\x1b[2Jx", "models": ["m" * 90]}], {"none": None}))
    assert "\x1b" not in page
    assert max(map(len, page.splitlines())) < 80


def test_what_to_do_about_a_backend_is_a_sentence_below_the_table() -> None:
    advice = (
        "its engine is listed by another URL as well (node b): list it once, by a URL that is the same on all nodes"
    )
    backends = [{**BACKEND, "advice": ""}, {**BACKEND, "name": "b", "advice": advice}]
    lines = status_page(NodeStatus("n", True, "", backends, {})).splitlines()
    assert f"  b: {advice}" in lines
    assert sum("advice" in line or "listed" in line for line in lines) == 1


def test_a_node_without_backends_states_how_to_add_one() -> None:
    assert "none; add one" in status_page(NodeStatus("n", True, "", [], {}))


def test_status_shows_what_policies_in_the_shadow_would_have_saved() -> None:
    shadows = [{"policy": "ttft", "placed": 10, "saved_s": 1.5}, {"policy": "random", "placed": 10, "saved_s": -3.0}]
    page = status_page(NodeStatus("n", True, "", [], {"rows": 3, "shadows": shadows}))
    assert "Shadows: what other policies would have done" in page
    assert re.search(r"random\s+10\s+-3", page)
    assert "rows  3" in page

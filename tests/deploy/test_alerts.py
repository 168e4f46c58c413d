"""Each alert fires when it should and stays silent when it should, by the tool of Prometheus; and names its runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from cluster.pages.metrics_page import PAGE
from cluster.processes.children import ROOT
from ranvier_py.core.engine_cache.gap_values import Level
from tests.deploy.promtool import needs_promtool, promtool
from tests.documents import anchors

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
NODE = 'instance="n:9180",job="ranvier"'
STEP = 4  # scrapes a minute


@cache
def group() -> Mapping[str, Any]:
    """What the file has. Each worker of a run imports this module, and few need that."""
    (only,) = YAML(typ="safe", pure=True).load(ALERTS.read_text())["groups"]
    return dict(only)


def rules() -> Mapping[str, Any]:
    return {rule["alert"]: rule for rule in group()["rules"]}


class Case(NamedTuple):
    """Series by name and labels, in Prometheus' notation, one value each 15 s; when to look."""

    series: Mapping[str, str]
    at: str = "3m"


def finding(kind: str, values: str = "0x3 1x60") -> dict[str, str]:
    return {f'ranvier_finding{{{NODE},kind="{kind}"}}': values}


def requests(ok: str, failed: str) -> dict[str, str]:
    name = f'ranvier_requests_total{{{NODE},path="/v1/chat/completions",model="m",tenant="",code='
    return {f'{name}"200"}}': ok, f'{name}"502"}}': failed}


def first_tokens(slow: int, every: int, reset: str = "") -> dict[str, str]:
    """So many of `every` streams take 5 to 10 s, each 15 s."""
    name = f'ranvier_time_to_first_token_seconds_bucket{{{NODE},model="m",le='
    count = f'ranvier_time_to_first_token_seconds_count{{{NODE},model="m"}}'
    fast, rest = f"0+{every - slow}x30{reset}", f"0+{every}x30{reset}"
    return {f'{name}"5.0"}}': fast, f'{name}"10.0"}}': rest, f'{name}"+Inf"}}': rest, count: rest}


def hits(cached: str) -> dict[str, str]:
    """Prompt tokens by a thousand each 15 s over eight hours, and what of them is cached."""
    return {
        f'ranvier_counted_prompt_tokens_total{{{NODE},model="m"}}': "0+15000x1920",
        f'ranvier_cached_tokens_total{{{NODE},model="m"}}': cached,
    }


def gauge(name: str, values: str, **labels: str) -> dict[str, str]:
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return {f"ranvier_{name}{{{NODE}{more}}}": values}


FIRES: Mapping[str, Sequence[Case]] = {
    "RanvierEngineDown": [
        Case(gauge("backend_healthy", "1x3 0x60", backend="a"), "2m"),
        Case(gauge("backend_circuit_closed", "1x3 0x60", backend="a"), "2m"),
        Case(gauge("backend_healthy", "1x60", backend="a") | finding("engine_fails"), "2m"),
        Case(finding("engine_hangs"), "2m"),
    ],
    "RanvierNoBackend": [Case(finding("no_engine"), "2m"), Case(finding("model_down"), "2m")],
    "RanvierErrors": [Case(requests("0+100x40", "0x4 0+10x40"))],
    "RanvierFirstTokensSlow": [Case(first_tokens(2, 10))],
    "RanvierHitRateFell": [Case(hits("0+12000x1760 21120000+3000x160"), "8h")],
    "RanvierPeerLost": [Case(finding("peer_lost"), "2m"), Case(finding("no_peer"), "2m")],
    "RanvierMismatch": [
        Case(finding(kind), "2m")
        for kind in ("peer_key", "peer_protocol", "peer_fingerprints", "engine_key_refused", "engine_tokenizer")
    ],
    "RanvierTablesDiffer": [Case(finding("tables_differ"))],
    "RanvierEventsDegraded": [
        Case(gauge("engine_cache_level", "1x60", backend="a", level="degraded")),
        Case(finding("events_unread")),
    ],
    "RanvierLoopFailed": [
        Case(finding("loop_failed"), "2m"),  # the first one of its place
        Case(gauge("unexpected_errors_total", "1x80 2x60", place="gossip"), "25m"),
    ],
    "RanvierBudgetNear": [Case(gauge("budget_left_ratio", "0.5x3 0.05x60", scope="tenant t", limit="budget"), "2m")],
    "RanvierCertificateEnds": [Case(finding("certificate_ends", "1x90"), "12m")],
    "RanvierLimitReached": [Case(finding("limit_reached"), "2m")],
    "RanvierRefuses": [Case(gauge("server_refused_total", "0+1x60", kind="connections"), "9m")],
    "RanvierExhausted": [Case(gauge("upstream_exhausted_total", "0x8 3x60"))],
    "RanvierLogLost": [Case(gauge("logs_dropped_total", "0x8 3x60") | gauge("logs_lost_total", "0x60"))],
}

IDLE = {
    **requests("5x60", "1x60"),
    **first_tokens(0, 0),
    **gauge("unexpected_errors_total", "2x80", place="gossip"),
    **gauge("backend_healthy", "1x60", backend="a"),
    **gauge("backend_circuit_closed", "1x60", backend="a"),
    **gauge("engine_cache_level", "1x60", backend="a", level="exact"),
    **gauge("budget_left_ratio", "1x60", scope="tenant t", limit="budget"),
    **gauge("server_refused_total", "4x60", kind="connections"),
    **gauge("upstream_exhausted_total", "4x60"),
    **gauge("logs_dropped_total", "4x60"),
    **gauge("logs_lost_total", "4x60"),
    **{
        name: each
        for kind in ("engine_fails", "no_engine", "peer_lost", "tables_differ", "certificate_ends")
        for name, each in finding(kind, "0x60").items()
    },
}
"""A node with nothing to do, of which some things happened long ago."""


def restarted(values: str) -> str:
    """As if its process ended after five minutes and another one counted from 0 a minute later."""
    return f"{values}x20 _x4 {re.sub('^[0-9]+', '0', values)}x40"


SILENT: Mapping[str, Sequence[Case]] = {
    "RanvierEngineDown": [
        Case(gauge("backend_healthy", "1x3 0 1x60", backend="a")),  # one probe was lost
        Case(gauge("backend_healthy", "1x8 _x40", backend="a"), "6m"),  # it was removed
    ],
    "RanvierNoBackend": [Case(finding("no_engine", "1 0x60"))],  # until the first probes of a start
    "RanvierErrors": [
        Case(requests("0+100x40", "0+1x40")),
        Case(requests("5x40", "0x4 1x40")),  # one request of an idle night failed
        Case(requests(restarted("1000+100"), restarted("50+1")), "8m"),
    ],
    "RanvierFirstTokensSlow": [
        Case(first_tokens(0, 10)),
        Case(first_tokens(1, 1, " 30x60"), "15m"),  # a few slow ones, long ago
        Case(first_tokens(0, 10, " 0+10x30"), "9m"),  # its counters begin anew
    ],
    "RanvierHitRateFell": [
        Case(hits("0+12000x1920"), "8h"),
        Case(hits("0+12000x1880 0+12000x40"), "8h"),  # its counters begin anew
        Case(
            {
                f'ranvier_{name}_total{{{NODE},model="m"}}': "0+15000x60"
                for name in ("counted_prompt_tokens", "cached_tokens")
            },
            "14m",
        ),
    ],
    "RanvierPeerLost": [Case(finding("peer_lost", "0x4 1 0x60"))],
    "RanvierMismatch": [Case(finding("peer_release", "1x60"))],  # an upgrade rolls
    "RanvierTablesDiffer": [Case(finding("tables_differ", "0x4 1x2 0x60"))],
    "RanvierEventsDegraded": [
        Case(gauge("engine_cache_level", "1x3 _x60", backend="a", level="degraded"), "9m"),
        Case(gauge("engine_cache_level", "1x60", backend="a", level="estimated"), "9m"),  # engines without events
    ],
    "RanvierLoopFailed": [Case(gauge("unexpected_errors_total", "2x80 _x8 0x60", place="gossip"), "25m")],
    "RanvierBudgetNear": [Case(gauge("budget_left_ratio", "0.2x60", scope="tenant t", limit="budget"))],
    "RanvierCertificateEnds": [Case(finding("certificate_ends", "1x8 0x60"), "12m")],
    "RanvierLimitReached": [Case(finding("limit_reached", "0x4 1 0x60"))],
    "RanvierRefuses": [Case(gauge("server_refused_total", "9x20 _x4 0x40", kind="connections"), "9m")],
    "RanvierExhausted": [Case(gauge("upstream_exhausted_total", "9x20 _x4 0x40"), "9m")],
    "RanvierLogLost": [
        Case(gauge("logs_dropped_total", "9x20 _x4 0x40") | gauge("logs_lost_total", "9x20 _x4 0x40"), "9m")
    ],
}


def asked(case: Case, names: Sequence[str], *, fires: bool) -> dict[str, Any]:
    """One test of promtool: whether the alerts fire then."""
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    what = f'count(ALERTS{{alertname=~"{"|".join(names)}",alertstate="firing"}}) > bool 0'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [{"expr": what, "eval_time": case.at, "exp_samples": samples}],
    }


def outcome(folder: Path, names: Iterable[str], tests: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with these alerts, alone: all of them would be looked at for each of the eight hours of one."""
    file, path = folder / "alerts.yaml", folder / "tests.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{**group(), "rules": [rules()[name] for name in names]}]}))
    path.write_text(json.dumps({"rule_files": [str(file)], "evaluation_interval": "15s", "tests": tests}))
    return promtool("test", "rules", str(path))


@needs_promtool
def test_the_file_is_one_that_prometheus_takes() -> None:
    assert promtool("check", "rules", str(ALERTS)) == ""


@needs_promtool
@pytest.mark.parametrize("name", FIRES)
def test_an_alert_fires_and_stays_silent(name: str, tmp_path: Path) -> None:
    cases = [asked(case, [name], fires=True) for case in FIRES[name]]
    assert outcome(tmp_path, [name], [*cases, *(asked(case, [name], fires=False) for case in SILENT[name])]) == ""


@needs_promtool
@pytest.mark.parametrize("at", ["1m", "4m", "14m"])
def test_no_alert_fires_in_an_idle_cluster(at: str, tmp_path: Path) -> None:
    assert outcome(tmp_path, FIRES, [asked(Case(IDLE, at), [*FIRES], fires=False)]) == ""


def test_each_alert_is_tried_and_has_a_summary_and_a_section_of_the_runbook() -> None:
    assert rules().keys() == FIRES.keys() == SILENT.keys()
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for name, rule in rules().items():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (path, anchor) == ("docs/runbook.md", name.lower())
        assert anchor in anchors(runbook)
        own = runbook.split(f"## {name}\n")[1].split("\n## ")[0]
        assert "- Look: " in own, name
        assert "- Do: " in own, name
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_alerts_name_metrics_findings_and_levels_that_there_are() -> None:
    known = set(re.findall(r"(?m)^\| `(\w+)`", PAGE.read_text()))
    kinds = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "operating.md").read_text()))
    for name, rule in rules().items():
        for metric in re.findall(r"ranvier_\w+", rule["expr"]):
            assert re.sub(r"_(bucket|count|sum)$", "", metric) in known, name
        for found in re.findall(r'kind=~?"([\w|]+)"', rule["expr"]):
            assert {*found.split("|")} <= kinds, name
        for found in re.findall(r'level=~?"([\w|]+)"', rule["expr"]):
            assert {*found.split("|")} <= {level.value for level in Level}, name

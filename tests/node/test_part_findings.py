"""What the parts of a node find wrong with themselves, each from its own state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from ranvier_py.config.config_loader import read_backend
from ranvier_py.core.clients.client_watch import BreakCount, BreakKind
from ranvier_py.core.engine_cache.calibration.bias_findings import BIASES, bias_finding
from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.engine_cache.calibration.predictions import BackendPredictions
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.routing.capacity import CapacityEstimate
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.node.access.limit_parts import LimitParts
from ranvier_py.node.client_parts import ClientReader
from ranvier_py.node.discovery.discovery_parts import DiscoveryParts
from ranvier_py.node.part import Part
from ranvier_py.node.parts.request_parts import PublicPort
from ranvier_py.node.parts.router_parts import ShadowPolicies
from ranvier_py.node.parts.status_views import engine_rows
from ranvier_py.node.parts.tls_parts import TlsFiles
from ranvier_py.node.reload import Reloads
from tests.builders.built_nodes import built
from tests.node.access.key_lab import keys_file
from tests.node.node_lab import lab, opened
from tests.node.test_reload import ReloadLab
from tests.node.test_verdict import SOON, finding, until_found


def found_by(kind: type[Part], **settings: Any) -> tuple[Any, list[Finding]]:
    part = built(**settings).part(kind)
    return part, [*part.findings(0.0)]


class Knows(Part):
    """A part that knows something of engines, and of one that has gone."""

    def __init__(self, **facts: Any) -> None:
        self._facts = facts

    def of_engines(self, now: float) -> dict[str, Any]:
        return {"one": self._facts, "gone": self._facts}


def test_the_status_shows_of_an_engine_what_the_last_part_knows_that_knows_anything() -> None:
    parts = [Knows(running=3, waiting=1), Knows(running=None, waiting=2, predicted_tokens=5)]
    node = built(backend=["http://127.0.0.1:9,name=one"], more=lambda _: [*parts])
    (row,) = engine_rows(node, [], 0.0)
    assert (row["running"], row["waiting"], row["predicted_tokens"]) == (3, 2, 5)
    assert (row["tokens_per_s"], row["level"]) == (None, "estimated")


@pytest.mark.parametrize(("days", "severity"), [(-1, Severity.DOWN), (13, Severity.DEGRADED), (15, None)])
def test_a_certificate_is_named_two_weeks_before_it_ends(tmp_path: Path, days: int, severity: Severity | None) -> None:
    made = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days))
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(str(chain))
    made.private_key_pem.write_to_path(str(key))
    _, found = found_by(TlsFiles, tls_certificate_file=chain, tls_key_file=key)
    assert [(each.kind, each.about, each.severity) for each in found] == (
        [("certificate_ends", str(chain), severity)] if severity is not None else []
    )


def test_the_break_of_a_client_that_costs_most_is_named_with_the_rule_that_mends_it() -> None:
    part, found = found_by(ClientReader)
    assert found == []
    counts = part.watch.counts("codex")
    counts.prompt_tokens = 1_000_000
    counts.breaks[BreakKind("reordered", "$.tools", "turn")] = BreakCount(3, 20_000, 1.0)
    assert not [*part.findings(0.0)], "too little is lost"
    counts.breaks[BreakKind("volatile", "$.system", "turn")] = BreakCount(9, 200_000, 12.5, {"sort-tools": 100})
    (each,) = part.findings(0.0)
    assert (each.kind, each.about, each.severity) == ("prefix_breaks", "codex", Severity.NOTICE)
    assert "$.system" in each.what
    assert "sort-tools" in each.remedy


def test_the_shadow_that_would_have_saved_most_is_named_if_it_is_worth_a_change() -> None:
    part, found = found_by(ShadowPolicies, shadow=["ttft", "random"])
    assert found == []
    for shadow, saved_s in zip(part.shadows.shadows, (90.0, 9.0), strict=True):
        shadow.counters.placed, shadow.counters.saved_seconds = 10_000, saved_s
    (each,) = part.findings(0.0)
    assert (each.kind, each.about) == ("shadow_better", "ttft")
    part.shadows.shadows[0].counters.saved_seconds = 40.0
    assert not [*part.findings(0.0)]


def test_a_port_that_is_nearly_full_is_named_by_what_it_is_full_of() -> None:
    part, found = found_by(PublicPort, connections_max=100, in_flight_max=100)
    assert found == []
    part.server.counters.in_flight = 90
    (each,) = part.findings(0.0)
    assert (each.kind, each.about, each.severity) == ("node_full", "in_flight_max", Severity.DEGRADED)


def test_a_table_of_limits_that_drops_counts_is_named_while_it_does(tmp_path: Path) -> None:
    part, found = found_by(LimitParts, keys_file=keys_file(tmp_path))
    assert found == []
    part.limiter.counts.dropped = 7
    part.sweep(100.0)
    (each,) = part.findings(129.0)
    assert (each.kind, each.severity) == ("limits_full", Severity.DEGRADED)
    assert not [*part.findings(131.0)]


def test_too_few_files_for_the_connections_that_are_configured_are_named() -> None:
    node = built(connections_max=100)
    reloads = Reloads(node, built(connections_max=5000).config, None, 1024)
    (each,) = reloads.findings(0.0)
    assert (each.kind, each.severity) == ("descriptors", Severity.NOTICE)
    assert "100 instead of 5000" in each.what


@pytest.mark.parametrize("bias", Bias)
def test_every_bias_of_predictions_has_its_words_and_its_remedy(bias: Bias) -> None:
    known = BackendPredictions("http://a:1", 0, CapacityEstimate(), 16)
    each = bias_finding(bias, known, "a")
    assert each.kind == BIASES[bias][0]
    assert each.about.startswith("a")
    assert each.remedy.endswith(".")


async def test_an_engine_whose_events_can_not_be_had_is_a_finding_with_the_reason() -> None:
    async with lab(engines=1, **SOON) as node:
        url = node.engines[0]
        await node.http.request("DELETE", f"{node.control}/admin/backends", json={"url": url})
        body = {"url": url, "kv_events": "tcp://127.0.0.1:1", "name": "w"}
        assert (await node.http.post(f"{node.control}/admin/backends", json=body)).is_success
        await node.until("/admin/status", lambda each: any("not connected" in one["what"] for one in each["findings"]))
        found = finding(await until_found(node, "cache_level"), "cache_level")
        assert (found["severity"], "w is known as estimated" in found["what"]) == ("degraded", True)


def test_sources_are_named_by_what_of_them_is_left_out_fails_or_waits() -> None:
    part, found = found_by(DiscoveryParts)
    assert found == []
    name, sources = SourceName("file"), part._sources
    sources.take(name, [FoundBackend(read_backend({"url": "http://a:1"}))], ["worker w7: it has no url"])
    sources.reconciler.failed["http://b:1"] = "there are 4096 already"
    sources.reconciler.unconfirmed["http://c:1"] = None
    kinds = [(each.kind, each.about, each.severity) for each in part.findings(0.0)]
    assert kinds == [
        ("source_left_out", "file", Severity.NOTICE),
        ("engine_not_added", "http://b:1", Severity.DEGRADED),
        ("engine_unconfirmed", "http://c:1", Severity.DEGRADED),
    ]
    assert "worker w7" in next(iter(part.findings(0.0))).what
    sources.fail(name, "it is not there")
    (first, *_) = part.findings(0.0)
    assert (first.kind, first.severity, "keeps 1 engine" in first.what) == ("source_failing", Severity.NOTICE, True)


async def test_a_configuration_that_was_refused_or_waits_for_a_restart_is_named_until_it_is_mended(
    tmp_path: Path,
) -> None:
    async with opened(partial(ReloadLab, folder=tmp_path), 1, 30) as place:
        node = await place.start()
        for settings, kind, words in (
            ({"probe_interval_s": -1}, "config_refused", "probe_interval_s"),
            ({"block_size_tokens": 32}, "restart_needed", "block_size_tokens"),
        ):
            place.write(**settings)
            await node.http.post(f"{node.control}/admin/reload")
            assert words in finding(await until_found(node, kind), kind)["what"]
            place.write()
            assert (await node.http.post(f"{node.control}/admin/reload")).is_success
            await until_found(node, kind, there=False)

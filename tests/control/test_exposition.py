from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ranvier_py.control.exposition import render
from ranvier_py.core.metrics import Histogram, Sample

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def parsed(samples: list[Sample]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, _ = render(samples)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in parse_text(body.decode())
        for sample in metric.samples
    }


def test_counters_gauges_and_histograms_read_back_as_they_are() -> None:
    seconds = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 5.0):
        seconds.observe(value)
    found = parsed(
        [
            Sample("requests", "counter", "Requests.", 7, {"outcome": "success"}),
            Sample("backends", "gauge", "Backends.", 2),
            Sample("first_token_seconds", "histogram", "Time to the first token.", seconds),
        ]
    )
    assert found == {
        ("ranvier_requests_total", frozenset({("outcome", "success")})): 7,
        ("ranvier_backends", frozenset()): 2,
        ("ranvier_first_token_seconds_bucket", frozenset({("le", "0.1")})): 1,
        ("ranvier_first_token_seconds_bucket", frozenset({("le", "1.0")})): 2,
        ("ranvier_first_token_seconds_bucket", frozenset({("le", "+Inf")})): 3,
        ("ranvier_first_token_seconds_count", frozenset()): 3,
        ("ranvier_first_token_seconds_sum", frozenset()): 5.55,
    }


@given(st.text(), st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r"), max_size=30))
def test_no_label_or_help_can_break_the_format(label: str, help_text: str) -> None:
    """Names of backends and models come from outside."""
    label = label.encode("utf-8", "replace").decode().replace("\r", "")  # the parser splits lines at \r as well
    body, _ = render([Sample("load", "gauge", help_text, 1, {"backend": label}), Sample("last", "gauge", "Last.", 2)])
    lines = [line for line in body.decode().split("\n") if line and not line.startswith("#")]
    assert len(lines) == 2
    assert lines[1] == "ranvier_last 2.0"
    (metric,) = parse_text(lines[0] + "\n")
    assert metric.samples[0].labels == {"backend": label}


def test_series_of_one_name_form_one_family() -> None:
    body, _ = render(
        [
            Sample("load", "gauge", "Load.", 1, {"backend": "a"}),
            Sample("other", "gauge", "Other.", 1),
            Sample("load", "gauge", "Load.", 2, {"backend": "b"}),
        ]
    )
    assert body.decode().count("# TYPE ranvier_load gauge") == 1


def test_one_name_with_two_kinds_is_refused() -> None:
    with pytest.raises(AssertionError, match="two kinds"):
        render([Sample("load", "gauge", "Load.", 1), Sample("load", "counter", "Load.", 1)])


@pytest.mark.parametrize(("kind", "value"), [("histogram", 1.0), ("gauge", Histogram((1.0,)))])
def test_a_value_of_the_wrong_kind_is_refused(kind: str, value: float | Histogram) -> None:
    with pytest.raises(AssertionError, match="histogram"):
        render([Sample("load", kind, "Load.", value)])  # type: ignore[arg-type]


def test_a_client_that_asks_for_openmetrics_gets_it() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(inf)
    body, content_type = render([Sample("seconds", "histogram", "Seconds.", histogram)], OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.decode().endswith("# EOF\n")
    assert [metric.name for metric in parse_openmetrics(body.decode())] == ["ranvier_seconds"]
    assert render([], "")[1].startswith("text/plain")


def test_two_answers_share_nothing() -> None:
    assert render([Sample("one", "gauge", "One.", 1)])[0] != b""
    assert render([])[0] == b""

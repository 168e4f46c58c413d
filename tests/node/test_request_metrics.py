"""What requests count as: times of first tokens from streams alone, by model and by backend, in bounded series."""

from __future__ import annotations

import re
from math import inf

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.metrics import LINES_MAX, OTHER, Family, Histogram, Sample
from ranvier_py.node.parts.request_metrics import Ended
from ranvier_py.node.parts.request_parts import RequestPath
from tests.builders.built_nodes import built
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Node, chat, lab, turn

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VALUES = st.lists(st.floats(0.0, 1000.0), max_size=50)


@given(VALUES)
def test_values_counted_at_once_are_those_counted_one_by_one(values: list[float]) -> None:
    one, many = Histogram((0.1, 1.0, 10.0)), Histogram((0.1, 1.0, 10.0))
    for value in values:
        one.observe(value)
    many.observe_all(values)
    assert many.counts == one.counts
    assert many.sum == pytest.approx(one.sum)


def test_a_bucket_keeps_the_latest_trace_that_fell_into_it() -> None:
    found = Histogram((1.0, 2.0))
    found.observe_all([0.5, 0.7, 5.0, 0.9], ["a", "b", "", ""], 7.0)
    assert {bucket: each.trace_id for bucket, each in found.exemplars.items()} == {0: "b"}


def test_a_family_has_at_most_ten_thousand_lines_and_counts_the_rest_as_other() -> None:
    plain = Family("requests", "Requests.", ("path", "code"), kept=("code",))
    for number in range(LINES_MAX + 5):
        plain.add((f"/{number}", "200"), 1)
    assert len(plain.rows) == LINES_MAX + 1
    assert (plain.rows[OTHER, "200"], plain.spilled) == (5, 5)
    plain.add(("/0", "200"), 1)  # which has its row
    assert plain.spilled == 5
    timed = Family("seconds", "Seconds.", ("model",), bounds=(0.1, 1.0))
    for number in range(LINES_MAX):
        timed.histogram(f"m{number}").observe(0.5)
    assert len([*timed.samples()]) * (len((0.1, 1.0, inf)) + 2) <= LINES_MAX + 5


def test_a_family_without_series_is_declared_and_one_that_is_gone_is_dropped() -> None:
    family = Family("requests", "Requests.", ("backend", "code"))
    assert [*family.samples()] == [Sample("requests", "counter", "Requests.", None, {"backend": "", "code": ""})]
    family.add(("a", "200"), 1)
    family.add(("b", "200"), 2)
    family.forget("backend", "a")
    assert [each.labels["backend"] for each in family.samples()] == ["b"]


async def values(node: Node, family: str) -> dict[str, float]:
    """By the labels of one name."""
    page = (await node.http.get(f"{node.control}/metrics")).text
    found = re.findall(rf"^ranvier_{family}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return {labels.replace('"', ""): float(number) for labels, number in found}


async def test_a_whole_answer_is_no_first_token_and_a_stream_is() -> None:
    async with lab(engines=1) as node:
        backend, chats = node.engines[0].removeprefix("http://"), turn("hello " * 100)
        by_model, by_backend = f"model={MODEL}", f"backend={backend}"
        await node.chat(chats)
        assert await values(node, "time_to_first_token_seconds_count") == {}
        assert await values(node, "request_duration_seconds_count") == {by_model: 1}
        await node.chat(chats, stream=True, stream_options={"include_usage": True})
        assert await values(node, "time_to_first_token_seconds_count") == {by_model: 1}
        assert await values(node, "backend_time_to_first_token_seconds_count") == {by_backend: 1}
        assert await values(node, "backend_request_duration_seconds_count") == {by_backend: 2}
        assert await values(node, "queue_seconds_count") == {by_model: 2}
        await node.until_routes(lambda view: view["engine_cached_share"])
        while not (found := await values(node, "time_per_output_token_seconds_count")):  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        assert found == {by_model: 1}
        assert await values(node, "output_tokens_total") == {by_model: 16}
        for name in ("prompt_tokens", "counted_prompt_tokens", "cached_tokens", "predicted_tokens"):
            ((label, count),) = (await values(node, f"{name}_total")).items()
            assert (label, count > 0) == (by_model, True), name
            assert await values(node, f"backend_{name}_total") == {by_backend: count}
        first, whole = (
            await values(node, "time_to_first_token_seconds_sum"),
            await values(node, "request_duration_seconds_sum"),
        )
        assert 0 < first[by_model] < whole[by_model]


async def test_requests_are_counted_without_keys_and_what_was_refused_before_it_was_read_is_too() -> None:
    async with lab(engines=1) as node:
        backend = node.engines[0].removeprefix("http://")
        await node.chat()
        await node.http.post(f"{node.url}/v1/chat/completions", content=chat(model="nobody's"))
        await node.http.request("BREW", f"{node.url}/coffee")
        wire = await node.wire()
        await wire.send(b"no HTTP\r\n\r\n")
        await wire.stream.receive_some()
        await wire.stream.aclose()
        requests = await values(node, "requests_total")
        assert requests[f"code=200,model={MODEL},path=/v1/chat/completions,tenant="] == 1
        assert requests["code=404,model=,path=/v1/chat/completions,tenant="] == 1
        assert sum(requests.values()) == 4
        assert await values(node, "backend_requests_total") == {f"backend={backend},code=200": 1}


async def test_a_backend_that_is_removed_takes_its_series_along() -> None:
    async with lab(engines=2, policy="round_robin") as node:
        for number in range(4):
            await node.chat(turn(f"chat {number} " * 50))
        assert len(await values(node, "backend_request_duration_seconds_count")) == 2
        gone = node.engines[0].removeprefix("http://")
        await node.http.request("DELETE", f"{node.control}/admin/backends", json={"name": gone})
        assert gone not in str(await values(node, "backend_request_duration_seconds_count"))
        assert gone not in str(await values(node, "backend_requests_total"))


def test_what_ends_after_its_backend_has_gone_brings_its_series_not_back() -> None:
    counts = built(backend=["http://127.0.0.1:1,name=a"]).part(RequestPath).counts
    counts._ended += [Ended(b"/v1/chat/completions", 200, "", "m", name) for name in ("a", "gone")]
    found = {(each.name, each.labels["backend"]) for each in counts.samples() if each.labels.get("backend")}
    assert {backend for _, backend in found} == {"a"}


async def test_a_traced_request_is_the_exemplar_of_its_buckets_for_who_accepts_openmetrics() -> None:
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    async with lab(engines=1, otel_endpoint="http://127.0.0.1:9", otel_sample_ratio=0.0) as node:
        for stream in (False, True):
            body = chat(stream=stream)
            await node.http.post(f"{node.url}/v1/chat/completions", content=body, headers=headers)
        await node.chat(turn("a request that nobody traces"), stream=True)
        accepted = {"accept": "application/openmetrics-text; version=1.0.0"}
        page = (await node.http.get(f"{node.control}/metrics", headers=accepted)).text
        found = re.findall(r"(?m)^ranvier_(\w+)_bucket\{.*\} \S+ # \{trace_id=\"(\w+)\"\}", page)
        assert {trace for _, trace in found} == {TRACE}
        names = {"time_to_first_token_seconds", "request_duration_seconds"}
        assert {name for name, _ in found} == {"queue_seconds", *names, *(f"backend_{name}" for name in names)}
        assert TRACE not in (await node.http.get(f"{node.control}/metrics")).text

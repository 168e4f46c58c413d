"""A whole node between real sockets: real engines of the lab, a real client library, real faults."""

import errno
import io
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from cluster.local_tokenizer import local_tokenizer
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import ControlPort
from ranvier_py.core.errors import ConfigError, ListenError, leaves
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.node.parts import request_parts
from ranvier_py.node.parts.router_parts import placement_options
from ranvier_py.node.run_node import keep_freed_memory, run
from ranvier_py.proxy.upstream import Upstream
from tests.core.routing.placement.engines import engines, match_of
from tests.node.node_lab import (
    BETWEEN_LOOKS_S,
    DEADLINE_S,
    KEY,
    MODEL,
    PLACES,
    SYSTEM,
    Lab,
    Node,
    chat,
    lab,
    opened,
    start_engine,
    turn,
)
from tests.proxy.wire import END, ROLE, STREAM_HEAD, TOKEN, Scripted


async def test_a_conversation_stays_on_the_engine_that_holds_it_and_the_engine_confirms_the_hit() -> None:
    async with lab(engines=4) as node:
        messages = turn("Where are the atlases? " * 10)
        served = set()
        for number in range(4):
            answer = await node.chat(messages)
            served.add(answer.headers["x-ranvier-backend"])
            body = answer.json()
            if number:
                assert answer.headers["x-ranvier-reason"] == "affinity"
                assert int(answer.headers["x-ranvier-matched-tokens"]) > 0
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            reply = body["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"And shelf {number}?"}]
        assert len(served) == 1


async def test_a_backend_that_nobody_listens_on_is_passed_over() -> None:
    async with lab(engines=1) as node:
        dead = "http://127.0.0.1:9"
        added = await node.http.post(f"{node.control}/admin/backends", json={"url": dead})
        assert added.status_code == 200
        for number in range(8):
            assert (await node.chat(turn(f"question {number}"))).status_code == 200


async def test_backends_come_and_go_at_run_time_also_in_sglangs_words() -> None:
    async with lab(engines=2, backend=[]) as node:
        assert (await node.chat(turn("hello"))).status_code == 503
        added = await node.http.post(f"{node.control}/add_worker", params={"url": node.engines[0]})
        assert added.text == f"Successfully added worker: {node.engines[0]}"
        assert (await node.chat(turn("hello"))).status_code == 200
        await node.http.post(f"{node.control}/admin/backends", json={"url": node.engines[1], "name": "second"})
        listed = (await node.http.get(f"{node.control}/list_workers")).json()
        assert listed == {"urls": node.engines}
        await node.http.post(f"{node.control}/remove_worker", params={"url": node.engines[0]})
        answer = await node.chat(turn("hello"))
        assert answer.headers["x-ranvier-backend"] == "second"
        drained = await node.http.post(f"{node.control}/admin/backends/drain", json={"url": node.engines[1]})
        assert drained.json()["draining"] is True
        assert (await node.chat(turn("hello"))).status_code == 503


async def test_only_what_somebody_may_have_to_look_at_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A healthy start without one warning: else nobody reads them."""
    with caplog.at_level("INFO", "ranvier_py"):
        async with lab(engines=1, probe_interval_s=0.05, probe_failures=1) as node:
            await node.until_backend(lambda backend: backend["health"] == "healthy")
            assert [record for record in caplog.records if record.levelname != "INFO"] == []
            await node.fault(node.engines[0], kind="status", status=503, health=True)
            await node.until_backend(lambda backend: backend["health"] == "unhealthy")
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "backend.health" in warned
    assert "healthy -> unhealthy" in warned


async def test_a_restarted_engine_loses_its_claims() -> None:
    async with lab(engines=0, probe_interval_s=0.05) as node:
        url, scope = await start_engine(node.nursery, 1)
        await node.http.post(f"{node.control}/admin/backends", json={"url": url})
        first = await node.chat(turn("hello"))
        assert first.headers["x-ranvier-reason"] == "only"
        assert int((await node.chat(turn("hello"))).headers["x-ranvier-matched-tokens"]) > 0
        scope.cancel()
        await node.until_backend(lambda backend: backend["health"] == "unhealthy")
        await start_engine(node.nursery, 1, port=int(url.rpartition(":")[2]))
        await node.until_backend(lambda backend: backend["generation"] == 2 and backend["health"] == "healthy")
        assert (await node.chat(turn("hello"))).headers["x-ranvier-matched-tokens"] == "0"


async def test_an_explanation_shows_every_candidate_and_places_nothing() -> None:
    async with lab(engines=3) as node:
        served = await node.chat(turn("hello"))
        body = {"model": MODEL, "messages": turn("hello", "hi", "and now?")}
        report = (await node.http.post(f"{node.control}/explain", json=body)).json()
        assert report["chosen"] == served.headers["x-ranvier-backend"]
        assert len(report["candidates"]) == 3
        decisions = (await node.http.get(f"{node.control}/admin/decisions")).json()["decisions"]
        assert len(decisions) == 1


async def test_an_explanation_by_ttft_shows_what_every_candidate_would_cost() -> None:
    async with lab(engines=2, policy="ttft") as node:
        served = (await node.chat(turn("Where are the atlases? " * 40))).headers["x-ranvier-backend"]
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > 0)
        body = {"model": MODEL, "messages": turn("Where are the atlases? " * 40, "There.", "And the maps?")}
        report = (await node.http.post(f"{node.control}/explain", json=body)).json()
        assert (report["policy"], report["chosen"]) == ("ttft", served)
        terms = {candidate["backend"]: candidate["terms"] for candidate in report["candidates"]}
        for each in terms.values():
            seconds = [value for name, value in each.items() if name.endswith("_s") and name != "tokens_per_s"]
            assert each["sum_s"] == pytest.approx(sum(seconds) - each["sum_s"])
            assert each["tokens_per_s"] > 0
        holder, other = terms.pop(served), next(iter(terms.values()))
        assert holder["prefill_s"] < other["prefill_s"] / 2, "it holds nearly all of the prompt"


async def test_an_explanation_names_the_prefixes_whose_tree_can_be_looked_at() -> None:
    """Nothing else tells an operator what a prefix is called."""
    async with lab(engines=2) as node:
        served = (await node.chat(turn("Where are the atlases? " * 40))).headers["x-ranvier-backend"]
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > 0)
        body = {"model": MODEL, "messages": turn("Where are the atlases? " * 40, "There.", "And the maps?")}
        chain = (await node.http.post(f"{node.control}/explain", json=body)).json()["chain"]
        depths = [stop["tokens"] for stop in chain]
        assert depths == sorted(depths, reverse=True)
        assert len(chain) > 2
        found = []
        for stop in chain:
            for name in filter(None, (stop["token_fingerprint"], stop["text_fingerprint"])):
                tree = await node.http.get(f"{node.control}/admin/routes/{name}")
                found += tree.json()["routes"] if tree.status_code == 200 else []
        assert {holder["backend"] for route in found for holder in route["holders"]} == {served}


async def test_a_completion_is_explained_as_one() -> None:
    async with lab(engines=3) as node:
        body = {"model": MODEL, "prompt": list(range(1, 200)), "max_tokens": 4}
        served = await node.http.post(f"{node.url}/v1/completions", json=body)
        await node.until_routes(lambda s: s["rows"] > 0)
        report = (await node.http.post(f"{node.control}/explain", json=body)).json()
        assert report["chosen"] == served.headers["x-ranvier-backend"]
        assert (report["reason"], report["prompt_tokens"]) == ("affinity", 199)


async def test_metrics_report_reasons_engine_caches_and_every_bound() -> None:
    async with lab(engines=2) as node:
        await node.chat(turn("hello"))
        await node.until_routes(lambda s: s["engine_cached_share"] is not None)
        page = (await node.http.get(f"{node.control}/metrics")).text
        for line in (
            'ranvier_decisions_total{reason="cold"} 1.0',
            'ranvier_outcomes_total{outcome="success"} 1.0',
            'ranvier_request_duration_seconds_count{model="lab-model"} 1.0',
            'ranvier_counted_prompt_tokens_total{model="lab-model"}',
            "ranvier_routes_rows",
            "ranvier_tokenizer_worker_dropped_total 0.0",
            "ranvier_server_connections",
        ):
            assert line in page, line


async def test_what_no_engine_schema_forbids_is_passed_on_and_what_is_no_json_is_refused() -> None:
    async with lab(engines=1) as node:
        url = f"{node.url}/v1/chat/completions"
        strange = await node.http.post(url, content=b'{"model":"lab-model","messages":"hello"}')
        assert strange.headers["x-ranvier-backend"]
        broken = await node.http.post(url, content=b'{"model":')
        assert broken.status_code == 400
        assert broken.json()["error"]["type"] == "invalid_request_error"
        assert broken.headers["x-request-id"]
        named = await node.http.post(url, content=b"{", headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        refused = await node.http.get(url)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await node.http.get(f"{node.url}/nothing")).status_code == 404
        assert (await node.http.get(f"{node.url}/health")).json() == {"status": "ok"}


async def test_without_time_for_tokens_a_cold_prompt_is_placed_all_the_same() -> None:
    async with lab(engines=2, tokenize_deadline_s=0) as node:
        assert (await node.chat(turn("cold"))).status_code == 200
        statistics = await node.ask("/admin/routes")
        assert statistics["tokenizer_worker"]["deadlines_missed"] == 1


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "power_of_two"])
async def test_every_policy_serves(policy: str) -> None:
    async with lab(engines=2, policy=policy) as node:
        for number in range(4):
            assert (await node.chat(turn(f"question {number}"))).status_code == 200


@pytest.mark.parametrize(("option", "reason"), [((), "diverted"), (("placement_compatibility=off",), "affinity")])
def test_compatible_with_ranvier_one_request_more_than_elsewhere_is_too_many(option: list[str], reason: str) -> None:
    config = config_of(placement_compatibility="ranvier", policy_option=option)
    policy = make_policy(config.policy, placement_options(config))
    assert policy.choose(match_of((0, 512)), engines(1, 0, 0), Random(1)).reason == reason


async def test_policies_in_the_shadow_are_in_status_and_metrics_and_route_nothing() -> None:
    async with lab(engines=3, shadow=["round_robin", "ttft"]) as one:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        served = set()
        for number in range(6):
            messages.append({"role": "user", "content": f"Question {number}: where is the atlas?"})
            answer = await one.chat(messages)
            messages.append(dict(answer.json()["choices"][0]["message"]))
            served.add(answer.headers["x-ranvier-backend"])
        assert len(served) == 1, "affinity alone routes"
        shadows = {each["policy"]: each for each in (await one.ask("/admin/routes"))["shadows"]}
        assert shadows["round_robin"]["placed"] == shadows["ttft"]["placed"] == 6
        assert shadows["round_robin"]["elsewhere_share"] > 0.5
        assert shadows["round_robin"]["saved_tokens"] < 0
        metrics = (await one.http.get(f"{one.control}/metrics")).text
        assert 'ranvier_shadow_placed_total{policy="ttft"} 6.0' in metrics
        assert 'ranvier_shadow_saved_seconds{policy="round_robin"}' in metrics


def children() -> list[int]:
    """Of this process, whichever of its threads has started them."""
    return [int(pid) for one in Path("/proc/self/task").glob("*/children") for pid in one.read_text().split()]


@pytest.mark.slow
async def test_a_node_serves_on_when_its_tokenizer_is_killed_and_gets_another_one() -> None:
    async with lab(engines=2, tokenizer=str(EMBEDDED)) as node:
        assert (await node.chat(turn("hello"))).status_code == 200
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > 0)
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        for number in range(8):
            assert (await node.chat(turn(f"question {number}"))).status_code == 200
        while "tokenizer_process_restarts_total 1.0" not in (await node.http.get(f"{node.control}/metrics")).text:
            assert (await node.chat(turn("hello", "hi", "and now?"))).status_code == 200
            await trio.sleep(BETWEEN_LOOKS_S)
        learned = (await node.ask("/admin/routes"))["tokenizer_worker"]["learned"]
        assert (await node.chat(turn("something new " * 40))).status_code == 200
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > learned)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_kept_where_the_c_library_can_be_set_so() -> None:
    assert keep_freed_memory()


@pytest.mark.parametrize(("same_s", "whole"), [(1000.0, True), (0.0, False)])
async def test_a_signal_that_comes_twice_at_once_drains_and_a_later_second_one_cuts(
    same_s: float, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_parts, "SAME_SIGNAL_S", same_s)
    begun, ends = trio.Event(), trio.Event()
    received: list[bytes] = []

    async def follow(node: Node) -> None:
        async with node.http.stream("POST", f"{node.url}/v1/chat/completions", content=chat(stream=True)) as answer:
            with suppress(httpx.HTTPError):
                async for piece in answer.aiter_bytes():
                    received.append(piece)
                    begun.set()

    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, ends, END)
    async with lab(engine, drain_timeout_s=DEADLINE_S) as node, trio.open_nursery() as nursery:
        nursery.start_soon(follow, node)
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await node.until("/readyz", lambda answer: not answer["ready"])
        os.kill(os.getpid(), signal.SIGTERM)
        if whole:
            await node.ask("/readyz")  # meanwhile it has seen the second
            ends.set()
    assert b"".join(received).endswith(b"data: [DONE]\n\n") is whole


@pytest.mark.parametrize("key", ["chat_template", "tls"])
async def test_files_that_are_not_what_they_should_be_are_the_configurations_problem(key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe\x00")
    files = {"tls_certificate_file": file, "tls_key_file": file} if key == "tls" else {key: file}
    with pytest.raises(ConfigError, match=key):
        await run(config_of(**PLACES, **files), lambda: ControlPort, tokenizer_of=local_tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["listen", "control"])
async def test_an_address_in_use_is_named(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        with pytest.raises(BaseExceptionGroup) as caught:
            await run(config_of(**{**PLACES, key: address}), lambda: ControlPort, tokenizer_of=local_tokenizer)
    assert any(address in str(error) and isinstance(error, ListenError) for error in leaves(caught.value))


@pytest.mark.parametrize("address", ["nowhere.test:1", "[fe80::1]:8080"])  # of the second only a zone makes an address
@pytest.mark.parametrize("key", ["listen", "control", "gossip"])
async def test_an_address_that_is_none_of_this_machine_is_named(
    key: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def look_up(host: Any, *others: Any, **named: Any) -> Any:
        if host in ("nowhere.test", b"nowhere.test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    config = config_of(**{**PLACES, "control_key": KEY, "insecure_gossip": True, "gossip": "127.0.0.1:0", key: address})
    with pytest.raises((BaseExceptionGroup, ListenError)) as caught:
        await run(config, lambda: ControlPort, tokenizer_of=local_tokenizer)
    (error,) = leaves(caught.value)
    assert isinstance(error, ListenError)
    assert address in str(error)


async def test_a_node_that_knows_no_engine_states_so(caplog: pytest.LogCaptureFixture) -> None:
    """A flag that was forgotten looks like a node that works, until the first request."""
    async with lab():
        pass
    assert "node.no_backends" in caplog.text


async def test_a_node_whose_output_can_not_be_written_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    async with lab():
        pass


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"])
async def test_a_template_that_must_be_read_in_full_is_a_warning_and_another_is_none(
    template: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template or "")
    async with lab(chat_template=file if template else None):
        pass
    assert ("node.tokenizer incremental=False" in caplog.text) == (template is not None)


async def test_a_signal_while_a_node_starts_ends_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one of an earlier node may be left
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        async with opened(Lab, 0, DEADLINE_S / 2) as place, trio.open_nursery() as nursery:
            place.engines.append(f"http://127.0.0.1:{hanging.getsockname()[1]}")
            nursery.start_soon(partial(place.start, probe_timeout_s=DEADLINE_S))
            while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # noqa: ASYNC110  # of the process
                await trio.sleep(BETWEEN_LOOKS_S)
            os.kill(os.getpid(), signal.SIGTERM)
    assert "node.ready" not in caplog.text


async def test_a_node_that_ends_has_closed_its_connections_to_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = Upstream.close

    def noted(upstream: Upstream) -> None:
        closed.append(upstream.counters.open)
        close(upstream)

    monkeypatch.setattr(Upstream, "close", noted)
    async with lab(engines=1) as node:
        assert (await node.chat()).status_code == 200
    assert closed == [1]

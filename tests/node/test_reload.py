"""The configuration, read again while a node serves: what changes, what does not, and what a broken file does."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio
import trustme

import ranvier_py.node.node  # all parts, of which a test looks at each
import ranvier_py.node.tracing.trace_parts  # noqa: F401  # which a node imports only with a collector
from cluster.dns.addresses import free_port
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import load
from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.config.config_reference import toml_value
from ranvier_py.control.control_port import ControlPort
from ranvier_py.core.options import SECONDS_MAX
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.core.shadows.mirrors import Mirrored
from ranvier_py.core.shadows.shadow import Shadow
from ranvier_py.core.tracing.span_names import VERSIONS
from ranvier_py.node.config_source import ConfigSource
from ranvier_py.node.part import Part
from ranvier_py.node.parts import request_parts
from ranvier_py.node.reload import NEEDS_RESTART, Reloads, takes
from ranvier_py.node.run_node import Addresses, run
from tests.node.node_lab import BETWEEN_LOOKS_S, DEADLINE_S, KEY, MODEL, PLACES, Lab, Node, opened, turn
from tests.proxy.wire import GOOD, Scripted

BASE = {**PLACES, "debug_headers": True, "probe_interval_s": 60, "drain_timeout_s": 5}

Own = Callable[[Config], Config]
"""Of the configuration as it was loaded, what one node runs with."""


class ReloadLab(Lab):
    """Nodes whose configuration is a file."""

    def __init__(self, nursery: trio.Nursery, http: httpx.AsyncClient, folder: Path, own: Own = lambda c: c) -> None:
        super().__init__(nursery, http)
        self.file, self.own = folder / "ranvier.toml", own

    def write(self, **settings: Any) -> None:
        values = {**BASE, "backend": self.engines, **settings}
        self.file.write_text("".join(f"{name} = {toml_value(value)}\n" for name, value in values.items()))

    async def start(self, **settings: Any) -> Node:
        self.write(**settings)
        scope, loaded = trio.CancelScope(), partial(load, {}, self.file)

        async def serve(task_status: trio.TaskStatus[Addresses]) -> None:
            with scope:
                source = ConfigSource(loaded, self.own)
                await run(
                    loaded().config,
                    lambda: ControlPort,
                    tokenizer_of=self.tokenizer_of,
                    source=source,
                    task_status=task_status,
                )

        return Node(self, await self.nursery.start(serve), scope)


@asynccontextmanager
async def reloadable(
    folder: Path, engines: int = 2, own: Own = lambda c: c, **settings: Any
) -> AsyncIterator[tuple[Node, Callable[..., Any]]]:
    """A node, and what has it read another configuration: the JSON of the answer."""
    async with opened(partial(ReloadLab, folder=folder, own=own), engines, DEADLINE_S) as place:
        node = await place.start(**settings)

        async def changed(headers: dict[str, str] | None = None, status: int = 200, **other: Any) -> Any:
            place.write(**{**settings, **other})
            answer = await node.http.post(f"{node.control}/admin/reload", headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()

        yield node, changed


def kinds_of(kind: type[Part]) -> list[type[Part]]:
    return [each for sub in kind.__subclasses__() for each in (sub, *kinds_of(sub))]


PARTS = kinds_of(Part)


def is_taken(name: str) -> bool:
    """Whether a part takes a new value of this key while a node runs."""
    return any(takes(part, name) for part in PARTS)


def test_every_key_may_change_or_is_listed_as_needing_a_restart() -> None:
    taken = {key for part in PARTS for key in part.keys}
    assert {name for name in KEYS if not is_taken(name)} == NEEDS_RESTART
    assert taken <= set(KEYS) | {key.path[0] for key in KEYS.values() if len(key.path) > 1}
    assert not taken & NEEDS_RESTART


OTHER_VALUES: dict[str, Any] = {
    "debug_headers": False,
    "client_rules": ["tools-by-name=rewrite"],
    "control_key": "another-key-of-the-control-port",
    "backend_api_key": "another-key-of-the-backends",
    "policy": "ttft",
    "policy_option": ["cache_threshold=0.5"],
    "shadow": ["random"],
    "metric_names": "continuum",
    "placement_compatibility": "ranvier",
    "log_level": "warning",
    "log_format": "json",
    "retry_statuses": [503],
    "response_cache_key": "continuum",
    "transfer_fields": "pass",
    "client_ranks": "remove",
    "cors_origins": ["http://chat.example"],
    "backend_dns_server": "127.0.0.1:53",
    "kubernetes_api": "https://127.0.0.1:6443",
    "limit_on_partition": "keep",
    "model": [{"name": "gpt-4o", "to": {MODEL: 1.0}}],
    "otel_sample_ratio": 0.5,
    "otel_semconv": VERSIONS[-1],
}
"""Of keys whose other value can't be made from their limits."""

FILES = (
    *("client_rules_file", "control_key_file", "backend_api_key_file", "tls_certificate_file", "tls_key_file"),
    *("upstream_ca_file", "upstream_certificate_file", "upstream_key_file", "keys_file", "trusted_proxies"),
    *("control_keys_file", "control_tls_certificate_file", "control_tls_key_file", "control_client_ca_file"),
    *("tls_client_ca_file", "backends_file", "backend_dns", "backend_kubernetes", "kubernetes_credentials"),
)
"""Keys of files, or of what needs one or a server: other tests change them."""


def another(name: str) -> Any:
    """A good value of a key that is not its default."""
    option = KEYS[name].option
    default = option.default
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    for value in (default + 1, default / 2 if isinstance(default, float) else default - 1):
        if option.least <= value <= min(option.most, SECONDS_MAX) or (default > SECONDS_MAX and value <= option.most):
            return value
    raise AssertionError(f"no other value of {name}")


APPLIED = [name for name in KEYS if is_taken(name) and name not in (*FILES, "backend")]


@pytest.mark.slow
async def test_every_key_that_may_change_does_and_goes_back(tmp_path: Path) -> None:
    async with reloadable(tmp_path, otel_endpoint="http://127.0.0.1:1") as (node, changed):
        before = await node.ask("/admin/config")
        for name in APPLIED:
            headers = {"authorization": f"Bearer {OTHER_VALUES['control_key']}"} if name == "control_key" else None
            answer = await changed(**{name: another(name)})
            assert (answer["applied"], answer["restart_needed"]) == ([name], []), name
            assert answer["unchanged"] == len(KEYS) - 1
            shown = (await node.http.get(f"{node.control}/admin/config", headers=headers)).json()
            assert [key for key in shown if shown[key] != before[key]] == [name]
            status = (await node.chat(turn("hello"))).status_code
            assert status == 200, name
            assert (await changed(headers))["applied"] == [name]
        assert await node.ask("/admin/config") == before
        assert await node.faults() == {}


async def test_what_needs_a_restart_is_named_each_time_and_left_as_it_was(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (node, changed):
        other = {"listen": "127.0.0.1:1", "block_size_tokens": 32, "route_capacity": 77, "load_factor": 3.0}
        first, again = await changed(**other), await changed(**other)
        assert first["applied"] == ["load_factor"]
        assert again["applied"] == []
        assert first["restart_needed"] == again["restart_needed"] == ["listen", "block_size_tokens", "route_capacity"]
        shown = await node.ask("/admin/config")
        assert (shown["block_size_tokens"], shown["route_capacity"], shown["load_factor"]) == (16, 1_000_000, 3.0)
        assert (await node.chat()).status_code == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polcy = 'ttft'", "polcy: no such key; did you mean policy?"),
        ("load_factor = [", "not TOML"),
        ("policy = 'ttft'\nworkers = 0", "workers: must be a whole number, 1 to 256"),
        ("policy = 'ttft'\nbackend = ['http://a:1', 'http://a:1']", "backend[1]: http://a:1 has the URL of an earlier"),
        ("policy = 'ttft'\ncontrol_key_file = '/nowhere/key'", "control_key_file: /nowhere/key can't be read"),
        (b"\xff\xfe", "not TOML"),
    ],
)
async def test_a_broken_file_changes_nothing_and_is_explained(
    tmp_path: Path, text: str | bytes, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloadable(tmp_path) as (node, _):
        before = await node.ask("/admin/config")
        (tmp_path / "ranvier.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 400
        assert expected in answer.json()["error"]["message"]
        assert "config.refused" in caplog.text
        assert await node.ask("/admin/config") == before
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_config_reloads_total{result="refused"} 1.0' in page
        assert (await node.chat()).status_code == 200


async def test_a_file_that_vanished_changes_nothing(tmp_path: Path) -> None:
    async with reloadable(tmp_path, policy="ttft") as (node, changed):
        (tmp_path / "ranvier.toml").unlink()
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 400
        assert "can't be read: No such file" in answer.json()["error"]["message"]
        assert (await node.ask("/admin/config"))["policy"] == "ttft"
        assert (await changed())["applied"] == []


async def test_what_would_open_the_control_port_together_with_what_stays_is_refused(tmp_path: Path) -> None:
    """Each of two changes is good, but one of them needs a restart: an open port would be left without its key."""
    headers = {"authorization": "Bearer a-key-of-the-control-port"}
    async with reloadable(tmp_path, control="0.0.0.0:0", control_key="a-key-of-the-control-port") as (node, _):
        control = node.control.replace("0.0.0.0", "127.0.0.1")
        place = node.lab
        assert isinstance(place, ReloadLab)
        place.write(control="127.0.0.1:0")
        answer = await node.http.post(f"{control}/admin/reload", headers=headers)
        assert answer.status_code == 400
        assert "reachable from elsewhere" in answer.json()["error"]["message"]
        assert (await node.http.get(f"{control}/admin/config")).status_code == 401


async def test_a_worker_reads_its_configuration_again_with_its_siblings_as_peers_and_the_last_ports_there_are(
    tmp_path: Path,
) -> None:
    """What may go together is asked of the file's values: those of a worker have ports and peers more."""
    rng = Random()
    public = free_port(["127.0.0.1"], rng)
    gossip = free_port(["127.0.0.1"], rng, frozenset((public, public - 1)))
    places = {"listen": f"127.0.0.1:{public}", "control": "127.0.0.1:65534", "gossip": f"127.0.0.1:{gossip}"}
    own = partial(config_of_worker, index=1, key=bytes(range(32)))
    async with reloadable(tmp_path, own=own, workers=2, **places) as (node, changed):
        assert node.control.endswith(":65535")
        answer = await changed(policy="ttft")
        assert (answer["applied"], answer["restart_needed"]) == (["policy"], [])
        shown = await node.ask("/admin/config")
        assert (shown["policy"], shown["control"]) == ("ttft", "127.0.0.1:65535")
        assert (shown["gossip"], shown["join"]) == (f"127.0.0.1:{gossip + 1}", [f"127.0.0.1:{gossip}"])


async def test_a_node_without_a_file_to_read_has_nothing_to_reload() -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        node = await place.start()
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 404
        assert (await node.http.get(f"{node.control}/admin/reload")).status_code == 405


async def test_a_policy_changes_between_two_requests_and_keeps_count_of_openings(tmp_path: Path) -> None:
    async with reloadable(tmp_path, policy="chwbl") as (node, changed):
        assert (await node.chat(turn("one"))).headers["x-ranvier-reason"] == "prefix_hash"
        assert (await changed(policy="chwbl", policy_option=["virtual_nodes=7"]))["applied"] == ["policy_option"]
        stats = await node.ask("/admin/prefix-routing/stats")
        assert (stats["config"]["virtual_nodes"], stats["unique_prefixes"]) == (7, 1)
        await changed(policy="round_robin")
        served = [(await node.chat(turn("one"))).headers["x-ranvier-backend"] for _ in range(4)]
        assert len(set(served)) == 2
        assert await node.ask("/admin/prefix-routing/stats") == {"enabled": False}


async def test_limits_count_for_the_next_request(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (node, changed):
        long = turn("word " * 2000)
        assert (await node.chat(long)).status_code == 200
        await changed(body_bytes_max=2048)
        assert (await node.chat(long)).status_code == 413
        await changed(in_flight_max=7)
        assert (await node.chat(long)).status_code == 200


async def test_the_keys_of_the_control_port_change_at_once(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (node, changed):
        await changed(control_key="first-key-of-the-port", metrics_public=True)
        first, second = ({"authorization": f"Bearer {name}-key-of-the-port"} for name in ("first", "second"))
        url = f"{node.control}/admin/config"
        assert (await node.http.get(url)).status_code == 401
        assert (await node.http.get(url, headers=first)).status_code == 200
        assert (await node.http.get(f"{node.control}/metrics")).status_code == 200
        assert "second-key" not in str(await changed(first, control_key="second-key-of-the-port"))
        assert (await node.http.get(url, headers=first)).status_code == 401
        assert (await node.http.get(url, headers=second)).json()["control_key"] == "***"
        assert (await node.http.get(f"{node.control}/metrics")).status_code == 401


async def test_a_reload_needs_the_control_key(tmp_path: Path) -> None:
    async with reloadable(tmp_path, control_key="a-key-of-the-control-port") as (node, _):
        assert (await node.http.post(f"{node.control}/admin/reload")).status_code == 401


async def test_the_response_cache_is_turned_on_bounded_anew_and_turned_off(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (node, changed):

        async def ask(word: str) -> str | None:
            body = {"model": MODEL, "messages": turn(word), "max_tokens": 4, "temperature": 0}
            return (await node.http.post(f"{node.url}/v1/chat/completions", json=body)).headers.get("x-cache")

        assert await ask("one") is None
        assert (await changed(response_cache=True))["applied"] == ["response_cache"]
        assert [await ask(word) for word in ("one", "two", "one", "two")] == ["MISS", "MISS", "HIT", "HIT"]
        await changed(response_cache=True, response_cache_capacity=1)
        assert (await node.ask("/admin/response-cache/stats"))["entries"] == 1
        assert [await ask(word) for word in ("two", "one")] == ["HIT", "MISS"]
        await changed(response_cache=True, response_cache_ttl_s=0.001)
        assert await ask("one") == "MISS"
        await changed()
        assert await ask("one") is None


async def test_routes_live_as_long_as_the_new_time_to_live_has_it(tmp_path: Path) -> None:
    async with reloadable(tmp_path, shadow=["affinity"]) as (node, changed):
        await node.chat(turn("hello"))
        await node.until_routes(lambda found: found["rows"] > 0)
        await changed(shadow=["affinity"], route_ttl_s=1.0)
        await node.until_routes(lambda found: found["rows"] == 0)


async def test_the_key_of_the_backends_goes_with_requests_and_probes_from_then_on(tmp_path: Path) -> None:
    keys: set[str] = set()

    async def engine(stream: trio.SocketStream) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += await stream.receive_some(65_536)
        keys.update(re.findall(r"(?i)authorization: bearer (\S+)", request.decode()))
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    async with opened(partial(ReloadLab, folder=tmp_path), 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(engine))
        node = await place.start(backend_api_key="first-key", probe_interval_s=0.2)
        place.write(backend_api_key="second-key", probe_interval_s=0.2)
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.json()["applied"] == ["backend_api_key"]
        keys.clear()
        while "second-key" not in keys:  # noqa: ASYNC110  # of a probe
            await trio.sleep(BETWEEN_LOOKS_S)
        keys.clear()
        await node.chat()
        assert keys == {"second-key"}


async def test_a_certificate_is_read_again_though_its_path_is_the_same_and_a_bad_one_changes_nothing(
    tmp_path: Path,
) -> None:
    authority = trustme.CA()

    def issue() -> str:
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(tmp_path / "key.pem")
        made.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
        return made.cert_chain_pems[0].bytes().decode()

    async def presented(port: int) -> str:
        return await trio.to_thread.run_sync(ssl.get_server_certificate, ("127.0.0.1", port))

    first = issue()
    files = {"tls_certificate_file": str(tmp_path / "chain.pem"), "tls_key_file": str(tmp_path / "key.pem")}
    async with reloadable(tmp_path, engines=1, **files) as (node, changed):
        port = node.address[1]
        assert await presented(port) == first
        second = issue()
        answer = await changed()
        assert (answer["applied"], answer["renewed"]) == ([], ["tls_certificate_file"])
        assert await presented(port) == second
        assert (await changed())["renewed"] == []
        (tmp_path / "chain.pem").write_text("no certificate")
        place = node.lab
        assert isinstance(place, ReloadLab)
        place.write(**files, policy="ttft")
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 400
        assert (await node.ask("/admin/config"))["policy"] == "affinity"
        assert await presented(port) == second
        issue()
        answer = await changed(tls_certificate_file="", tls_key_file="")
        assert answer["restart_needed"] == ["tls_certificate_file", "tls_key_file"]


async def test_backends_come_go_and_change_and_what_an_operator_added_stays(tmp_path: Path) -> None:
    async with reloadable(tmp_path, engines=4) as (node, changed):
        first, second, third, fourth = node.engines
        await changed(backend=[first, second])
        added = await node.http.post(f"{node.control}/admin/backends", json={"url": third, "name": "third"})
        assert added.status_code == 200
        answer = await changed(backend=[f"{first},weight=3", f"{fourth},name=fourth"])
        assert answer["applied"] == ["backend"]
        found = {each["url"]: (each["name"], each["weight"]) for each in await node.backends()}
        names = {third: ("third", 1.0), fourth: ("fourth", 1.0)}
        assert found == {first: (first.partition("://")[2], 3.0), **names}
        await changed(backend=[f"{first},weight=3,name=renamed", third])
        assert {each["url"]: each["name"] for each in await node.backends()} == {first: "renamed", third: "third"}
        assert (await node.chat()).status_code == 200


async def test_a_backend_whose_name_an_operator_has_given_to_another_is_refused(tmp_path: Path) -> None:
    async with reloadable(tmp_path, engines=2) as (node, changed):
        first, second = node.engines
        await changed(backend=[first])
        await node.http.post(f"{node.control}/admin/backends", json={"url": second, "name": "mine"})
        place = node.lab
        assert isinstance(place, ReloadLab)
        place.write(backend=[first, "http://127.0.0.1:9,name=mine"], policy="ttft")
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 400
        assert "backend[1]: mine is the name of a backend that was added" in answer.json()["error"]["message"]
        assert (await node.ask("/admin/config"))["policy"] == "affinity"


async def test_an_event_stream_of_an_index_needs_a_restart_and_its_backend_does_not(tmp_path: Path) -> None:
    async with reloadable(tmp_path, engines=2) as (node, changed):
        first, second = node.engines
        await changed(backend=[first])
        answer = await changed(backend=[first, f"{second},kv_index=http://127.0.0.1:9/events"])
        assert (answer["applied"], answer["restart_needed"]) == (["backend"], ["backend.kv_index"])
        assert len(await node.backends()) == 2


async def test_logs_change_their_level(tmp_path: Path) -> None:
    logger = logging.getLogger("ranvier_py")
    level = logger.level
    async with reloadable(tmp_path) as (_, changed):
        assert (await changed(log_level="error"))["applied"] == ["log_level"]
    assert logger.level == level, "nobody set up logs here: whose they are keeps them"


async def test_requests_are_counted_whatever_the_level_and_logged_while_it_asks_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[RequestSummary] = []
    is_read = False
    monkeypatch.setattr(request_parts, "request_line", lambda: lines.append if is_read else None)
    async with reloadable(tmp_path, log_level="warning") as (node, changed):
        for level, logged in (("warning", 0), ("info", 1), ("error", 1)):
            is_read = level == "info"
            await changed(log_level=level)
            for path in ("/v1/models", "/nothing"):
                await node.http.get(f"{node.url}{path}")
            assert [line.path for line in lines] == ["/v1/models", "/nothing"] * logged
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert 'ranvier_requests_total{code="200",model="",path="/v1/models",tenant=""} 3' in page


async def test_looks_at_metrics_are_not_begun_by_a_reload(tmp_path: Path) -> None:
    async with reloadable(tmp_path, engine_metrics_interval_s=0) as (_, changed):
        answer = await changed(engine_metrics_interval_s=5)
        assert (answer["applied"], answer["restart_needed"]) == ([], ["engine_metrics_interval_s"])


async def test_a_stream_goes_on_at_a_backend_that_was_removed(tmp_path: Path) -> None:
    async with reloadable(tmp_path, engines=2) as (node, changed):
        body = {"model": MODEL, "messages": turn("hello"), "max_tokens": 300, "stream": True, "ignore_eos": True}
        async with node.http.stream("POST", f"{node.url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            left = [url for url in node.engines if answer.headers["x-ranvier-backend"] not in url]
            await changed(backend=left, policy="random", body_bytes_max=1024, in_flight_max=1)
            assert len(await node.backends()) == 1
            assert "data: [DONE]" in [line async for line in lines]


@pytest.mark.slow
async def test_fifty_reloads_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    async with reloadable(tmp_path, shadow=["random"]) as (node, changed):
        other = {"policy": "chwbl", "load_factor": 3.0, "shadow": ["chwbl"], "response_cache": True}

        async def both() -> tuple[int, int]:
            await changed(**other, backend=node.engines[:1])
            await changed()
            gc.collect()
            kept = sum(isinstance(each, Config | Shadow | Mirrored) for each in gc.get_objects())
            return len(os.listdir("/proc/self/fd")), kept

        await node.chat()
        first = await both()
        for _ in range(23):
            await changed(**other, backend=node.engines[:1])
            assert (await node.chat()).status_code == 200
            await changed()
        assert max(0, (await both())[1] - first[1]) <= 2
        while (await both())[0] > first[0]:  # noqa: ASYNC110  # connections of the control port come and go
            await trio.sleep(BETWEEN_LOOKS_S)
        assert await node.faults() == {}
        assert (await node.chat()).status_code == 200


def bug(*_: object) -> None:
    raise RuntimeError("a bug of ours")


async def test_a_hang_up_reads_the_configuration_and_goes_on_after_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # as `ranvier serve` has it
    try:
        async with reloadable(tmp_path) as (node, _):
            place = node.lab
            assert isinstance(place, ReloadLab)
            place.file.write_text("policy = 7")
            os.kill(os.getpid(), signal.SIGHUP)
            refused = 'ranvier_config_reloads_total{result="refused"} 1.0'
            while refused not in (await node.http.get(f"{node.control}/metrics")).text:  # noqa: ASYNC110  # a page
                await trio.sleep(BETWEEN_LOOKS_S)
            place.write(policy="ttft")
            os.kill(os.getpid(), signal.SIGHUP)
            await node.until("/admin/config", lambda config: config["policy"] == "ttft")
            with monkeypatch.context() as patch:
                patch.setattr(Reloads, "apply", bug)
                os.kill(os.getpid(), signal.SIGHUP)
                while await node.faults() != {"reload": 1}:  # noqa: ASYNC110  # a page
                    await trio.sleep(BETWEEN_LOOKS_S)
            place.write(policy="chwbl")
            while (await node.ask("/admin/config"))["policy"] != "chwbl":  # as soon as the loop is back
                os.kill(os.getpid(), signal.SIGHUP)
                await trio.sleep(BETWEEN_LOOKS_S)
    finally:
        signal.signal(signal.SIGHUP, before)


RULES = """
format = 1
[[rule]]
name = "own"
client = "*"
apis = ["chat"]
causes = []
action = "replace"
where = "history"
pattern = "question"
replacement = "%s"
source = "ours"
"""


async def test_rules_that_were_written_anew_count_from_the_reload_on_and_bad_ones_change_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES % "riddle")
    rules = {"client_rules_file": str(file), "client_rules": ["own=rewrite"], "client_rule_control_share": 0.01}
    engine = Scripted(GOOD)
    async with reloadable(tmp_path, 0, cluster_secret="the same groups each time", **rules) as (node, changed):
        await node.http.post(f"{node.control}/admin/backends", json={"url": await node.lab.listen(engine.serve)})
        await node.chat()
        file.write_text(RULES % "puzzle")
        answer = await changed()
        assert (answer["applied"], answer["renewed"]) == ([], ["client_rules_file"])
        await node.chat()
        file.write_text("format = 7")
        answer = await node.http.post(f"{node.control}/admin/reload")
        assert answer.status_code == 400
        assert "client_rules_file" in answer.text
        await node.chat()
    assert [next(w for w in (b"riddle", b"puzzle") if w in body) for body in engine.bodies] == [
        b"riddle",
        *[b"puzzle"] * 2,
    ]


async def test_what_a_rule_proves_to_be_reaches_peers_also_where_a_reload_turned_it_on(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    gossip = {"gossip": "127.0.0.1:0", "cluster_key_file": str(tmp_path / "key")}
    (tmp_path / "rules.toml").write_text(RULES % "riddle")
    rules = {"client_rules_file": str(tmp_path / "rules.toml"), "client_rules": ["own=rewrite"]}
    rules |= {"client_rule_control_share": 0.4, "client_rule_sessions": 20}
    async with reloadable(tmp_path, 1, **gossip) as (node, changed):
        join = [(await node.ask("/admin/cluster"))["address"]]
        peer = await Lab.start(node.lab, **gossip, **rules, join=join)
        await node.sees(1)
        await changed(**rules)
        for number in range(80):
            alike = {"role": "user", "content": "The question of all sessions, which helps nothing. " * 20}
            await node.chat([alike], prompt_cache_key=f"session {number // 2}")
        await peer.until("/admin/clients", lambda view: view["trials"] and view["trials"][0]["state"] == "off")

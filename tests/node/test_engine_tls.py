"""TLS to engines: whom a node trusts, under which name, how it proves itself, and what happens to files replaced."""

from __future__ import annotations

import gc
import os
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from ranvier_py.config.config_loader import config_of
from ranvier_py.core.errors import ConfigError
from ranvier_py.node.config_check import file_problems
from ranvier_py.node.parts.tls_parts import engine_context_of
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, Node, cluster_lab, opened
from tests.proxy.wire import GOOD, Scripted

LIST = b'{"data":[{"id":"lab-model","owned_by":"vllm"}]}'


class Authority:
    """One that signs certificates of engines and nodes, with its own in a file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.made, self.file = trustme.CA(), folder / f"{name}.pem"
        self.write(self.file)

    def write(self, file: Path) -> None:
        self.made.cert_pem.write_to_path(file)

    def issue(self, folder: Path, name: str) -> dict[str, str]:
        """Files of a node's own certificate."""
        cert = self.made.issue_cert(f"{name}.example")
        chain, own_key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.private_key_pem.write_to_path(own_key)
        cert.cert_chain_pems[0].write_to_path(chain)
        return {"upstream_certificate_file": str(chain), "upstream_key_file": str(own_key)}

    def server(self, name: str, clients: Authority | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.made.issue_cert(name).configure_cert(context)
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            clients.made.configure_trust(context)
        return context


async def listening(place: Lab, context: ssl.SSLContext) -> str:
    """The URL of an engine that speaks TLS."""
    listeners = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1", https_compatible=True)
    place.nursery.start_soon(partial(trio.serve_listeners, Scripted(GOOD, page=LIST).serve, listeners))
    return f"https://127.0.0.1:{listeners[0].transport_listener.socket.getsockname()[1]}"


@asynccontextmanager
async def tls_node(context: ssl.SSLContext, fields: str = "", **settings: Any) -> AsyncIterator[Node]:
    """A node in front of one engine that speaks TLS."""
    async with opened(Lab, 0, 60) as place:
        url = await listening(place, context)
        given = {"backend": [f"{url}{fields}"], "probe_interval_s": 0.05, **settings}
        yield await place.start(**given)
    collect_handshakes()


def collect_handshakes() -> None:
    """Httpcore leaves a socket whose handshake was cancelled to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def status_of(node: Node) -> int:
    return (await node.chat()).status_code


async def until_served(node: Node) -> None:
    while await status_of(node) != 200:  # noqa: ASYNC110  # the node's own look at its files ends this
        await trio.sleep(BETWEEN_LOOKS_S)


async def test_an_engine_of_a_private_authority_is_served_and_probed_if_the_node_knows_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with tls_node(authority.server("127.0.0.1"), upstream_ca_file=str(authority.file)) as node:
        assert await status_of(node) == 200
        await node.until_backend(lambda backend: backend["health"] == "healthy" and backend["models"])
    async with tls_node(authority.server("127.0.0.1")) as node:
        assert await status_of(node) == 502
        await node.until_backend(lambda backend: "certificate" in backend["probe_detail"])


async def test_an_engine_may_have_the_certificate_of_another_name_that_the_operator_gave(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusted = {"upstream_ca_file": str(authority.file)}
    async with tls_node(authority.server("engine.internal"), ",tls_name=engine.internal", **trusted) as node:
        assert await status_of(node) == 200
        await node.until_backend(lambda backend: backend["health"] == "healthy" and backend["models"])
    async with tls_node(authority.server("engine.internal"), **trusted) as node:
        assert await status_of(node) == 502
    async with tls_node(authority.server("127.0.0.1"), ",tls_name=engine.internal", **trusted) as node:
        assert await status_of(node) == 502


async def test_a_backend_added_on_one_node_has_the_name_of_its_certificate_on_all(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    settings = {"upstream_ca_file": str(authority.file), "gossip_admin_key": "an operator's own secret"}
    async with cluster_lab(tmp_path, engines=0) as place:
        first, second = await place.cluster(2, probe_interval_s=0.05, **settings)
        url = await listening(place, authority.server("engine.internal"))
        given = {"url": url, "tls_name": "engine.internal"}
        assert (await place.http.post(f"{first.control}/admin/backends", json=given)).json()["shared"] is True
        await second.until("/admin/backends", lambda answer: answer["backends"])
        await second.until_backend(lambda backend: backend["health"] == "healthy" and backend["models"])
        assert await status_of(second) == 200
    collect_handshakes()


async def test_an_engine_that_wants_to_know_its_nodes_gets_their_certificate(tmp_path: Path) -> None:
    authority, nodes = Authority(tmp_path), Authority(tmp_path, "nodes")
    trusted = {"upstream_ca_file": str(authority.file)}
    async with tls_node(authority.server("127.0.0.1", nodes), **trusted, **nodes.issue(tmp_path, "node")) as node:
        assert await status_of(node) == 200
        await node.until_backend(lambda backend: backend["health"] == "healthy" and backend["models"])
    async with tls_node(authority.server("127.0.0.1", nodes), **trusted) as node:
        assert await status_of(node) == 502


@pytest.mark.slow
async def test_files_that_are_replaced_are_noticed_without_a_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, later, nodes = Authority(tmp_path), Authority(tmp_path, "later"), Authority(tmp_path, "nodes")
    files = {"upstream_ca_file": str(authority.file), **authority.issue(tmp_path, "node")}
    async with tls_node(later.server("127.0.0.1", nodes), **files) as node:
        assert await status_of(node) == 502, "neither knows the other"
        nodes.issue(tmp_path, "node")
        later.write(tmp_path / "new.pem")
        os.replace(tmp_path / "new.pem", authority.file)
        await until_served(node)
        await node.until_backend(lambda backend: backend["health"] == "healthy")
        authority.file.write_text("-----BEGIN CERTIFICATE-----\nhalf")
        while not any("tls.refused" in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        assert await status_of(node) == 200, "what can't be used changes nothing"


@pytest.mark.slow
async def test_a_certificate_of_the_public_port_that_is_replaced_is_noticed_without_a_signal(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    def issue() -> str:
        made = authority.made.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(tmp_path / "key.pem")
        made.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
        return made.cert_chain_pems[0].bytes().decode()

    first = issue()
    files = {"tls_certificate_file": str(tmp_path / "chain.pem"), "tls_key_file": str(tmp_path / "key.pem")}
    async with opened(Lab, 0, 60) as place:
        node = await place.start(**files)

        async def presented() -> str:
            return await trio.to_thread.run_sync(ssl.get_server_certificate, ("127.0.0.1", node.address[1]))

        assert await presented() == first
        second = issue()
        while await presented() != second:  # noqa: ASYNC110  # the node's own look at its files ends this
            await trio.sleep(BETWEEN_LOOKS_S)


def problems_of(**settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config_of(**settings)
    return "\n".join(refused.value.problems)


def test_what_can_not_work_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue(tmp_path, "node")
    assert "set upstream_certificate_file and upstream_key_file together" in problems_of(
        upstream_key_file=own["upstream_key_file"]
    )
    assert "tls_name needs an https URL" in problems_of(backend=["http://127.0.0.1:9,tls_name=a"])
    assert "tls_name" in problems_of(backend=["https://127.0.0.1:9,tls_name=a b"])
    (tmp_path / "broken.pem").write_text("nothing")
    for settings in (
        {"upstream_ca_file": str(tmp_path / "broken.pem")},
        {"upstream_ca_file": str(tmp_path / "missing.pem")},
        {**own, "upstream_key_file": str(tmp_path / "broken.pem")},
        {**own, "upstream_key_file": Authority(tmp_path, "x").issue(tmp_path, "other")["upstream_key_file"]},
    ):
        config = config_of(**settings)
        with pytest.raises(ConfigError):
            engine_context_of(config)
        (problem,) = file_problems(config)
        assert problem.startswith("upstream_"), problem

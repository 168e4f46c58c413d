"""Several keys of the control port: what each role may ask for, whose order it was, and TLS with certificates."""

from __future__ import annotations

import logging
import ssl
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme

from ranvier_py.cli import main
from ranvier_py.commands.exit_codes import EXIT_FAILED
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import ADMIN, OPERATE, READ, ControlPort, role_for
from ranvier_py.core.errors import ConfigError
from ranvier_py.io.keys import FollowedFile
from ranvier_py.node.reload import Reloads
from tests.builders.built_nodes import built
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, Node, lab, opened, printed

KEYS = {role: f"rk-{role}-of-an-operator" for role in (READ, OPERATE, ADMIN)}
LEAST = {
    "POST /explain": READ,
    "POST /admin/backends/drain": OPERATE,
    "POST /admin/backends/weight": OPERATE,
    "POST /admin/node/drain": OPERATE,
    "POST /admin/kv-index/clear": OPERATE,
    "POST /admin/response-cache/invalidate": OPERATE,
    "POST /internal/events": OPERATE,
    "POST /internal/eviction": OPERATE,
    "POST /internal/sync": OPERATE,
}
"""What of all that is no GET takes less than an admin."""


def keys_file(folder: Path, more: str = "") -> Path:
    path = folder / "control.toml"
    digests = {role: sha256(key.encode()).hexdigest() for role, key in KEYS.items()}
    lines = (f'[[key]]\nid = "{role}-id"\nsha256 = "{each}"\nrole = "{role}"\n' for role, each in digests.items())
    path.write_text("\n".join(lines) + more)
    return path


async def status(node: Node, key: str, method: str, path: str, **sent: Any) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return (await node.http.request(method, node.control + path, headers=headers, **sent)).status_code


def test_each_route_takes_the_role_that_is_written_here() -> None:
    node = built(more=lambda node: [ControlPort(node), Reloads(node, node.config, None, 0)])
    for route in (route for part in node.parts for route in part.routes()):
        method, path = route.split(" ")
        assert role_for(method, path) == (READ if method == "GET" else LEAST.get(route, ADMIN)), route


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FollowedFile.__init__.__kwdefaults__, "interval_s", 0.05)


async def test_each_key_may_do_what_its_role_allows_and_orders_are_logged_with_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with lab(engines=1, control_keys_file=keys_file(tmp_path), control_key="the-one-key-of-before") as node:
        drain = {"json": {"url": node.engines[0], "draining": False}}
        more = {"json": {"url": "http://127.0.0.1:1", "name": "more"}}
        asks: list[tuple[str, str, dict[str, Any], str]] = [
            ("GET", "/admin/backends", {}, READ),
            ("GET", "/metrics", {}, READ),
            ("POST", "/admin/backends/drain", drain, OPERATE),
            ("POST", "/admin/backends", more, ADMIN),
            ("DELETE", "/admin/backends", {"json": {"url": "http://127.0.0.1:1"}}, ADMIN),
        ]
        order = [READ, OPERATE, ADMIN]
        for method, path, sent, needed in asks:
            assert await status(node, "", method, path, **sent) == 401
            assert await status(node, "rk-other", method, path, **sent) == 401
            for role, key in KEYS.items():
                is_allowed = order.index(role) >= order.index(needed)
                assert await status(node, key, method, path, **sent) == (200 if is_allowed else 403), (role, path)
        assert await status(node, "the-one-key-of-before", *asks[3][:2], **more) == 200
        assert await status(node, "", "GET", "/healthz") == 200
    lines = [text for text in caplog.messages if text.startswith(("control.ordered", "control.refused"))]
    refused = [text for text in lines if text.startswith("control.refused")]
    assert [text.partition(" by ")[2].partition(" ")[0] for text in refused if " by " in text] == [
        "read-id",
        "operate-id",
    ]
    assert refused[1] == "control.refused 403: POST /admin/backends/drain of 127.0.0.1 by read-id"
    assert [text for text in lines if text not in refused] == [
        "control.ordered POST /admin/backends/drain by operate-id: 200",
        "control.ordered POST /admin/backends/drain by admin-id: 200",
        "control.ordered POST /admin/backends by admin-id: 200",
        "control.ordered DELETE /admin/backends by admin-id: 200",
        "control.ordered POST /admin/backends by control_key: 200",
    ]
    assert not any("rk-" in record.getMessage() for record in caplog.records)


async def test_keys_of_the_control_port_follow_their_file_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    async with lab(engines=1, control_keys_file=path) as node:
        assert await status(node, KEYS[READ], "GET", "/admin/backends") == 200
        path.write_text(path.read_text() + '[[key]]\nid = "x"\nsha256 = "y"\nrole = "root"\n')
        while "control_access_file_failures_total 1" not in (await metrics(node, KEYS[READ])):  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        keys_file(tmp_path, "expires = 2001-01-01\n")
        while await status(node, KEYS[ADMIN], "GET", "/admin/backends") != 401:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        assert await status(node, KEYS[READ], "GET", "/admin/backends") == 200


async def test_a_stream_of_the_page_ends_with_the_key_of_who_follows_it(tmp_path: Path) -> None:
    async with lab(engines=1, control_keys_file=keys_file(tmp_path)) as node:
        headers = {"authorization": f"Bearer {KEYS[ADMIN]}"}
        async with node.http.stream("GET", f"{node.control}/admin/page/stream", headers=headers) as answer:
            lines = answer.aiter_lines()
            assert "hello" in await anext(lines)
            keys_file(tmp_path, "expires = 2001-01-01\n")
            assert [line async for line in lines if "hello" in line] == []
        assert await status(node, KEYS[ADMIN], "GET", "/admin/page/stream?seconds=1") == 401


async def metrics(node: Node, key: str) -> str:
    return (await node.http.get(f"{node.control}/metrics", headers={"authorization": f"Bearer {key}"})).text


def test_an_address_that_others_can_reach_needs_either_a_key_or_a_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is reachable from elsewhere"):
        config_of(control="0.0.0.0:9180")
    assert config_of(control="0.0.0.0:9180", control_keys_file=keys_file(tmp_path)).ports.control_keys_file
    with pytest.raises(ConfigError, match="has no effect without control_tls_certificate_file"):
        config_of(control_client_ca_file=keys_file(tmp_path))


class Certificates:
    """Files of a server, of a client, and of their authority."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.authority = trustme.CA()
        names = ("ca", "chain", "key", "client")
        self.ca, self.chain, self.key, self.client = (str(folder / f"{name}.pem") for name in names)
        self.authority.cert_pem.write_to_path(self.ca)
        server, client = self.authority.issue_cert("127.0.0.1"), self.authority.issue_cert("ops.example")
        server.private_key_pem.write_to_path(self.key)
        server.cert_chain_pems[0].write_to_path(self.chain)
        client.private_key_and_cert_chain_pem.write_to_path(self.client)

    def context(self, *, proves: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if proves:
            context.load_cert_chain(self.client)
        return context

    def settings(self, port: str, *, clients: bool) -> dict[str, str]:
        names = {"public": ("tls_certificate_file", "tls_key_file", "tls_client_ca_file")}
        names["control"] = ("control_tls_certificate_file", "control_tls_key_file", "control_client_ca_file")
        files = (self.chain, self.key, self.ca) if clients else (self.chain, self.key)
        return dict(zip(names[port], files, strict=False))


@pytest.mark.parametrize("port", ["public", "control"])
@pytest.mark.parametrize("clients", [False, True])
async def test_either_port_speaks_tls_and_may_ask_clients_for_a_certificate(
    tmp_path: Path, port: str, clients: bool
) -> None:
    files = Certificates(tmp_path)
    async with opened(Lab, 1, 60) as place:
        node = await place.start(**files.settings(port, clients=clients))
        url = node.control if port == "control" else node.url.replace("http://", "https://")
        assert url.startswith("https://")
        path = "/admin/backends" if port == "control" else "/v1/models"
        for proves in (True, False):
            async with httpx.AsyncClient(verify=files.context(proves=proves), trust_env=False) as client:
                if proves or not clients:
                    for _ in range(2):
                        assert (await client.get(url + path)).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.get(url + path)
        async with httpx.AsyncClient(trust_env=False) as client:
            for method in ("GET", "POST"):
                plain = await client.request(method, url.replace("https://", "http://") + path, content=b"x" * 1000)
                assert (plain.status_code, plain.json()["error"]["code"]) == (400, "tls_required")
        async with httpx.AsyncClient(verify=files.context(proves=True), trust_env=False) as client:
            assert (await client.get(url + path)).status_code == 200, "it serves on"


async def test_the_tools_speak_tls_with_the_control_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Certificates(tmp_path)
    async with opened(Lab, 1, 60) as place:
        node = await place.start(**files.settings("control", clients=True))
        flags = ["status", "--control", node.control]
        proving = ["--control-ca", files.ca, "--control-certificate", files.client]
        tries = ([], proving, ["--control-ca", "none"])
        codes = [await trio.to_thread.run_sync(partial(main, [*flags, *more])) for more in tries]
    assert codes == [3, 0, 3]
    assert "ENGINE " in capsys.readouterr().out


async def test_a_command_is_answered_whether_its_key_is_missing_or_wrong_and_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("rk-of-another-node")
    async with lab(engines=1, control_key=KEYS[ADMIN]) as node:
        for words, why in (((), "needs its key"), (("--control-key-file", f"{tmp_path / 'wrong'}"), "does not know")):
            shown = await printed("access", "--control", node.control, *words, status=EXIT_FAILED)
            assert why in shown
            assert "--control-key-file" in shown
            assert "rk-of-another-node" not in shown

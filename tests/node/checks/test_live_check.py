"""`ranvier check`: what keeps a node from serving is named before it starts, by what it is about, with its remedy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trustme

from ranvier_py import cli
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from ranvier_py.config.config_loader import config_of
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.node.checks import host_checks, live_check, peer_checks
from ranvier_py.node.checks.host_checks import KEY_BITS_MIN, bits_of
from ranvier_py.node.checks.live_check import live_findings
from tests.node.node_lab import KEY, MODEL, PLACES, Lab, cluster_lab, opened, start_engine
from tests.proxy.test_realtime import certified
from tests.proxy.wire import Wire, answer

DEADLINE_S = 60
LISTED = json.dumps({"data": [{"id": MODEL, "root": "org/the-model"}]}).encode()
TOKEN = answer(b'{"choices":[{"message":{"role":"assistant","content":"a"}}]}')
GOOD = {"GET /health": answer(b""), "GET /v1/models": answer(LISTED), "POST /v1/chat": TOKEN}


class Pages:
    """An engine that answers by method and beginning of the path; 404 where there is nothing."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self.pages, self.heads = pages, list[bytes]()

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async with Wire(stream) as wire:
                while (asked := await wire.next_request()) is not None:
                    self.heads.append(asked[0])
                    found = [page for line, page in self.pages.items() if asked[0].startswith(line.encode())]
                    await wire.send(found[0] if found else answer(b"{}", status=404))


async def findings(**settings: Any) -> list[Finding]:
    with trio.fail_after(DEADLINE_S):
        return await live_findings(config_of(**{**PLACES, "probe_timeout_s": 5, **settings}))


def only(found: list[Finding]) -> Finding:
    (one,) = found
    assert one.remedy
    return one


async def of_pages(pages: Mapping[str, bytes | None], **settings: Any) -> list[Finding]:
    """What is found of an engine that answers so, and else well."""
    given = {line: page for line, page in {**pages, **GOOD, **pages}.items() if page is not None}
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(Pages(given).serve)
        return await findings(backend=[url], tokenizer=str(EMBEDDED), **settings)


# --- engines ----------------------------------------------------------------------------------------------------------


async def test_nothing_is_found_where_all_is_well() -> None:
    async with trio.open_nursery() as nursery:
        url, _ = await start_engine(nursery, tokenizer=str(EMBEDDED))
        assert await findings(backend=[url]) == []
        nursery.cancel_scope.cancel()


async def test_an_engine_with_another_tokenizer_is_named_with_the_remedy() -> None:
    async with trio.open_nursery() as nursery:
        url, _ = await start_engine(nursery, tokenizer="bytes")
        one = only(await findings(backend=[{"url": url, "name": "e"}]))
        assert (one.kind, one.about, one.severity) == ("engine_tokenizer", "e", Severity.DEGRADED)
        assert "tokenizes otherwise than 'embedded'" in one.what
        assert one.remedy == f"Set tokenizer to that of its model: tokenizer = '{MODEL}'."
        nursery.cancel_scope.cancel()


async def test_a_template_that_differs_and_the_embedded_tokenizer_that_nobody_confirms_are_named(
    tmp_path: Path,
) -> None:
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    async with trio.open_nursery() as nursery:
        url, _ = await start_engine(nursery, tokenizer=str(EMBEDDED))
        one = only(await findings(backend=[url], chat_template=template))
        assert "renders chats otherwise" in one.what
        assert "Set chat_template" in one.remedy
        nursery.cancel_scope.cancel()
    assert await of_pages({}) == []  # it does not tokenize for others, and the tokenizer is the operator's choice
    async with opened(Lab, 0, DEADLINE_S) as place:
        one = only(await findings(backend=[await place.listen(Pages(GOOD).serve)]))
        assert "the embedded tokenizer" in one.what
        assert one.remedy.endswith("tokenizer = 'org/the-model'.")


REFUSED = answer(b'{"error":{"message":"no key"}}', status=401)
ENGINES: dict[str, tuple[Mapping[str, bytes | None], str, str, Severity]] = {
    "ill": ({"GET /health": answer(b"", status=503)}, "engine_down", "answers 503", Severity.DOWN),
    "key": ({"GET /v1/models": REFUSED}, "engine_key_refused", "wants a key", Severity.DOWN),
    "key of chats": ({"POST /v1/chat": REFUSED}, "engine_key_refused", "wants a key", Severity.DOWN),
    "no engine": ({"GET /v1/models": answer(b"<html>")}, "model", "lists no models", Severity.DEGRADED),
    "no template": (
        {"POST /v1/chat": answer(b'{"error":{"message":"no chat template"}}', status=400)},
        *("engine_fails", "status 400, no chat template", Severity.DEGRADED),
    ),
    "busy": ({"POST /v1/chat": answer(b"{}", status=503)}, "engine_busy", "too busy", Severity.NOTICE),
    "late": (
        {"GET /health": answer(b"", b"date: " + formatdate(time.time() - 86_450, usegmt=True).encode())},
        *("clocks", "this machine's by 86", Severity.DEGRADED),
    ),
}


@pytest.mark.parametrize("kind", ENGINES)
async def test_an_engine_is_named_with_what_is_wrong_with_it(kind: str) -> None:
    pages, found_kind, words, severity = ENGINES[kind]
    one = only(await of_pages(pages))
    assert (one.kind, one.severity) == (found_kind, severity)
    assert words in one.what


async def test_a_key_that_an_engine_refuses_is_named_as_such_and_sent_where_it_is_taken() -> None:
    one = only(await of_pages({"GET /v1/models": REFUSED}, backend_api_key="a-key-of-the-engines"))
    assert "refuses this node's key" in one.what
    assert "a-key-of-the-engines" not in repr(one)
    engine = Pages(GOOD)
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(engine.serve)
        assert await findings(backend=[url], tokenizer=str(EMBEDDED), backend_api_key="a-key-of-the-engines") == []
    assert all(b"authorization: Bearer a-key-of-the-engines\r\n" in head for head in engine.heads)


@pytest.mark.parametrize("is_in_file", [False, True])
async def test_an_engine_with_a_key_of_its_own_is_asked_with_that(is_in_file: bool, tmp_path: Path) -> None:
    engine, (key, file) = Pages(GOOD), (tmp_path / "key", tmp_path / "engines.toml")
    key.write_text("the-engines-own\n")
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(engine.serve)
        file.write_text(f"[[backend]]\nurl = '{url}'\napi_key_file = '{key}'\n")
        entries = {"backends_file": file} if is_in_file else {"backend": [f"{url},api_key_file={key}"]}
        assert await findings(tokenizer=str(EMBEDDED), backend_api_key="of-all", **entries) == []
    assert engine.heads
    assert all(b"authorization: Bearer the-engines-own\r\n" in head for head in engine.heads)


async def test_engines_of_a_file_are_asked_as_well(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[[backend]]\nurl = "http://127.0.0.1:9"\nname = "of-a-file"\n')
    one = only(await findings(backends_file=file))
    assert (one.kind, one.about) == ("engine_down", "of-a-file")


@pytest.mark.slow
async def test_sources_that_give_nothing_and_a_redis_that_is_not_there_are_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        redis = {"response_cache": True, "response_cache_backend": "redis"}
        url = {"response_cache_redis_url": "redis://:secret-of-redis@127.0.0.1:9"}
        found = await findings(backend_dns=["engines.test:8000"], backend_dns_server=server, **redis, **url)
    assert sorted(one.kind for one in found) == ["source", "store"]
    assert "secret-of-redis" not in repr(found)


async def test_engines_that_are_not_there_and_names_that_do_not_resolve_are_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = await findings(backend=[f"http://127.0.0.1:{port}", "http://nowhere.invalid:80"])
    assert {(one.kind, one.severity) for one in found} == {("engine_down", Severity.DOWN), ("name", Severity.DOWN)}
    assert only(await findings()).what == "no engine is configured"


async def test_a_hosted_provider_is_asked_for_its_models_alone() -> None:
    engine = Pages(GOOD)
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(engine.serve)
        assert await findings(backend=[{"url": url, "hosted": True}], tokenizer=str(EMBEDDED)) == []
    assert not any(head.startswith(b"POST") for head in engine.heads)


async def test_a_table_that_leads_to_what_no_engine_serves_is_named() -> None:
    one = only(await of_pages({}, model=[f"gpt={MODEL}", "claude=my-qwen"]))
    assert (one.about, one.kind) == ("model claude", "model")
    assert "my-qwen, which no engine serves" in one.what


# --- this machine -----------------------------------------------------------------------------------------------------


async def test_ports_that_others_have_are_named_but_not_those_of_a_node_that_serves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        found = [one for one in await findings(listen=place) if one.kind == "port"]
        assert (only(found).about, only(found).severity) == (f"listen {place}", Severity.DOWN)
        gossip = [one for one in await findings(gossip=place, insecure_gossip=True) if one.kind == "port"]
        assert only(gossip).about == f"gossip {place}"
    async with trio.open_nursery() as nursery, opened(Lab, 0, DEADLINE_S) as lab:
        url, _ = await start_engine(nursery, tokenizer=str(EMBEDDED))
        node = await lab.start(backend=[url])
        (one,) = await findings(backend=[url], control=node.control.removeprefix("http://"))
        assert (one.severity, one.what) == (Severity.NOTICE, "a node serves here already, so its ports were not tried")
        nursery.cancel_scope.cancel()


async def test_a_node_that_serves_its_control_port_over_tls_is_one_that_serves(tmp_path: Path) -> None:
    files, _ = certified(tmp_path)
    control = {f"control_{name}": path for name, path in files.items()}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    async with opened(Lab, 0, DEADLINE_S) as lab:
        await lab.start(control=place, **control)
        found = await host_checks.check_ports(config_of(**{**PLACES, "control": place, **control}))
        assert [one.severity for one in found] == [Severity.NOTICE]


async def test_too_few_descriptors_are_named_with_how_many_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "raise_descriptor_limit", lambda: 1024)
    one = only(await host_checks.check_descriptors(config_of()))
    assert "may have 1024 files open" in one.what
    monkeypatch.setattr(host_checks, "raise_descriptor_limit", lambda: int(one.command.split()[-1]))
    assert await host_checks.check_descriptors(config_of()) == []


KEYS = {
    "0123456789abcdef" * 2: True,
    "0123456789ABCDEF" * 2: True,
    "Xk3-9fQz_7LwPa2bYt6RcVn4": True,
    "0123456789abcdef": False,
    "correct horse batt": False,
    "123456789012345678": False,
    "zzzzzzzzzzzzzzzzzzzzzzzzzzzz": False,
}


@pytest.mark.parametrize(("key", "enough"), KEYS.items())
async def test_a_control_key_that_can_be_guessed_is_named_where_others_can_reach_it(key: str, enough: bool) -> None:
    assert (bits_of(key) >= KEY_BITS_MIN) is enough
    found = await host_checks.check_control_key(config_of(control="0.0.0.0:0", control_key=key))
    assert bool(found) is not enough
    assert key not in repr(found)
    assert await host_checks.check_control_key(config_of(control="127.0.0.1:0", control_key=key)) == []


@pytest.mark.parametrize(("days", "severity"), [(-1, Severity.DOWN), (10, Severity.DEGRADED), (30, None)])
async def test_certificates_are_named_that_have_ended_or_end_soon(
    tmp_path: Path, days: int, severity: Severity | None
) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days))
    paths = {name: tmp_path / name for name in ("tls_certificate_file", "tls_key_file")}
    paths["tls_certificate_file"].write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    paths["tls_key_file"].write_bytes(certificate.private_key_pem.bytes())
    found = await host_checks.check_certificates(config_of(**paths))
    assert [one.severity for one in found] == ([] if severity is None else [severity])


async def test_a_check_that_fails_is_a_finding_and_the_others_count() -> None:
    async def check_broken(_: object) -> list[Finding]:
        raise ValueError("a bug")

    async def check_other(_: object) -> list[Finding]:
        return [Finding("other", Severity.DOWN, "it is down")]

    found = await live_findings(config_of(), [check_broken, check_other])
    assert [(one.kind, one.about) for one in found] == [("other", ""), ("check", "broken")]


# --- peers ------------------------------------------------------------------------------------------------------------


async def of_peers(**settings: Any) -> list[Finding]:
    return await peer_checks.check_peers(config_of(**{**PLACES, "gossip": "127.0.0.1:0", **settings}))


@pytest.mark.slow
async def test_a_peer_with_this_key_is_well_and_one_with_another_key_name_or_none_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(KEY[::-1])
    async with cluster_lab(tmp_path, engines=0) as place:
        node = await place.start()
        asked = {"join": place.places, "cluster_key_file": place.key_file}
        assert await of_peers(**asked) == []
        for more in ({"cluster_key_file": other}, {"cluster_name": "another"}):
            one = only(await of_peers(**{**asked, **more}))
            assert (one.kind, one.about) == ("peer_key", f"peer {place.places[0]}")
            assert "does not answer to this key" in one.what
        assert "was not tried" in (await of_peers(**asked, gossip_udp=False))[0].what
        view = await node.ask("/admin/cluster")
        assert [member["state"] for member in view["members"]] == []  # nobody took the check for a member
        gone = {**asked, "join": ["127.0.0.1:9", "nowhere.invalid"]}
        assert sorted(one.kind for one in await of_peers(**gone)) == ["name", "peer_lost"]


async def test_a_peer_of_another_release_or_with_another_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        public = f"127.0.0.1:{listener.getsockname()[1]}"  # a node tells its peers the port of its configuration
    async with cluster_lab(tmp_path, engines=0) as place:
        await place.start(listen=public)
        asked = {"join": place.places, "cluster_key_file": place.key_file}
        monkeypatch.setattr(peer_checks, "__version__", "9.9")
        late = SimpleNamespace(time=lambda: time.time() + 60, monotonic=time.monotonic)
        monkeypatch.setattr(peer_checks, "time", late)
        release, clock = sorted(await of_peers(**asked), key=lambda one: one.severity)
        assert (release.kind, release.severity) == ("peer_release", Severity.NOTICE)
        assert clock.kind == "clocks"
        assert "differ by 60 s" in clock.what or "differ by 59 s" in clock.what or "differ by 61 s" in clock.what


# --- the command ------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main([*words, "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"])
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.slow
@pytest.mark.parametrize("words", [("check",), ("config", "--check", "--live")])
def test_the_command_has_the_worst_first_with_the_remedy_in_80_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = printed(
        capsys, *words, "--backend", "http://127.0.0.1:9", "--join", "127.0.0.1:9", "--insecure-gossip"
    )
    lines = text.splitlines()
    assert (code, lines[0][:4]) == (EXIT_FAILED, "DOWN")
    assert any("-> Start it, or correct its URL." in line for line in lines)
    assert lines[-1] == "checked: 1 down, 1 degraded"
    assert max(map(len, lines)) <= 80


def test_problems_of_the_configuration_are_findings_and_the_rest_is_checked_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = printed(capsys, "check", "--backend", "http://127.0.0.1:9", "--workers", "0", "--json")
    found = json.loads(text)
    assert code == EXIT_CONFIG
    assert {(one["kind"], one["severity"]) for one in found} == {("config", "down"), ("engine_down", "down")}
    assert printed(capsys, "check")[0] == EXIT_OK


@pytest.mark.parametrize("check", live_check.CHECKS, ids=lambda check: check.__name__)
async def test_no_check_finds_anything_of_a_node_alone(check: Callable[..., Any]) -> None:
    assert [one for one in await check(config_of(**PLACES)) if one.severity > Severity.NOTICE] == []

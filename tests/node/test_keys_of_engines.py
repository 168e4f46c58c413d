"""An engine's own key, in a file that only operators' files name, goes wherever the node asks it, and nowhere else."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.core.routing.backend_state.signed_commands import CommandOptions
from tests.builders.engines import AnsweringEngine, Request
from tests.node.checks.test_tokenizer_fit import compared
from tests.node.discovery.source_labs import kubernetes_lab, quick
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Lab, Node, chat, opened
from tests.node.test_reload import ReloadLab
from tests.proxy.wire import CHUNKED_HEAD, answer, chunk

DEADLINE_S = 30
OWN, LATER, OF_MODEL, OF_ALL = "the-engines-own", "the-one-after", "of-the-model", "of-all-engines"
LISTED = json.dumps({"data": [{"id": MODEL, "owned_by": "vllm"}]}).encode()
WHOLE = answer(b'{"choices":[{"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}')
EVENTS = CHUNKED_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-type: text/event-stream\r\n\r\n")
STREAMED = EVENTS + b"".join(
    chunk(data)
    for data in (
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b"data: [DONE]\n\n",
        b"",
    )
)
__all__ = ["quick"]


class Guarded(AnsweringEngine):
    """An engine that answers whoever has its key, or everybody, and keeps what key each request had."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.came: list[tuple[str, str]] = []  # target, key

    async def answer(self, asked: Request) -> bytes:
        key = asked.fields.get(b"authorization", b"").decode().removeprefix("Bearer ")
        self.came.append((asked.target, key))
        if self.key is not None and key != self.key:
            return answer(b"{}", status=401)
        if asked.target == "/v1/chat/completions":
            return STREAMED if json.loads(asked.body).get("stream") else WHOLE
        pages = {"/v1/models": answer(LISTED), "/health": answer(b""), "/events": EVENTS}
        return pages.get(asked.target) or answer(b"", status=404)

    def keys_at(self, target: str) -> set[str]:
        return {key for at, key in self.came if at == target}

    async def until(self, target: str, key: str) -> None:
        while key not in self.keys_at(target):  # noqa: ASYNC110  # the engine's own record
            await trio.sleep(BETWEEN_LOOKS_S)


def key_file(folder: Path, content: str = OWN) -> Path:
    file = folder / "engine.key"
    file.write_text(f"{content}\n")
    return file


PAGES = ("/health", "/v1/models", "/metrics", "/kv_event_sources", "/tokenize", "/events")
"""What a node asks an engine for: is it alive, what does it serve, how busy is it, where are its events, how does it
tokenize, what does its stream of events say?"""
SHOWING = tuple(f"/admin/{page}" for page in ("backends", "config", "status", "sources", "backends?cluster=true"))


@pytest.mark.parametrize("stream", [False, True])
async def test_it_goes_wherever_the_node_asks_that_engine_and_the_key_of_all_to_the_others(
    stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine, other = Guarded(OWN), Guarded(OF_ALL)
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.tokenizer_of = compared
        url, second = await place.listen(engine.serve), await place.listen(other.serve)
        own = {"url": url, "name": "own", "kv_index": f"{url}/events", "api_key_file": str(key_file(tmp_path))}
        node = await place.start(
            backend=[own, second], backend_api_key=OF_ALL, policy="round_robin", engine_metrics_interval_s=0.1
        )
        for _ in range(2):
            assert (await node.chat(stream=stream)).status_code == 200
        for target in ("/v1/chat/completions", *PAGES):
            await engine.until(target, OWN)
        assert {key for _, key in engine.came} == {OWN}
        assert {key for _, key in other.came} == {OF_ALL}
        shown = [(await node.http.get(f"{node.control}{path}")).text for path in (*SHOWING, "/metrics")]
        assert (await node.backends())[0]["api_key_file"] == str(tmp_path / "engine.key")
    assert OWN not in "".join(shown) + caplog.text


async def test_it_goes_before_the_key_of_the_model_and_that_before_the_key_of_all(tmp_path: Path) -> None:
    engine, other = Guarded(None), Guarded(None)
    async with opened(Lab, 0, DEADLINE_S) as place:
        own, second = await place.listen(engine.serve), await place.listen(other.serve)
        tables = [{"name": "keyed", "to": MODEL, "api_key": OF_MODEL}]
        node = await place.start(
            backend=[{"url": own, "api_key_file": str(key_file(tmp_path))}, second],
            backend_api_key=OF_ALL,
            model=tables,
            policy="round_robin",
        )
        for model, fields in MODELS_ASKED:
            for _ in range(2):  # one for each engine
                await node.http.post(f"{node.url}/v1/chat/completions", content=chat(model=model), headers=fields)
    assert [key for target, key in engine.came if target == "/v1/chat/completions"] == [OWN, OWN, "mine"]
    assert [key for target, key in other.came if target == "/v1/chat/completions"] == [OF_MODEL, OF_ALL, "mine"]
    assert (engine.keys_at("/health"), other.keys_at("/health")) == ({OWN}, {OF_ALL})


MODELS_ASKED: Sequence[tuple[str, dict[str, str]]] = (
    ("keyed", {}),
    (MODEL, {}),
    ("keyed", {"authorization": "Bearer mine"}),
)


# --- sources --------------------------------------------------------------------------------------------------------


ENTRY = {
    "toml": "[[backend]]\nurl = '{}'\napi_key_file = '{}'\n",
    "yaml": "backend:\n- url: {}\n  api_key_file: {}\n",
}


async def until_named(node: Node) -> Mapping[str, Any]:
    return dict((await node.until("/admin/backends", lambda found: found["backends"]))["backends"][0])


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
@pytest.mark.usefixtures("quick")
async def test_a_file_of_backends_may_name_it_and_a_new_key_is_taken_at_a_reload(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine, file = Guarded(OWN), tmp_path / f"engines.{suffix}"
    async with opened(partial(ReloadLab, folder=tmp_path), 0, DEADLINE_S) as place:
        url, path = await place.listen(engine.serve), key_file(tmp_path)
        file.write_text(ENTRY[suffix].format(url, path))
        node = await place.start(backends_file=str(file), probe_interval_s=0.1)
        assert (await until_named(node))["api_key_file"] == str(path)
        assert (await node.chat()).status_code == 200
        assert engine.keys_at("/v1/chat/completions") == {OWN}
        engine.key = LATER
        key_file(tmp_path, LATER)
        assert (await node.http.post(f"{node.control}/admin/reload")).status_code == 200
        await engine.until("/health", LATER)
        assert (await node.chat()).status_code == 200
        key_file(tmp_path, "")
        assert (await node.http.post(f"{node.control}/admin/reload")).status_code == 200
        source = await node.until("/admin/sources", lambda found: found["sources"]["file"]["state"] == "failing")
        assert f"{file}:" in source["sources"]["file"]["why"]
        assert f"{path} must hold one line of text" in source["sources"]["file"]["why"]
        assert (await node.chat()).status_code == 200  # with what it had
        named = (await node.backends())[0]["name"]
    assert f"backend.key_changed {named} has another key: {path} -> {path}" in caplog.text
    assert caplog.text.count("backend.key_changed") == 1
    assert OWN not in caplog.text
    assert LATER not in caplog.text


async def test_nobody_may_name_one_over_the_control_port_nor_in_a_signed_command(tmp_path: Path) -> None:
    engine = Guarded(OWN)
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, path = await place.listen(engine.serve), key_file(tmp_path)
        node = await place.start(backend=[])
        given = {"url": url, "api_key_file": str(path)}
        refused = await node.http.post(f"{node.control}/admin/backends", json=given)
        assert refused.status_code == 400
        assert "only the backends of a node's own configuration" in refused.text
        assert await node.backends() == []
        await node.http.post(f"{node.control}/admin/backends", json={"url": url})
        refused = await node.http.post(f"{node.control}/admin/backends/set", json=given)
        assert refused.status_code == 400
        assert "api_key_file: only the backends of a node's own configuration" in refused.text
        await node.chat()
    assert {key for _, key in engine.came} == {""}
    assert not {"api_key_file", "api_key"} & {*CommandOptions._fields}


async def test_other_options_that_operators_set_leave_it_as_it_is(tmp_path: Path) -> None:
    engine = Guarded(OWN)
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, folder = await place.listen(engine.serve), tmp_path / "state"
        own = {"url": url, "name": "own", "api_key_file": str(key_file(tmp_path))}
        node = await place.start(backend=[own], state_folder=folder)
        for fields in ({"weight": 3}, {"any_model": True}):
            done = await node.http.post(f"{node.control}/admin/backends/set", json={"name": "own", **fields})
            assert done.status_code == 200, done.text
            assert done.json()["api_key_file"] == own["api_key_file"]
            assert (await node.chat()).status_code == 200
        again = await place.start(backend=[own], state_folder=folder)
        assert (await again.backends())[0]["any_model"]
        assert (await again.chat()).status_code == 200
        assert OWN not in (folder / "backends.json").read_text()
    assert {key for _, key in engine.came} == {OWN}


@pytest.mark.usefixtures("quick")
async def test_an_annotation_of_a_pod_names_none(tmp_path: Path) -> None:
    engine = Guarded("")
    async with opened(Lab, 0, DEADLINE_S) as place, kubernetes_lab("pods", tmp_path) as source:
        url = await place.listen(engine.serve)
        named = {"ranvier.io/api-key-file": str(key_file(tmp_path))}
        source.pod(url, annotations=named)  # type: ignore[attr-defined]
        node = await place.start(backend=[], **source.settings)
        await until_named(node)
        sources = (await node.ask("/admin/sources"))["sources"]
        assert (await node.chat()).status_code == 200
    ((left_out,),) = [each["left_out"] for each in sources.values() if each["left_out"]]
    assert "ranvier.io/api_key_file is not used: only the backends of a node's own configuration" in left_out
    assert {key for _, key in engine.came} == {""}


# --- reloads --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def reloadable(folder: Path) -> AsyncIterator[tuple[Node, ReloadLab, Guarded]]:
    engine = Guarded(OWN)
    async with opened(partial(ReloadLab, folder=folder), 0, DEADLINE_S) as place:
        url = await place.listen(engine.serve)
        place.engines.append(f"{url},name=own,api_key_file={key_file(folder)}")
        yield await place.start(probe_interval_s=0.1), place, engine


async def reloaded(node: Node) -> httpx.Response:
    return await node.http.post(f"{node.control}/admin/reload")


async def test_a_reload_takes_another_key_without_a_new_generation_and_shows_neither(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with reloadable(tmp_path) as (node, _, engine):
        await node.chat()
        before = (await node.backends())[0]
        engine.key = LATER
        key_file(tmp_path, LATER)
        answered = await reloaded(node)
        assert answered.json()["applied"] == ["backend"]
        await engine.until("/health", LATER)
        assert (await node.chat()).status_code == 200
        after = (await node.backends())[0]
        assert [after[name] for name in ("generation", "outcomes")] == [
            before["generation"],
            {**before["outcomes"], "success": before["outcomes"]["success"] + 1},
        ]
        assert (await reloaded(node)).json()["applied"] == []
    assert "what is not shown differs" in caplog.text
    assert OWN not in caplog.text + answered.text
    assert LATER not in caplog.text + answered.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read: No such file or directory"),
        ("", "must hold one line of text, the secret"),
        ("two\nlines", "must hold one line of text, the secret"),
        ("bell\a", "must hold one line of text, the secret"),
    ],
)
async def test_a_file_that_holds_no_key_is_an_error_at_a_reload_which_changes_nothing_and_at_the_start(
    content: str | None, why: str, tmp_path: Path
) -> None:
    async with reloadable(tmp_path) as (node, place, engine):
        file = key_file(tmp_path, content or "")
        if content is None:
            file.unlink()
        place.write(policy="ttft")
        answered = await reloaded(node)
        assert answered.status_code == 400
        assert f"backend[0].api_key_file: {file} {why}" in answered.text
        assert (await node.ask("/admin/config"))["policy"] == "affinity"
        assert (await node.chat()).status_code == 200
        assert {key for _, key in engine.came} == {OWN}

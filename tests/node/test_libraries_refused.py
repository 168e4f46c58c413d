"""What the libraries of OpenAI and Anthropic see of engines that fail within a 200, or are silent before they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from cluster.engine.engine_faults import FailureForm
from ranvier_py.proxy.answers import awaited_stream
from tests.late_import import Late
from tests.node.node_lab import MODEL, Node, lab, turn
from tests.proxy.wire import NO_TLS

anthropic, openai = Late("anthropic"), Late("openai")

FORMS = [form.value for form in FailureForm if form is not FailureForm.LATE]
WORDS = "a fault on demand"


def asked(client: openai.OpenAI, claude: anthropic.Anthropic, *, stream: bool) -> dict[str, Callable[[], Any]]:
    """A call of each API."""
    chat, made = turn("Hello"), {"model": MODEL, "stream": stream}
    return {
        "chat": lambda: client.chat.completions.create(messages=chat, max_tokens=9, **made),
        "completion": lambda: client.completions.create(prompt="Hello", max_tokens=9, **made),
        "response": lambda: client.responses.create(input="Hello", max_output_tokens=9, store=False, **made),
        "message": lambda: claude.messages.create(messages=chat[1:], max_tokens=9, **made),
    }


def outcome(ask: Callable[[], Any], *, stream: bool) -> tuple[str, ...]:
    """The types of what comes, or the exception."""
    seen: list[str] = []
    try:
        found = ask()
        for each in found if stream else [found]:
            name = getattr(each, "type", None) or getattr(each, "object", None) or ""
            seen.append(f"{name} {WORDS}" if WORDS in str(each) else str(name))
    except openai.APIError as error:
        seen += [f"openai {type(error).__name__}", str(error)]
    except anthropic.APIError as error:
        seen += [f"anthropic {type(error).__name__}", str(error)]
    return tuple(seen)


def outcomes(url: str, *, stream: bool) -> dict[str, tuple[str, ...]]:
    http = [library.DefaultHttpxClient(verify=NO_TLS, trust_env=False) for library in (openai, anthropic)]
    own: Any = {"api_key": "k", "max_retries": 0}
    with (
        openai.OpenAI(base_url=f"{url}/v1", http_client=http[0], **own) as client,
        anthropic.Anthropic(base_url=url, http_client=http[1], **own) as claude,
    ):
        return {name: outcome(ask, stream=stream) for name, ask in asked(client, claude, stream=stream).items()}


async def seen(url: str, *, stream: bool) -> dict[str, tuple[str, ...]]:
    return await trio.to_thread.run_sync(lambda: outcomes(url, stream=stream))


async def fail(node: Node, engine: int, form: str) -> None:
    await node.fault(node.engines[engine], kind="error_inside", form=form, status=500)


@pytest.mark.parametrize("stream", [True, False])
async def test_each_library_sees_nothing_of_failures_within_a_200_while_another_engine_serves(stream: bool) -> None:
    async with lab(engines=2, policy="round_robin") as node:
        well = await seen(node.engines[1], stream=stream)
        assert all(len(each) > 5 for each in well.values()) or not stream
        for form in FORMS if stream else FORMS[:1]:
            await fail(node, 0, form)
            assert await seen(node.url, stream=stream) == well, form
        assert sum((await node.ask("/admin/routes"))["outcomes"].values()) > len(well), "the sick one was asked"


ERRORS = {"chat": "openai APIError", "completion": "openai APIError", "message": "anthropic APIStatusError"}
SILENT = (FailureForm.EMPTY.value, FailureForm.DONE.value)


@pytest.mark.parametrize("stream", [True, False])
async def test_if_all_fail_within_a_200_each_library_sees_what_its_engine_sent(stream: bool) -> None:
    async with lab(engines=1) as node:
        for form in [form for form in FORMS if form not in SILENT] if stream else FORMS[:1]:
            await fail(node, 0, form)
            direct = await seen(node.engines[0], stream=stream)
            assert await seen(node.url, stream=stream) == direct, form
            if stream and form == "first":
                assert {name: direct[name][0] for name in ERRORS} == ERRORS
                assert direct["response"] == (f"response.failed {WORDS}",)


@pytest.mark.parametrize("form", SILENT)
async def test_if_all_answer_without_output_each_library_raises_an_error_with_the_reason(form: str) -> None:
    async with lab(engines=1) as node:
        await fail(node, 0, form)
        for name, (kind, words) in (await seen(node.url, stream=True)).items():
            assert kind == f"{'anthropic' if name == 'message' else 'openai'} InternalServerError"
            assert "the engine ended its answer without any output" in words


async def test_each_library_waits_behind_a_head_and_comments_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_stream, "HELD_S", 0.05)
    async with lab(engines=1, sse_keepalive_s=0.05) as node:
        well = await seen(node.engines[0], stream=True)
        await node.fault(node.engines[0], kind="stall", seconds=0.5, after_tokens=0)
        assert await seen(node.url, stream=True) == well

"""Talks with an engine by each API that carries one, each turn by another node, and what of it was predicted and found.

A talk is what was said, whichever API it comes by: a system prompt, questions, answers, and calls of a tool with their
results. The tool is the client's own idea: what the model says is noise.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import orjson
import trio

from tests.engines.real import BLOCK_TOKENS, MODEL

WORDS = [f"{a}{b}" for a in ("read", "write", "list", "string", "open") for b in ("er", "ing", "s", "_to", "")]
ARGUMENTS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "look", "description": "Looks into a file.", "parameters": ARGUMENTS}
ANSWER_TOKENS = 24


class Entry(NamedTuple):
    """One thing of a talk. `role`: that of a chat's message; "call" is the assistant's, and says a path."""

    role: str
    text: str
    number: int  # of a call and its result


class Usage(NamedTuple):
    """Tokens of a prompt, and how many of them the engine had."""

    prompt: int
    cached: int


class SpokenApi(NamedTuple):
    """How a talk is sent, with the tool where it calls one, and how an event of the answer is read: a piece of its
    text, and the counts at its end."""

    path: str
    body: Callable[[Sequence[Entry]], dict[str, Any]]
    tool: dict[str, Any]
    piece: Callable[[dict[str, Any]], str]
    usage: Callable[[dict[str, Any]], Usage | None]


def chat_body(talk: Sequence[Entry]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for entry in talk:
        if entry.role == "call":
            call = {"name": TOOL["name"], "arguments": orjson.dumps({"path": entry.text}).decode()}
            messages[-1]["tool_calls"] = [{"id": name_of(entry), "type": "function", "function": call}]
        elif entry.role == "tool":
            messages.append({"role": "tool", "tool_call_id": name_of(entry), "content": entry.text})
        else:
            messages.append({"role": entry.role, "content": entry.text})
    return {"messages": messages, "max_tokens": ANSWER_TOKENS, "stream_options": {"include_usage": True}}


def messages_body(talk: Sequence[Entry]) -> dict[str, Any]:
    """A tool's result and the question after it are one item, and the last item has a mark, which moves each turn."""
    messages: list[dict[str, Any]] = []
    for entry in talk[1:]:
        if entry.role == "call":
            call = {"type": "tool_use", "id": name_of(entry), "name": TOOL["name"], "input": {"path": entry.text}}
            messages[-1]["content"].append(call)
        elif entry.role == "tool":
            result = {"type": "tool_result", "tool_use_id": name_of(entry), "content": entry.text}
            messages.append({"role": "user", "content": [result]})
        elif messages and messages[-1]["role"] == entry.role:
            messages[-1]["content"].append({"type": "text", "text": entry.text})
        else:
            messages.append({"role": entry.role, "content": [{"type": "text", "text": entry.text}]})
    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = [{"type": "text", "text": talk[0].text}]
    return {"system": system, "messages": messages, "max_tokens": ANSWER_TOKENS}


def responses_body(talk: Sequence[Entry]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for entry in talk[1:]:
        if entry.role == "call":
            arguments = orjson.dumps({"path": entry.text}).decode()
            call = {"type": "function_call", "name": TOOL["name"], "arguments": arguments}
            items.append({**call, "call_id": name_of(entry), "id": f"fc_{entry.number}", "status": "completed"})
        elif entry.role == "tool":
            items.append({"type": "function_call_output", "call_id": name_of(entry), "output": entry.text})
        else:
            kind = "output_text" if entry.role == "assistant" else "input_text"
            about = {"type": "message", "role": entry.role, "status": "completed", "id": f"msg_{entry.number}"}
            items.append({**about, "content": [{"type": kind, "text": entry.text, "annotations": []}]})
    return {"instructions": talk[0].text, "input": items, "max_output_tokens": ANSWER_TOKENS, "store": False}


def name_of(entry: Entry) -> str:
    return f"call_{entry.number:08}"


def usage_of_chat(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage")
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) if usage else None


def usage_of_messages(event: dict[str, Any]) -> Usage | None:
    """What was found and what was kept is counted apart from the rest."""
    if event["type"] != "message_delta":
        return None
    usage = event["usage"]
    cached = usage["cache_read_input_tokens"]
    return Usage(usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0), cached)


def usage_of_responses(event: dict[str, Any]) -> Usage | None:
    if event["type"] != "response.completed":
        return None
    usage = event["response"]["usage"]
    return Usage(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


CHAT = SpokenApi(
    "/v1/chat/completions",
    chat_body,
    {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
    lambda event: "".join(choice["delta"].get("content") or "" for choice in event["choices"]),
    usage_of_chat,
)
MESSAGES = SpokenApi(
    "/v1/messages",
    messages_body,
    {
        "tools": [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": ARGUMENTS}],
        "tool_choice": {"type": "none"},
    },
    lambda event: event.get("delta", {}).get("text", ""),
    usage_of_messages,
)
RESPONSES = SpokenApi(
    "/v1/responses",
    responses_body,
    {"tools": [{"type": "function", **TOOL}], "tool_choice": "none"},
    lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    usage_of_responses,
)


@dataclass(slots=True)
class Served:
    """One answer as its client saw it."""

    talk: int
    backend: str
    reason: str
    predicted_tokens: int  # that the node expected to be found
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str

    def usable_tokens(self, block_tokens: int) -> int:
        """Of the predicted: whole blocks of the engine, and never the last token of the prompt."""
        return min(self.predicted_tokens, self.prompt_tokens - 1) // block_tokens * block_tokens


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield orjson.loads(line[6:])


async def ask(
    http: httpx.AsyncClient, url: str, api: SpokenApi, number: int, talk: Sequence[Entry], *, calls: bool
) -> Served:
    body = {"model": MODEL, "temperature": 1.0, "stream": True, **api.body(talk), **(api.tool if calls else {})}
    start, first, text, usage = time.monotonic(), 0.0, "", Usage(0, 0)
    async with http.stream("POST", f"{url}{api.path}", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread())[:500]
        async for event in events_of(answer):
            piece = api.piece(event)
            if piece and not first:
                first = time.monotonic() - start
            text += piece
            usage = api.usage(event) or usage
        heads = answer.headers
    predicted = int(heads["x-ranvier-matched-tokens"])
    return Served(number, heads["x-ranvier-backend"], heads["x-ranvier-reason"], predicted, *usage, first, text)


class Talks:
    """Talks that share system prompts, and go on turn by turn, each turn by another node, and by the next API."""

    def __init__(
        self, seed: int, count: int, *, systems: int = 3, system_words: int = 350, apis: Sequence[SpokenApi] = (CHAT,)
    ) -> None:
        self.rng = random.Random(seed)
        self.apis = apis
        opening = [self.announce(system_words) for _ in range(systems)]
        self.talks = [[Entry("system", opening[number % systems], 0)] for number in range(count)]

    def announce(self, words: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(words))

    def call(self, talk: list[Entry]) -> None:
        """The answer goes on with a call of the tool, which has its result."""
        talk.append(Entry("call", self.announce(1), len(talk)))
        talk.append(Entry("tool", self.announce(self.rng.randrange(20, 60)), len(talk) - 1))

    async def run(
        self, urls: Sequence[str], turns: int, *, users: int = 3, pause_s: float = 0.7, calls: bool = False
    ) -> list[Served]:
        """All talks, `users` at a time, each with so many turns more; `calls`: a tool is called between two of them, by
        an answer that the client adds the call to."""
        found: list[Served] = []
        left = list(enumerate(self.talks))
        self.rng.shuffle(left)

        async def user() -> None:
            while left:
                number, talk = left.pop()
                for turn in range(turns):
                    if calls and len(talk) > 1:
                        self.call(talk)
                    talk.append(Entry("user", self.announce(self.rng.randrange(30, 120)), len(talk)))
                    api = self.apis[turn % len(self.apis)]
                    served = await ask(http, urls[(number + turn) % len(urls)], api, number, talk, calls=calls)
                    talk.append(Entry("assistant", served.text, len(talk)))
                    found.append(served)
                    await trio.sleep(self.rng.uniform(0.5, 1.5) * pause_s)

        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as http, trio.open_nursery() as nursery:
            for _ in range(users):
                nursery.start_soon(user)
        return found


@dataclass(slots=True)
class Share:
    """Predicted against cached, over many answers, in tokens."""

    answers: int
    prompt_tokens: int
    predicted: int
    cached: int
    right: int
    first_p50_ms: float
    first_p95_ms: float
    wrong: list[str]  # what was predicted otherwise than it was, for whoever reads why a test failed

    @property
    def precision(self) -> float:
        return self.right / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.right / self.cached if self.cached else 1.0

    def row(self, name: str) -> str:
        return (
            f"{name:34} {self.answers:4} answers  {self.prompt_tokens:7} prompt tokens  cached {self.cached:7}"
            f"  precision {self.precision:.4f}  recall {self.recall:.4f}"
            f"  first token p50 {self.first_p50_ms:6.0f} ms  p95 {self.first_p95_ms:6.0f} ms"
        )


def share_of(several: Sequence[Served], block_tokens: int = BLOCK_TOKENS) -> Share:
    waits = sorted(each.first_token_s * 1000 for each in several)
    pairs = [(each.usable_tokens(block_tokens), each.cached_tokens) for each in several]
    return Share(
        len(several),
        sum(each.prompt_tokens for each in several),
        sum(usable for usable, _ in pairs),
        sum(cached for _, cached in pairs),
        sum(min(pair) for pair in pairs),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.95)],
        [
            f"{each.backend} {each.reason}: predicted {usable}, cached {cached} of {each.prompt_tokens}"
            for each, (usable, cached) in zip(several, pairs, strict=True)
            if usable != cached
        ],
    )


def engines_of_each(served: Sequence[Served]) -> Mapping[int, set[str]]:
    """Which engines each talk came to."""
    found: dict[int, set[str]] = {}
    for each in served:
        found.setdefault(each.talk, set()).add(each.backend)
    return found

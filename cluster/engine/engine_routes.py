"""The fake engine's routes: vLLM's HTTP over a block cache with a clock.

It answers with made-up words at the speed of its model, and reports the exact state of its cache: `cached_tokens` in
each usage, /metrics, and /admin/stats. /admin/faults sets faults. A client that disconnects cancels its request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import orjson
import trio

from cluster.engine.agent_apis import StoredResponse, StoredResponses, chat_of_claude, chat_of_items
from cluster.engine.agent_replies import ClaudeReply, ResponseReply
from cluster.engine.engine_api import (
    DONE,
    ApiError,
    Ask,
    Reply,
    bad_request,
    by_the_schema,
    embedded,
    read_ask,
    read_messages,
    read_object,
    read_prompt,
    read_template_options,
    usage_of,
)
from cluster.engine.engine_faults import NEVER, POISON, UNKNOWN_ERROR, FailureForm, Fault, FaultKind, Faults
from cluster.engine.engine_metrics import CONTENT_TYPE, metrics_page
from cluster.engine.engine_models import VLLM, EngineModels
from cluster.engine.engine_text import Answer, AnswerBook, RenderError, TextTokenizer
from cluster.engine.kv_events import EventSource, Scope
from cluster.engine.kv_publisher import KvEndpoints
from cluster.engine.live_engine import LiveEngine, Mailbox
from cluster.engine.stream_writer import StreamWriter
from cluster.engine.tool_calls import next_call
from ranvier_py.core.errors import ClientGone
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import Headers, HttpRequest
from ranvier_py.replay.engine.block_cache import Job, TokenIds
from ranvier_py.replay.engine.engine_values import EngineLimits, PromptTooLongError, QueueFullError
from ranvier_py.replay.hybrid.cache_models import state_groups

INLINE_BYTES_MAX = 4096
"""Larger bodies are tokenized in a worker thread: from 1 ms of tokenizing on, the hop (0.1 ms) is worth it."""

TOKENIZER_THREADS = 2
STORED = b"/v1/responses/"
CLAUDE = b"/v1/messages"
GENERATE: dict[bytes, str] = {
    b"/v1/chat/completions": "chatcmpl",
    b"/v1/completions": "cmpl",
    b"/v1/messages": "msg",
    b"/v1/responses": "resp",
}
"""Paths that generate, and the prefixes of their answers' ids."""

REPLIES: dict[str, type[Reply]] = {"msg": ClaudeReply, "resp": ResponseReply}

CACHE_EVENTS_MAX = 1 << 20
"""How many events of one step are recorded; they are published after each step."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine. Without a `name` it is named by the address on which it listens.

    `models[0]` is the base model, the rest are LoRA adapters, whose caches are apart. `owner` is vLLM or SGLang;
    `embeds`: it serves embeddings alone.
    """

    name: str
    models: tuple[str, ...]
    limits: EngineLimits
    tokens_max: int  # max_model_len
    answer_tokens: tuple[int, int] = (40, 160)
    seed: int = 1
    kv: KvEndpoints | None = None  # where it publishes KV events; None: nowhere
    rank: int = 0  # among the data-parallel ranks behind its port
    owner: str = VLLM
    embeds: bool = False


class Engine:
    """The routes of one engine. `live.run` must be running."""

    def __init__(self, config: EngineConfig, tokenizer: TextTokenizer) -> None:
        """Raises OSError if an address for its KV events can't be had."""
        self.config = config
        groups = state_groups(config.limits)
        self.kv = EventSource(config.kv, config.limits.block_size, groups, config.rank) if config.kv else None
        limits = replace(config.limits, cache_events_max=CACHE_EVENTS_MAX) if config.kv else config.limits
        self.live = LiveEngine(limits, self.kv.publish) if self.kv else LiveEngine(limits)
        self.faults = Faults(Random(config.seed))
        self.responses = StoredResponses()
        self.models = EngineModels(config.models, config.owner, embeds=config.embeds)
        self.cut = 0  # connections cut by faults and restarts
        self._tokenizer = tokenizer
        self._book = AnswerBook(tokenizer, config.answer_tokens, config.seed)
        self._threads = trio.CapacityLimiter(TOKENIZER_THREADS)
        self.name = config.name
        self._created = int(time.time())
        self._requests = 0
        self._routes: dict[tuple[bytes, bytes], Callable[[HttpRequest, Client], Awaitable[None]]] = {
            (b"POST", b"/v1/embeddings"): self.embed,
            (b"GET", b"/v1/models"): partial(self.probe, body=self._models),
            (b"GET", b"/health"): partial(self.probe, body=bytes),
            (b"GET", b"/ping"): partial(self.probe, body=bytes),
            (b"GET", b"/version"): partial(self.probe, body=lambda: orjson.dumps({"version": "0.32.0+lab"})),
            (b"GET", b"/metrics"): self.metrics,
            (b"POST", b"/tokenize"): self.tokenize,
            (b"POST", b"/detokenize"): self.detokenize,
            (b"POST", b"/admin/faults"): self.set_fault,
            (b"POST", b"/admin/restart"): self.restart,
            (b"POST", b"/admin/clear"): self.clear,
            (b"GET", b"/admin/stats"): self.statistics,
            (b"GET", b"/admin/occupancy"): self.occupancy,
        }
        if not config.embeds or config.owner != VLLM:
            self._routes |= {(b"POST", path): partial(self.generate, api=api) for path, api in GENERATE.items()}
            self._routes[b"POST", b"/v1/messages/count_tokens"] = self.count_tokens
        self._routes |= self.models.routes(self._routes)
        if self.kv is not None:
            self._routes[b"GET", self.kv.path] = partial(self.probe, body=self.kv.sources)
            self._routes[b"POST", b"/admin/kv"] = self.lose_events

    @property
    def _headers(self) -> Headers:
        return [(b"x-engine", self.name.encode())]

    async def handle(self, request: HttpRequest, client: Client) -> None:
        """Answer one request of the server."""
        client.work()
        if not request.path.startswith(b"/admin/"):
            await self.live.wait_released()
        method = b"GET" if request.method == b"HEAD" else request.method
        route = self._routes.get((method, request.path))
        if route is None and request.path.startswith(STORED):
            route = self.stored
        try:
            if route is None:
                known = any(path == request.path for _, path in self._routes)
                raise ApiError(405 if known else 404, "NotFoundError", "Method Not Allowed" if known else "Not Found")
            await route(request, client)
        except ApiError as error:
            body = error.body(claude=request.path.startswith(CLAUDE))
            client.respond(error.status, body, [*self._headers, *error.headers])

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: HttpRequest, client: Client, *, api: str) -> None:
        fault = self.faults.draw(trio.current_time())
        await self._begin(fault)
        if POISON in request.body:
            raise ApiError(500, *UNKNOWN_ERROR)
        with by_the_schema():
            fields = self._chat_fields(read_object(request.body), api)
            ask = read_ask(fields, chat=api != "cmpl", default_model=self.config.models[0])
            ask = replace(ask, adapter=self.models.adapter_of(ask.model))
            if fault is not None and fault.kind is FaultKind.UNCACHED:
                ask = replace(ask, salt=f"{ask.salt}\0{self._requests}")
            job, answer = await self._prepare(ask, len(request.body))
        if fault is not None and fault.kind is FaultKind.ERROR_INSIDE and not fault.is_late:
            reply = REPLIES.get(api, Reply)(f"{api}-{self.name}", int(time.time()), ask.model, self.name, ask.chat)
            await self._fail(StreamWriter(request, client, self.name), ask, reply, fault)
            return
        if self.kv is not None and job.keys:
            self.kv.encoder.note(job.keys[0], Scope(ask.adapter, ask.salt))
        self._requests += 1
        request_id = f"{api}{'_' if api == 'resp' else '-'}{self.name}-{self._requests}"
        mailbox = self.submit(request_id, job)
        reply = REPLIES.get(api, Reply)(request_id, int(time.time()), ask.model, self.name, ask.chat, answer.call)
        try:
            if ask.stream:
                done = await self._stream(StreamWriter(request, client, self.name), ask, reply, mailbox, answer, fault)
            else:
                done = await self._whole(client, reply, mailbox, answer, fault)
        finally:
            self.live.leave(mailbox)
        if not done:
            raise self._cut()
        if api == "resp" and fields.get("store") is not False:
            self.responses.keep(request_id, kept(fields, reply, mailbox, answer))

    async def _fail(self, writer: StreamWriter, ask: Ask, reply: Reply, fault: Fault) -> None:
        """Answer 200, and fail."""
        if not ask.stream:
            writer.client.respond(200, reply.failed(fault.error, stream=False), self._headers)
            return
        before = {FailureForm.ANNOUNCED: reply.announced(), FailureForm.COMMENTED: PING}.get(fault.form, b"")
        await writer.write(before)
        if fault.form is FailureForm.DONE:
            await writer.write(DONE)
        elif fault.form is not FailureForm.EMPTY:
            await writer.write(reply.failed(fault.error, stream=True))
        await writer.end()

    def job_of(self, path: str, body: bytes) -> Job:
        """Return the job of a request for an answer. Raises ApiError."""
        api = GENERATE[path.encode()]
        fields = self._chat_fields(read_object(body), api)
        return self._tokenized(read_ask(fields, chat=api != "cmpl", default_model=self.config.models[0]))[0]

    def _chat_fields(self, fields: dict[str, Any], api: str) -> dict[str, Any]:
        """Turn a body of any API into the body of a chat or completion, as vLLM does. Raises ApiError."""
        if api == "msg":
            return chat_of_claude(fields)
        if api == "resp":
            previous = fields.get("previous_response_id")
            return chat_of_items(fields, self.responses[previous].messages if previous else ())
        return fields

    async def stored(self, request: HttpRequest, client: Client) -> None:
        """Answer a request for a response that is stored here."""
        name, _, more = request.path.removeprefix(STORED).partition(b"/")
        response = self.responses[name.decode()]
        body = response.listed() if more == b"input_items" else response.body
        if request.method == b"DELETE":
            self.responses.delete(name.decode())
            body = orjson.dumps({"id": name.decode(), "object": "response", "deleted": True})
        client.respond(200, body, self._headers)

    async def embed(self, request: HttpRequest, client: Client) -> None:
        fields = read_object(request.body)
        given = fields.get("input")
        texts: list[Any] = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise bad_request("input must be a text or a list of texts", "input")
        tokens = sum(len(self._tokenizer.encode(text, special=True)) for text in texts)
        as_base64 = fields.get("encoding_format") == "base64"
        client.respond(200, embedded(texts, self.config.models[0], tokens, as_base64=as_base64), self._headers)

    async def count_tokens(self, request: HttpRequest, client: Client) -> None:
        with by_the_schema():
            fields = chat_of_claude(read_object(request.body))
            ids = self._chat_ids(read_messages(fields), fields["tools"], {}, generation=True)
        client.respond(200, orjson.dumps({"input_tokens": len(ids)}), self._headers)

    def submit(self, request_id: str, job: Job) -> Mailbox:
        """Queue a job at the model. Raises ApiError."""
        try:
            return self.live.submit(request_id, job)
        except PromptTooLongError as error:
            raise bad_request(str(error)) from error
        except QueueFullError as error:
            raise ApiError(503, "ServiceUnavailableError", str(error)) from error

    async def _begin(self, fault: Fault | None) -> None:
        """Carry out what a fault does before the request is read."""
        if fault is None:
            return
        if fault.kind is FaultKind.REFUSE:
            raise self._cut()
        if fault.kind is FaultKind.STATUS:
            raise fault.error
        if fault.kind is FaultKind.LATENCY:
            await trio.sleep(fault.seconds)

    def _cut(self) -> ClientGone:
        """Count a cut and return the error that makes the server drop the connection without an answer."""
        self.cut += 1
        return ClientGone("cut on demand")

    async def _prepare(self, ask: Ask, body_bytes: int) -> tuple[Job, Answer]:
        if body_bytes <= INLINE_BYTES_MAX:
            return self._tokenized(ask)
        return await trio.to_thread.run_sync(self._tokenized, ask, limiter=self._threads)

    def _tokenized(self, ask: Ask) -> tuple[Job, Answer]:
        """Return the whole prompt in tokens, and its answer. Also runs in worker threads: it changes nothing."""
        prompt = self._prompt_ids(ask)
        room = self.config.tokens_max - len(prompt)
        if room < max(1, ask.limit):
            message = (
                f"This model's maximum context length is {self.config.tokens_max} tokens. However, you requested "
                f"{ask.limit or 1} output tokens and your prompt contains {len(prompt)} input tokens."
            )
            raise bad_request(message)
        call = next_call(ask.messages, ask.tools, ask.tool_choice) if ask.messages and not ask.exact else None
        limit = ask.limit or room
        if call is None:
            answer = self._book.answer(prompt, limit, ask.stop, exact=ask.exact and ask.limit > 0)
        else:
            answer = self._book.calling(call, limit)
        salt = f"{ask.adapter}\0{ask.salt}".encode() if ask.adapter or ask.salt else b""
        return Job.of(prompt, answer.ids, self.config.limits.block_size, salt), answer

    def _prompt_ids(self, ask: Ask) -> TokenIds:
        if ask.messages is not None:
            ids = self._chat_ids(ask.messages, ask.tools, ask.template_options, generation=True)
        elif ask.text is not None:
            ids = self._tokenizer.encode(ask.text, special=True)
        else:
            ids = np.asarray(ask.ids, dtype=np.uint32)
        if not len(ids):
            raise bad_request("the prompt has no tokens")
        return ids

    def _chat_ids(self, messages: Any, tools: Any, options: Mapping[str, Any], *, generation: bool) -> TokenIds:
        try:
            text = self._tokenizer.render(messages, tools, options, generation=generation)
        except RenderError as error:
            raise bad_request(str(error)) from error
        return self._tokenizer.encode(text, special=False)

    async def _whole(self, client: Client, reply: Reply, mailbox: Mailbox, answer: Answer, fault: Fault | None) -> bool:
        """Answer in one piece. False: the connection is to be cut instead."""
        out, fault_at = 0, NEVER if fault is None else fault.depth(len(answer.ids))
        while not mailbox.ended:
            out = await mailbox.wait_tokens(out)
            if out >= fault_at:
                if fault is not None and fault.is_late:
                    client.respond(200, reply.failed(fault.error, stream=False), self._headers)
                    return True
                if not await keeps_open(fault):
                    return False
                fault_at = NEVER
        if mailbox.aborted:
            return False
        body = reply.whole(answer.text, answer.finish_reason, counted(mailbox, answer, fault))
        client.respond(200, body, self._headers)
        return True

    async def _stream(
        self, writer: StreamWriter, ask: Ask, reply: Reply, mailbox: Mailbox, answer: Answer, fault: Fault | None
    ) -> bool:
        """Answer token by token. False: the connection is to be cut."""
        sent, fault_at = 0, NEVER if fault is None else fault.depth(len(answer.ids))
        if fault is not None and fault.kind is FaultKind.STALL and not fault_at:
            await writer.write(b"")  # the head alone, as vLLM's before the prefill
            await keeps_open(fault)
            fault_at = NEVER
        while sent < len(answer.ids):
            out = min(await mailbox.wait_tokens(sent), fault_at)
            if mailbox.aborted:
                return False
            head = b"" if sent else reply.role_chunk()
            await writer.write(head + reply.text_chunks(answer.pieces[sent:out]))
            sent = out
            if sent >= fault_at:
                if fault is not None and fault.is_late:
                    await writer.write(reply.failed(fault.error, stream=True))
                    await writer.end()
                    return True
                if not await keeps_open(fault):
                    return False
                fault_at = NEVER
        usage = counted(mailbox, answer, fault) if ask.stream_usage or type(reply) is not Reply else None
        await writer.write(reply.last_chunks(answer.text, answer.finish_reason, usage))
        await writer.end()
        return True

    # --- everything else --------------------------------------------------------------------------------------------

    async def probe(self, _: HttpRequest, client: Client, *, body: Callable[[], bytes]) -> None:
        await self._begin(self.faults.draw(trio.current_time(), health=True))
        client.respond(200, body(), self._headers)

    def _models(self) -> bytes:
        return self.models.listed(self._created, self.config.tokens_max)

    async def metrics(self, _: HttpRequest, client: Client) -> None:
        client.respond(200, self.page(), self._headers, content_type=CONTENT_TYPE)

    def page(self) -> bytes:
        return metrics_page(
            self.live.statistics(),
            model=self.config.models[0],
            block_size=self.config.limits.block_size,
            cache=self.config.limits.cache,
            started_at=self.live.started_at,
            first_token_s=self.live.first_token_s,
            duration_s=self.live.duration_s,
            prefix_caching=not self.faults.states_no_cache(trio.current_time()),
        )

    async def tokenize(self, request: HttpRequest, client: Client) -> None:
        fields = read_object(request.body)
        if "messages" in fields:
            generation = bool(fields.get("add_generation_prompt", True))
            options = read_template_options(fields)
            ids = self._chat_ids(read_messages(fields), fields.get("tools"), options, generation=generation)
        else:
            text = read_prompt(fields).get("text")
            if text is None:
                raise bad_request("prompt must be a text", "prompt")
            ids = self._tokenizer.encode(text, special=bool(fields.get("add_special_tokens", True)))
        body = {"count": len(ids), "max_model_len": self.config.tokens_max, "tokens": ids.tolist(), "token_strs": None}
        client.respond(200, orjson.dumps(body), self._headers)

    async def detokenize(self, request: HttpRequest, client: Client) -> None:
        ids = read_prompt({"prompt": read_object(request.body).get("tokens")}).get("ids")
        if ids is None:
            raise bad_request("tokens must be a list of token ids", "tokens")
        client.respond(200, orjson.dumps({"prompt": self._tokenizer.decode(ids)}), self._headers)

    async def set_fault(self, request: HttpRequest, client: Client) -> None:
        try:
            fault = Fault.read(read_object(request.body))
        except ValueError as error:
            raise bad_request(str(error)) from error
        now = trio.current_time()
        self.faults.set(fault, now)
        self.live.hold(now + fault.lasting_s if fault is not None and fault.kind is FaultKind.HANG else now)
        client.respond(200, b'{"set":true}', self._headers)

    async def lose_events(self, request: HttpRequest, client: Client) -> None:
        """Handle {"lose": n}: the next n messages are not sent, only kept for those who ask for them again."""
        number = read_object(request.body).get("lose")
        if type(number) is not int or number < 0 or self.kv is None:
            raise bad_request("lose must be a number of messages", "lose")
        self.kv.publisher.to_lose = number
        client.respond(200, b'{"set":true}', self._headers)

    async def restart(self, _: HttpRequest, client: Client) -> None:
        self.live.restart()
        self.responses.forget()
        if self.kv is not None:
            self.kv.restart()
        await self.statistics(_, client)

    async def clear(self, _: HttpRequest, client: Client) -> None:
        self.live.clear_cache()
        await self.statistics(_, client)

    async def occupancy(self, _: HttpRequest, client: Client) -> None:
        client.respond(200, orjson.dumps([self.live.occupancy()]), self._headers)

    async def statistics(self, _: HttpRequest, client: Client) -> None:
        body = {
            "name": self.name,
            "model": self.config.models[0],
            "started_at": self.live.started_at,
            **asdict(self.live.statistics()),
            "faults": self.faults.hits,
            "cut": self.cut,
            "kv_messages": self.kv.publisher.published if self.kv else 0,
        }
        client.respond(200, orjson.dumps(body), self._headers)


PING = b": ping\n\n"


async def keeps_open(fault: Fault | None) -> bool:
    """Carry out a fault in mid-answer. False: the connection is to be cut."""
    if fault is not None and fault.kind is FaultKind.STALL:
        await trio.sleep(fault.seconds)
        return True
    return False


def counted(mailbox: Mailbox, answer: Answer, fault: Fault | None = None) -> dict[str, Any]:
    usage = usage_of(mailbox.job.prompt_tokens, len(answer.ids), mailbox.cached_tokens)
    if fault is not None and not fault.counts:
        del usage["prompt_tokens_details"]
    return usage


def kept(fields: Mapping[str, Any], reply: Reply, mailbox: Mailbox, answer: Answer) -> StoredResponse:
    """Return what an engine stores of a response; `fields` are its body as a chat's body."""
    items = fields["input"]
    body = reply.whole(answer.text, answer.finish_reason, counted(mailbox, answer))
    return StoredResponse(
        [*fields["messages"], {"role": "assistant", **reply.spoken(answer.text)}],
        items if isinstance(items, list) else [{"type": "message", "role": "user", "content": items}],
        body,
    )

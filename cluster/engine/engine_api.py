"""The engine's API as values: reads requests' bodies and makes answers' bodies in the shapes of vLLM. Pure.

Field names, error types and the order of stream chunks follow vLLM's OpenAI server (0.32): a role chunk with the first
token, one chunk per token, a last one with `finish_reason`, the usage chunk if asked for, `[DONE]`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import pack
from typing import Any

import orjson

from cluster.engine.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"


class ApiError(Exception):
    """An error that is answered in vLLM's error shape."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]
        self.kind = kind
        self.param = param

    def body(self, *, claude: bool = False) -> bytes:
        """Return the body in OpenAI's shape, or in Anthropic's."""
        if claude:
            kind = CLAUDE_KINDS.get(self.status, "api_error")
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": str(self)}})
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


CLAUDE_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


@contextmanager
def by_the_schema() -> Iterator[None]:
    """Read a body as its API has it. Raises ApiError 400 where a member is missing or of another type, as vLLM does."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise bad_request(f"the body is not as the API has it: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation request. Exactly one of `messages`, `text` and `ids` is given. `limit` 0 = none."""

    chat: bool
    model: str
    messages: Sequence[Any] | None = None
    tools: Sequence[Any] | None = None
    tool_choice: object = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    ids: Sequence[int] | None = None
    limit: int = 0
    exact: bool = False  # ignore_eos
    stop: Sequence[str] = ()
    stream: bool = False
    stream_usage: bool = False
    salt: str = ""
    adapter: str = ""


def read_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body. Raises ApiError."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"JSON decode error: {error}") from error
    if not isinstance(parsed, dict):
        raise bad_request("the body must be a JSON object")
    return parsed


def read_ask(fields: Mapping[str, Any], *, chat: bool, default_model: str) -> Ask:
    """Read the members of a generation request. Raises ApiError 400 for what vLLM refuses too."""
    if fields.get("n") not in (None, 1):
        raise bad_request("only n=1 is supported", "n")
    options = fields.get("stream_options") or {}
    prompt = {"messages": read_messages(fields)} if chat else read_prompt(fields)
    return Ask(
        chat=chat,
        model=str(fields.get("model") or default_model),
        tools=fields.get("tools") or None,
        tool_choice=fields.get("tool_choice"),
        template_options=read_template_options(fields),
        limit=read_limit(fields, chat=chat),
        exact=bool(fields.get("ignore_eos")),
        stop=read_prefix_key(fields.get("stop")),
        stream=bool(fields.get("stream")),
        stream_usage=bool(isinstance(options, dict) and options.get("include_usage")),
        salt=str(fields.get("cache_salt") or ""),
        **prompt,
    )


def read_messages(fields: Mapping[str, Any]) -> list[Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message", "messages")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise bad_request("every message must be an object with a role", "messages")
    return messages


def read_prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `prompt` as a text or as token ids; a list of one prompt counts as that prompt."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return {"text": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        return {"ids": prompt}
    raise bad_request("prompt must be one text or one list of token ids, not empty", "prompt")


def read_template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = fields.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    reserved = options.keys() & {"tokenize", "add_generation_prompt", "tools", "conversation", "return_dict"}
    if reserved:
        raise bad_request(f"chat_template_kwargs may not set {sorted(reserved)}", "chat_template_kwargs")
    return options


COMPLETION_TOKENS = 16
"""The limit of /v1/completions if the client sets none: OpenAI's and vLLM's default."""


def read_limit(fields: Mapping[str, Any], *, chat: bool) -> int:
    limit = fields.get("max_completion_tokens") if chat else None
    if limit is None:
        limit = fields.get("max_tokens")
    if limit is None:
        return 0 if chat else COMPLETION_TOKENS
    if type(limit) is not int or limit < 1:
        raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    return limit


def read_prefix_key(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    words = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(word, str) for word in words):
        raise bad_request("stop must be a text or a list of texts", "stop")
    return tuple(words)


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of an answer that do not change from chunk to chunk, and the shapes of its chunks."""

    request_id: str
    created: int  # Unix seconds
    model: str
    engine: str
    chat: bool
    call: ToolCall | None = None

    @property
    def call_id(self) -> str:
        return f"call_{self.request_id}"

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> bytes:
        """Return the body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "refusal": None, **self.spoken(text)}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return orjson.dumps({**self._head(kind), "choices": [choice], "usage": usage})

    def spoken(self, text: str) -> dict[str, Any]:
        """Return content and calls of a message of the history. `text`: its words, or the arguments of its call."""
        if self.call is None:
            return {"content": text, "tool_calls": []}
        return {"content": None, "tool_calls": [replace(self.call, arguments=text).in_chat(self.call_id)]}

    def announced(self) -> bytes:
        """Return what may come before the prefill is done."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.chat else b""

    def failed(self, error: ApiError, *, stream: bool) -> bytes:
        """Return the event by which an answer fails, or the whole answer that is an error."""
        return event(orjson.loads(error.body())) if stream else error.body()

    def role_chunk(self) -> bytes:
        """Return the first chunk of a chat's stream, with the name of any call; a completion's stream has none."""
        if not self.chat:
            return b""
        head = self.announced()
        if self.call is None:
            return head
        return head + self._chunk({"delta": {"tool_calls": [{"index": 0, **self.spoken("")["tool_calls"][0]}]}}, None)

    def text_chunks(self, pieces: Sequence[str]) -> bytes:
        """Return one chunk per token; for a call, only for tokens that are part of the arguments."""
        return b"".join(self._chunk(self._piece(piece), None) for piece in pieces if piece or not self.call)

    def last_chunks(self, text: str, finish_reason: str, usage: Mapping[str, Any] | None) -> bytes:  # noqa: ARG002
        """Return the last chunk, the usage chunk if asked for, and the end mark. `text`: all text that was sent."""
        last = self._chunk({**self._piece(""), "stop_reason": None}, finish_reason)
        if usage is None:
            return last + DONE
        return last + event({**self._head(self._chunk_kind()), "choices": [], "usage": usage}) + DONE

    def _piece(self, text: str) -> dict[str, Any]:
        if self.call is not None:
            return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}}
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.engine,
        }

    def _chunk(self, content: Mapping[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head(self._chunk_kind()), "choices": [choice]})


def event(value: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def usage_of(prompt_tokens: int, answer_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "completion_tokens": answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def models_body(names: Sequence[str], created: int, tokens_max: int, owner: str) -> bytes:
    """Return the body of GET /v1/models: the base model first, then the adapters."""
    cards: list[dict[str, Any]] = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": owner,
            "root": name,
            "parent": None if name == names[0] else names[0],
            "max_model_len": tokens_max,
            "permission": [],
        }
        for name in names
    ]
    return orjson.dumps({"object": "list", "data": cards})


def embedded(texts: Sequence[str], model: str, tokens: int, *, as_base64: bool) -> bytes:
    """Return the body of POST /v1/embeddings: eight numbers for each text, from its digest."""
    data: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        vector = [byte / 256 for byte in blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()]
        value = b64encode(pack("<8f", *vector)).decode() if as_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "model": model, "data": data, "usage": usage})

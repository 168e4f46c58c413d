"""Reads one answer as it arrives: status, text, usage, and when its pieces came. Pure: `now` is passed in.

It reads OpenAI's event streams and plain JSON bodies, and judges them: an answer is good if its status is 2xx, it is
complete (a stream ends with `[DONE]`), and it contains no error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

BODY_BYTES_MAX = 64 * 1024 * 1024
"""More than any answer of text. A server that sends more is broken, and must not fill the client's memory."""

DETAIL_CHARS_MAX = 200
"""Of an error's message, which gets one line on the screen."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `reason` is a short phrase, by which failures are grouped; `detail` is of this one."""

    reason: str
    detail: str = ""


@dataclass(slots=True)
class Answer:
    """The state of one answer.

    Times are on the caller's clock. `first_s` is when the first chunk with text came (None until then, and for answers
    that do not stream); `gaps_s` are the pauses between chunks with text.
    """

    stream: bool
    first_s: float | None = None
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    has_usage: bool = False
    fingerprint: str = ""
    done: bool = False
    error: Failure | None = None
    buffer: bytearray = field(default_factory=bytearray)
    size: int = 0

    def feed(self, data: bytes, status: int, now: float) -> None:
        """Take in the next bytes of the body."""
        self.size += len(data)
        if self.size > BODY_BYTES_MAX:
            self.error = Failure("answer too large", f"more than {BODY_BYTES_MAX} bytes")
            return
        self.buffer += data
        if self.stream and 200 <= status < 300 and not self.buffer.startswith(b"{"):
            self.feed_events(now)

    def feed_events(self, now: float) -> None:
        *lines, rest = self.buffer.split(b"\n")
        self.buffer = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                self.take_event(bytes(line[5:].strip()), now)

    def take_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        chunk = self.parse(data)
        if chunk is None or self.take_error(chunk):
            return
        self.take_usage(chunk)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.take_text(delta.get("content") or choice.get("text") or "", now)

    def take_text(self, text: str, now: float) -> None:
        if not text:
            return
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps_s.append(now - self.last_s)
        self.last_s = now
        self.text.append(text)

    def take_usage(self, body: dict[str, Any]) -> None:
        if body.get("system_fingerprint"):
            self.fingerprint = str(body["system_fingerprint"])
        usage = body.get("usage")
        if not usage:
            return
        self.has_usage = True
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.completion_tokens = int(usage.get("completion_tokens") or 0)
        self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def take_error(self, body: dict[str, Any]) -> bool:
        error = body.get("error")
        if error and self.error is None:
            self.error = Failure(f"error in the answer: {error_word(error)}", error_detail(error))
        return bool(error)

    def parse(self, data: bytes) -> dict[str, Any] | None:
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self.error = Failure("answer is not JSON", f"{error}: {data[:80]!r}")
            return None
        if not isinstance(body, dict):
            self.error = Failure("answer is not a JSON object", f"{data[:80]!r}")
            return None
        return body

    def finish(self, status: int) -> Failure | None:
        """Judge the answer, whose body is complete. None: it is good."""
        if not 200 <= status < 300:
            return self.judge_status(status)
        if self.error is not None:
            return self.error
        if self.stream and not self.buffer.startswith(b"{"):
            return None if self.done else Failure("stream ended without [DONE]")
        body = self.parse(bytes(self.buffer))
        if body is not None and not self.take_error(body):
            self.take_usage(body)
            for choice in body.get("choices") or ():
                message = choice.get("message") or {}
                self.text.append(message.get("content") or choice.get("text") or "")
        return self.error

    def judge_status(self, status: int) -> Failure:
        try:
            body = orjson.loads(self.buffer)
        except orjson.JSONDecodeError:
            body = None
        error = body.get("error") if isinstance(body, dict) else None
        if not error:
            return Failure(f"HTTP {status}", self.buffer[:DETAIL_CHARS_MAX].decode("utf-8", "replace"))
        return Failure(f"HTTP {status} {error_word(error)}", error_detail(error))


def error_word(error: Any) -> str:
    """Return the machine-readable name of an error in OpenAI's shape: its code, else its type."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")[:60]
    return "error"


def error_detail(error: Any) -> str:
    message = error.get("message", "") if isinstance(error, dict) else error
    return str(message)[:DETAIL_CHARS_MAX]

"""Drives conversations against an OpenAI-compatible address: closed loop (users) or open loop (arrivals).

Each conversation is one task with one connection. A failed turn ends its conversation, whose later turns count as not
sent. When the time is up no turn begins and requests in flight may finish; a cancelled run counts those as cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import trio

from cluster.load.answer import Answer, Failure
from cluster.load.http_client import Connection, ExchangeFailed, ResponseReader, fetch, request_bytes
from cluster.load.load_report import LoadLog, Sample
from cluster.load.workload import PARENTS_MAX, Conversation, Turn

OPEN_CONVERSATIONS_MAX = 8_000
"""Conversations at once. An open loop does not slow down for a slow target; arrivals beyond are skipped and counted."""

TRANSCRIPTS_KEPT = 2 * PARENTS_MAX
"""Histories of the latest conversations that are kept for branches: twice as many as may be parents."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to send requests. `stream` false: no answer is asked for as a stream. `extra` joins every body."""

    host: str
    port: int
    path: str = "/v1/chat/completions"
    model: str = "lab"
    max_tokens: int = 64
    stream: bool = True
    timeout_s: float = 120.0
    api_key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, messages: Iterable[bytes], *, stream: bool) -> bytes:
        """Return one request. `messages` are JSON already, so that a long history is not encoded again each turn."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        head = orjson.dumps(fields | self.extra)
        body = head[:-1] + b',"messages":[' + b",".join(messages) + b"]}"
        return request_bytes(self.path, self.host, self.port, body, self.api_key)


class Transcript:
    """The history of one conversation, with its length after each of its own turns; branches begin from it."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.marks: list[int] = []
        self.ended = False
        self.changed = trio.Event()

    def turn_done(self) -> None:
        self.marks.append(len(self.messages))
        self.wake()

    def end(self) -> None:
        self.ended = True
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def wait_turns(self, turns: int) -> list[bytes]:
        """Return the history after that many own turns, or all of it if the conversation has ended before."""
        while len(self.marks) < turns and not self.ended:
            await self.changed.wait()
        if not self.marks:
            return []
        return self.messages[: self.marks[min(turns, len(self.marks)) - 1]]


class Runner:
    """Runs one load. `log` may be read at any time. Make a new Runner for each run."""

    def __init__(self, target: Target, log: LoadLog) -> None:
        self.target = target
        self.log = log
        self.transcripts: dict[str, Transcript] = {}
        self.stop_at_s = math.inf
        self.open = 0

    async def run_closed(
        self, conversations: Iterable[Conversation], starts_s: Iterable[float], duration_s: float = math.inf
    ) -> None:
        """Run a user for each entry of `starts_s`. A user takes the next conversation when the last one has ended."""
        begun_s = trio.current_time()
        self.stop_at_s = begun_s + duration_s
        supply = iter(conversations)
        async with trio.open_nursery() as nursery:
            for start_s in starts_s:
                nursery.start_soon(self.user, supply, begun_s + start_s)

    async def user(self, supply: Iterator[Conversation], start_s: float) -> None:
        await trio.sleep_until(min(start_s, self.stop_at_s))
        while trio.current_time() < self.stop_at_s and (conversation := next(supply, None)) is not None:
            await self.converse(conversation, self.transcript_for(conversation))

    async def run_open(self, conversations: Iterable[Conversation], duration_s: float = math.inf) -> None:
        """Begin every conversation at its `start_s`, however slow the target is."""
        begun_s = trio.current_time()
        self.stop_at_s = begun_s + duration_s
        async with trio.open_nursery() as nursery:
            for conversation in conversations:
                due_s = begun_s + (conversation.start_s or 0.0)
                if due_s >= self.stop_at_s:
                    break
                await trio.sleep_until(due_s)
                self.log.lags_s.append(trio.current_time() - due_s)
                if self.open >= OPEN_CONVERSATIONS_MAX:
                    self.log.skipped_conversations += 1
                    continue
                self.open += 1
                nursery.start_soon(self.visit, conversation, self.transcript_for(conversation))

    async def visit(self, conversation: Conversation, transcript: Transcript) -> None:
        try:
            await self.converse(conversation, transcript)
        finally:
            self.open -= 1

    def transcript_for(self, conversation: Conversation) -> Transcript:
        """Make a conversation's transcript before its task runs, so that a branch always finds its parent's."""
        transcript = self.transcripts[conversation.name] = Transcript()
        while len(self.transcripts) > TRANSCRIPTS_KEPT:
            del self.transcripts[next(iter(self.transcripts))]
        return transcript

    async def converse(self, conversation: Conversation, transcript: Transcript) -> None:
        """Send all turns of one conversation, on one connection."""
        self.log.begin(len(conversation.turns))
        left = len(conversation.turns)
        try:
            parent = self.transcripts.get(conversation.parent) if conversation.parent else None
            if parent is not None:
                transcript.messages.extend(await parent.wait_turns(conversation.parent_turns))
            async with Connection(self.target.host, self.target.port) as connection:
                for turn in conversation.turns:
                    if not await self.pause(turn.think_s):
                        break
                    left -= 1
                    if not await self.take_turn(connection, turn, transcript):
                        break
        finally:
            self.log.not_sent += left
            transcript.end()

    async def pause(self, think_s: float) -> bool:
        """Wait before a turn. False: the run's time is up before the pause ends."""
        due_s = trio.current_time() + think_s
        if due_s >= self.stop_at_s:
            return False
        if think_s > 0:
            await trio.sleep_until(due_s)
        return True

    async def take_turn(self, connection: Connection, turn: Turn, transcript: Transcript) -> bool:
        """Send one request. True: the answer is good, and is in the transcript."""
        transcript.messages.extend(orjson.dumps(message) for message in turn.messages)
        answer = Answer(stream=self.target.stream and turn.stream)
        self.log.sent += 1
        try:
            failure = await self.ask(connection, self.target.request(transcript.messages, stream=answer.stream), answer)
        except trio.Cancelled:
            self.log.cancelled += 1
            raise
        if failure is not None:
            self.log.bad(failure, connection.node)
            return False
        answered = turn.recorded or {"role": "assistant", "content": "".join(answer.text)}
        transcript.messages.append(orjson.dumps(answered))
        transcript.turn_done()
        return True

    async def ask(self, connection: Connection, request: bytes, answer: Answer) -> Failure | None:
        """Send a request, read and judge its answer, and log a good one. Returns the failure, if any."""
        began_s = trio.current_time()

        def on_body(data: bytes, status: int) -> None:
            answer.feed(data, status, trio.current_time())

        with trio.move_on_after(self.target.timeout_s) as patience:
            try:
                reader = await connection.exchange(request, on_body)
            except ExchangeFailed as error:
                return error.failure
        if patience.cancelled_caught:
            return Failure(f"no complete answer within {self.target.timeout_s:g} s")
        failure = answer.finish(reader.status)
        if failure is None:
            self.log.good(sample(reader, answer, connection.node, began_s, trio.current_time()), answer.gaps_s)
        return failure


def sample(reader: ResponseReader, answer: Answer, node: str, began_s: float, ended_s: float) -> Sample:
    """Return the sample of one good answer, from its headers, its usage and its times."""
    headers = reader.headers
    predicted = headers.get("x-ranvier-matched-tokens", "")
    return Sample(
        engine=headers.get("x-engine") or headers.get("x-ranvier-backend") or answer.fingerprint or "unknown",
        node=node,
        total_s=ended_s - began_s,
        ttft_s=None if answer.first_s is None else answer.first_s - began_s,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        has_usage=answer.has_usage,
        predicted_tokens=int(predicted) if predicted.isdecimal() else None,
        route=headers.get("x-ranvier-reason", ""),
    )


async def first_model(target: Target) -> str:
    """Return the first model that the target lists. Raises ExchangeFailed."""
    with trio.move_on_after(target.timeout_s) as patience:
        status, body = await fetch(target.host, target.port, "/v1/models", api_key=target.api_key)
    if patience.cancelled_caught:
        raise ExchangeFailed(Failure("GET /v1/models: no answer", f"within {target.timeout_s:g} s"))
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        detail = body[:80].decode("utf-8", "replace")
        raise ExchangeFailed(Failure(f"GET /v1/models: HTTP {status} names no model", detail)) from error

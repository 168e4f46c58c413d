"""Learns from an answer what it proves, while it is relayed and once it is whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranvier_py.core.answers.answer_stream import ResponseName, counted_prompt, has_finished, has_token
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome, Transition
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call, PromptTokenizer
from ranvier_py.proxy.failed_tries import serves
from ranvier_py.proxy.http_values import HttpResponseHead

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed but not learned: 1 MiB of a stream is some 5,000 tokens."""


@dataclass(slots=True, eq=False, repr=False)
class LearnStage:
    router: Router
    tokenizer: PromptTokenizer
    changed: Callable[[Sequence[Transition]], object]  # called with changes of health that a first token causes


class AnswerProof:
    """What one answer proves. Accounts for each piece that is relayed, and collects an answer that is learned."""

    __slots__ = ("_attempt", "_call", "_captured", "_naming", "_stage")

    def __init__(self, stage: LearnStage, call: Call, attempt: Attempt, head: HttpResponseHead) -> None:
        self._stage, self._call, self._attempt = stage, call, attempt
        is_served = 200 <= attempt.reply.status < 300
        is_learned = is_served and attempt.prompt.kind != "opaque" and head.fields.readable
        self._captured = bytearray() if is_learned else None  # not a list: an engine may send two bytes at a time
        self._naming = ResponseName() if is_served and call.read.is_kept else None

    @property
    def is_prefilled(self) -> bool:
        """Whether the engine has nothing left to compute before it answers, so that it may be silent but briefly."""
        return self._captured is None or self._attempt.first_at is not None or not self._attempt.prompt.stream

    def passed(self, data: bytes) -> None:
        call, attempt, stage, now = self._call, self._attempt, self._stage, time.monotonic()
        if not call.first_byte_at:
            call.first_byte_at = now
        if attempt.generation == attempt.target.generation:
            attempt.target.seen.received_at = now
        if self._captured is not None and data:
            if attempt.first_at is None and (not attempt.prompt.stream or has_token(data, attempt.prompt.api)):
                stage.router.first_token(attempt, now)
                if attempt.prompt.stream:  # which its backend serves from now on, whatever becomes of it
                    self._serves(now)
            if call.sent_bytes <= CAPTURE_BYTES_MAX:
                self._captured += data
        if self._naming is not None and data and (name := self._naming.feed(data)):
            stage.router.stored(attempt, name, call.read.tenant, now)
        call.sent_bytes += len(data)

    def _serves(self, now: float) -> None:
        served = serves(self._stage.router.registry, self._call.request.path, self._attempt)
        if self._call.failed_tries is not None:
            served = [*self._call.failed_tries.settle(Outcome.SUCCESS, now), *served]
        if served:
            self._stage.changed(served)

    def whole(self, *, chunked: bool) -> None:
        """Have a whole answer learned. One without output proves a prefill only if the engine says how it finished."""
        if self._captured is None:
            return
        attempt, raw = self._attempt, bytes(self._captured)
        attempt.reply.counted_tokens = counted_prompt(raw, attempt.prompt.api)
        if attempt.first_at is None and has_finished(raw, attempt.prompt.api):
            self._stage.router.first_token(attempt, time.monotonic())
        if attempt.first_at is not None and self._call.sent_bytes <= CAPTURE_BYTES_MAX:
            self._stage.tokenizer.finish(attempt, raw, chunked=chunked)

"""Learns from an answer what it proves, while it is relayed and once it is whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranvier_py.core.answers.answer_counts import answer_counts
from ranvier_py.core.answers.answer_events import BLANK
from ranvier_py.core.answers.answer_reader import CAPTURE_BYTES_MAX, AnswerReader
from ranvier_py.core.answers.answer_stream import has_finished
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome, Registry, Transition
from ranvier_py.core.routing.blame.refusals import kind_of
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call, PromptTokenizer


@dataclass(slots=True, eq=False, repr=False)
class LearnStage:
    router: Router
    tokenizer: PromptTokenizer
    changed: Callable[[Sequence[Transition]], object]  # called with changes of health that a first token causes


class AnswerProof:
    """What one answer proves, and how much of it was relayed."""

    __slots__ = ("_attempt", "_call", "_captured", "_is_due", "_reader", "_stage")

    def __init__(self, stage: LearnStage, call: Call, attempt: Attempt, reader: AnswerReader) -> None:
        self._stage, self._call, self._attempt, self._reader = stage, call, attempt, reader
        self._captured = reader.captured if attempt.reply.status < 300 else None
        self._is_due = self._captured is not None or reader.naming is not None or bool(reader.name)

    @property
    def is_prefilled(self) -> bool:
        """Whether the engine has nothing left to compute before it answers, so that it may be silent but briefly."""
        return self._captured is None or self._attempt.first_at is not None or not self._attempt.prompt.stream

    def passed(self) -> None:
        """Account for what was relayed, and learn what it proves."""
        call, attempt, now = self._call, self._attempt, time.monotonic()
        if attempt.generation == attempt.target.generation:
            attempt.target.seen.received_at = now
        if self._is_due:
            self._learn(now)
        call.sent_bytes = self._reader.size

    def _learn(self, now: float) -> None:
        stage, attempt, reader = self._stage, self._attempt, self._reader
        if reader.has_output and self._captured is not None and attempt.first_at is None:
            stage.router.first_token(attempt, now)
            if attempt.prompt.stream:  # which its backend serves from now on, whatever becomes of it
                self._serves(now)
        if reader.name:
            stage.router.stored(attempt, reader.name, self._call.read.tenant, now)
            reader.name = ""
        self._is_due = not reader.has_output or reader.naming is not None

    def _serves(self, now: float) -> None:
        served = serves(self._stage.router.registry, self._call.request.path, self._attempt)
        if self._call.failed_tries is not None:
            served = [*self._call.failed_tries.settle(Outcome.SUCCESS, now), *served]
        if served:
            self._stage.changed(served)

    def whole(self, *, chunked: bool) -> None:
        """Have a whole answer learned. One without output proves a prefill only if the engine says how it finished."""
        if self._captured is None or self._reader.failure not in (None, BLANK):
            return
        attempt, raw = self._attempt, bytes(self._captured)
        attempt.reply.counts = answer_counts(raw, attempt.prompt.api)
        if attempt.first_at is None and has_finished(raw, attempt.prompt.api):
            self._stage.router.first_token(attempt, time.monotonic())
        if attempt.first_at is not None and self._call.sent_bytes <= CAPTURE_BYTES_MAX:
            self._stage.tokenizer.finish(attempt, raw, chunked=chunked)


def serves(registry: Registry, path: bytes, attempt: Attempt) -> Sequence[Transition]:
    """Note that a backend serves what it or others may have refused. Returns what this changes."""
    refusals = registry.refusals
    if not (refusals.avoiding or refusals.rows) or not attempt.judged or attempt.reply.is_blank:
        return ()
    kind = kind_of(path, attempt.prompt.model, stream=attempt.prompt.stream)
    return refusals.served(attempt.target, kind, attempt.sent_at)

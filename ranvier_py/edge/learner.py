"""Learning off the request's path: tails and answers are tokenized while the engines work.

One task takes lessons from a bounded queue in batches and hands each batch to one worker thread, where encoding releases
the interpreter lock. What comes back is given to the Router in one synchronous call per lesson. When lessons come faster
than one thread can tokenize, the oldest is dropped and counted: its text fingerprints were learned at the first token, so
the chat goes on being placed; only mid-message matches of that turn are lost.

The same tokenizer serves the few prompts that must be tokenized before placement, each with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import trio

from ranvier_py.core.boundaries import Chat, Message, TokenIds, TokenizedChat
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.fingerprint import Segment, TokenHasher
from ranvier_py.core.prompt import Boundary
from ranvier_py.core.request import Prompt
from ranvier_py.core.router import Flight, Router
from ranvier_py.core.stream import NOTHING, Answer, read_answer

log = logging.getLogger(__name__)

BATCH_MAX = 64  # lessons in one hop to the worker thread: about 5 ms of work, so that no lesson waits long
GATHER_S = 0.004  # how long the first lesson of a batch waits for company: a hop costs as much as two lessons
TOKENIZE_THREADS = 2  # prompts tokenized before placement at one time; more would fight the event loop for its core


class Tokenizer(Protocol):
    """What the learner needs; edge/tokenizer.py has the real one. Called in worker threads."""

    def tokenize(self, chat: Chat) -> TokenizedChat: ...
    def tokenize_tail(
        self, tail: Sequence[Message], context: Callable[[], Chat], known: int
    ) -> TokenizedChat | None: ...
    def tokenize_text(self, text: str) -> TokenIds: ...


@dataclass(slots=True)
class Lesson:
    """One flight's tokens to be learned; with `raw`, its answer as well."""

    flight: Flight
    raw: bytes | None = None
    chunked: bool = False
    streamed: bool = False
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Taught:
    """What a worker thread made of one prompt or lesson."""

    ancestor: Boundary
    segments: Sequence[Segment | None]
    answer: Answer


@dataclass(frozen=True, slots=True)
class LearnerStatistics:
    queued: int
    learned: int
    dropped: int
    failed: int
    tokenized_first: int
    deadlines_missed: int


class Learner:
    """Owns the tokenizing threads. `submit` and `finish` cost an append; `run` must be running for anything to come of it."""

    def __init__(self, tokenizer: Tokenizer, hasher: TokenHasher, router: Router, *, queue_max: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._hasher = hasher
        self._router = router
        self._queue: deque[Lesson] = deque()
        self._queue_max = queue_max
        self._wake = trio.Event()
        self._limiter = trio.CapacityLimiter(TOKENIZE_THREADS)
        self._learned = self._dropped = self._failed = 0
        self._tokenized_first = self._deadlines_missed = 0

    def submit(self, flight: Flight) -> Lesson | None:
        """Have the flight's tail tokenized, if it is not yet."""
        if flight.prompt.kind == "opaque" or flight.prompt.end.state is not None:
            return None
        lesson = Lesson(flight)
        self._append(lesson)
        return lesson

    def finish(self, flight: Flight, lesson: Lesson | None, raw: bytes, *, chunked: bool, streamed: bool) -> None:
        """The answer is complete: learn it too, in the lesson that still waits or in a new one."""
        if flight.prompt.kind == "opaque":
            return
        if lesson is None or lesson.taken:
            lesson = Lesson(flight)
            self._append(lesson)
        lesson.raw, lesson.chunked, lesson.streamed = raw, chunked, streamed

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        """Tokenize a prompt before it is placed. False when the deadline passed or the template refuses it."""
        taught: Taught | None = None
        with trio.move_on_after(deadline_s):
            taught = await trio.to_thread.run_sync(
                self._try_prompt, prompt, limiter=self._limiter, abandon_on_cancel=True
            )
        if taught is None:
            self._deadlines_missed += 1
            return False
        self._router.absorb(prompt, taught.ancestor, taught.segments)
        self._tokenized_first += 1
        return prompt.end.state is not None

    async def run(self) -> None:
        """Teach for ever, batch by batch."""
        while True:
            if not self._queue:
                self._wake = trio.Event()
                await self._wake.wait()
            await trio.sleep(GATHER_S)
            batch = [self._take() for _ in range(min(len(self._queue), BATCH_MAX))]
            results = await trio.to_thread.run_sync(self._teach_all, batch)
            now = time.monotonic()
            for lesson, taught in zip(batch, results, strict=True):
                if taught is not None:
                    self._router.taught(lesson.flight, taught.ancestor, taught.segments, taught.answer, now)

    def statistics(self) -> LearnerStatistics:
        return LearnerStatistics(
            queued=len(self._queue),
            learned=self._learned,
            dropped=self._dropped,
            failed=self._failed,
            tokenized_first=self._tokenized_first,
            deadlines_missed=self._deadlines_missed,
        )

    def _append(self, lesson: Lesson) -> None:
        if len(self._queue) >= self._queue_max:
            self._queue.popleft().taken = True
            self._dropped += 1
        self._queue.append(lesson)
        self._wake.set()

    def _take(self) -> Lesson:
        lesson = self._queue.popleft()
        lesson.taken = True
        return lesson

    # --- in worker threads: these read prompts and never change them ------------------------------------------------

    def _teach_all(self, batch: Sequence[Lesson]) -> list[Taught | None]:
        return [self._try(lesson) for lesson in batch]

    def _try(self, lesson: Lesson) -> Taught | None:
        kind = lesson.flight.prompt.kind
        answer = NOTHING
        if lesson.raw is not None:
            answer = read_answer(lesson.raw, chunked=lesson.chunked, streamed=lesson.streamed, kind=kind)
        taught = self._try_prompt(lesson.flight.prompt, answer)
        if taught is None:
            self._failed += 1
            return Taught(lesson.flight.prompt.end, (), answer)
        self._learned += 1
        return taught

    def _try_prompt(self, prompt: Prompt, answer: Answer = NOTHING) -> Taught | None:
        try:
            if prompt.kind == "chat":
                return self._chat(prompt, answer)
            return self._completion(prompt, answer)
        except RanvierError as refused:  # the template refuses this conversation: the engine will say so itself
            log.debug("tokenize.refused %s", refused)
            return None

    def _chat(self, prompt: Prompt, answer: Answer) -> Taught:
        ancestor = prompt.end.tokenized_ancestor()
        messages = list(prompt.messages_after(ancestor))
        if answer.message is not None:
            messages.append(answer.message)
        if not messages:
            return Taught(ancestor, (), answer)

        def context() -> Chat:
            chat = prompt.chat()
            return Chat([*chat.messages, *messages[len(messages) - (answer.message is not None) :]], chat.tools, chat.template)

        tokenized = None
        if ancestor.messages:
            tokenized = self._tokenizer.tokenize_tail(messages, context, ancestor.messages)
        if tokenized is None or ancestor.state is None:
            while ancestor.parent is not None:
                ancestor = ancestor.parent
            tokenized = self._tokenizer.tokenize(context())
        return Taught(ancestor, self._segments(ancestor, tokenized.ids, tokenized.ends), answer)

    def _completion(self, prompt: Prompt, answer: Answer) -> Taught:
        root = prompt.end.parent
        assert root is not None
        if prompt.end.state is not None:
            return Taught(prompt.end, (), answer)
        ids = self._tokenizer.tokenize_text(prompt.text)
        return Taught(root, self._segments(root, ids, [len(ids)]), answer)

    def _segments(self, ancestor: Boundary, ids: TokenIds, ends: Sequence[int]) -> list[Segment | None]:
        """One segment for each message; None where its end is no clean cut, and the next one covers it."""
        assert ancestor.state is not None
        found = iter(self._hasher.extend(ancestor.state, np.asarray(ids, dtype=np.uint32), [end for end in ends if end >= 0]))
        return [next(found) if end >= 0 else None for end in ends]

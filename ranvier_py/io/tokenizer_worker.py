"""Tokenizes off the request's path: tails and answers, while the engines work.

One task takes jobs from a bounded queue in batches and hands each batch to one worker thread, where encoding releases
the interpreter lock. What comes of a job is given to the Router in one synchronous call. When jobs come faster than one
thread can tokenize, the oldest is dropped and counted: its text fingerprints were learned at the first token, so the
chat goes on being placed; only mid-message matches of that turn are lost. The same tokenizer serves the few prompts
that must be tokenized before placement, each with a deadline.

Rules: whatever a client sends, and whatever a template makes of it, costs its own job at most: it is counted as failed,
and the others of its batch are learned. What waits is bounded in number and in bytes, what is tokenized at once in
tokens. Counters change on the event loop alone. Worker threads read prompts and never change them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from ranvier_py.core.answers.answer_stream import NOTHING, Answer, read_answer
from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.boundaries import Chat, Message, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher, TokenState, media_of
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.router import Attempt, Router

log = logging.getLogger(__name__)

BATCH_MAX = 64  # jobs in one hop to the worker thread: few enough that none waits long
GATHER_S = 0.004  # how long the first job of a batch waits for others: a hop costs as much as two jobs
LEARN_SHARE = 0.1
"""Most of the time that learning may take, in its thread and on the event loop. It competes with requests for the
interpreter lock: measured under full load (benchmarks/data_plane.py), more learning costs more requests than its
matches can save."""

QUEUE_BYTES_MAX = 64 << 20
"""Bodies and answers that wait. A job keeps its body, for templates that need the whole chat: a thousand of the largest
would be 64 GB."""

TOKENS_MAX = 1 << 19
"""Tokens, as estimated, of one prompt and of one batch: the tokenizer takes about 200 bytes for each while it works. A
prompt that is longer is placed by its text alone."""

TOKENIZE_THREADS = 2  # prompts tokenized before placement at one time; more would fight the event loop for its core

FIRST_MAX = 64  # prompts waiting to be tokenized before placement; a further one would miss its deadline anyway


class Tokenizer(Protocol):
    """What the tokenizer worker needs; io/tokenizer.py has the real one. Called in worker threads."""

    def tokenize(self, chat: Chat) -> TokenizedChat: ...
    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat | None]: ...
    def tokenize_text(self, text: str) -> TokenIds: ...


@dataclass(slots=True)
class TokenizerCounters:
    """What became of jobs, and of prompts that were to be tokenized before placement."""

    queued: int = gauge("Prompts and answers that wait to be tokenized.")
    learned: int = counter("Prompts and answers learned by their tokens.")
    dropped: int = counter("Prompts and answers not tokenized because too many waited.")
    failed: int = counter("Prompts that could not be tokenized.")
    tokenized_first: int = counter("Prompts tokenized before their placement.")
    deadlines_missed: int = counter("Prompts placed before they were tokenized, for want of time.")


class TokenizeJob:
    """One prompt to be tokenized, with its answer if there is one, and then what came of it in a worker thread."""

    __slots__ = ("ancestor", "answer", "chunked", "failed", "messages", "prompt", "raw", "segments", "tokenized")

    def __init__(self, prompt: Prompt, raw: bytes | None = None, *, chunked: bool = False) -> None:
        self.prompt = prompt
        self.raw = raw  # the answer
        self.chunked = chunked
        self.reset()

    def reset(self) -> None:
        """As if nothing had been done."""
        self.ancestor = self.prompt.end.tokenized_ancestor()
        self.answer: Answer = NOTHING
        self.messages: Sequence[Message] = ()  # after `ancestor`
        self.tokenized: TokenizedChat | None = None
        self.segments: Sequence[Segment | None] = ()  # one for each message
        self.failed = False

    def read(self) -> None:
        """Find out what there is to tokenize."""
        self.reset()
        prompt = self.prompt
        if self.raw is not None:
            self.answer = read_answer(self.raw, chunked=self.chunked, streamed=prompt.stream, kind=prompt.kind)
        if prompt.kind == "chat":
            answered = (self.answer.message,) if self.answer.message else ()
            self.messages = (*prompt.messages_after(self.ancestor), *answered)

    @property
    def size_bytes(self) -> int:
        """What it keeps alive."""
        return len(self.prompt.body) + len(self.raw or b"")

    @property
    def tokens(self) -> int:
        """How many tokens there are to find, as far as is known."""
        return self.prompt.end.length - self.prompt.end.tokenized_ancestor().length

    @property
    def is_tail(self) -> bool:
        """Whether only new messages of a tokenized chat are to be tokenized."""
        new = self.prompt.end.length - self.ancestor.length
        return self.ancestor.messages > 0 and bool(self.messages) and new <= TOKENS_MAX

    @property
    def is_known(self) -> bool:
        """Whether there is nothing to tokenize."""
        return self.prompt.end.state is not None and not self.messages

    @property
    def has_media(self) -> bool:
        return any(type(message.get("content")) is list and media_of(message) for message in self.messages)

    def chat(self) -> Chat:
        """The whole conversation, with the answer."""
        chat = self.prompt.chat()
        if self.answer.message is None:
            return chat
        return Chat([*chat.messages, self.answer.message], chat.tools, chat.template)

    def stretch(self) -> tuple[TokenState, TokenIds, Sequence[int]]:
        """What is to be hashed: the state before, the tokens, and where messages end in them."""
        assert self.tokenized is not None
        assert self.ancestor.state is not None
        return self.ancestor.state, self.tokenized.ids, [end for end in self.tokenized.ends if end >= 0]

    def take(self, segments: Sequence[Segment]) -> None:
        """One segment for each message; None where its end is no clean cut, and the next one covers it."""
        assert self.tokenized is not None
        found = iter(segments)
        self.segments = [next(found) if end >= 0 else None for end in self.tokenized.ends]


class TokenizerWorker:
    """Owns the tokenizing threads. `submit` and `finish` cost an append; nothing comes of them unless `run` runs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        hasher: TokenHasher,
        router: Router,
        *,
        queue_max: int,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self.counters = TokenizerCounters()
        self._tokenizer = tokenizer
        self._hasher = hasher
        self._router = router
        self._queue: OrderedDict[Attempt, TokenizeJob] = OrderedDict()  # oldest first
        self._queue_max = queue_max
        self._queue_bytes = 0
        self._queue_bytes_max = queue_bytes_max
        self._wake = trio.Event()
        self._asleep = False
        self._nursery: trio.Nursery | None = None  # while running
        self._tokenizing_first = 0
        self._limiter = trio.CapacityLimiter(TOKENIZE_THREADS)

    # --- what is to be done -----------------------------------------------------------------------------------------

    def submit(self, attempt: Attempt) -> None:
        """Have the tail of the attempt's prompt tokenized, if it is not yet."""
        if attempt.prompt.kind != "opaque" and attempt.prompt.end.state is None:
            self._append(attempt, TokenizeJob(attempt.prompt))

    def finish(self, attempt: Attempt, raw: bytes, *, chunked: bool) -> None:
        """The answer is complete: learn it too, with the prompt if that still waits."""
        if attempt.prompt.kind == "opaque":
            return
        job = self._queue.get(attempt)
        if job is None:
            self._append(attempt, TokenizeJob(attempt.prompt, raw, chunked=chunked))
            return
        job.raw, job.chunked = raw, chunked
        self._queue_bytes += len(raw)
        self._trim()

    def _append(self, attempt: Attempt, job: TokenizeJob) -> None:
        self._queue[attempt] = job
        self._queue_bytes += job.size_bytes
        self.counters.queued += 1
        self._trim()
        if self._asleep:
            self._asleep = False
            self._wake.set()

    def _trim(self) -> None:
        """Drop what is too much, oldest first."""
        while len(self._queue) > self._queue_max or (self._queue_bytes > self._queue_bytes_max and self._queue):
            self._take()
            self.counters.dropped += 1

    def _take(self) -> tuple[Attempt, TokenizeJob]:
        attempt, job = self._queue.popitem(last=False)
        self._queue_bytes -= job.size_bytes
        self.counters.queued -= 1
        return attempt, job

    def take_batch(self) -> list[tuple[Attempt, TokenizeJob]]:
        """The oldest jobs: at least one if there is any, no more than one hop should carry."""
        batch: list[tuple[Attempt, TokenizeJob]] = []
        tokens = 0
        while self._queue and len(batch) < BATCH_MAX:
            tokens += next(iter(self._queue.values())).tokens
            if batch and tokens > TOKENS_MAX:
                break
            batch.append(self._take())
        return batch

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        """Tokenize a prompt before it is placed. False when the deadline passed or it can't be tokenized.

        What comes too late for this request is kept all the same: the next turn needs it.
        """
        if self._nursery is None or self._tokenizing_first >= FIRST_MAX:
            self.counters.deadlines_missed += 1
            return False
        done = trio.Event()
        self._nursery.start_soon(self._tokenize_in_time, TokenizeJob(prompt), done)
        with trio.move_on_after(deadline_s) as scope:
            await done.wait()
        self.counters.deadlines_missed += scope.cancelled_caught
        return prompt.end.state is not None

    async def _tokenize_in_time(self, job: TokenizeJob, done: trio.Event) -> None:
        self._tokenizing_first += 1
        try:
            await trio.to_thread.run_sync(self.tokenize, [job], limiter=self._limiter, abandon_on_cancel=True)
        finally:
            self._tokenizing_first -= 1
        if job.failed:
            self.counters.failed += 1
        else:
            self._router.absorb(job.prompt, job.ancestor, job.segments)
            self.counters.tokenized_first += 1
        done.set()

    # --- doing it ---------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tokenize until cancelled, batch by batch."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                while True:
                    await self._tokenize_next()
            finally:
                self._nursery = None

    async def _tokenize_next(self) -> None:
        if not self._queue:
            self._wake = trio.Event()
            self._asleep = True
            await self._wake.wait()
        await trio.sleep(GATHER_S)
        batch = self.take_batch()
        began = time.monotonic()
        await trio.to_thread.run_sync(self.tokenize, [job for _, job in batch])
        now = time.monotonic()
        took_s = now - began
        for attempt, job in batch:
            began = time.monotonic()
            self._learn(attempt, job, now)
            took_s += time.monotonic() - began
            await trio.lowlevel.checkpoint()  # requests come between them
        await trio.sleep(took_s * (1 / LEARN_SHARE - 1))

    def _learn(self, attempt: Attempt, job: TokenizeJob, now: float) -> None:
        try:
            self._router.learn_tokens(attempt, job.ancestor, job.segments, job.answer, now)
        except (TypeError, UnicodeError):  # an answer with values beyond JSON, such as lone surrogates
            self.counters.failed += 1
            return
        self.counters.failed += job.failed
        self.counters.learned += bool(job.segments)

    # --- in worker threads ------------------------------------------------------------------------------------------

    def tokenize(self, jobs: Sequence[TokenizeJob]) -> None:
        """Fill in what comes of each job. Does not raise, whatever is in them."""
        try:
            self._tokenize_all(jobs)
        except Exception as error:
            if len(jobs) > 1:  # one of them spoils it: each alone
                for job in jobs:
                    self.tokenize([job])
                return
            log.debug("tokenize.failed %s", type(error).__name__)  # its words may quote the prompt
            jobs[0].reset()
            jobs[0].ancestor, jobs[0].failed = jobs[0].prompt.end, True

    def _tokenize_all(self, jobs: Sequence[TokenizeJob]) -> None:
        """Tails share one call of the tokenizer, all jobs one of the hasher."""
        for job in jobs:
            job.read()
        tails = [job for job in jobs if job.is_tail]
        asked = [TailJob(job.messages, job.chat, job.ancestor.messages) for job in tails]
        for job, tail in zip(tails, self._tokenizer.tokenize_tails(asked), strict=True):
            job.tokenized = tail
        for job in jobs:
            if job.tokenized is None and not job.is_known:
                self._tokenize_whole(job)
        found = [job for job in jobs if job.tokenized is not None]
        plain = [job for job in found if not job.has_media]
        for job, segments in zip(plain, self._hasher.extend_many([job.stretch() for job in plain]), strict=True):
            job.take(segments)
        for job in found:
            if job.has_media:
                job.take(self._hashed_with_media(job))

    def _tokenize_whole(self, job: TokenizeJob) -> None:
        """Whatever is more than a tail: first contacts, completions, and tails that can't be cut off."""
        job.ancestor = job.prompt.end.root()
        try:
            if job.prompt.end.length > TOKENS_MAX:
                raise TemplateRefused("the prompt is too long")
            if job.prompt.kind == "completion":
                ids = self._tokenizer.tokenize_text(job.prompt.text)
                job.tokenized = TokenizedChat(ids, [len(ids)], "rendered")
            else:
                chat = job.chat()
                job.messages = chat.messages
                job.tokenized = self._tokenizer.tokenize(chat)
        except TemplateRefused:  # the engine will say so itself
            job.ancestor = job.prompt.end
            job.failed = True

    def _hashed_with_media(self, job: TokenizeJob) -> list[Segment]:
        """Message by message, each salted with its media: equal placeholders must not make two images equal."""
        state, ids, _ = job.stretch()
        assert job.tokenized is not None
        segments: list[Segment] = []
        start = 0
        for message, end in zip(job.messages, job.tokenized.ends, strict=True):
            media = media_of(message)
            if media:
                state = self._hasher.salted(state, media)
            if end >= 0:
                segments += self._hasher.extend(state, ids[start:end], [end - start])
                state, start = segments[-1].state, end
        return segments

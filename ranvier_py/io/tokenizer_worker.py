"""Learning off the request's path: tails and answers are tokenized while the engines work.

One task takes route updates from a bounded queue in batches and hands each batch to one worker thread, where encoding
releases the interpreter lock. What comes back is given to the Router in one synchronous call per route update. When
route updates come faster than one thread can tokenize, the oldest is dropped and counted: its text fingerprints were
learned at the first token, so the chat goes on being placed; only mid-message matches of that turn are lost.

Rules: whatever a client sends, and whatever a template makes of it, costs its own route update at most: it is counted
as failed, and the others of its batch are taught. What waits is bounded in number and in bytes, what is tokenized at
once in tokens. Counters change on the event loop alone.

The same tokenizer serves the few prompts that must be tokenized before placement, each with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from ranvier_py.core.answers.answer_stream import NOTHING, Answer, read_answer
from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat, Message, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher, TokenState, media_of
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.router import Attempt, Router

log = logging.getLogger(__name__)

BATCH_MAX = 64  # route updates in one hop to the worker thread: about 5 ms of work, so that no route update waits long
GATHER_S = (
    0.004  # how long the first route update of a batch waits for company: a hop costs as much as two route updates
)
LEARN_SHARE = 0.1
"""Most of the time that learning may take, in its thread and on the event loop. It competes with requests for the
interpreter lock: measured under full load (benchmarks/data_plane.py), more learning costs more requests than its
matches can save."""

QUEUE_BYTES_MAX = 64 << 20
"""Bodies and answers that wait. A route update keeps its body, for templates that need the whole chat: a thousand of
the largest would be 64 GB."""

TOKENS_MAX = 1 << 19
"""Tokens, as estimated, of one prompt and of one batch. The tokenizer takes about 200 bytes and 1 us for each while it
works; a prompt that is longer is placed by its text alone."""

TOKENIZE_THREADS = 2  # prompts tokenized before placement at one time; more would fight the event loop for its core

UNDER_WAY_MAX = 64  # prompts waiting to be tokenized before placement; a further one would miss its deadline anyway


class Tokenizer(Protocol):
    """What the tokenizer worker needs; io/tokenizer.py has the real one. Called in worker threads."""

    def tokenize(self, chat: Chat) -> TokenizedChat: ...
    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat | None]: ...
    def tokenize_text(self, text: str) -> TokenIds: ...


@dataclass(slots=True)
class TokenizeJob:
    """One attempt's tokens to be learned; with `raw`, its answer as well."""

    attempt: Attempt
    raw: bytes | None = None
    chunked: bool = False
    streamed: bool = False
    taken: bool = False

    @property
    def size_bytes(self) -> int:
        """What it keeps alive."""
        return len(self.attempt.prompt.body) + len(self.raw or b"")

    @property
    def tokens(self) -> int:
        """How many tokens there are to find, as far as is known."""
        end = self.attempt.prompt.end
        return end.length - end.tokenized_ancestor().length


@dataclass(frozen=True, slots=True)
class Taught:
    """What a worker thread made of one prompt or route update."""

    ancestor: Boundary
    segments: Sequence[Segment | None]
    answer: Answer
    failed: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerCounters:
    queued: int
    learned: int
    dropped: int
    failed: int
    tokenized_first: int
    deadlines_missed: int


class TokenizerWorker:
    """Owns the tokenizing threads. `submit` and `finish` cost an append; nothing comes of them unless `run` runs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        hasher: TokenHasher,
        router: Router,
        *,
        queue_max: int = 1024,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self._tokenizer = tokenizer
        self._hasher = hasher
        self._router = router
        self._queue: deque[TokenizeJob] = deque()
        self._queue_max = queue_max
        self._queue_bytes = 0
        self._queue_bytes_max = queue_bytes_max
        self._wake = trio.Event()
        self._asleep = False
        self._nursery: trio.Nursery | None = None  # while running
        self._under_way = 0
        self._limiter = trio.CapacityLimiter(TOKENIZE_THREADS)
        self._learned = self._dropped = self._failed = 0
        self._tokenized_first = self._deadlines_missed = 0

    def submit(self, attempt: Attempt) -> TokenizeJob | None:
        """Have the attempt's tail tokenized, if it is not yet."""
        if attempt.prompt.kind == "opaque" or attempt.prompt.end.state is not None:
            return None
        job = TokenizeJob(attempt)
        self._append(job)
        return job

    def finish(self, attempt: Attempt, job: TokenizeJob | None, raw: bytes, *, chunked: bool, streamed: bool) -> None:
        """The answer is complete: learn it too, in the route update that still waits or in a new one."""
        if attempt.prompt.kind == "opaque":
            return
        if job is None or job.taken:
            self._append(TokenizeJob(attempt, raw, chunked, streamed))
            return
        job.raw, job.chunked, job.streamed = raw, chunked, streamed
        self._queue_bytes += len(raw)
        self._trim()

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        """Tokenize a prompt before it is placed. False when the deadline passed or it can't be tokenized.

        What comes too late for this request is kept all the same: the next turn needs it.
        """
        if self._nursery is None or self._under_way >= UNDER_WAY_MAX:
            self._deadlines_missed += 1
            return False
        done = trio.Event()
        self._nursery.start_soon(self._tokenize_in_time, prompt, done)
        with trio.move_on_after(deadline_s) as scope:
            await done.wait()
        self._deadlines_missed += scope.cancelled_caught
        return prompt.end.state is not None

    async def _tokenize_in_time(self, prompt: Prompt, done: trio.Event) -> None:
        self._under_way += 1
        try:
            taught = await trio.to_thread.run_sync(self.teach, prompt, limiter=self._limiter, abandon_on_cancel=True)
        finally:
            self._under_way -= 1
        if taught.failed:
            self._failed += 1
        else:
            self._router.absorb(prompt, taught.ancestor, taught.segments)
            self._tokenized_first += 1
        done.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Teach until cancelled, batch by batch."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                while True:
                    await self._teach_next()
            finally:
                self._nursery = None

    async def _teach_next(self) -> None:
        if not self._queue:
            self._wake = trio.Event()
            self._asleep = True
            await self._wake.wait()
        await trio.sleep(GATHER_S)
        batch = self._take_batch()
        began = time.monotonic()
        results = await trio.to_thread.run_sync(self.teach_all, batch)
        now = time.monotonic()
        took_s = now - began
        for job, taught in zip(batch, results, strict=True):
            began = time.monotonic()
            self._learn(job.attempt, taught, now)
            took_s += time.monotonic() - began
            await trio.lowlevel.checkpoint()  # each takes 0.1 ms of the event loop
        await trio.sleep(took_s * (1 / LEARN_SHARE - 1))

    def statistics(self) -> TokenizerCounters:
        return TokenizerCounters(
            queued=len(self._queue),
            learned=self._learned,
            dropped=self._dropped,
            failed=self._failed,
            tokenized_first=self._tokenized_first,
            deadlines_missed=self._deadlines_missed,
        )

    def _learn(self, attempt: Attempt, taught: Taught, now: float) -> None:
        try:
            self._router.taught(attempt, taught.ancestor, taught.segments, taught.answer, now)
        except (TypeError, UnicodeError):  # an answer with values beyond JSON, such as lone surrogates
            self._failed += 1
            return
        self._failed += taught.failed
        self._learned += bool(taught.segments)

    def _append(self, job: TokenizeJob) -> None:
        self._queue.append(job)
        self._queue_bytes += job.size_bytes
        self._trim()
        if self._asleep:
            self._asleep = False
            self._wake.set()

    def _trim(self) -> None:
        """Drop what is too much, oldest first."""
        while len(self._queue) > self._queue_max or (self._queue_bytes > self._queue_bytes_max and self._queue):
            self._take()
            self._dropped += 1

    def _take_batch(self) -> list[TokenizeJob]:
        """The oldest route updates: at least one if there is any, no more than one hop should carry."""
        batch: list[TokenizeJob] = []
        tokens = 0
        while self._queue and len(batch) < BATCH_MAX:
            tokens += self._queue[0].tokens
            if batch and tokens > TOKENS_MAX:
                break
            batch.append(self._take())
        return batch

    def _take(self) -> TokenizeJob:
        job = self._queue.popleft()
        job.taken = True
        self._queue_bytes -= job.size_bytes
        return job

    # --- in worker threads: these read prompts and never change them ------------------------------------------------

    def teach_all(self, batch: Sequence[TokenizeJob]) -> list[Taught]:
        """One Taught for each route update. Does not raise, whatever is in them."""
        try:
            return self._taught([Task.of(job) for job in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them spoils it: each alone
                return [self.teach_all([job])[0] for job in batch]
            return [untaught(batch[0].attempt.prompt, error)]

    def teach(self, prompt: Prompt) -> Taught:
        """The same for a prompt without an answer."""
        try:
            return self._taught([Task(prompt, NOTHING)])[0]
        except Exception as error:
            return untaught(prompt, error)

    def _taught(self, tasks: Sequence[Task]) -> list[Taught]:
        """Each task's tokens and fingerprints. Tails share one call of the tokenizer, all tasks one of the hasher."""
        tails = [task for task in tasks if task.continues and task.tokens <= TOKENS_MAX]
        for task, tail in zip(tails, self._tokenizer.tokenize_tails([task.job() for task in tails]), strict=True):
            task.tokenized = tail
        for task in tasks:
            self._tokenize(task)
        found = [task for task in tasks if task.tokenized is not None]
        plain = [task for task in found if not task.has_media]
        for task, segments in zip(plain, self._hasher.extend_many([task.stretch() for task in plain]), strict=True):
            task.take(segments)
        for task in found:
            if task.has_media:
                task.take(self._hashed_with_media(task))
        return [Taught(task.ancestor, task.segments, task.answer, task.failed) for task in tasks]

    def _hashed_with_media(self, task: Task) -> list[Segment]:
        """Message by message, each salted with its media: equal placeholders must not make two images equal."""
        state, ids, _ = task.stretch()
        assert task.tokenized is not None
        segments: list[Segment] = []
        start = 0
        for message, end in zip(task.messages, task.tokenized.ends, strict=True):
            media = media_of(message)
            if media:
                state = self._hasher.salted(state, media)
            if end >= 0:
                segments += self._hasher.extend(state, ids[start:end], [end - start])
                state, start = segments[-1].state, end
        return segments

    def _tokenize(self, task: Task) -> None:
        """Whatever is more than a tail: first contacts, completions, and tails that can't be cut off."""
        if task.tokenized is not None or task.is_known:
            return
        task.ancestor = task.prompt.end.root()
        try:
            if task.tokens > TOKENS_MAX:
                raise TemplateRefused("the prompt is too long")
            if task.prompt.kind == "completion":
                ids = self._tokenizer.tokenize_text(task.prompt.text)
                task.tokenized = TokenizedChat(ids, [len(ids)], "rendered")
            else:
                chat = task.chat()
                task.messages = chat.messages
                task.tokenized = self._tokenizer.tokenize(chat)
        except TemplateRefused:  # the engine will say so itself
            task.ancestor = task.prompt.end
            task.failed = True


def untaught(prompt: Prompt, error: Exception) -> Taught:
    """Nothing came of it. The log gets the error's type alone: its words may quote the prompt."""
    log.debug("tokenize.failed %s", type(error).__name__)
    return Taught(prompt.end, (), NOTHING, failed=True)


class Task:
    """One prompt, with its answer if there is one, as the worker thread sees it."""

    __slots__ = ("ancestor", "answer", "failed", "messages", "prompt", "segments", "tokenized")

    def __init__(self, prompt: Prompt, answer: Answer) -> None:
        self.prompt = prompt
        self.answer = answer
        self.ancestor = prompt.end.tokenized_ancestor()
        self.messages: Sequence[Message] = ()
        self.tokenized: TokenizedChat | None = None
        self.segments: Sequence[Segment | None] = ()
        self.failed = False
        if prompt.kind == "chat":
            self.messages = (*prompt.messages_after(self.ancestor), *([answer.message] if answer.message else ()))

    @classmethod
    def of(cls, job: TokenizeJob) -> Task:
        prompt, answer = job.attempt.prompt, NOTHING
        if job.raw is not None:
            answer = read_answer(job.raw, chunked=job.chunked, streamed=job.streamed, kind=prompt.kind)
        return cls(prompt, answer)

    @property
    def tokens(self) -> int:
        """How many tokens there are to find, as far as is known."""
        return self.prompt.end.length - self.ancestor.length

    @property
    def continues(self) -> bool:
        """Whether only new messages of a tokenized chat are to be tokenized."""
        return self.ancestor.messages > 0 and bool(self.messages)

    @property
    def is_known(self) -> bool:
        """Whether there is nothing to tokenize."""
        return self.prompt.end.state is not None and not self.messages

    @property
    def has_media(self) -> bool:
        return any(type(message.get("content")) is list and media_of(message) for message in self.messages)

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

    def job(self) -> TailJob:
        return TailJob(self.messages, self.chat, self.ancestor.messages)

    def chat(self) -> Chat:
        """The whole conversation, with the answer."""
        chat = self.prompt.chat()
        if self.answer.message is None:
            return chat
        return Chat([*chat.messages, self.answer.message], chat.tools, chat.template)

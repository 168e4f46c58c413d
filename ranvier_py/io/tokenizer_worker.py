"""Tokenizes prompts and answers off the request's path, while the engines work.

Rule: one task sends prompts from a bounded queue in batches to the tokenizer process, and gives each result to the
Router in one synchronous call. What finds no room, or is lost with the process, is counted and costs matches inside
that turn alone: text fingerprints were learned at the first token. Prompts that must be tokenized before placement go
ahead, each with a deadline. Invariant: what a client sends fails its own job at most (test_tokenizer_worker.py).
Bounds: the queue in prompts and bytes, a batch in prompts, tokens and bytes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix
from ranvier_py.core.errors import TokenizerLost
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backend import all_of_sglang
from ranvier_py.core.routing.router import Attempt, Router
from ranvier_py.core.tokenize.tokenize_frames import BadResults, PackedResult, Reply
from ranvier_py.core.tokenize.tokenize_job import (
    BODY_BYTES_MAX,
    TOKENS_MAX,
    Status,
    TokenizeJob,
    TokenizeResult,
    TokenizerFacts,
    job_of,
)

BATCH_MAX = 16  # prompts in one batch: sending it is one step of the event loop, which delays requests
GATHER_S = 0.004  # how long a batch's first prompt waits for others: one batch costs as much as learning two prompts
LEARN_SHARE = 0.05
"""Largest share of its time that the event loop may spend on learning, which competes with requests: under full load
(benchmarks/data_plane.py) more learning costs more requests than its matches can save."""

PROCESS_SHARE = 0.25
"""Largest share of a core that the tokenizer process may use for learning."""

QUEUE_BYTES_MAX = 64 << 20
"""Limit of queued bodies and answers. A prompt keeps its body, for templates that need the whole chat: a thousand of
the largest would be 64 GB."""

FIRST_MAX = 64  # prompts that wait to be tokenized before placement; one more would miss its deadline anyway


class TokenizerLink(Protocol):
    """What the worker asks (io/tokenizer_process.py)."""

    facts: TokenizerFacts

    async def ready(self) -> None: ...
    def reject(self, why: Exception) -> None:
        """End the process: it has sent an invalid result."""
        ...

    async def ask(self, jobs: Sequence[TokenizeJob], lengths: Sequence[int], *, first: bool) -> Reply:
        """Raises TokenizerLost."""
        ...


class PrefixHashes(Protocol):
    """Takes prefix hashes of prompts through `put`; `lengths` has the lengths in tokens of those that are wanted."""

    @property
    def lengths(self) -> Sequence[int]: ...
    def put(self, keyed: KeyedPrefix) -> None: ...


@dataclass(slots=True)
class TokenizerCounters:
    """Outcomes of prompts and answers to learn, and of prompts to tokenize before placement."""

    queued: int = gauge("Prompts and answers that wait to be tokenized.")
    learned: int = counter("Prompts and answers learned by their tokens.")
    dropped: int = counter("Prompts and answers not tokenized because too many waited.")
    failed: int = counter("Prompts that could not be tokenized.")
    lost: int = counter("Prompts and answers that the tokenizer process had when it ended.")
    tokenized_first: int = counter("Prompts that were tokenized before their placement.")
    deadlines_missed: int = counter("Prompts placed before they were tokenized, for want of time.")


@dataclass(slots=True)
class QueuedPrompt:
    """One prompt to be tokenized, with its answer if there is one."""

    prompt: Prompt
    answer: bytes | None = None
    chunked: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that it keeps alive."""
        return len(self.prompt.body) + len(self.answer or b"")

    @property
    def tokens(self) -> int:
        """How many tokens there are to compute, as far as is known."""
        return self.prompt.end.length - self.prompt.end.tokenized_ancestor().length


class Found(NamedTuple):
    """Result of one prompt: it has the segments of the messages after `ancestor`."""

    ancestor: Boundary
    result: PackedResult


class TokenizerWorker:
    """Has prompts tokenized. `submit` and `finish` only append to a queue, which `run` serves."""

    def __init__(
        self,
        tokenizer: TokenizerLink,
        router: Router,
        hashes: PrefixHashes,
        *,
        queue_max: int,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self.counters = TokenizerCounters()
        self._tokenizer, self._router, self._hashes = tokenizer, router, hashes
        self._queue: OrderedDict[Attempt, QueuedPrompt] = OrderedDict()  # oldest first
        self.queue_max = queue_max
        self._queue_bytes = 0
        self._queue_bytes_max = queue_bytes_max
        self._wake = trio.Event()
        self._asleep = False
        self._nursery: trio.Nursery | None = None  # while running
        self._tokenizing_first = 0

    def submit(self, attempt: Attempt) -> None:
        """Queue the attempt's prompt, unless it is already tokenized."""
        if attempt.prompt.kind != "opaque" and attempt.prompt.end.state is None:
            self._append(attempt, None, chunked=False)

    def finish(self, attempt: Attempt, raw: bytes, *, chunked: bool) -> None:
        """Queue the complete answer, together with the prompt if that is still queued."""
        if attempt.prompt.kind == "opaque":
            return
        queued = self._queue.get(attempt)
        if queued is None:
            self._append(attempt, raw, chunked=chunked)
        elif self._queue_bytes + len(raw) > self._queue_bytes_max:
            self.counters.dropped += 1
        else:
            queued.answer, queued.chunked = raw, chunked
            self._queue_bytes += len(raw)

    def _append(self, attempt: Attempt, answer: bytes | None, *, chunked: bool) -> None:
        prompt, counters = attempt.prompt, self.counters
        size_bytes = len(prompt.body) if answer is None else len(prompt.body) + len(answer)
        if len(self._queue) >= self.queue_max or self._queue_bytes + size_bytes > self._queue_bytes_max:
            counters.dropped += 1
            return
        self._queue[attempt] = QueuedPrompt(prompt, answer, chunked)
        self._queue_bytes += size_bytes
        counters.queued += 1
        if self._asleep:
            self._asleep = False
            self._wake.set()

    def _take(self) -> tuple[Attempt, QueuedPrompt]:
        attempt, queued = self._queue.popitem(last=False)
        self._queue_bytes -= queued.size_bytes
        self.counters.queued -= 1
        return attempt, queued

    def take_batch(self) -> list[tuple[Attempt, QueuedPrompt]]:
        """Take the oldest prompts: at least one if there is any, and no more than one batch may have."""
        batch: list[tuple[Attempt, QueuedPrompt]] = []
        tokens = size_bytes = 0
        while self._queue and len(batch) < BATCH_MAX:
            oldest = next(iter(self._queue.values()))
            tokens, size_bytes = tokens + oldest.tokens, size_bytes + oldest.size_bytes
            if batch and (tokens > TOKENS_MAX or size_bytes > BODY_BYTES_MAX):
                break
            batch.append(self._take())
        return batch

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        """Tokenize a prompt before it is placed. Returns False if the deadline passed or it can't be tokenized.

        A result that comes too late for this request is kept all the same: the next turn needs it.
        """
        if self._nursery is None or self._tokenizing_first >= FIRST_MAX:
            self.counters.deadlines_missed += 1
            return False
        done = trio.Event()
        self._nursery.start_soon(self._tokenize_in_time, prompt, done)
        with trio.move_on_after(deadline_s) as scope:
            await done.wait()
        self.counters.deadlines_missed += scope.cancelled_caught
        return prompt.end.state is not None

    async def _tokenize_in_time(self, prompt: Prompt, done: trio.Event) -> None:
        self._tokenizing_first += 1
        try:
            ((found,), _) = await self._ask([QueuedPrompt(prompt)], first=True)
        except TokenizerLost:
            self.counters.lost += 1
        else:
            self._absorb(prompt, found)
        finally:
            self._tokenizing_first -= 1
            done.set()

    def _absorb(self, prompt: Prompt, found: Found) -> None:
        if found.result.status is Status.FAILED:
            self.counters.failed += 1
        elif (result := self._read(found.result)) is not None:
            self._router.absorb(prompt, found.ancestor, result.segments)
            self.counters.tokenized_first += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tokenize queued prompts until cancelled, batch by batch."""
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
        await self._tokenizer.ready()
        batch = self.take_batch()
        try:
            found, busy_s = await self._ask([queued for _, queued in batch], first=False)
        except TokenizerLost:
            self.counters.lost += len(batch)
            return
        now, loop_s = time.monotonic(), 0.0
        for (attempt, _), each in zip(batch, found, strict=True):
            began = time.monotonic()
            self._learn(attempt, each, now)
            loop_s += time.monotonic() - began
            await trio.lowlevel.checkpoint()  # so that requests run in between
        await trio.sleep(max(loop_s * (1 / LEARN_SHARE - 1), busy_s * (1 / PROCESS_SHARE - 1)))

    def _learn(self, attempt: Attempt, found: Found, now: float) -> None:
        result = self._read(found.result)
        if result is None:
            return
        try:
            self._router.learn_tokens(attempt, found.ancestor, result.segments, result.answer, now)
        except (TypeError, UnicodeError):  # an answer with values that JSON does not have
            self.counters.failed += 1
            return
        self.counters.failed += result.status is Status.FAILED
        self.counters.learned += bool(result.segments)

    def _read(self, packed: PackedResult) -> TokenizeResult | None:
        """Unpack a result. None if it is invalid: then the process that sent it is ended."""
        try:
            return packed.read()
        except BadResults as error:
            self._tokenizer.reject(error)
            self.counters.lost += 1
            return None

    async def _ask(self, batch: Sequence[QueuedPrompt], *, first: bool) -> tuple[list[Found], float]:
        """Return each prompt's result, and the processor time of the batch. Raises TokenizerLost."""
        found, busy_s = await self._ask_once(batch, first=first, with_body=not self._tokenizer.facts.incremental)
        again = [number for number, each in enumerate(found) if each.result.status is Status.NEEDS_BODY]
        if again:
            whole, more_s = await self._ask_once([batch[number] for number in again], first=first, with_body=True)
            busy_s += more_s
            for number, each in zip(again, whole, strict=True):
                found[number] = each
        return found, busy_s

    async def _ask_once(
        self, batch: Sequence[QueuedPrompt], *, first: bool, with_body: bool
    ) -> tuple[list[Found], float]:
        registry = self._router.registry
        by_sglang = {model: all_of_sglang(registry, model) for model in {each.prompt.model for each in batch}}
        asked = [
            job_of(
                each.prompt,
                each.answer,
                chunked=each.chunked,
                with_body=with_body,
                by_sglang=by_sglang[each.prompt.model],
            )
            for each in batch
        ]
        reply = await self._tokenizer.ask([job for _, job in asked], self._hashes.lengths, first=first)
        for keyed in reply.keyed:
            self._hashes.put(keyed)
        return [
            Found(end_of(result, each.prompt, ancestor), result)
            for each, (ancestor, _), result in zip(batch, asked, reply.results, strict=True)
        ], reply.busy_s


def end_of(result: PackedResult, prompt: Prompt, ancestor: Boundary) -> Boundary:
    """Return the boundary before the first segment of a result; the prompt's end if it has none."""
    if result.status is not Status.DONE:
        return prompt.end
    return prompt.end.root() if result.is_whole else ancestor

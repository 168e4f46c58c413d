"""The node's own router, driven in virtual time: read, find, tokenize first where that is wanted, place, learn.

The router is composed exactly as a node composes it. What the node's tokenizer worker does in worker threads happens
here at once, with the tokenizer worker's own code: the tail is taught when the first token comes, the answer when it is
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any, Protocol, cast

import orjson

from benchmarks.hit_rate_traces import Prepared
from cluster.engine.engine_api import usage_of
from ranvier_py.config.config_model import Config
from ranvier_py.core.prompts.boundaries import Chat, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.routing.backends import BackendLimits, Outcome, Registry
from ranvier_py.core.routing.router import CHAT_PATH, Attempt
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.io.tokenizer_worker import TokenizeJob, Tokenizer, TokenizerWorker
from ranvier_py.node.parts import make_router, scheme_of


class TraceTokenizer(Tokenizer, Protocol):
    """What a node needs of a tokenizer: the tokenizer worker's part, and what the reader is made with."""

    identity: str
    keeps_turns: bool
    chars_per_token: float


class RememberingTokenizer:
    """The node's tokenizer, asked once for each distinct text: the runs of one trace say the same things."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[bytes, TokenizedChat | None] = {}
        self.identity = tokenizer.identity
        self.keeps_turns = tokenizer.keeps_turns
        self.chars_per_token = tokenizer.chars_per_token

    def tokenize(self, chat: Chat) -> TokenizedChat:
        found = self._remember(chat, 0, lambda: self._tokenizer.tokenize(chat))
        assert found is not None
        return found

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> list[TokenizedChat | None]:
        return [self._remember(job.context(), job.known, partial(self._tail, job)) for job in jobs]

    def tokenize_text(self, text: str) -> TokenIds:
        return self._tokenizer.tokenize_text(text)

    def _tail(self, job: TailJob) -> TokenizedChat | None:
        return self._tokenizer.tokenize_tails([job])[0]

    def _remember(self, chat: Chat, known: int, ask: Callable[[], TokenizedChat | None]) -> TokenizedChat | None:
        key = blake2b(orjson.dumps((known, chat.messages)), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


class RouterPlacement:
    """A Placement (see `hit_rate_replay`) by one policy of the real router. `settings`: further keys of its Config."""

    def __init__(self, policy: str, tokenizer: TraceTokenizer, engines: int, seed: int | str, **settings: Any) -> None:
        names = [f"http://engine-{index}:8000" for index in range(engines)]
        config = Config(policy=policy, cluster_secret="hit-rate-benchmark", **settings)  # type: ignore[arg-type]  # noqa: S106
        registry = Registry(BackendLimits())
        self._ids = [registry.add(name).id for name in names]
        self._engine_of = {id_: index for index, id_ in enumerate(self._ids)}
        known = cast("ChatTokenizer", tokenizer)
        self.scheme = scheme_of(config, known, None)
        self.router = make_router(config, known, self.scheme, registry, Random(seed))
        self.router.hasher.short = 0  # these engines keep every token of an answer, and messages may end with a block
        self._tokenizer_worker = TokenizerWorker(tokenizer, self.router.hasher, self.router)

    def route(self, item: Prepared, now: float, kept_out: Collection[int] = ()) -> tuple[int, Attempt]:
        """`kept_out`: engines that are out of the question."""
        router = self.router
        prompt = router.read(CHAT_PATH, item.body)
        tried = [self._ids[engine] for engine in kept_out]
        found = router.find(prompt, now, tried)
        if router.too_little(prompt, found):
            taught = self._tokenizer_worker.teach(prompt)
            if taught is not None:
                router.absorb(prompt, taught.ancestor, taught.segments)
                found = router.find(prompt, now, tried)
        decision = router.place(prompt, found)
        return self._engine_of[decision.backend], router.start_attempt(prompt, decision, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        self.router.first_token(attempt, now)
        self.teach(TokenizeJob(attempt), now)

    def finished(self, attempt: Attempt, item: Prepared, cached_tokens: int, now: float) -> None:
        self.teach(TokenizeJob(attempt, answer_body(item, cached_tokens)), now)
        self.router.finish_attempt(attempt, Outcome.SUCCESS, now)

    def teach(self, route_update: TokenizeJob, now: float) -> None:
        if not self.router.policy.depths_wanted:
            return  # a policy that asks for no prefix is not changed by what is known of them
        for taught in self._tokenizer_worker.teach_all([route_update]):
            self.router.taught(route_update.attempt, taught.ancestor, taught.segments, taught.answer, now)


def answer_body(item: Prepared, cached_tokens: int) -> bytes:
    """The engine's answer as the node would have relayed it."""
    message = {"role": "assistant", **item.request.answer}
    usage = usage_of(item.job.prompt_tokens, item.job.answer_tokens, cached_tokens)
    return orjson.dumps({"choices": [{"index": 0, "message": message}], "usage": usage})

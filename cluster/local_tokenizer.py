"""A tokenizer in the node's own process, for tests and benchmarks. Its jobs and results pass through the real frames.

A tokenizer process takes a second to start. Tests that start many nodes and benchmarks that measure a node without its
tokenizer process use this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix, KeyHasher
from ranvier_py.core.tokenize.tokenize_frames import (
    FRAME_HEAD,
    Reply,
    Setup,
    decode_jobs,
    decode_results,
    encode_jobs,
    encode_results,
)
from ranvier_py.core.tokenize.tokenize_job import TokenizeJob, TokenizerFacts
from ranvier_py.core.tokenize.tokenize_service import Tokenizer, TokenizeService
from ranvier_py.core.tokenize.tokenizer_probe import NO_TOKENS
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.node.fingerprints import tokenizer_process


class LocalTokenizer(TokenizerProcess):
    """Tokenizes at once, in the caller's thread."""

    def __init__(self, setup: Setup, tokenizer: Tokenizer, facts: TokenizerFacts) -> None:
        super().__init__(setup)
        self.facts = facts
        self._keyed: list[KeyedPrefix] = []
        self._hasher = KeyHasher(
            setup.key, setup.block_tokens, notify=self._keyed.append, lengths=(), short=setup.short
        )
        reads_parts = isinstance(tokenizer, ChatTokenizer) and tokenizer.profile.parts
        self._service = TokenizeService(
            tokenizer, self._hasher, hoists_system=facts.hoists_system, reads_parts=reads_parts
        )

    async def begin(self) -> None:
        await trio.lowlevel.checkpoint()

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        await trio.sleep_forever()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    async def ready(self) -> None:
        await trio.lowlevel.checkpoint()

    async def ask(self, jobs: Sequence[TokenizeJob], lengths: Sequence[int] = (), *, first: bool) -> Reply:  # noqa: ARG002
        await trio.lowlevel.checkpoint()
        asked, lengths = decode_jobs(encode_jobs(jobs, lengths)[FRAME_HEAD.size :])
        self._hasher.keep(lengths)
        self._keyed.clear()
        results = self._service.results(asked)
        return decode_results(encode_results(results, self._keyed, 0.0)[FRAME_HEAD.size :], len(jobs))


@cache
def embedded() -> ChatTokenizer:
    """Return the embedded tokenizer. It is loaded once, since that takes a while."""
    return ChatTokenizer.load("embedded")


def local_tokenizer(config: Config, key: bytes) -> TokenizerProcess:
    """Return the embedded tokenizer in this process; a configured tokenizer or template runs in its own process. Its
    tokens are not compared with those of engines, which mostly have bytes here."""
    made = tokenizer_process(config, key)
    if config.tokenizer != "embedded" or config.chat_template:
        return made
    return LocalTokenizer(made.setup, embedded(), replace(embedded().facts, probe=NO_TOKENS))

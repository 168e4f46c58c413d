"""What oracles ask their engine's cache, and how they write it. Runs in the environment of each engine."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec

TABLE_INTERVAL = 100  # requests between two looks at the whole table
CHATS_MAX = 60
PROMPT_TOKENS_MAX = 3000
VOCABULARY = 150_000
SALTS = (None, None, None, None, "tenant-a", "tenant-b")

Chat = tuple[list[int], str | None, str | None]
"""Tokens, salt, adapter."""


class Requests:
    """Draws requests that share documents, branch off each other's chats, repeat each other, and carry salts and
    adapters. Of chats that go on from some place, those that are drawn from `whole_from` to 0.5 end with a block."""

    def __init__(self, options: argparse.Namespace, adapters: Sequence[str | None], whole_from: float = 0.5) -> None:
        self.rng = random.Random(options.seed)
        self.size = options.block_size
        self.adapters, self.whole_from = adapters, whole_from
        self.encoder = msgspec.msgpack.Encoder()
        self.output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what the engine prints is no record
        self.chats: list[Chat] = []
        self.documents = [self.tokens(self.rng.randrange(100, 1500)) for _ in range(40)]

    def prompt(self) -> Chat:
        rng, kind = self.rng, self.rng.random()
        if self.chats and kind < 0.55:
            tokens, salt, adapter = rng.choice(self.chats)
            if kind < 0.35:  # the next turn
                tokens = tokens + self.tokens(rng.randrange(5, 120))
            elif kind < self.whole_from:  # another way on from somewhere inside
                tokens = tokens[: rng.randrange(1, len(tokens))] + self.tokens(rng.randrange(1, 200))
            elif kind < 0.5:  # the same again, to a block's end: the last block is computed and stored once more
                tokens = tokens[: len(tokens) // self.size * self.size]
            if 0 < len(tokens) < PROMPT_TOKENS_MAX:  # else the same once more would be all there is
                return tokens, salt, adapter
        document = self.documents[min(39, int(rng.paretovariate(0.6)) - 1)]
        return document + self.tokens(rng.randrange(1, 150)), rng.choice(SALTS), rng.choice(self.adapters)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def keep(self, *chat: Any) -> None:
        """One that later requests may go on with."""
        self.chats.append(chat)
        if len(self.chats) > CHATS_MAX:
            self.chats.pop(self.rng.randrange(len(self.chats)))

    def write(self, record: list[Any]) -> None:
        data = self.encoder.encode(record)
        self.output.write(len(data).to_bytes(4, "big") + data)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name, default in {"requests": 2000, "blocks": 1500, "block-size": 16, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser

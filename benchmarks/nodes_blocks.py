"""Prompts that are known by their blocks alone: the Mooncake trace, and shapes of traffic made for one question.

A block is a number and up to 512 tokens; equal numbers are equal tokens. In a message a block is a word of about half a
character for each token, so that the router's estimates are right, and `BlockTokenizer` reads it back into tokens. All
else is the node's own code. The engine names its blocks by the same numbers, so no token is ever hashed for it.

Mooncake's ids stand for a whole prefix, and the trace has no messages. Here a message ends where requests of the trace
part, as turns and questions about one document do, and where a prompt ends. What the answers said is hidden in the ids
of the next turn: answers are new tokens that nobody asks for again. Arrivals are stamped in steps of 3 s; each is drawn
from its step, or every router would see bursts that were none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import orjson

from benchmarks.hit_rate_traces import ChatRequest, Prepared, read_lines
from ranvier_py.core.prompts.boundaries import Chat, Message, TailJob, TokenIds, TokenizedChat
from ranvier_py.replay.engine.block_cache import Job

BLOCK_TOKENS = 512  # Mooncake's
CHARACTERS_PER_TOKEN = 0.5  # enough that a message's own markup is no block, and bodies stay small
STAMP_S = 3.0
ANSWERS = 1 << 22
"""Numbers from here on are answers; 512 tokens each still fit into 32 bits."""

ANSWER_BITS = 12  # blocks of one answer, in the names of the engine's blocks
MODEL = "lab-model"


class Block(NamedTuple):
    number: int
    tokens: int = BLOCK_TOKENS


def spelled(blocks: Iterable[Block]) -> str:
    """Blocks as the content of a message."""
    return " ".join(
        f"{block.number}:{block.tokens}".ljust(int(block.tokens * CHARACTERS_PER_TOKEN) - 1, ".") for block in blocks
    )


def read_blocks(content: str) -> Iterator[Block]:
    """The blocks that `spelled` wrote."""
    for word in content.split():
        number, _, tokens = word.rstrip(".").partition(":")
        yield Block(int(number), int(tokens))


def token_ids(blocks: Iterable[Block]) -> TokenIds:
    """The tokens of block n are the 512 numbers from 512 n on; a long answer goes on counting."""
    found = [np.arange(tokens, dtype=np.uint32) + np.uint32(number * BLOCK_TOKENS) for number, tokens in blocks]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint32)


class BlockTokenizer:
    """Tokenizer and template of such prompts: the tokens of a chat are those of its blocks, one after the other."""

    identity = "blocks"
    keeps_turns = True
    chars_per_token = CHARACTERS_PER_TOKEN

    def tokenize(self, chat: Chat) -> TokenizedChat:
        return tokenized(chat.messages)

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> list[TokenizedChat | None]:
        return [tokenized(job.tail) for job in jobs]

    def tokenize_text(self, text: str) -> TokenIds:
        return token_ids(read_blocks(text))


def tokenized(messages: Sequence[Message]) -> TokenizedChat:
    parts = [token_ids(read_blocks(message["content"])) for message in messages]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return TokenizedChat(np.concatenate(parts), ends, "rendered")


def prepared(at: float, session: str, messages: Sequence[Sequence[Block]], number: int, answer_tokens: int) -> Prepared:
    """A request of these messages; `number` tells its answer from all others."""
    blocks = [block for message in messages for block in message]
    roles = ("system", *("user", "assistant") * len(messages))
    said = [{"role": role, "content": spelled(message)} for role, message in zip(roles, messages, strict=False)]
    answer = {"role": "assistant", "content": spelled([Block(ANSWERS + number, answer_tokens)])}
    body = orjson.dumps({"model": MODEL, "messages": said, "stream": True})
    return Prepared(ChatRequest(at, session, said, answer), body, job_of(blocks, number, answer_tokens))


def job_of(blocks: Sequence[Block], number: int, answer_tokens: int) -> Job:
    """What the engine needs: names of whole blocks. The tokens themselves only its events would tell."""
    prompt_tokens = sum(block.tokens for block in blocks)
    known = [block.number + 1 for block in blocks if block.tokens == BLOCK_TOKENS]
    fresh = (prompt_tokens + answer_tokens) // BLOCK_TOKENS - len(known)
    keys = (*known, *((ANSWERS + number << ANSWER_BITS) + index for index in range(fresh)))
    return Job(prompt_tokens, answer_tokens, np.zeros(0, dtype=np.uint32), keys)


# --- Mooncake ----------------------------------------------------------------------------------------------------


def load_mooncake(path: Path, seed: int, minutes: float) -> list[Prepared]:
    """The requests of the first `minutes` of the trace, in order of time."""
    records = [record for record in read_lines(path) if record["timestamp"] < minutes * 60_000]
    ends = message_ends(record["hash_ids"] for record in records)
    rng = Random(f"{seed}/arrivals")
    found = []
    for number, record in enumerate(records):
        at = record["timestamp"] / 1000 + rng.uniform(0.0, STAMP_S)
        messages = cut(blocks_of(record), ends)
        found.append(prepared(at, f"request-{number}", messages, number, max(1, record["output_length"])))
    return sorted(found, key=lambda item: item.request.at)


def blocks_of(record: dict[str, Any]) -> list[Block]:
    """All but the last are whole."""
    ids = record["hash_ids"]
    rest = record["input_length"] - BLOCK_TOKENS * (len(ids) - 1)
    return [*(Block(number) for number in ids[:-1]), Block(ids[-1], rest)]


def message_ends(paths: Iterable[Sequence[int]]) -> frozenset[int]:
    """The blocks after which requests part: those that more than one block follows."""
    following: dict[int, int] = {}
    found = set()
    for path in paths:
        for block, after in pairwise(path):
            if following.setdefault(block, after) != after:
                found.add(block)
    return frozenset(found)


def cut(blocks: Sequence[Block], ends: frozenset[int]) -> list[list[Block]]:
    """Blocks as messages."""
    found: list[list[Block]] = [[]]
    for block in blocks:
        found[-1].append(block)
        if block.number in ends:
            found.append([])
    return found if found[-1] else found[:-1]

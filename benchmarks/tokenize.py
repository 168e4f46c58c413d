"""What does the next turn of a chat cost in tokenizing, and does its history matter?

    python -m benchmarks.tokenize [--rounds 10] [--out FILE]

For histories of 2k, 10k and 50k tokens, in milliseconds, medians over rounds in which the candidates take turns:

- `tail`: tokenize_tail of the new turn (an answer of about 200 tokens and a question of about 50), one at a time;
- `text_alone`: the same two texts encoded once by the bare tokenizer: what can't be avoided. Goal: tail <= 1.5 x;
- `full`: the whole conversation, as every turn would cost without incremental tokenizing.

`batch` is a batch of 64 plain tails of 200 bytes: microseconds per tail, in all and in Python code that holds the
interpreter lock. With the embedded tokenizer, and with the one in $SHARED_DATA/tokenizers/qwen2.5 where it is present.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import ROOT, to_json, write_result
from cluster.train_tokenizer import Grammar
from ranvier_py.core.boundaries import Chat, Message, TailJob
from ranvier_py.edge.tokenizer import EMBEDDED, ChatTokenizer

HISTORY_TOKENS = (2_000, 10_000, 50_000)
TURN_ROUNDS = 20  # rounds of a single turn, which takes well under a millisecond, per round of a whole conversation
BATCH = 64
TAIL_BYTES = 200
SEED = 1
DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data")) / "tokenizers" / "qwen2.5"


def median_s(rounds: int, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call; one of each per round, in alternating order, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in sorted(calls, reverse=turn % 2 == 1):
            begin = perf_counter()
            calls[name]()
            times[name].append(perf_counter() - begin)
    return {name: median(found) for name, found in times.items()}


class Texts:
    """Running text by the embedded tokenizer's grammar: not the text it was trained on, by another seed."""

    def __init__(self) -> None:
        self._grammar = Grammar(Random(SEED))

    def of(self, characters: int) -> str:
        found = ""
        while len(found) < characters:
            found += self._grammar.sentence() + " "
        return found[:characters]

    def turn(self, characters_per_token: float) -> list[Message]:
        """An answer and the next question."""
        return [
            {"role": "assistant", "content": self.of(int(200 * characters_per_token))},
            {"role": "user", "content": self.of(int(50 * characters_per_token))},
        ]


def history(tokenizer: ChatTokenizer, texts: Texts, tokens: int) -> list[Message]:
    """A chat of about `tokens` tokens that ends with a question."""
    messages: list[Message] = [{"role": "system", "content": texts.of(2_000)}, {"role": "user", "content": "Hello."}]
    while len(tokenizer.tokenize(Chat(messages)).ids) < tokens:
        for _ in range(max(1, tokens // 2_000)):
            messages.extend(texts.turn(tokenizer.chars_per_token))
    return messages


def measure_turn(tokenizer: ChatTokenizer, bare: Tokenizer, texts: Texts, tokens: int, rounds: int) -> dict[str, Any]:
    known = history(tokenizer, texts, tokens)
    tail = texts.turn(tokenizer.chars_per_token)
    whole = Chat([*known, *tail])
    contents = [str(message["content"]) for message in tail]
    encode(bare, [tokenizer.render(Chat(known), generation=False)])  # the library caches words: both have met the same
    calls: dict[str, Callable[[], object]] = {
        "tail": lambda: tokenizer.tokenize_tail(tail, lambda: whole, len(known)),
        "text_alone": lambda: encode(bare, contents),
    }
    times = median_s(rounds * TURN_ROUNDS, calls) | median_s(rounds, {"full": lambda: tokenizer.tokenize(whole)})
    found = tokenizer.tokenize_tail(tail, lambda: whole, len(known))
    assert found is not None, tokenizer.probe_report
    return {
        "history_tokens": len(tokenizer.tokenize(Chat(known)).ids),
        "history_messages": len(known),
        "tail_tokens": len(found.ids),
        **{f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in times.items()},
        "tail_to_text_alone": round(times["tail"] / times["text_alone"], 3),
        "full_to_tail": round(times["full"] / times["tail"], 1),
    }


def measure_batch(tokenizer: ChatTokenizer, bare: Tokenizer, texts: Texts, rounds: int) -> dict[str, float]:
    """Microseconds per plain tail in a batch; `python_us` is what is not spent inside the encoder."""

    def context() -> Chat:
        raise AssertionError("a plain tail asks for no context")

    jobs = [TailJob([{"role": "user", "content": texts.of(TAIL_BYTES)}], context, 20) for _ in range(BATCH)]
    affixes = tokenizer.profile.affixes["user"]
    prompts = [affixes.before + job.tail[0]["content"] + affixes.after for job in jobs]
    calls: dict[str, Callable[[], object]] = {
        "total": lambda: tokenizer.tokenize_tails(jobs),
        "encoder": lambda: bare.encode_batch_fast(prompts, add_special_tokens=False),
    }
    times = median_s(rounds, calls)
    micro = {name: seconds / BATCH * 1e6 for name, seconds in times.items()}
    return {
        "total_us": round(micro["total"], 2),
        "encoder_us": round(micro["encoder"], 2),
        "python_us": round(micro["total"] - micro["encoder"], 2),
    }


def measure(name: str, source: Path, rounds: int) -> dict[str, Any]:
    tokenizer = ChatTokenizer.load(str(source))
    bare = Tokenizer.from_file(str(source / "tokenizer.json"))
    texts = Texts()
    return {
        "tokenizer": name,
        "chars_per_token": round(tokenizer.chars_per_token, 2),
        "turns": [measure_turn(tokenizer, bare, texts, tokens, rounds) for tokens in HISTORY_TOKENS],
        "batch": measure_batch(tokenizer, bare, texts, rounds * TURN_ROUNDS),
    }


def encode(bare: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in bare.encode_batch_fast(texts, add_special_tokens=False)]


def sources() -> list[tuple[str, Path]]:
    return [("embedded", EMBEDDED), *([("qwen2.5", DATA)] if DATA.is_dir() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    result = {
        "rounds": arguments.rounds,
        "goals": {"tail_to_text_alone": 1.5},
        "tokenizers": [measure(name, source, arguments.rounds) for name, source in sources()],
    }
    print(to_json(result), end="")
    write_result("tokenize", result)
    if arguments.out:
        arguments.out.write_text(to_json(result))


if __name__ == "__main__":
    main()

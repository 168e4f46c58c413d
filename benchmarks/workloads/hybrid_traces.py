"""Four seeded traces of token ids: chats like LMSys and ShareGPT, agents like SWE-bench, and shared documents.

They resemble what Marconi's paper shows of its sets (section 5.1, figure 6), but are not those sets. Random numbers are
numpy's `default_rng([SEED, number of the set])`, drawn strictly in the order of this file, so that `TRACES` are equal
everywhere. DIGESTS has the sha256 of each, as `lines` writes it, and reveals a numpy that draws differently.

Messages are wrapped as by a chat template. Once an agent's history has six observations, it loses that of its fifth
last round with each further round, so its prompts part from one another instead of only growing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp, log
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

SEED = 20261121
WORDS_MAX = 28_000
TOKENS_MAX = 32_768
ROUNDS_KEPT = 6
TURN_MAX = 50
DOCUMENTS = 24

Tokens = list[int]
SetName = Literal["lmsys", "sharegpt", "swebench", "rag"]
NUMBERS = MappingProxyType({"lmsys": 0, "sharegpt": 1, "swebench": 2, "rag": 3})

HEAD = [1, 8853, 3051, 1115, 376]
USER_TAIL = [613, 376, 12154, 1115, 376, 1792, 9092]
ASSISTANT_TAIL = [613, 376, 12154, 1115, 376, 465, 22137, 9092]


class Length(NamedTuple):
    """The length of a text in tokens: lognormal with this median, from 4 to `most`."""

    median: float
    sigma: float
    most: int


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`turns`: the least, the mean of a geometric number added to it, and the most. `spread`: of lengths by session."""

    templates: tuple[int, int]
    turns: tuple[int, int, int]
    spread: float
    user: Length
    answer: Length


CHATS = MappingProxyType(
    {
        "lmsys": ChatShape((120, 600), (10, 5, 35), 0.4, Length(35, 1.1, 1500), Length(190, 0.9, 2500)),
        "sharegpt": ChatShape((60, 250), (10, 3, 25), 0.3, Length(22, 1.0, 600), Length(75, 0.8, 600)),
    }
)
TASK, OBSERVATION, ACTION = Length(350, 0.8, 4000), Length(420, 1.1, 5000), Length(110, 0.6, 800)
QUESTION, REPLY = Length(220, 0.9, 1500), Length(90, 0.7, 600)


class Turn(NamedTuple):
    """One request of a session."""

    session: int
    turn: int
    at: float
    prompt: Tokens
    answer: Tokens


class Shape(NamedTuple):
    """A set: its name, how often sessions begin, their number, and the mean seconds of an agent's tool."""

    name: SetName
    sessions_per_s: float
    sessions: int
    tool_s: float = 0.0

    @property
    def title(self) -> str:
        tool = f"_art={self.tool_s:g}" if self.name == "swebench" else ""
        return f"{self.name}_sps={self.sessions_per_s:g}{tool}_nums={self.sessions}"


TRACES = MappingProxyType(
    {
        "lmsys": Shape("lmsys", 1, 100),
        "sharegpt": Shape("sharegpt", 1, 100),
        "swebench": Shape("swebench", 1, 40, 7.5),
        "rag": Shape("rag", 2, 600),
    }
)
DIGESTS = MappingProxyType(
    {
        "lmsys": "4272b231ef307efb2341e4ffa5450f021033c329603ac80729e2be0d8ce1e62e",
        "sharegpt": "aaaef5c731e09ac723deaa45551aeff57931864589aaa1650f02ff90035f76d4",
        "swebench": "d0463de5f715e249fdc0b7a5e839422ed0b5cb7c82631255bff69fa19d2d2bb0",
        "rag": "8f8811f3db6f65ce6b2a80de9400cb31c32e8e459f383474153e60c1e202b825",
    }
)


def trace(shape: Shape) -> list[Turn]:
    """Return the requests of a set in order of time."""
    drawn = Drawn(NUMBERS[shape.name])
    makers = {"swebench": agents, "rag": questions}
    found = makers[shape.name](drawn, shape) if shape.name in makers else chats(drawn, shape, CHATS[shape.name])
    return sorted(found, key=lambda turn: turn.at)


def lines(turns: Sequence[Turn]) -> Iterator[bytes]:
    """Yield a trace as JSON, one request per line."""
    for each in turns:
        named = {
            "session_id": each.session,
            "turn_id": each.turn,
            "ts": each.at,
            "num_input_tokens": len(each.prompt),
            "num_output_tokens": len(each.answer),
            "input_tokens": each.prompt,
            "output_tokens": each.answer,
        }
        yield json.dumps(named).encode() + b"\n"


def digest(turns: Sequence[Turn]) -> str:
    found = sha256()
    for line in lines(turns):
        found.update(line)
    return found.hexdigest()


class Drawn:
    """Draws the random values of one set, in order."""

    def __init__(self, number: int) -> None:
        self.random = np.random.default_rng([SEED, number])

    def length(self, shape: Length, factor: float = 1.0) -> int:
        drawn = exp(log(shape.median * factor) + shape.sigma * float(self.random.standard_normal()))
        return max(4, min(shape.most, round(drawn)))

    def tokens(self, count: int) -> Tokens:
        """Draw words with frequencies as in a language."""
        ranks = self.random.zipf(1.3, count)
        others = self.random.integers(1, WORDS_MAX, count)
        words = np.where(ranks > WORDS_MAX, others, ranks)
        found: Tokens = (103 + (7919 * words) % 31_800).tolist()
        return found

    def text(self, shape: Length, factor: float = 1.0) -> Tokens:
        return self.tokens(self.length(shape, factor))

    def factor(self, spread: float) -> float:
        return exp(spread * float(self.random.standard_normal()))

    def turns(self, least: int, chance: float, most: int) -> int:
        return min(most, least + int(self.random.geometric(chance)) - 1)


def user(content: Tokens) -> Tokens:
    return [*HEAD, *content, *USER_TAIL]


def assistant(content: Tokens) -> Tokens:
    return [*HEAD, *content, *ASSISTANT_TAIL]


def chats(drawn: Drawn, shape: Shape, chat: ChatShape) -> Iterator[Turn]:
    templates = [drawn.tokens(int(drawn.random.integers(*chat.templates))) for _ in range(4)]
    least, mean, most = chat.turns
    for session in range(shape.sessions):
        at = session / shape.sessions_per_s
        turns = drawn.turns(least, 1 / (mean + 1), most)
        template = templates[int(drawn.random.integers(4))] if drawn.random.random() < 0.25 else []
        factor = drawn.factor(chat.spread)
        history: Tokens = []
        for turn in range(turns):
            content = [*(template if turn == 0 else ()), *drawn.text(chat.user, factor)]
            answer = assistant(drawn.text(chat.answer, factor))
            prompt = history + user(content)
            if len(prompt) + len(answer) > TOKENS_MAX:
                break
            if turn:
                at += int(0.75 * len(content)) / 1.5  # ninety words a minute
            yield Turn(session, turn, at, prompt, answer)
            history = prompt + answer


def agents(drawn: Drawn, shape: Shape) -> Iterator[Turn]:
    system = drawn.tokens(900)
    for session in range(shape.sessions):
        at = session / shape.sessions_per_s
        factor = drawn.factor(0.8)
        turns = drawn.turns(4, 1 / 21, 51)
        rounds: list[tuple[Tokens, Tokens]] = []
        for turn in range(turns):
            content = system + drawn.text(TASK) if turn == 0 else drawn.text(OBSERVATION, factor)
            observed, answer = user(content), assistant(drawn.text(ACTION))
            if turn:
                at += int(drawn.random.poisson(shape.tool_s))
            prompt = [token for each in rounds for message in each for token in message] + observed
            if len(prompt) > TOKENS_MAX or turn > TURN_MAX:
                break
            yield Turn(session, turn, at, prompt, answer)
            if sum(1 for each, _ in rounds if each) >= ROUNDS_KEPT:
                rounds[-5] = ([], rounds[-5][1])
            rounds.append((observed, answer))


def questions(drawn: Drawn, shape: Shape) -> Iterator[Turn]:
    documents = [drawn.tokens(int(drawn.random.integers(800, 3000))) for _ in range(DOCUMENTS)]
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    for session in range(shape.sessions):
        at = session / shape.sessions_per_s
        document = documents[int(drawn.random.choice(DOCUMENTS, p=popularity / popularity.sum()))]
        prompt = user(document + drawn.text(QUESTION))
        yield Turn(session, 0, at, prompt, assistant(drawn.text(REPLY)))

"""A trace of numbers alone: conversations over a few system prompts, each turn longer than the one before."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from ranvier_py.core.ids import Fingerprint
from ranvier_py.replay.traces.trace import Depth, Trace, TraceRequest

BLOCK = 16


def name_of(*parts: object) -> int:
    """A number that stands for these parts, equal in every process."""
    return Random(repr(parts)).getrandbits(63) or 1


def conversation(number: int, at: float, turns: int, *, systems: int = 2, turn_blocks: int = 8) -> list[TraceRequest]:
    """Turn k has what turn k - 1 asked and was answered, and something new. Each answer is four blocks."""
    system = [name_of("system", number % systems, index) for index in range(turn_blocks)]
    names = [*system, *(name_of("chat", number, index) for index in range(turns * (turn_blocks + 4)))]
    requests = []
    for turn in range(turns):
        asked = turn_blocks + turn * (turn_blocks + 4) + turn_blocks
        blocks = names[: asked + 4]
        chain = [Depth((index + 1) * BLOCK, Fingerprint(name)) for index, name in enumerate(blocks)]
        ends = [turn_blocks - 1, *(turn_blocks - 1 + (each + 1) * (turn_blocks + 4) - 4 for each in range(turn + 1))]
        requests.append(
            TraceRequest(
                at=at + turn * 2.0,
                session=f"chat-{number}",
                model="model",
                prompt_tokens=asked * BLOCK + 5,
                answer_tokens=4 * BLOCK,
                chain=chain,
                ends=ends,
                blocks=tuple(blocks),
            )
        )
    return requests


def chats(count: int = 40, turns: int = 5, within_s: float = 20.0, seed: int = 1) -> Trace:
    """So many conversations that begin within some seconds."""
    rng = Random(seed)
    requests = [
        request for number in range(count) for request in conversation(number, rng.uniform(0.0, within_s), turns)
    ]
    return Trace("chats", sorted(requests, key=lambda request: request.at), BLOCK, timed=True)


def documents(count: int = 200, kinds: int = 40, within_s: float = 20.0, seed: int = 2) -> Trace:
    """So many questions, each about one of some documents, of which the first are asked for most."""
    rng = Random(seed)
    requests = [
        question(number, min(kinds - 1, int(rng.expovariate(3.0 / kinds))), rng.uniform(0.0, within_s), rng)
        for number in range(count)
    ]
    return Trace("documents", sorted(requests, key=lambda request: request.at), BLOCK, timed=True)


def question(number: int, document: int, at: float, rng: Random, document_blocks: int = 30) -> TraceRequest:
    """A question of a few blocks about a document, and an answer of 2 to 6."""
    asked, answered = document_blocks + rng.randint(2, 6), rng.randint(2, 6)
    names = [name_of("document", document, index) for index in range(document_blocks)]
    names += [name_of("question", number, index) for index in range(asked + answered - document_blocks)]
    return TraceRequest(
        at=at,
        session="",
        model="model",
        prompt_tokens=asked * BLOCK + 3,
        answer_tokens=answered * BLOCK,
        chain=[Depth((index + 1) * BLOCK, Fingerprint(name)) for index, name in enumerate(names)],
        ends=[document_blocks - 1, asked - 1, asked + answered - 1],
        blocks=tuple(names),
    )


def shifted(trace: Trace, by_s: float, seed: int) -> Trace:
    """The same requests, each up to so much earlier or later."""
    rng = Random(seed)
    moved = [replace(request, at=max(0.0, request.at + rng.uniform(-by_s, by_s))) for request in trace.requests]
    return replace(trace, requests=sorted(moved, key=lambda request: request.at))

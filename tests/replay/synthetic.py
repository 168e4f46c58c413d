"""A trace of numbers alone: conversations over a few system prompts, each turn longer than the one before."""

from __future__ import annotations

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

"""Plans a load run before anything is sent: conversations, turns, pauses, arrivals, branches.

Pure and lazy: every draw comes from the one `Random` that is passed in, in the order of the conversations.

A *turn* is one request: the messages that the client adds. The engine's real answer follows it in the history, unless
the turn has a recorded one (a tool call that the next tool message refers to). A *branch* begins with the history of an
earlier conversation, its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

Message = dict[str, Any]
"""One chat message as JSON: role, content, and whatever else the trace has."""

UNSTREAMED_SHARE = 0.5
"""Of the lab's requests: half of its clients' turns are like those of scripts and agents that ask for whole answers."""

PARENTS_MAX = 32
"""A branch picks its parent among so many of the latest conversations, whose prefixes are likely still warm."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `think_s` passes before it is sent; `recorded` replaces the real answer in the history. `stream`:
    whether the answer is asked for as a stream."""

    messages: tuple[Message, ...]
    recorded: Message | None = None
    think_s: float = 0.0
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """The client's side of one chat.

    `start_s` counts from the start of the run; None: it begins when a user is free. A branch begins with the history of
    its `parent` after `parent_turns` of the parent's own turns.
    """

    name: str
    turns: tuple[Turn, ...]
    start_s: float | None = None
    parent: str | None = None
    parent_turns: int = 0


def split_turns(messages: Iterable[Message], *, keep_recorded: bool = False) -> tuple[Turn, ...]:
    """Cut a recorded chat into requests. Each has the messages before an assistant message, or the last ones.

    An assistant message that opens the chat is history, not an answer. A recorded answer is kept where it calls tools,
    since the tool message after it refers to its ids; `keep_recorded` keeps all of them.
    """
    turns: list[Turn] = []
    added: list[Message] = []
    asked = False
    for message in messages:
        if message["role"] != "assistant" or not (asked or turns):
            asked = asked or message["role"] in ("user", "tool")
            added.append(message)
            continue
        keep = keep_recorded or bool(message.get("tool_calls"))
        turns.append(Turn(tuple(added), message if keep else None))
        added = []
    if any(message["role"] in ("user", "tool") for message in added):
        turns.append(Turn(tuple(added)))
    return tuple(turns)


def cut(conversations: Iterable[Conversation], turns_max: int) -> Iterator[Conversation]:
    """Cut conversations to at most `turns_max` requests."""
    for conversation in conversations:
        yield replace(conversation, turns=conversation.turns[:turns_max])


def with_branches(conversations: Iterable[Conversation], share: float, rng: Random) -> Iterator[Conversation]:
    """Let this share of conversations continue the history of an earlier one instead of their own beginning."""
    parents: deque[Conversation] = deque(maxlen=PARENTS_MAX)
    for conversation in conversations:
        chosen = conversation
        candidates = [parent for parent in parents if len(parent.turns) > 1] if rng.random() < share else []
        if candidates and len(conversation.turns) > 1:
            parent = rng.choice(candidates)
            kept = rng.randint(1, min(len(parent.turns), len(conversation.turns)) - 1)
            chosen = replace(conversation, turns=conversation.turns[kept:], parent=parent.name, parent_turns=kept)
        parents.append(chosen)
        yield chosen


def with_think(conversations: Iterable[Conversation], mean_s: float, rng: Random) -> Iterator[Conversation]:
    """Put exponential pauses before every turn but the first."""
    for conversation in conversations:
        if mean_s <= 0:
            yield conversation
            continue
        first, *rest = conversation.turns or (Turn(()),)
        later = tuple(replace(turn, think_s=rng.expovariate(1 / mean_s)) for turn in rest)
        yield replace(conversation, turns=(first, *later)) if conversation.turns else conversation


def with_unstreamed(conversations: Iterable[Conversation], share: float, rng: Random) -> Iterator[Conversation]:
    """Let this share of turns ask for a whole answer instead of a stream."""
    for conversation in conversations:
        turns = tuple(replace(turn, stream=rng.random() >= share) for turn in conversation.turns)
        yield replace(conversation, turns=turns)


def with_poisson_arrivals(
    conversations: Iterable[Conversation], rate_per_s: float, rng: Random
) -> Iterator[Conversation]:
    """Let conversations arrive at `rate_per_s` with exponential gaps: an open loop."""
    now_s = 0.0
    for conversation in conversations:
        now_s += rng.expovariate(rate_per_s)
        yield replace(conversation, start_s=now_s)


def with_trace_arrivals(conversations: Iterable[Conversation], speed: float) -> list[Conversation]:
    """Let conversations arrive as recorded, the first at 0 s, `speed` times as fast. All must have a start."""
    known = sorted(conversations, key=lambda conversation: conversation.start_s or 0.0)
    first_s = (known[0].start_s or 0.0) if known else 0.0
    return [replace(one, start_s=((one.start_s or 0.0) - first_s) / speed) for one in known]


def user_starts(users: int, think_s: float, rng: Random) -> list[float]:
    """Return when each user of a closed loop begins: spread over one pause, so that users are not in step."""
    return [rng.uniform(0.0, think_s) for _ in range(users)]

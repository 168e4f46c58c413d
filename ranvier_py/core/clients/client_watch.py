"""What clients do to their own prefixes: finds, for each prompt, the one that it goes on from, and counts the breaks.

Prompts are of one conversation when they come from one client, in one session, with one application (`head`: tools and
system prompt but for what is volatile). Several branches of a conversation are kept, and a prompt goes on from the one
that it shares most with. A client that names no session has one for all: then only what is repeated tells.

The first prompt of a session is compared with that of the application's last session: what changes by itself in tools
and system prompt keeps sessions from sharing them.

Bounds: CONVERSATIONS_MAX, BRANCHES_MAX in each, SECTIONS_MAX sections of all; the oldest conversation goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.cardinality import Cardinality
from ranvier_py.core.clients.known_clients import Headers, client_of, session_of
from ranvier_py.core.clients.prefix_break import VOLATILE_CAUSES, PrefixBreak, prefix_break
from ranvier_py.core.clients.prompt_sketch import PromptSketch, digest_of, sketch_of
from ranvier_py.core.prompts.request_apis import Api

CONVERSATIONS_MAX = 1024
BRANCHES_MAX = 4
SECTIONS_MAX = 100_000
BREAKS_MAX = 64  # kinds of breaks of one client that are told apart

INDEX = re.compile(r"\[\d+\]")


class BreakKind(NamedTuple):
    """What is counted together. `path`: numbers in the history are left out. `scope` is turn or session."""

    cause: str
    path: str
    scope: str


@dataclass(slots=True)
class BreakCount:
    """How often, and what it cost: tokens that were there and were computed again."""

    count: int = 0
    tokens: int = 0


@dataclass(slots=True)
class ClientCounts:
    """One client's."""

    turns: int = 0
    prompt_tokens: int = 0
    sessions: Cardinality = field(default_factory=Cardinality)
    breaks: BoundedDict[BreakKind, BreakCount] = field(default_factory=lambda: BoundedDict(BREAKS_MAX))


class ClientWatch:
    """State: sketches of the last prompts, and counts by client. `key` seeds digests: 64 bits."""

    def __init__(self, key: int) -> None:
        self.clients: dict[str, ClientCounts] = {}
        self.dropped = 0  # conversations, for want of room
        self._key = key
        self._sections = 0
        self._conversations: dict[tuple[str, bytes, int], list[PromptSketch]] = {}
        self._heads: BoundedDict[tuple[str, int], PromptSketch] = BoundedDict(CONVERSATIONS_MAX)

    def observe(self, headers: Headers, fields: Mapping[str, Any], api: Api, tokens: int) -> PrefixBreak | None:
        """A prompt of so many tokens. Returns the break that it makes, if any."""
        client, session = client_of(headers), session_of(headers, fields)
        counts = self.clients.setdefault(client, ClientCounts())
        counts.turns += 1
        counts.prompt_tokens += tokens
        if session:
            counts.sessions.add(digest_of(session.decode("latin-1"), self._key))
        sketch = sketch_of(fields, api, self._key)
        head = sketch.head()
        branches = self._conversations.pop((client, session, head), None)
        found = self._first(client, head, sketch) if branches is None else least(branches, sketch)
        self._keep((client, session, head), branches or [], sketch)
        if found is not None and found.lost:
            kind = BreakKind(found.cause, pattern(found.path, api), "turn" if branches else "session")
            counted = counts.breaks.get(kind) or BreakCount()
            counts.breaks[kind] = counted
            counted.count += 1
            counted.tokens += round(found.lost * tokens / max(1, sketch.size))
            return found
        return None

    def _first(self, client: str, head: int, sketch: PromptSketch) -> PrefixBreak | None:
        """Of the first prompt of a conversation."""
        before = self._heads.get((client, head))
        self._heads[client, head] = sketch
        found = None if before is None else prefix_break(before, sketch)
        return found if found is not None and found.cause in VOLATILE_CAUSES and found.kind == "system" else None

    def _keep(self, place: tuple[str, bytes, int], branches: list[PromptSketch], sketch: PromptSketch) -> None:
        while len(branches) >= BRANCHES_MAX:
            self._sections -= len(branches.pop(0).sections)
        branches.append(sketch)
        self._conversations[place] = branches
        self._sections += len(sketch.sections)
        while len(self._conversations) > CONVERSATIONS_MAX or self._sections > SECTIONS_MAX:
            oldest = self._conversations.pop(next(iter(self._conversations)))
            self._sections -= sum([len(each.sections) for each in oldest])
            self.dropped += 1
            if not self._conversations:
                break


def least(branches: Sequence[PromptSketch], sketch: PromptSketch) -> PrefixBreak | None:
    """The break against the branch that shares most with it; None where it goes on from one."""
    found: PrefixBreak | None = None
    for branch in reversed(branches):
        each = prefix_break(branch, sketch)
        if each is None:
            return None
        if found is None or each.shared > found.shared:
            found = each
    return found


def pattern(path: str, api: Api) -> str:
    """A path with the numbers of the history left out: they grow with it."""
    history = f"$.{api.history}["
    return INDEX.sub("[*]", path) if path.startswith(history) and not path.startswith(f"{history}0]") else path


def client_rows(watch: ClientWatch) -> list[dict[str, Any]]:
    """Of each client what it sent and its breaks, the dearest first."""
    return [
        {
            "client": name,
            "sessions": counts.sessions.estimate(),
            "turns": counts.turns,
            "prompt_tokens": counts.prompt_tokens,
            "break_tokens": sum([each.tokens for each in counts.breaks.values()]),
            "breaks": [
                {**kind._asdict(), "count": each.count, "tokens": each.tokens}
                for kind, each in sorted(counts.breaks.items(), key=lambda pair: -pair[1].tokens)
            ],
        }
        for name, counts in sorted(watch.clients.items(), key=lambda pair: -pair[1].prompt_tokens)
    ]

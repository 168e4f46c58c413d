"""Finds, for each prompt, the earlier prompt that it continues, and counts the prefixes that clients break themselves.

Rule: prompts with the same client, session and application form one conversation (`Place`). Several branches are kept;
a prompt continues the one with which it shares most. The first prompt of a session is compared with that of the
application's last session: volatile parts of tools and system prompt prevent sessions from sharing them. A prompt that
was read as the continuation of a known history broke nothing (`extend`).
Bounds: CONVERSATIONS_MAX, BRANCHES_MAX in each, PIECES_MAX in all; the oldest conversation is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.cardinality import Cardinality
from ranvier_py.core.clients.prefix_break import VOLATILE_CAUSES, PrefixBreak, prefix_break
from ranvier_py.core.clients.prompt_sketch import PromptSketch, sketch_of
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.request_apis import Api

CONVERSATIONS_MAX = 1024
BRANCHES_MAX = 4
PIECES_MAX = 1_000_000
"""Sections, lines and volatile words of all sketches: 80 MB of agents' prompts, 200 MB of those made to be large."""
BREAKS_MAX = 64  # kinds of breaks of one client that are counted separately

INDEX = re.compile(r"\[\d+\]")


class BreakKind(NamedTuple):
    """What breaks are counted by. `path` has no indices within the history. `scope` is turn or session."""

    cause: str
    path: str
    scope: str


@dataclass(slots=True)
class BreakCount:
    """How often, and the cost: tokens that were cached and were computed again, and the seconds that engines took.

    `mendable`: how many of these tokens a rule would have saved, by the rule's name.
    """

    count: int = 0
    tokens: int = 0
    seconds: float = 0.0
    mendable: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: int, seconds: float, rule: str = "") -> None:
        self.count += 1
        self.tokens += tokens
        self.seconds += seconds
        if rule:
            self.mendable[rule] = self.mendable.get(rule, 0) + tokens


@dataclass(slots=True)
class ClientCounts:
    """Counts of one client. `counted_tokens`: of prompts whose reused tokens the engine counted. `reusable_tokens`:
    those of the `compared_tokens` that an earlier prompt had, or would have had if a break were mended."""

    turns: int = 0
    prompt_tokens: int = 0
    counted_tokens: int = 0
    reused_tokens: int = 0
    compared_tokens: int = 0
    reusable_tokens: int = 0
    sessions: Cardinality = field(default_factory=Cardinality)
    breaks: BoundedDict[BreakKind, BreakCount] = field(default_factory=lambda: BoundedDict(BREAKS_MAX))
    causes: dict[str, BreakCount] = field(default_factory=dict)  # all breaks, by cause alone


class PromptBreak(NamedTuple):
    """One prompt's break: where and why, what it is counted by, and the tokens that it repeats after the break."""

    found: PrefixBreak
    kind: BreakKind
    tokens: int


class Place(NamedTuple):
    """Prompts of one place may continue each other. `session`: a digest, 0 if none is named; then only what prompts
    repeat decides. `head`: the application, by tools and system prompt without their volatile parts."""

    client: str
    session: int
    head: int


class ClientWatch:
    """Keeps sketches of recent prompts, and counts by client. `key`: 64 bits that seed digests."""

    def __init__(self, key: int) -> None:
        self.clients: dict[str, ClientCounts] = {}
        self.dropped = 0  # conversations dropped for want of room
        self._key = key
        self._pieces = 0
        self._conversations: dict[Place, list[PromptSketch]] = {}
        self._openings: BoundedDict[tuple[str, int, int], Place] = BoundedDict(CONVERSATIONS_MAX)
        self._heads: BoundedDict[tuple[str, int], PromptSketch] = BoundedDict(CONVERSATIONS_MAX)
        self._ends: BoundedDict[int, tuple[PromptSketch, int]] = BoundedDict(CONVERSATIONS_MAX)

    def counts(self, client: str) -> ClientCounts:
        found = self.clients.get(client)
        if found is None:
            found = self.clients[client] = ClientCounts()
        return found

    def turn(self, client: str, session: int, tokens: int) -> None:
        """Count a prompt of so many tokens."""
        counts = self.counts(client)
        counts.turns += 1
        counts.prompt_tokens += tokens
        if session:
            counts.sessions.add(session & (1 << 64) - 1)

    def compared(self, client: str, tokens: int, reusable: int) -> None:
        """Count how many of a prompt's tokens an earlier one had."""
        counts = self.counts(client)
        counts.compared_tokens += tokens
        counts.reusable_tokens += min(reusable, tokens)

    def observe(
        self, client: str, session: int, fields: Mapping[str, Any], api: Api, tokens: int, end: int = 0
    ) -> PromptBreak | None:
        """Return the break that this prompt makes, if any, without counting it. `end` names the prompt's end."""
        sketch = sketch_of(fields, api, self._key)
        place = Place(client, session, sketch.head())
        branches = self._conversations.pop(place, None)
        before = branches
        if branches is None:
            # with another model or other tools it may continue a conversation all the same: equal session, system
            # prompt, history
            before = self._elsewhere(place, sketch)
            found, shared = self._first(client, place.head, sketch)
        if before:
            found, shared = least(before, sketch)
        self.compared(client, tokens, round(shared * tokens / max(1, sketch.size)))
        self._keep(place, branches or [], sketch)
        if end:
            self._ends[end] = sketch, len(sketch.sections)
        if found is None or not found.lost:
            return None
        kind = BreakKind(found.cause, pattern(found.path, api), "turn" if before else "session")
        return PromptBreak(found, kind, round(found.lost * tokens / max(1, sketch.size)))

    def broke(self, client: str, found: PromptBreak, token_s: float = 0.0, rule: str = "") -> None:
        """Count a break. `token_s`: the engine's seconds for a token; `rule`: the one that would have mended it."""
        counts = self.counts(client)
        counted = counts.breaks[found.kind] = counts.breaks.get(found.kind) or BreakCount()
        for each in (counted, counts.causes.setdefault(found.kind.cause, BreakCount())):
            each.add(found.tokens, found.tokens * token_s, rule)

    def extend(self, base: int, end: int, messages: Sequence[Message], api: Api, known: int) -> None:
        """Note that a prompt continued `base`, after so many `known` messages, up to `end`. A side branch adds nothing:
        the sketch no longer ends at `base`."""
        found = self._ends.get(base)
        if found is None:
            return
        sketch, count = found
        if not sketch.kept or len(sketch.sections) != count:  # it was dropped, or another branch came first
            return
        before = sketch.pieces
        for number, message in enumerate(messages, known):
            sketch.add_message(f"$.{api.history}[{number}]", message)
        self._pieces += sketch.pieces - before
        self._ends[end] = sketch, len(sketch.sections)
        self._trim()

    def _first(self, client: str, head: int, sketch: PromptSketch) -> tuple[PrefixBreak | None, int]:
        """Compare the first prompt of a conversation with that of the last session. Returns what `least` does."""
        before = self._heads.get((client, head))
        self._heads[client, head] = sketch
        if before is None or not before.kept:
            return None, 0
        found, shared = least([before], sketch)
        if found is None or (found.cause in VOLATILE_CAUSES and found.kind == "system"):
            return found, shared
        return None, found.shared  # another task

    def _elsewhere(self, place: Place, sketch: PromptSketch) -> list[PromptSketch]:
        """Return the branch that the prompt continues with another model or other tools, if any."""
        key = (place.client, place.session, sketch.opening())
        last, self._openings[key] = self._openings.get(key), place
        history = [section.digest for section in sketch.history()]
        return [
            branch
            for branch in (self._conversations.get(last, ()) if last is not None else ())
            if continues(history, branch)
        ][-1:]

    def _keep(self, place: Place, branches: list[PromptSketch], sketch: PromptSketch) -> None:
        while len(branches) >= BRANCHES_MAX:
            oldest, application = branches.pop(0), (place.client, place.head)
            if self._heads.get(application) is oldest:  # the next session is compared with this branch instead
                self._heads[application] = sketch
            self._forget(oldest)
        branches.append(sketch)
        self._conversations[place] = branches
        self._pieces += sketch.pieces
        sketch.kept = True
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest conversations while there are too many, or too many pieces in all."""
        while len(self._conversations) > CONVERSATIONS_MAX or self._pieces > PIECES_MAX:
            for each in self._conversations.pop(next(iter(self._conversations))):
                self._forget(each)
            self.dropped += 1

    def _forget(self, sketch: PromptSketch) -> None:
        self._pieces -= sketch.pieces
        sketch.forget()  # others may refer to it still


def least(branches: Sequence[PromptSketch], sketch: PromptSketch) -> tuple[PrefixBreak | None, int]:
    """Return the break against the branch that shares most with the prompt, or None if it continues one; and how many
    of its characters that branch has, before or after the break."""
    found: PrefixBreak | None = None
    for branch in reversed(branches):
        each = prefix_break(branch, sketch)
        if each is None:
            return None, branch.size
        if found is None or each.shared > found.shared:
            found = each
    return found, found.shared + found.lost if found is not None else 0


def continues(history: Sequence[int], before: PromptSketch) -> bool:
    """Whether a history, as digests, begins with the whole history of the one before, and has more."""
    old = [section.digest for section in before.history()]
    return len(old) < len(history) and list(history[: len(old)]) == old


def pattern(path: str, api: Api) -> str:
    """Return a path without the indices in the history, which grow with it."""
    history = f"$.{api.history}["
    return INDEX.sub("[*]", path) if path.startswith(history) and not path.startswith(f"{history}0]") else path


def client_rows(watch: ClientWatch) -> list[dict[str, Any]]:
    """For each client what it sent, and its breaks, the most expensive first."""
    return [
        {
            "client": name,
            "sessions": counts.sessions.estimate(),
            "turns": counts.turns,
            "prompt_tokens": counts.prompt_tokens,
            "reused_share": round(counts.reused_tokens / counts.counted_tokens, 4) if counts.counted_tokens else None,
            "reusable_share": round(counts.reusable_tokens / counts.compared_tokens, 4)
            if counts.compared_tokens
            else None,
            "break_tokens": sum([each.tokens for each in counts.causes.values()]),
            "break_prefill_s": round(sum([each.seconds for each in counts.causes.values()]), 6),
            "breaks": [
                {
                    **kind._asdict(),
                    "count": each.count,
                    "tokens": each.tokens,
                    "prefill_s": round(each.seconds, 6),
                    "rules": each.mendable,
                }
                for kind, each in sorted(counts.breaks.items(), key=lambda pair: -pair[1].tokens)
            ],
        }
        for name, counts in sorted(watch.clients.items(), key=lambda pair: -pair[1].prompt_tokens)
    ]

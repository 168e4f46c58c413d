"""Finds departures: where the prompts of a recording do not continue the earlier prompts of their session.

Rule: each prompt is compared with the earlier prompt of its session with which it shares most. It departs if it does
not begin with all of that prompt although it has as many messages, and half as many tokens; a shorter prompt is taken
for a separate task, such as a title or a sub-agent. A recording has no text, so a departure has no cause; its depth is
that of the deepest shared prefix key, its cost the upper bound: the earlier prompt's tokens behind that, up to this
one's length.
Bounds: SESSIONS_MAX sessions, BRANCHES_MAX prompts of each; the oldest is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.clients.client_watch import BreakKind, ClientWatch, PromptBreak
from ranvier_py.core.clients.prefix_break import PrefixBreak
from ranvier_py.core.routing.request_record import RequestRecord
from ranvier_py.replay.lint_page import UNSEEN

SESSIONS_MAX = 4096
BRANCHES_MAX = 8
KEYS_MAX = 1 << 20  # remembered fingerprints of earlier prompts, to count the tokens that could be reused


class Ancestor(NamedTuple):
    """An earlier prompt of a session. `depths`: of its prefixes, by fingerprint; `end`: the deepest of them;
    `messages`: the number of message ends in its chain."""

    depths: dict[int, int]
    end: int
    messages: int
    tokens: int


class RecordedDepartures:
    """Counts turns, reused tokens and departures of records in a ClientWatch. Records are added in order of time."""

    def __init__(self, watch: ClientWatch) -> None:
        self._watch = watch
        self._sessions: BoundedDict[tuple[str, str, str], list[Ancestor]] = BoundedDict(SESSIONS_MAX)
        self._had: BoundedDict[int, None] = BoundedDict(KEYS_MAX)

    def add(self, record: RequestRecord) -> None:
        """Count a record that was served."""
        client, tokens = record.client, record.prompt_tokens
        self._watch.turn(client, int(record.session, 16) if record.session else 0, tokens)
        if record.cached_tokens is not None:
            counts = self._watch.counts(client)
            counts.counted_tokens += tokens
            counts.reused_tokens += record.cached_tokens
        keys = [key for key in record.chain if key[0] <= tokens]
        if not keys:  # the prompt was not tokenized
            return
        self._watch.compared(client, tokens, max([depth for depth, name in keys if name in self._had], default=0))
        for _, name in record.chain:
            self._had[name] = None
        if record.session:
            messages = sum(end < len(keys) for end in record.ends)
            now = Ancestor({name: depth for depth, name in keys}, keys[-1][0], messages, tokens)
            self._compare(client, (client, record.session, record.model), now)

    def _compare(self, client: str, session: tuple[str, str, str], now: Ancestor) -> None:
        before = self._sessions.pop(session, [])
        self._sessions[session] = [*before, now][-BRANCHES_MAX:]
        shared, earlier = closest(before, now)
        if earlier is None or now.messages < earlier.messages or 2 * now.tokens < earlier.tokens:
            return
        lost = min(earlier.end, now.tokens) - shared
        if lost > 0:
            place = f"behind token {shared:,}"
            found = PrefixBreak(cause=UNSEEN, kind="", path=place, line=0, shared=shared, lost=lost)
            self._watch.broke(client, PromptBreak(found, BreakKind(UNSEEN, place, "turn"), lost))


def closest(before: Sequence[Ancestor], now: Ancestor) -> tuple[int, Ancestor | None]:
    """Return the most tokens that an earlier prompt shares with this one, and that prompt; (0, None) if there is none.
    Of several such prompts it is the one that ends first, and of these the latest."""
    found: tuple[int, Ancestor | None] = 0, None
    for earlier in before:
        shared = max([depth for name, depth in now.depths.items() if name in earlier.depths], default=0)
        if found[1] is None or (shared, -earlier.end) >= (found[0], -found[1].end):
            found = shared, earlier
    return found

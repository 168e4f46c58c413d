"""Where prompts of a recording depart from their sessions: all that fingerprints tell of who breaks prefixes.

A recording has no text, so a departure has a depth in tokens and no cause. A prompt goes on from what its session had
before: from the prompt that it shares most with. It departs where it does not begin with all of that one, although it
is as long: it has as many messages at least, and half as many tokens. Whatever else shares little is a task of its own,
such as a title or a sub-agent. Without sessions nothing departs.

The depth is that of the deepest shared prefix key, so a departure may be up to the next anchor or message end further
on. Of its cost the upper bound is counted: what the earlier prompt had behind it.
Bounds: SESSIONS_MAX sessions, BRANCHES_MAX prompts of each; the oldest goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.clients.client_watch import BreakKind, ClientWatch, PromptBreak
from ranvier_py.core.clients.prefix_break import PrefixBreak
from ranvier_py.core.routing.request_record import RequestRecord

SESSIONS_MAX = 4096
BRANCHES_MAX = 8
KEYS_MAX = 1 << 20  # fingerprints of which it is remembered that a prompt had them, for what could be reused
UNSEEN = "unseen"
"""The cause where no text was recorded."""


class Ancestor(NamedTuple):
    """An earlier prompt of a session. `depths` of its prefixes by fingerprint, `end` the deepest, and how many of its
    messages end."""

    depths: dict[int, int]
    end: int
    messages: int
    tokens: int


class RecordedDepartures:
    """Counts what records tell into a ClientWatch, in the order in which they were sent."""

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
        if not keys:  # nobody tokenized it
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
            found = PrefixBreak(UNSEEN, "", place, 0, shared, lost)
            self._watch.broke(client, PromptBreak(found, BreakKind(UNSEEN, place, "turn"), lost))


def closest(before: Sequence[Ancestor], now: Ancestor) -> tuple[int, Ancestor | None]:
    """Of the earlier prompts that share most with this one the last that has least behind it, and how many tokens are
    shared."""
    found: tuple[int, Ancestor | None] = 0, None
    for earlier in before:
        shared = max([depth for name, depth in now.depths.items() if name in earlier.depths], default=0)
        if found[1] is None or (shared, -earlier.end) >= (found[0], -found[1].end):
            found = shared, earlier
    return found

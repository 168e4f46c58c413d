"""What one engine's cache would hold, had it got the requests that one world sends there: a tree of prefixes, and LRU.

Rule: whoever needs room takes it from the prefix used longest ago, the deepest of its prompt first, block by block; so
what is left of a prompt is always its beginning. A running request holds its prefix, and reserves room for what has no
prefix: its last tokens and its answer.
Bounds: `capacity` in tokens as the engine has it, and `prefixes_max`. Both drop what was used longest ago.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from ranvier_py.core.prompts.prompt import PrefixKey

STALE_MAX = 64  # places in the heap that are out of date, beyond one for each prefix


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """One depth of a prompt; it counts the tokens between it and the prefix above it. `missing`: so many of its last
    tokens were evicted; only prefixes without children have any."""

    parent: CachedPrefix | None
    depth: int = 0
    span: int = 0  # tokens between the one above and this one
    token: int = 0
    text: int = 0
    missing: int = 0
    children: int = 0
    holders: int = 0  # running requests whose deepest prefix it is
    used: int = 0  # when last, by the cache's count of uses
    proved: bool = False
    gone: bool = False


@dataclass(slots=True, eq=False)
class Hold:
    """What a running request holds. `held`: tokens of its prompt that were there before it; `new`: those that are its
    own; `found`: the prefix that they continue."""

    end: CachedPrefix
    reserved: int
    held: int
    new: int
    found: CachedPrefix


class SupposedCache:
    """One engine's cache in one world."""

    def __init__(self, block_tokens: int, prefixes_max: int) -> None:
        self.capacity = inf
        self.prefixes_max = prefixes_max
        self.dropped = 0  # prefixes that `prefixes_max` had no room for
        self.tokens = 0  # of all prefixes, and reserved
        self._block = block_tokens
        self._root = CachedPrefix(None, proved=True)
        self._index: dict[int, CachedPrefix] = {}  # by token fingerprint and by text fingerprint
        self._uses = 0
        self._idle: list[
            tuple[int, int, CachedPrefix]
        ] = []  # heap of those without children and holders, and stale places
        self._pushed = 0
        self.count = 0  # prefixes

    def hold(self, chain: Iterable[PrefixKey], more: int, *, force: bool = False) -> Hold | None:
        """Hold a prompt, of which `chain` has the prefixes, deepest first, and reserve room for `more` tokens. Returns
        None, and holds nothing, if others hold too much of the cache; unless `force`."""
        new, found = self._found(chain)
        known = next((prefix for _, prefix in new if prefix is not None), found)
        held = known.depth - known.missing
        deepest = new[0][0][0] if new else found.depth
        found.holders += 1
        fits = self._make_room(max(0, deepest - held) + more)
        found.holders -= 1
        if not fits and not force:
            self._idles(found)
            return None
        end = self._extended(new, found)
        end.holders += 1
        self.tokens += more
        return Hold(end, more, held, max(0, deepest - held), found)

    def prove(self, hold: Hold) -> None:
        """Note that a request has its first token: the engine has computed its prompt."""
        prefix: CachedPrefix | None = hold.end
        while prefix is not None and not prefix.proved:
            prefix.proved = True
            prefix = prefix.parent

    def release(self, hold: Hold, answered: Iterable[PrefixKey] = ()) -> None:
        """End a request that was served. `answered`: the prefixes of its prompt with its answer, if they are known."""
        self._end(hold)
        self.continued(hold, answered)
        self._use(hold.end)

    def continued(self, hold: Hold, answered: Iterable[PrefixKey]) -> None:
        """Learn the answer of a request, unless its prompt was evicted since."""
        if hold.end.gone or hold.end.missing:
            return
        new, found = self._found(answered)
        if not new or found is self._root:
            return
        found.holders += 1
        self._make_room(max(0, new[0][0][0] - found.depth))
        found.holders -= 1
        hold.end = self._extended(new, found)
        self.prove(hold)
        self._use(hold.end)

    def abandon(self, hold: Hold) -> None:
        """End a request that failed: only what others have computed, or will, stays."""
        self._end(hold)
        prefix = hold.end
        while not (prefix.proved or prefix.holders or prefix.children) and prefix.parent is not None:
            above = prefix.parent
            self._remove(prefix)
            prefix = above
        if prefix is hold.end:
            self._use(prefix)
        else:
            self._idles(prefix)

    def _found(self, chain: Iterable[PrefixKey]) -> tuple[list[tuple[PrefixKey, CachedPrefix | None]], CachedPrefix]:
        """Return the keys that are new, deepest first, and the prefix that they continue. A known prefix is among the
        new where it becomes known by its tokens: there may be others between it and the one above."""
        new = list[tuple[PrefixKey, CachedPrefix | None]]()
        index = self._index
        for key in chain:
            _, token, text = key
            prefix = index.get(token) or index.get(text)
            if prefix is not None and (prefix.token or not token):
                return new, prefix
            if key[0]:
                new.append((key, prefix))
        return new, self._root

    def _extended(self, new: list[tuple[PrefixKey, CachedPrefix | None]], parent: CachedPrefix) -> CachedPrefix:
        """Add new prefixes below `parent`, which is whole from now on. Returns the deepest."""
        self.tokens += parent.missing
        parent.missing = 0
        for (tokens, token, text), known in reversed(new):
            depth = max(tokens, parent.depth)
            if known is None or known.gone:
                prefix = CachedPrefix(parent)
                self.count += 1
            else:
                prefix = known
                self.tokens -= prefix.span - prefix.missing
                assert prefix.parent is not None
                prefix.parent.children -= 1
            prefix.parent, prefix.depth, prefix.span, prefix.missing = parent, depth, depth - parent.depth, 0
            parent.children += 1
            self.tokens += prefix.span
            self._name(prefix, token, text)
            parent = prefix
        return parent

    def _name(self, prefix: CachedPrefix, token: int, text: int) -> None:
        if token and token not in self._index:
            self._index[token], prefix.token = prefix, token
        if text and text not in self._index:
            self._index[text], prefix.text = prefix, text

    def _make_room(self, tokens: int) -> bool:
        """Evict until there is room for so many tokens. Returns whether there is."""
        while self.count > self.prefixes_max and (victim := self._oldest()) is not None:
            self.dropped += 1
            self._remove(victim)
        while (over := self.tokens + tokens - self.capacity) > 0:
            victim = self._oldest()
            if victim is None:
                return False
            here = victim.span - victim.missing
            taken = min(here, -int(-over // self._block) * self._block)
            if taken < here:
                victim.missing += taken
                self.tokens -= taken
                self._push(victim)
            else:
                self._remove(victim)
        return True

    def _oldest(self) -> CachedPrefix | None:
        """Take the idle prefix that was used longest ago."""
        while self._idle:
            used, _, prefix = heappop(self._idle)
            if used == prefix.used and is_idle(prefix):
                return prefix
        return None

    def _remove(self, prefix: CachedPrefix) -> None:
        above = prefix.parent
        assert above is not None
        self.count -= 1
        self.tokens -= prefix.span - prefix.missing
        prefix.gone = True
        for name in (prefix.token, prefix.text):
            if name:
                del self._index[name]
        above.children -= 1
        above.used = max(above.used, prefix.used)
        self._idles(above)

    def _end(self, hold: Hold) -> None:
        hold.end.holders -= 1
        self.tokens -= hold.reserved
        hold.reserved = 0

    def _use(self, prefix: CachedPrefix) -> None:
        self._uses += 1
        prefix.used = self._uses
        self._idles(prefix)

    def _idles(self, prefix: CachedPrefix) -> None:
        if is_idle(prefix) and prefix is not self._root:
            self._push(prefix)

    def _push(self, prefix: CachedPrefix) -> None:
        self._pushed += 1
        heappush(self._idle, (prefix.used, self._pushed, prefix))
        if len(self._idle) > 2 * self.count + STALE_MAX:
            fresh = {id(each): (used, number, each) for used, number, each in self._idle if used == each.used}
            self._idle = [place for place in fresh.values() if is_idle(place[2])]
            heapify(self._idle)


def is_idle(prefix: CachedPrefix) -> bool:
    return not (prefix.gone or prefix.children or prefix.holders)

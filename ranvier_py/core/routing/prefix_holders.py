"""Who holds how much of a prompt: by the route table, and by attempts under way (`Speculation`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from ranvier_py.core.ids import UNKNOWN
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.attempt import PoolMatch
from ranvier_py.core.routing.backends import Pool
from ranvier_py.core.routing.placement import SEVERAL_HOLDERS, Decision, Holder
from ranvier_py.core.routing.route_table import RouteTable, Unheld
from ranvier_py.core.routing.speculation import Speculation, merged


class PrefixHolders:
    """Finds the holders of prompts. `texts_match`: earlier turns stay a prefix, so text fingerprints may be matched."""

    def __init__(self, routes: RouteTable, *, texts_match: bool) -> None:
        self._routes = routes
        self.texts_match = texts_match
        self.speculation = Speculation()

    def chain(self, end: Boundary) -> Iterable[PrefixKey]:
        return end.chain() if self.texts_match else end.token_chain()

    def find(
        self, prompt: Prompt, pool: Pool, now: float, wanted: int, unheld: Unheld, *, touch: bool
    ) -> tuple[int, Sequence[Holder]]:
        """Return how many tokens are learned, and `wanted` or more eligible backends that hold some of it or soon will.

        Deepest first; fewer where there are not so many. `unheld` gets the keys that are not learned.
        """
        if not wanted or prompt.kind == "opaque":
            return 0, ()
        chain, generations = self.chain(prompt.end), pool.generations
        found = self._routes.match(chain, generations, now, wanted=wanted, touch=touch, unheld=unheld)
        learned = found[0].tokens if found else 0
        if found and prompt.end.state is None and prompt.end.correct(len(unheld), self._routes.exact_depth):
            unheld[:] = islice(self.chain(prompt.end), len(unheld))
        guessed = self.speculation.match(unheld, pool.generations, wanted, deeper_than=learned)
        return learned, merged(found, guessed, wanted) if guessed else found

    def is_shared(self, end: Boundary, tokens: int, found: PoolMatch, key: PrefixKey, depth: int) -> bool:
        """Whether other chats go on from the held prefix. One continuation does not count where half of the prompt is
        learned: it is the engine's own answer, which the client altered, or a side branch of this chat."""
        learned = found.learned_tokens
        if 2 * learned < tokens:
            return depth > learned or self._routes.rows.branches(key) > 0
        if depth != learned:
            key = self.key_at(end, found, learned)
        return self._routes.rows.branches(key) > 1

    def key_at(self, end: Boundary, found: PoolMatch, depth: int) -> PrefixKey:
        """Return the deepest key of at most `depth` tokens: where the prompt's walk ended, or deeper for a guess."""
        if depth == found.learned_tokens:
            return found.unheld.end
        return next((key for key in self.chain(end) if key[0] <= depth), (0, UNKNOWN, UNKNOWN))

    def several(self, prompt: Prompt, found: PoolMatch) -> Sequence[Holder]:
        """Return the holders in `found` and those of shorter prefixes: SEVERAL_HOLDERS, or all eligible backends."""
        holders, generations = found.holders, found.pool.generations
        wanted, is_guess = min(SEVERAL_HOLDERS, len(found.pool.ids)), holders[0].tokens > found.learned_tokens
        if found.credit or (len(holders) >= wanted and not is_guess):
            return holders
        first = prompt.end.first.own_chain
        if not is_guess and (self.texts_match or first[-1][1]):  # every holder holds the shallowest key, too
            everyone = self._routes.match((first[0], first[-1]), generations, found.at, wanted=wanted, touch=False)
            if len(everyone) == len(holders):
                return holders
        rest = islice(self.chain(prompt.end), len(found.unheld), None)
        held = self._routes.match(rest, generations, found.at, wanted=wanted, touch=False)
        if not is_guess:
            return held
        deepest = held[0].tokens if held else 0
        guessed = self.speculation.match(found.unheld, generations, SEVERAL_HOLDERS, deeper_than=deepest)
        return merged(held, guessed, SEVERAL_HOLDERS) or holders  # the guess may have failed meanwhile

    def unmatched(self, prompt: Prompt, decision: Decision, found: PoolMatch | None) -> Sequence[int]:
        """Return the fingerprints deeper than the matched prefix: this attempt is about to make them warm."""
        chain: Iterable[PrefixKey]
        if found is not None and decision.matched_tokens == found.learned_tokens:
            chain = found.unheld
        else:  # the chosen backend holds less than the deepest holder, or the match was a guess
            chain = takewhile(lambda key: key[0] > decision.matched_tokens, self.chain(prompt.end))
        return [fingerprint for _, token, text in chain for fingerprint in (token, text)]

"""Speculative claims: what the requests in flight will leave in the caches, before it is proved.

A burst of equal new prefixes would scatter, because nothing is learned before the first answer. So each request writes,
when it is sent, its backend under the fingerprints that the route table did not have; the next one finds it. The claim
goes when the request is learned for real, and when it fails.

Rules: a fingerprint may be claimed by several attempts, of one backend or of several; it stays until the last of them
is removed. Beyond `capacity` fingerprints (counted per attempt) no claim of an attempt is made, which is counted.
Invariant: when no attempt is left, nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import Trust


@dataclass(slots=True)
class SpeculationCounters:
    """What is claimed now, and what was since the start."""

    attempts: int = gauge("Attempts in flight whose prefixes are claimed.")
    fingerprints: int = gauge("Fingerprints that they claim, counted for each attempt.")
    added: int = counter("Attempts whose prefixes were claimed.")
    dropped: int = counter("Attempts that found no room for claims.")


class Speculation:
    """Fingerprint -> backends of the requests in flight.

    Args:
        capacity: fingerprints of all attempts together. The default is room for 1000 attempts of long chats, or 20 MB.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._attempts: dict[int, dict[BackendId, int]] = {}  # fingerprint -> backend -> number of attempts
        self.counters = SpeculationCounters()

    def __len__(self) -> int:
        """Different fingerprints claimed now."""
        return len(self._attempts)

    def add(self, fps: Sequence[int], backend: BackendId) -> Sequence[int]:
        """Claim fingerprints (0 is none) for a request that is sent. Returns those claimed, for `remove`: none where
        there is no room for all."""
        known = [fingerprint for fingerprint in fps if fingerprint]
        if self.counters.fingerprints + len(known) > self._capacity:
            self.counters.dropped += 1
            return ()
        attempts = self._attempts
        for fingerprint in known:
            backends = attempts.get(fingerprint)
            if backends is None:
                attempts[fingerprint] = {backend: 1}
            else:
                backends[backend] = backends.get(backend, 0) + 1
        self.counters.fingerprints += len(known)
        self.counters.attempts += bool(known)
        self.counters.added += bool(known)
        return known

    def remove(self, claimed: Sequence[int], backend: BackendId) -> None:
        """Withdraw the claims of one attempt, once: it was learned for real, or it failed."""
        attempts = self._attempts
        for fingerprint in claimed:
            backends = attempts[fingerprint]
            left = backends[backend] - 1
            if left:
                backends[backend] = left
            elif len(backends) > 1:
                del backends[backend]
            else:
                del attempts[fingerprint]
        self.counters.fingerprints -= len(claimed)
        self.counters.attempts -= bool(claimed)

    def match(
        self, chain: Iterable[PrefixKey], eligible_generations: Sequence[int], wanted: int = 1, *, deeper_than: int = 0
    ) -> list[Holder]:
        """The first `wanted` eligible backends that will hold a prefix of the prompt, each once, deepest first.

        The same shape as `RouteTable.match`; backends beyond `eligible_generations`, or with -1 there, do not count.
        Keys of `deeper_than` tokens and less are not read.
        """
        attempts, known = self._attempts, len(eligible_generations)
        found: list[Holder] = []
        for tokens, token, text in chain:
            if tokens <= deeper_than:
                break
            if token in attempts or (text and text in attempts):  # for most prompts nowhere
                for backend in (*attempts.get(token, ()), *attempts.get(text, ())):
                    eligible = backend < known and eligible_generations[backend] >= 0
                    if eligible and all(holder.backend != backend for holder in found):
                        found.append(Holder(backend, tokens, Trust.LOCAL))
                        if len(found) >= wanted:
                            return found
        return found


def merged(found: Sequence[Holder], guessed: Sequence[Holder], wanted: int) -> Sequence[Holder]:
    """Both lists as one: each backend once at its deepest, deepest first."""
    best: dict[int, Holder] = {}
    for holder in (*found, *guessed):
        known = best.get(holder.backend)
        if known is None or holder.tokens > known.tokens:
            best[holder.backend] = holder
    return sorted(best.values(), key=lambda holder: -holder.tokens)[:wanted]

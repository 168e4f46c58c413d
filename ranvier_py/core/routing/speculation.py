"""Speculative claims: prefixes that the requests in flight will leave in the caches, before that is proved.

Without them a burst of requests with one new prefix would scatter, because nothing is learned before the first answer.
Rule: a request that is sent stores its backend under the fingerprints that the route table did not have, until it is
learned for real, or fails. A fingerprint stays until the last of its claims is removed. Peers learn of prompts that
take long to compute (`gossip.backend_state.prefills`). Bound: `capacity`; an attempt beyond it is counted.
Invariant: when no attempt is left, nothing is claimed (test_speculation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import Trust

SHARED_TOKENS_MIN = 1024
"""Prompts with fewer tokens to compute are not shared: they are done in a tenth of a second, before a peer follows."""

ENDED_MAX = 4096


class Prefill(NamedTuple):
    """A long prompt that an engine is computing. `fingerprints`: the deepest first."""

    backend: BackendId
    generation: int
    fingerprints: Sequence[int]


@dataclass(slots=True)
class SpeculationCounters:
    """What is claimed now, and what has been claimed since the start."""

    attempts: int = gauge("Attempts in flight whose prefixes are claimed, with those of peers.")
    fingerprints: int = gauge("Fingerprints claimed by attempts in flight, counted for each attempt.")
    added: int = counter("Attempts in flight whose prefixes were claimed.")
    dropped: int = counter("Attempts in flight whose prefixes found no room for claims.")
    shared: int = counter("Attempts of which peers were sent the prefixes.")
    unshared: int = counter("Attempts whose prefixes were not sent to peers: too many began at once.")
    received: int = counter("Attempts of peers whose prefixes were claimed here.")
    void: int = counter("Attempts of peers that were not taken: an unknown process of an engine, or too many.")


class Speculation:
    """Maps fingerprints to the backends of the requests in flight that claim them.

    Args:
        capacity: most fingerprints of all attempts together. The default has room for 1000 long chats: 20 MB.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self._attempts: dict[int, dict[BackendId, int]] = {}  # fingerprint -> backend -> number of attempts
        self.counters = SpeculationCounters()
        self.begun: dict[int, Prefill] = {}  # by number, u32; the sender empties this and `ended`
        self.ended: list[int] = []
        self._came: Callable[[], object] | None = None
        self._numbers: dict[int, int] = {}  # of claims that are shared, by their identity
        self._number = 0

    def collect(self, came: Callable[[], object]) -> None:
        """Note from now on which prefills begin and end, for peers. `came` is called for each."""
        self._came = came

    def __len__(self) -> int:
        """How many different fingerprints are claimed now."""
        return len(self._attempts)

    def add(self, fps: Sequence[int], backend: BackendId, generation: int = 0, tokens: int = 0) -> Sequence[int]:
        """Claim fingerprints (0 is none) for a request that is sent. Returns the claimed ones, for `remove`: none if
        there is no room for all. `tokens`: how many the backend has to compute for it; 0 for a peer's request."""
        known = [fingerprint for fingerprint in fps if fingerprint]
        if not known:
            return ()
        counters, count = self.counters, len(known)
        if counters.fingerprints + count > self.capacity:
            counters.dropped += 1
            return ()
        attempts = self._attempts
        for fingerprint in known:
            backends = attempts.get(fingerprint)
            if backends is None:
                attempts[fingerprint] = {backend: 1}
            else:
                backends[backend] = backends.get(backend, 0) + 1
        counters.fingerprints += count
        counters.attempts += 1
        counters.added += 1
        if tokens >= SHARED_TOKENS_MIN and self._came is not None:
            self._number = self._numbers[id(known)] = (self._number + 1) & 0xFFFFFFFF or 1
            self.begun[self._number] = Prefill(backend, generation, known)
            self._came()
        return known

    def remove(self, claimed: Sequence[int], backend: BackendId) -> None:
        """Withdraw an attempt's claims, once, with what `add` returned: it was learned for real, or it failed."""
        if not claimed:
            return
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
        counters = self.counters
        counters.fingerprints -= len(claimed)
        counters.attempts -= 1
        number = self._numbers.pop(id(claimed), 0) if self._numbers else 0
        if number and self.begun.pop(number, None) is None and len(self.ended) < ENDED_MAX and self._came is not None:
            self.ended.append(number)
            self._came()

    def match(
        self, chain: Iterable[PrefixKey], eligible_generations: Sequence[int], wanted: int = 1, *, deeper_than: int = 0
    ) -> list[Holder]:
        """Return the first `wanted` eligible backends that will hold a prefix of the prompt, each once, deepest first.

        As for `RouteTable.match`, backends beyond `eligible_generations`, or with -1 there, are not eligible. Keys of
        `deeper_than` tokens and less are not read.
        """
        attempts, known = self._attempts, len(eligible_generations)
        found: list[Holder] = []
        if not attempts:
            return found
        for tokens, token, text in [key for key in chain if key[1] in attempts or key[2] in attempts]:  # few
            if tokens <= deeper_than:
                break
            for backend in (*attempts.get(token, ()), *attempts.get(text, ())):
                eligible = backend < known and eligible_generations[backend] >= 0
                if eligible and all(holder.backend != backend for holder in found):
                    found.append(Holder(backend, tokens, Trust.LOCAL))
                    if len(found) >= wanted:
                        return found
        return found


def merged(found: Sequence[Holder], guessed: Sequence[Holder], wanted: int) -> Sequence[Holder]:
    """Merge both lists into one of at most `wanted`: each backend once at its deepest, deepest first."""
    best: dict[int, Holder] = {}
    for holder in (*found, *guessed):
        known = best.get(holder.backend)
        if known is None or holder.tokens > known.tokens:
            best[holder.backend] = holder
    return sorted(best.values(), key=lambda holder: -holder.tokens)[:wanted]

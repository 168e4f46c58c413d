"""Numbers that a session has to repeat to prove that it is live, and how often strangers are answered at all.

An answer to a stranger carries a keyed hash of its session and the time, so that no stranger can make us remember it.
A greeting, which we send before we know any session, carries a random number that is kept for a while: it also tells
which address was greeted. Each is good for CHALLENGE_S to 2 * CHALLENGE_S seconds, and only its session's key can seal
the answer, so nobody can use what he overhears.

An address may lead back to ourselves: DNS names us too, and a service's address may lead to any node. That is believed
for OWN_S when a greeting of our own, sent to that very address less than 4 s ago, came back; it is no proof, since
whoever is on the wire can reflect it, so not where a proved session was received from since the greeting.
Bounds: GREETINGS_MAX greetings, OWN_MAX addresses, the oldest goes first.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.gossip.gossip_values import Address

CHALLENGE_S = 2.0  # long enough for the way there and back over a stream that has to be opened first
GREETINGS_MAX = 1024  # addresses greeted within 4 s: a whole cluster of the largest size we aim at
OWN_S = 5.0
"""A greeting of half a kilobyte to ourselves each five seconds costs nothing; an address that leads to one of several
nodes is tried again, and a reflected greeting keeps us from its receiver no longer."""

OWN_MAX = 64  # a host has few addresses, and a cluster few service names


class Challenges:
    """What was asked, and whether it was answered. `rng` is the system's where it counts."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._secret = rng.randbytes(32)
        self.greetings: BoundedDict[int, tuple[Address, float]] = BoundedDict(GREETINGS_MAX)

    def ask(self, session: int, now: float) -> int:
        """A challenge for this session, not 0. The same one for CHALLENGE_S seconds; nothing is kept."""
        return self._hash(session, int(now // CHALLENGE_S))

    def greet(self, address: Address, now: float) -> int:
        """A challenge for whoever is at this address, not 0."""
        self._expire(now)
        challenge = self._rng.getrandbits(64) or 1
        self.greetings[challenge] = (address, now)
        return challenge

    def greeted(self, challenge: int, now: float) -> tuple[Address, float] | None:
        """Where and when we sent a greeting with this challenge."""
        self._expire(now)
        return self.greetings.get(challenge)

    def answered(self, session: int, nonce: int, now: float) -> bool:
        """Whether this session repeats what it, or the address it was greeted at, was asked just now."""
        self._expire(now)
        if self.greetings.pop(nonce, None) is not None:
            return True
        period = int(now // CHALLENGE_S)
        return nonce in (self._hash(session, period), self._hash(session, period - 1))

    def _expire(self, now: float) -> None:
        while self.greetings:
            challenge = next(iter(self.greetings))
            if self.greetings[challenge][1] > now - 2 * CHALLENGE_S:
                return
            del self.greetings[challenge]

    def _hash(self, session: int, period: int) -> int:
        data = session.to_bytes(8, "little") + period.to_bytes(8, "little", signed=True)
        return int.from_bytes(blake2b(data, digest_size=8, key=self._secret).digest(), "little") or 1


class RateLimit:
    """Leave for one address at most once in `interval_s`, and for `keys_max` addresses in that time."""

    def __init__(self, interval_s: float, keys_max: int) -> None:
        self._interval_s = interval_s
        self._keys_max = keys_max
        self._last: dict[Address, float] = {}

    def may(self, key: Address, now: float) -> bool:
        """Whether it may be done now; if so, it counts as done."""
        while self._last:
            oldest = next(iter(self._last))
            if self._last[oldest] > now - self._interval_s:
                break
            del self._last[oldest]
        if key in self._last or len(self._last) >= self._keys_max:
            return False
        self._last[key] = now
        return True


class OwnAddresses(BoundedDict[Address, float]):
    """Addresses that lead back to us, until when. `mine` is the one that we advertise, our own for ever."""

    def __init__(self, mine: Address) -> None:
        super().__init__(OWN_MAX)
        self.mine = mine

    def believe(self, address: Address, now: float) -> None:
        """It leads back to us just now."""
        self[address] = now + OWN_S

    def holds(self, address: Address, now: float) -> bool:
        """Whether it is not worth a greeting now."""
        if address == self.mine or self.get(address, now) > now:
            return True
        self.pop(address, None)
        return False

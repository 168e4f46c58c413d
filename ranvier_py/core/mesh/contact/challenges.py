"""Challenges: numbers that a session has to repeat to prove that it is live, and the limits of answers to strangers.

A challenge is a keyed hash of the time and of the session that it is for, or of no session in a greeting, which we send
before we know any. So no stranger can make us remember it. It is good for CHALLENGE_S to 2 * CHALLENGE_S seconds, and
only the session's own key can seal the answer, so an eavesdropper can't use it.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from ranvier_py.core.mesh.mesh_values import Address

CHALLENGE_S = 2.0  # long enough for the way there and back over a stream that has to be opened first
ANY = 0  # in place of a session: whichever answers


class Challenges:
    """Makes challenges and checks their answers. `rng` is the system's where security matters."""

    def __init__(self, rng: Random) -> None:
        self._secret = rng.randbytes(32)

    def ask(self, session: int, now: float) -> int:
        """Return a challenge for this session, or for ANY; not 0. It is the same for CHALLENGE_S seconds."""
        return self._hash(session, int(now // CHALLENGE_S))

    def answered(self, session: int, nonce: int, now: float) -> bool:
        """Whether `nonce` repeats a challenge of the last seconds, for this session or for any."""
        period = int(now // CHALLENGE_S)
        return nonce in [self._hash(asked, at) for asked in (session, ANY) for at in (period, period - 1)]

    def _hash(self, session: int, period: int) -> int:
        data = session.to_bytes(8, "little") + period.to_bytes(8, "little", signed=True)
        return int.from_bytes(blake2b(data, digest_size=8, key=self._secret).digest(), "little") or 1


class RateLimit:
    """Allows an action once in `interval_s` for each address, and for at most `keys_max` addresses in that time."""

    def __init__(self, interval_s: float, keys_max: int) -> None:
        self._interval_s = interval_s
        self._keys_max = keys_max
        self._last: dict[Address, float] = {}

    def may(self, key: Address, now: float) -> bool:
        """Whether the action is allowed for this address now; if so, it counts as done."""
        while self._last:
            oldest = next(iter(self._last))
            if self._last[oldest] > now - self._interval_s:
                break
            del self._last[oldest]
        if key in self._last or len(self._last) >= self._keys_max:
            return False
        self._last[key] = now
        return True

"""Settings and counters of sharing stored answers with peers."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge

ANSWER_BYTES_MAX = 1024 * 1024
"""The largest answer that is advertised: a larger one takes 1 Gbit/s longer to carry than anybody waits for it."""


@dataclass(frozen=True, slots=True)
class PeerAnswerSettings:
    """`shares`: whether answers are advertised, given and fetched; if not, peers only learn what is void. `ttl_s`: how
    old an answer may be here. `timeout_s`: the longest that a request waits for a peer's answer."""

    shares: bool = False
    ttl_s: float = 300.0
    timeout_s: float = 0.02
    keys_bytes_per_s: int = 64 * 1024  # of keys, sent to all peers together: 800 new answers a second to 8 peers
    given_bytes_per_s: int = 32 * 1024 * 1024  # of answers, to all peers together
    given_per_s: int = 2000  # questions of one peer that are answered


@dataclass(slots=True)
class PeerAnswerCounters:
    """Gauges, and counts of one node since its start."""

    advertised: int = gauge("Stored answers that peers know to be here.")
    known: int = gauge("Stored answers of peers that are known here.")
    fetches: dict[str, int] = counter("Stored answers asked of peers, by what came of it.", label="result")
    fetched_bytes: int = counter("Bytes of stored answers that came from peers.")
    given: dict[str, int] = counter("Stored answers that peers asked for, by what came of it.", label="result")
    given_bytes: int = counter("Bytes of stored answers sent to peers.")
    passed_over: int = counter(
        "Times that a peer was not asked for a stored answer: it fell silent before, or was asked for too much."
    )
    keys_held_back: int = counter("Times that keys of answers waited for want of room.")
    keys_dropped: int = counter("Keys of stored answers beyond what is advertised, or remembered of peers.")
    key_lists: int = counter("Whole lists of answers' keys sent to peers that joined, or missed something.")
    invalidations: int = gauge("Invalidations of stored answers that hold now.")
    invalidations_received: int = counter("Invalidations of stored answers from peers that were new here.")
    invalidations_refused: int = counter(
        "Invalidations of stored answers from peers without the admin key's signature, or of no number."
    )
    invalidations_folded: int = counter(
        "Times that invalidations of stored answers were too many, and became one of everything."
    )

    def __post_init__(self) -> None:
        self.fetches.update(dict.fromkeys(("found", "absent", "timeout", "busy", "bad"), 0))
        self.given.update(dict.fromkeys(("found", "absent", "busy"), 0))

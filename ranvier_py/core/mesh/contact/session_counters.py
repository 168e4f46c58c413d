"""What happens at the gate that every packet of gossip passes, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge


@dataclass(slots=True)
class SessionCounters:
    """The gate's counters, and how many sessions are proved now."""

    own: int = counter("Gossip packets of this node that came back to it.")
    receiver: int = counter("Gossip packets that were meant for another session.")
    replay: int = counter("Gossip packets that came before, or are older than their sender's proof.")
    stranger: int = counter(
        "Gossip packets of sessions without a proof; their sender is challenged if it was a datagram."
    )
    record: int = counter("Gossip handshakes whose record is not of the node that sealed them.")
    version: int = counter("Gossip handshakes of nodes that speak no version of the protocol that this node speaks.")
    nonce: int = counter("Proofs of gossip sessions that repeat no number that this node asked for.")
    unsolicited: int = counter("Challenges from addresses that this node had sent nothing to.")
    limited: int = counter("Answers to unknown senders that were not sent because too many had been.")
    short: int = counter("Messages of unknown senders left unanswered because the answer would be longer.")
    body: int = counter("Gossip packets that could be decrypted, but hold no message.")
    unknown: int = counter("Gossip messages of kinds that this node does not know, which it skipped.")
    proved: int = counter("Gossip sessions of peers that proved themselves.")
    replaced: int = counter("Gossip sessions replaced by a later one of the same name.")
    evicted: int = counter("Gossip sessions forgotten because their table was full.")
    resent: int = counter("Gossip messages sent again, together with a proof of the session.")
    greetings: int = counter("Greetings sent to nodes without a proved session.")
    sessions: int = gauge("Gossip sessions of peers that are proved now.")

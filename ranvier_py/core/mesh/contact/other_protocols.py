"""Nodes of a protocol that this node does not speak, by host, so that an operator sees them from their first packet.

Rule: the version in a header is clear text that anybody can write, so nothing else depends on this list. A host is
forgotten KEPT_S after its last such packet. Bound: HOSTS_MAX; the one that was silent longest goes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranvier_py.core.bounded import BoundedDict

HOSTS_MAX = 64
KEPT_S = 60.0  # a node that finds nobody greets the addresses of its configuration each half minute


class OtherProtocols:
    """`new`: the protocols of hosts that were not listed before; whoever logs them clears it."""

    def __init__(self) -> None:
        self.new: BoundedDict[str, int] = BoundedDict(HOSTS_MAX)
        self._seen: BoundedDict[str, tuple[int, float]] = BoundedDict(HOSTS_MAX)

    def note(self, host: str, protocol: int, now: float) -> None:
        """Note a packet from there."""
        known, _ = self._seen.get(host, (-1, now))
        self._seen[host] = protocol, now
        if known != protocol:
            self.new[host] = protocol

    def listed(self, now: float) -> Mapping[str, int]:
        """Return the protocol of each host, as its last packet shows it."""
        for host in [host for host, (_, seen_at) in self._seen.items() if now - seen_at > KEPT_S]:
            del self._seen[host]
        return {host: protocol for host, (protocol, _) in self._seen.items()}

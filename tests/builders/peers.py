"""Live peers as membership names them to the machines of gossip."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Peer


def alike(near: Sequence[Peer], members: Sequence[int] = (), met: Sequence[Peer] | None = None) -> LivePeers:
    """These peers, all of which share routes; `members` are the sessions of all live members."""
    return LivePeers(near, near, near if met is None else met, members, members)

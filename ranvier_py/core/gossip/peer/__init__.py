"""A node among its peers: what binds router and registry to gossip."""

from ranvier_py.core.gossip.peer.router_peer import PeerSettings, RouterPeer

__all__ = ["PeerSettings", "RouterPeer"]

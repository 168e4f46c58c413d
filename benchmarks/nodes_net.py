"""Several nodes that read text, in virtual time: each a real router, made peers by the real gossip.

A request comes to one node by the draw of `node_of`, as a DNS name with many addresses would send it. The network, and
what makes routers peers, are those of `ranvier replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from benchmarks.hit_rate_router import RouterPlacement
from benchmarks.hit_rate_traces import Prepared
from ranvier_py.core.gossip.peer import RouterPeer
from ranvier_py.core.routing.router import Attempt
from ranvier_py.replay.replay_network import PeerNet, make_peers


def make_net(nodes: Sequence[RouterPlacement], seed: int | str, now: float) -> PeerNet:
    """The nodes as peers that have been told of each other."""
    scheme = nodes[0].scheme
    routers = [node.router for node in nodes]
    return PeerNet(make_peers(RouterPeer, routers, key=scheme.key, schema=scheme.schema, seed=seed, now=now), now)


class NodesPlacement:
    """A Placement (see `hit_rate_replay`) by several nodes.

    `kept_out` names engines that are out of the question for a request: how a benchmark makes an engine busy.
    """

    def __init__(
        self,
        nodes: Sequence[RouterPlacement],
        node_of: Callable[[Prepared], int],
        net: PeerNet | None = None,
        kept_out: Callable[[Prepared], Collection[int]] = lambda _: (),
    ) -> None:
        self.nodes = nodes
        self._node_of = node_of
        self._net = net
        self._kept_out = kept_out

    def route(self, item: Prepared, now: float) -> tuple[int, Any]:
        index = self._node_of(item)
        engine, attempt = self.nodes[index].route(item, now, self._kept_out(item))
        self._touched(index, now)
        return engine, (index, attempt)

    def first_token(self, attempt: tuple[int, Attempt], now: float) -> None:
        index, own = attempt
        self.nodes[index].first_token(own, now)
        self._touched(index, now)

    def finished(self, attempt: tuple[int, Attempt], item: Prepared, cached_tokens: int, now: float) -> None:
        index, own = attempt
        self.nodes[index].finished(own, item, cached_tokens, now)
        self._touched(index, now)

    def _touched(self, index: int, now: float) -> None:
        if self._net is not None:
            self._net.touched(index, now)

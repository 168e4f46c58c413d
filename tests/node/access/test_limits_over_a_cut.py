"""A limit over four processes under load: datagrams are lost, the network is cut in halves, and one is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import httpx
import pytest
import trio

from cluster.dns.addresses import free_port
from cluster.network.links import CUT, Link, Links, Rule
from cluster.processes.relay import End, Relay
from tests.node.access.test_limits_of_nodes import ask, engines, limits_file
from tests.node.node_lab import BETWEEN_LOOKS_S, ClusterLab, cluster_lab

LIMIT = 60
REAL, SHOWN = ([f"127.0.{net}.{number}" for number in range(2, 6)] for net in (6, 7))
CUT_AT, KILLED_AT, HEALED_AT, LOADED_S = LIMIT // 3, LIMIT // 2, 12.0, 25.0
EVERY_S = 0.4  # a request of each client
LOSS = 0.2  # of datagrams; streams wait longer


class CutNetwork:
    """Processes of nodes, and the relay between them."""

    def __init__(self, place: ClusterLab) -> None:
        self.place, self.links, self.port = place, Links(Link(loss=LOSS)), free_port([*REAL, *SHOWN], Random())
        ends = [End((real, self.port), (shown, self.port)) for real, shown in zip(REAL, SHOWN, strict=True)]
        self.relay = Relay(ends, self.links, Random(1))
        self.processes, self.urls, self.controls = list[trio.Process](), list[str](), list[str]()

    async def start(self, file: Path) -> None:
        await self.place.nursery.start(self.relay.run)
        for real, shown in zip(REAL, SHOWN, strict=True):
            settings = {"gossip": f"{real}:{self.port}", "advertise": f"{shown}:{self.port}", "keys_file": file}
            process, url, control = await self.place.addressed_process(**settings)
            self.place.places.append(f"{shown}:{self.port}")
            self.processes.append(process)
            self.urls.append(url)
            self.controls.append(control)
        for control in self.controls:
            while (await self.place.http.get(f"{control}/admin/access")).json()["nodes"] != len(REAL):  # noqa: ASYNC110
                await trio.sleep(BETWEEN_LOOKS_S)

    def cut(self) -> None:
        self.links.add(Rule(range(2), range(2, 4), CUT))
        self.relay.wake()

    def heal(self) -> None:
        self.links.heal()
        self.relay.wake()


@pytest.mark.slow
async def test_halves_that_lost_each_other_and_a_killed_node_serve_together_no_more_than_the_limit(
    tmp_path: Path,
) -> None:
    async with cluster_lab(tmp_path, engines=0, deadline_s=150.0) as place:
        await engines(place)
        net, statuses = CutNetwork(place), list[int]()
        await net.start(limits_file(tmp_path, requests_per_minute=LIMIT))
        began = trio.current_time()

        async def load(url: str) -> None:
            while True:
                try:
                    statuses.append(await ask(place.http, url))
                except httpx.TransportError:
                    return  # it was killed
                await trio.sleep(EVERY_S)

        with trio.move_on_after(LOADED_S):
            async with trio.open_nursery() as clients:
                for url in net.urls:
                    clients.start_soon(load, url)
                while statuses.count(200) < CUT_AT:  # noqa: ASYNC110
                    await trio.sleep(BETWEEN_LOOKS_S)
                net.cut()
                while statuses.count(200) < KILLED_AT:  # noqa: ASYNC110
                    await trio.sleep(BETWEEN_LOOKS_S)
                net.processes[-1].send_signal(signal.SIGKILL)
                await trio.sleep(HEALED_AT)
                net.heal()
        assert trio.current_time() - began < 60.0  # all of it in one minute
        assert statuses.count(429) > LIMIT / 4
        assert 0.6 * LIMIT <= statuses.count(200) <= 1.05 * LIMIT

"""Four routers and a Redis that is killed, emptied, cleared and cut off: in the end all know what the engines hold."""

from __future__ import annotations

import time
from random import Random

import pytest
import trio

from ranvier_py.core.engine_cache.prefix_index.prefix_index import Verb
from tests.examples import some
from tests.io.redis_server import RedisServer, needs_redis, redis_server
from tests.io.test_redis_index import BACKENDS, DEADLINE_S, Side, X, Y, all_share, hurried, running

pytestmark = [needs_redis, pytest.mark.usefixtures("hurried")]

__all__ = ["hurried"]

PREFIXES = [f"{number:x}" for number in range(60)]
STEPS = 120


class Chaos:
    """Router a reads X and b reads Y without a gap, c both with gaps, d nothing. `held` is what the engines hold."""

    def __init__(self, server: RedisServer, rng: Random) -> None:
        self.server = server
        self.rng = rng
        self.a, self.b = Side(server.url, (X,)), Side(server.url, (Y,))
        self.c, self.d = Side(server.url, (X, Y)), Side(server.url, ())
        self.sides = (self.a, self.b, self.c, self.d)
        self.held: dict[str, dict[str, int]] = {X: {}, Y: {}}
        self.is_dead = False

    def engines_report(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(30)):
            engine, prefix = rng.choice((X, Y)), rng.choice(PREFIXES)
            kind, tokens = (Verb.CREATED, rng.randrange(1, 1000)) if rng.random() < 0.6 else (Verb.PURGED, None)
            if tokens is None:
                self.held[engine].pop(prefix, None)
            else:
                self.held[engine][prefix] = tokens
            for side in self.sides:
                if engine in side.reads and BACKENDS[engine] in side.standing:
                    side.receive(kind, prefix, engine, tokens)
        for side in self.sides:
            side.index.holders(rng.choice(PREFIXES), time.monotonic())

    def gap(self, begins: bool) -> None:
        """c loses its streams, or has them anew."""
        if begins:
            self.c.standing.clear()
        elif not self.c.standing:
            for name in self.c.reads:
                self.c.standing.add(BACKENDS[name])
                self.c.index.forget((BACKENDS[name],))

    def revive(self) -> None:
        if self.is_dead:
            self.server.start()
            self.is_dead = False

    async def harm(self) -> None:
        chance = self.rng.random()
        if self.is_dead:
            if chance < 0.2:
                self.revive()
        elif chance < 0.04:
            self.server.kill()
            self.is_dead = True
        elif chance < 0.06:
            self.server.client().flushall()
        elif chance < 0.08:
            self.server.client().execute_command("client", "kill", "type", "normal")
        elif chance < 0.10:
            side = self.rng.choice(self.sides)
            side.index.clear()
            side.shared.clear(time.monotonic())
            self.held = {X: {}, Y: {}}  # what comes before all have read of it is another matter
            while any(len(side.index) or not side.shared.sharing for side in self.sides):
                await self.pause()

    async def pause(self) -> None:
        """For about a tick."""
        await trio.sleep(0.02)

    async def differences(self) -> list[tuple[str, dict[str, int]]]:
        """Prefixes of which somebody knows something else than the engines hold, and what."""
        found = []
        for prefix in PREFIXES:
            expected = {engine: held[prefix] for engine, held in self.held.items() if prefix in held}
            known = [await side.holders(prefix) for side in self.sides]
            found += [(prefix, each) for each in known if each != expected]
        return found


@pytest.mark.parametrize("seed", some([1, 2, 3]))
async def test_cx21_after_any_outages_gaps_and_clears_all_routers_know_what_the_engines_hold(seed: int) -> None:
    with redis_server() as server:
        chaos = Chaos(server, Random(seed))
        async with running(*chaos.sides):
            await all_share(*chaos.sides)
            for _ in range(STEPS):
                chaos.engines_report()
                chaos.gap(begins=chaos.rng.random() < 0.05)
                await chaos.harm()
                await chaos.pause()
            chaos.revive()
            chaos.gap(begins=False)
            with trio.move_on_after(DEADLINE_S / 2):
                while await chaos.differences():
                    await chaos.pause()
                return
            pytest.fail(f"seed {seed}: {await chaos.differences()}")

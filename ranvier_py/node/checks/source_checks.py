"""What a node finds its engines by, and what it keeps beside itself: sources of backends, and Redis.

Rule: each source is looked at once, by what follows it in a node. Bound: LOOK_S for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import SystemRandom
from typing import Any, cast

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.redis_commands import RedisFailure, RedisRefusal
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.node.discovery.discovery_parts import followers_of
from ranvier_py.node.discovery.followers import Sink, SourceFollower
from ranvier_py.node.parts.response_parts import redis_pools_of

LOOK_S = 10.0
KEPT = "engines that only it names"


class FirstSets:
    """Takes what each source gives first. `specs`: by URL; `found`: what is wrong."""

    def __init__(self) -> None:
        self.specs: dict[str, BackendSpec] = {}
        self.found: list[Finding] = []
        self._given: dict[SourceName, trio.Event] = {}

    async def look(self, follower: SourceFollower) -> None:
        given = self._given[follower.name] = trio.Event()
        with trio.move_on_after(LOOK_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follower.run, Sink(cast("Any", self), follower.name))
                await given.wait()
                nursery.cancel_scope.cancel()
        if not given.is_set():
            self.fail(follower.name, f"no answer within {LOOK_S:g} s")

    def take(self, name: SourceName, found: Iterable[FoundBackend[BackendSpec]], left_out: Sequence[str]) -> None:
        if self._given[name].is_set():
            return
        self._given[name].set()
        self.specs |= {each.url: each.spec.with_key(each.key) for each in found if not each.draining}
        for words in left_out:
            self._add(
                name, Severity.NOTICE, f"of the backends by {name} one is left out: {words}", "None, if so meant."
            )

    def fail(self, name: SourceName, why: str) -> None:
        if not self._given[name].is_set():
            self._given[name].set()
            if name.kind == "file":  # a problem of the configuration
                return
            remedy = "Correct it, or what it names; a node keeps its last good set meanwhile."
            self._add(name, Severity.DEGRADED, f"backends can't be found by {name}: {why}", remedy)

    def doubt(self, name: SourceName, why: str) -> None:
        self.fail(name, why)

    def _add(self, name: SourceName, severity: Severity, what: str, remedy: str) -> None:
        self.found.append(
            Finding("source", severity, what, about=str(name), whom=KEPT, remedy=remedy, command="ranvier check")
        )


async def backends_of(config: Config) -> tuple[Sequence[BackendSpec], Sequence[Finding]]:
    """Return the backends of a configuration and of its sources, and what is wrong with these."""
    sets = FirstSets()
    async with trio.open_nursery() as nursery:
        for follower in followers_of(config, SystemRandom()).values():
            nursery.start_soon(sets.look, follower)
    return [*({spec.url: spec for spec in config.backend} | sets.specs).values()], sets.found


async def check_stores(config: Config) -> list[Finding]:
    """Redis, where it is used."""
    try:
        pools = redis_pools_of(config)
    except ConfigError:  # a problem of the configuration
        return []
    found: list[Finding] = []
    for name, pool in {id(pool): (name, pool) for name, pool in pools.items()}.values():
        replies = await pool.send([("PING",)], connects=True)
        found += store_findings(name, pool.place, replies)
        pool.close_idle()
    return found


def store_findings(name: str, place: str, replies: list[object] | RedisFailure) -> Iterator[Finding]:
    whom = "what is shared by it; each node goes on with its own"
    if isinstance(replies, RedisFailure):
        what = f"Redis at {place} does not answer: {replies.why}"
        yield Finding("store", Severity.DEGRADED, what, about=name, whom=whom, remedy=f"Start it, or correct {name}.")
    elif any(isinstance(each, RedisRefusal) for each in replies):
        what = f"Redis at {place} refuses this node: {replies[0]}"
        yield Finding(
            "store", Severity.DEGRADED, what, about=name, whom=whom, remedy=f"Correct user and password in {name}."
        )

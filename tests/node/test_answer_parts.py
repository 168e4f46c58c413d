"""What comes of a peer's answer on its way to a request: kept if it is one, young enough, and not void by then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.mesh.transfer import TransferPart, Wanted
from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.prompts.tenants import CREDENTIAL, Tenants
from ranvier_py.core.response_cache.answer_frames import encoded
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.invalidations import EVERYTHING, VoidScope
from ranvier_py.core.response_cache.peers.answer_keys import AnswerKeys
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.peer_answers import AnswerSecrets, PeerAnswers
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.parts.response_parts import share_answers
from ranvier_py.proxy.stages.response_cache import ResponseCache
from tests.builders.machine_net import alike, peer_of

KEY, TENANT, SECRET = b"k" * 32, b"t" * 16, b"a secret"


def answer(stored_at: float) -> StoredAnswer:
    return StoredAnswer("chat", "m", TENANT, b"application/json", b"{}", b"", False, stored_at, (1, 1))


@dataclass
class Lab:
    """One node of which the test is the only peer."""

    outbox: list[Outgoing] = field(default_factory=list)
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        options = ResponseCacheOptions(enabled=True, backend="cluster", peer_timeout_s=self.timeout_s)
        self.responses = ResponseCache(AnswerStore(options), Tenants(CREDENTIAL, TextHasher(SECRET)))
        settings = PeerAnswerSettings(shares=True, timeout_s=self.timeout_s)
        now = time.monotonic()
        self.answers = PeerAnswers(settings, AnswerSecrets(SECRET), self.outbox, Random(1), now)
        self.answers.met(alike([peer_of(2)]), now)
        parts = SimpleNamespace(
            peer=SimpleNamespace(features=SimpleNamespace(answers=self.answers)),
            port=SimpleNamespace(poke=lambda: None),
        )
        share_answers(self.responses, cast("ClusterParts", parts))
        self.advertise()

    def advertise(self) -> None:
        digest = self.answers.keys.name_of(KEY)[:8]
        message = AnswerKeys(1, True, digest, b"\0\0", b"")
        self.answers.receive(peer_of(2), message, time.monotonic())

    async def find(self, data: bytes, *, before: Any = lambda: None, max_age_s: float = 1e9) -> StoredAnswer | None:
        """What a request gets when the peer answers it so; `before` that something happens."""
        assert self.responses.elsewhere is not None
        found: list[StoredAnswer | None] = []

        async def look() -> None:
            assert self.responses.elsewhere is not None
            found.append(await self.responses.elsewhere.find(KEY, max_age_s))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                await trio.testing.wait_all_tasks_blocked()
                before()
                for wanted in [one.message for one in self.outbox if isinstance(one.message, Wanted)]:
                    part = TransferPart(wanted.what, wanted.request, 0, True, data)
                    self.answers.fetches.transfer.receive(peer_of(2), part, time.monotonic())
                self.outbox.clear()
        return found[0]


def framed(age_s: float = 1.0, key: bytes = KEY) -> bytes:
    return encoded(key, answer(0.0), age_s)


async def test_a_peers_answer_is_as_old_as_its_frame_has_it_and_no_younger() -> None:
    lab = Lab()
    found = await lab.find(framed(10.0))
    assert found is not None
    assert found.body == b"{}"
    assert time.monotonic() - found.stored_at >= 10.0


async def test_what_is_no_answer_to_it_or_too_old_is_none() -> None:
    for data in (b"", b"garbage", framed(key=b"o" * 32), framed() + b"x"):
        lab = Lab()
        assert await lab.find(data) is None
        assert lab.answers.counters.fetches["bad"] == 1
    assert await Lab().find(framed(400.0)) is None


async def test_an_answer_older_than_the_client_takes_is_none_whatever_the_peer_gives() -> None:
    assert await Lab().find(framed(10.0), max_age_s=5.0) is None


async def test_an_answer_that_is_made_void_before_it_arrives_is_none() -> None:
    for scope in (EVERYTHING, VoidScope("m"), VoidScope("m", TENANT)):
        lab = Lab()
        assert await lab.find(framed(), before=lambda lab=lab, scope=scope: void(lab, scope)) is None
    assert await (lab := Lab()).find(framed(), before=lambda: void(lab, VoidScope("other"))) is not None


def void(lab: Lab, scope: VoidScope) -> None:
    lab.responses.voids(scope, time.monotonic(), time.monotonic())


async def test_a_peer_that_gives_nothing_costs_the_deadline_and_no_more() -> None:
    lab = Lab(timeout_s=0.02)
    assert lab.responses.elsewhere is not None
    began = time.monotonic()
    with trio.fail_after(5):
        assert await lab.responses.elsewhere.find(KEY, 1e9) is None
    assert time.monotonic() - began >= 0.02


def test_what_is_kept_is_advertised_and_what_is_dropped_is_not() -> None:
    lab = Lab()
    store = lab.responses.store
    now = time.monotonic()
    for number in range(3):
        store.keep(bytes([number]) * 32, answer(now))
    assert lab.answers.counters.advertised == 3
    store.void(VoidScope("m"), now + 1)
    assert lab.answers.counters.advertised == 0
    name = lab.answers.keys.name_of(bytes(32))
    store.keep(bytes(32), answer(now))
    assert lab.answers.fetches.find(name, 1e9, now) == encoded(bytes(32), answer(now), now)
    assert lab.answers.fetches.find(name[:8] + bytes(24), 1e9, now) is None

"""Looking up names for ever, with resolvers that answer well and badly, mostly in virtual time."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
import trio.abc
import trio.testing

from ranvier_py.core.addresses import HostPort
from ranvier_py.core.errors import ConfigError
from ranvier_py.io import discovery
from ranvier_py.io.discovery import ADDRESSES_MAX, Discovery, own_host

Clock = trio.testing.MockClock

PORT = 7946
Answer = Sequence[str] | Exception | float
"""Addresses, an error, or seconds to wait before the next answer in the list."""


class FakeResolver(trio.abc.HostnameResolver):
    """What each name answers: the same for ever, or by number of the question."""

    def __init__(self, answers: dict[str, Answer | Callable[[int], Answer]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, float]] = []

    def times(self, name: str) -> list[float]:
        return [at for asked, at in self.asked if asked == name]

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: Any,
        family: int = 0,
        type: int = 0,  # noqa: A002  # the interface's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        assert host is not None
        name = host.decode()
        number = len(self.times(name))
        self.asked.append((name, trio.current_time()))
        answer = self.answers[name]
        answer = answer(number) if callable(answer) else answer
        if isinstance(answer, float):
            await trio.sleep(answer)
            answer = ["10.9.9.9"]
        if isinstance(answer, Exception):
            raise answer
        return [entry(text, port) for text in answer if family in (0, entry(text, port)[0])]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


def entry(text: str, port: int) -> tuple[Any, ...]:
    if ":" in text:
        return (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", (text, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_DGRAM, 17, "", (text, port))


NXDOMAIN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
SERVFAIL = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class World:
    """A Discovery, what it found, and whether it is alone."""

    def __init__(
        self,
        answers: dict[str, Answer | Callable[[int], Answer]],
        join: Sequence[str],
        own: str = "10.0.0.1",
        family: int = socket.AF_UNSPEC,
    ):
        self.resolver = FakeResolver(answers)
        self.alone = False
        self.contacts: list[tuple[float, tuple[HostPort, ...]]] = []
        places = [(host, PORT) for host in join]
        self.discovery = Discovery(
            places,
            lambda found: self.contacts.append((trio.current_time(), tuple(found))),
            lambda: self.alone,
            Random(7),
            (own, PORT),
            family,
        )

    @property
    def hosts(self) -> set[str]:
        return {host for _, places in self.contacts for host, _ in places}


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    trio.socket.set_custom_hostname_resolver(world.resolver)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.discovery.run)
        yield world
        nursery.cancel_scope.cancel()


async def run(world: World, seconds: float) -> None:
    async with running(world):
        await trio.sleep(seconds)


async def test_names_are_looked_up_for_ever_about_every_half_minute(autojump_clock: Clock) -> None:
    """Resolved once, a node stays alone after the next change of addresses (grafana/mimir#16254)."""
    world = World({"peers": lambda number: [f"10.0.1.{number % 200 + 1}"]}, ["peers"])
    await run(world, 3600)
    gaps = [later - earlier for earlier, later in pairwise(world.resolver.times("peers"))]
    assert 100 <= len(gaps) <= 150
    assert all(24 <= gap <= 36.01 for gap in gaps)
    assert len({round(gap, 3) for gap in gaps}) > 90
    assert len(world.hosts) == len(gaps) + 1


async def test_a_node_that_is_alone_looks_every_second_at_first_and_every_five_seconds_for_ever(
    autojump_clock: Clock,
) -> None:
    world = World({"peers": NXDOMAIN}, ["peers"])
    world.alone = True
    await run(world, 600)
    times = world.resolver.times("peers")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    expected = [1, 2, 4, *[5] * (len(gaps) - 3)]
    assert len(gaps) > 100
    assert all(0.8 * wait <= gap <= 1.21 * wait for gap, wait in zip(gaps, expected, strict=True))


async def test_a_node_that_was_alone_for_long_finds_whom_the_name_names_at_last_within_six_seconds(
    autojump_clock: Clock,
) -> None:
    world = World({"peers": lambda _: ["10.0.0.2"] if trio.current_time() > 3000 else []}, ["peers"])
    world.alone = True
    await run(world, 3007)
    assert world.contacts[0][0] <= 3006


async def test_a_node_that_has_found_a_peer_looks_for_others_soon_and_then_each_half_minute(
    autojump_clock: Clock,
) -> None:
    """Two groups that formed apart know each other by the name alone."""
    world = World({"peers": ["10.0.0.2"]}, ["peers"])
    world.alone = True
    async with running(world):
        await trio.sleep(0.5)
        world.alone = False
        await trio.sleep(200)
    gaps = [later - earlier for earlier, later in pairwise(world.resolver.times("peers"))]
    expected = [1, 2, 4, 8, 16, *[30] * (len(gaps) - 5)]
    assert all(0.8 * wait <= gap <= 1.21 * wait for gap, wait in zip(gaps, expected, strict=True))


async def test_whoever_becomes_alone_looks_at_once_and_then_often(autojump_clock: Clock) -> None:
    world = World({"peers": ["10.0.0.2"]}, ["peers"])
    async with running(world):
        await trio.sleep(100)
        world.alone = True
        left_at = trio.current_time()
        await trio.sleep(5)
    after = [at - left_at for at in world.resolver.times("peers") if at > left_at]
    assert after[0] <= 1.01
    assert len(after) >= 3


@pytest.mark.parametrize(
    ("trouble", "counter"),
    [
        (NXDOMAIN, "failures"),
        (SERVFAIL, "failures"),
        ([], "empty"),
        (["10.0.0.1"], "empty"),  # ourselves alone
    ],
)
async def test_a_name_that_answers_badly_keeps_what_it_sent_before(
    autojump_clock: Clock, trouble: Answer, counter: str
) -> None:
    good = ["10.0.0.1", "10.0.0.2"]
    world = World({"peers": lambda number: good if number == 0 or number > 5 else trouble}, ["peers"])
    async with running(world):
        await trio.sleep(150)
        assert world.contacts[-1][1] == (("10.0.0.2", PORT),)
        assert len(world.contacts) == len(world.resolver.asked) > 3
        assert getattr(world.discovery.counters, counter) == len(world.contacts) - 1
        await trio.sleep(60)
    assert world.hosts == {"10.0.0.2"}
    assert world.discovery.counters.addresses == 1


async def test_new_addresses_take_the_place_of_old_ones(autojump_clock: Clock) -> None:
    world = World({"peers": lambda number: ["10.0.0.2"] if number == 0 else ["10.0.0.3"]}, ["peers"])
    async with running(world):
        await trio.sleep(40)
        assert world.contacts[-1][1] == (("10.0.0.3", PORT),)


async def test_a_slow_name_holds_up_no_other(autojump_clock: Clock) -> None:
    world = World({"slow": 50.0, "quick": ["10.0.0.2"]}, ["slow", "quick", "10.0.0.3"])
    async with running(world):
        await trio.sleep(1)
        assert world.hosts == {"10.0.0.2", "10.0.0.3"}
        await trio.sleep(48)
        assert len(world.resolver.times("quick")) == 2
        await trio.sleep(3)
        assert "10.9.9.9" in world.hosts


async def test_literals_are_not_looked_up_and_entries_count_once(autojump_clock: Clock) -> None:
    world = World({}, ["10.0.0.2", "::1", "10.0.0.2", "10.0.0.1"])
    await run(world, 100)
    assert world.resolver.asked == []
    assert set(world.contacts[-1][1]) == {("10.0.0.2", PORT), ("::1", PORT)}
    assert len(world.contacts) >= 3


async def test_families_that_we_do_not_speak_are_left_out(autojump_clock: Clock) -> None:
    answers: Sequence[str] = ["10.0.0.2", "fd00::2", "10.0.0.2"]
    only4 = World({"peers": answers}, ["peers", "fd00::3"], family=socket.AF_INET)
    await run(only4, 1)
    assert only4.hosts == {"10.0.0.2"}
    assert only4.discovery.counters.ignored == 1
    both = World({"peers": answers}, ["peers", "fd00::3"])
    await run(both, 1)
    assert both.hosts == {"10.0.0.2", "fd00::2", "fd00::3"}


async def test_a_node_that_advertises_loopback_does_not_greet_remote_ones(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """They would answer to their own loopback."""
    world = World({"peers": ["127.0.0.2", "10.0.0.2", "10.0.0.3"]}, ["peers"], own="127.0.0.1")
    await run(world, 100)
    assert world.hosts == {"127.0.0.2"}
    assert len(caplog.records) == 1
    assert world.discovery.counters.ignored >= 4


async def test_of_a_large_answer_a_few_are_tried_and_all_in_the_end(autojump_clock: Clock) -> None:
    world = World({"peers": [f"10.1.{number // 250}.{number % 250 + 1}" for number in range(500)]}, ["peers"])
    async with running(world):
        await trio.sleep(1)
        assert [len(places) for _, places in world.contacts] == [ADDRESSES_MAX]
        await trio.sleep(3600)
    assert len(world.hosts) == 500


async def test_more_names_than_can_be_looked_up_are_reported(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world = World({f"n{number}": ["10.0.0.2"] for number in range(30)}, [f"n{number}" for number in range(30)])
    await run(world, 1)
    assert len(world.resolver.asked) == discovery.NAMES_MAX
    assert "at most 16" in caplog.text


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which address of ours faces which of theirs; no way to any other."""
    table: dict[str, str] = {}
    monkeypatch.setattr(discovery, "facing", lambda host: table.get(host, ""))
    return table


async def test_our_address_is_the_one_that_faces_the_peers(autojump_clock: Clock, modes: dict[str, str]) -> None:
    modes.update({"10.0.0.2": "10.0.0.1", "192.0.2.1": "172.16.0.1", "127.0.0.1": "127.0.0.1"})
    assert await own_host([("127.0.0.1", 1), ("10.0.0.2", 1)], socket.AF_INET) == ("10.0.0.1", False)
    assert await own_host([("127.0.0.1", 1)], socket.AF_INET) == ("172.16.0.1", False)
    trio.socket.set_custom_hostname_resolver(FakeResolver({"peers": ["10.0.0.2"], "bad": NXDOMAIN, "slow": 99.0}))
    assert await own_host([("bad", 1), ("peers", 1)], socket.AF_INET) == ("10.0.0.1", False)
    assert await own_host([("slow", 1)], socket.AF_INET) == ("172.16.0.1", True)
    assert await own_host([("bad", 1)], socket.AF_INET) == ("172.16.0.1", True)
    modes.pop("192.0.2.1")
    assert await own_host([("127.0.0.1", 1)], socket.AF_INET) == ("127.0.0.1", False)


LATER = [(NXDOMAIN, "no record"), ([], "an empty record"), (SERVFAIL, "no server")]


@pytest.mark.parametrize("before", [answer for answer, _ in LATER], ids=[words for _, words in LATER])
async def test_a_guessed_address_is_chosen_again_before_the_first_peer_is_greeted(
    before: Answer, autojump_clock: Clock, modes: dict[str, str]
) -> None:
    modes.update({"10.0.0.2": "10.0.0.1", "10.0.9.9": "10.0.9.1", "127.0.0.1": "127.0.0.1"})
    answers = {"peers": lambda number: before if number < 4 else ["127.0.0.1", "10.0.0.2"], "other": lambda _: before}
    moves = list[tuple[HostPort, int]]()
    world = World(answers, ["peers", "other"], own="172.16.0.1")
    world.discovery = Discovery(
        *([("peers", PORT), ("other", PORT)], lambda found: world.contacts.append((0, tuple(found))), lambda: True),
        *(Random(7), ("172.16.0.1", PORT), socket.AF_INET),
    )
    world.discovery.moved = lambda own: moves.append((own, len(world.contacts)))
    await run(world, 300)
    assert moves == [(("10.0.0.1", PORT), 0)]
    assert world.discovery.own == ("10.0.0.1", PORT)
    assert "10.0.0.2" in world.hosts
    world.resolver.answers["other"] = ["10.0.9.9"]  # the next peer known changes nothing any more
    await run(world, 300)
    assert len(moves) == 1


async def test_a_node_that_stays_alone_names_the_cause(
    autojump_clock: Clock, modes: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    modes["10.0.0.2"] = "10.0.0.1"
    world = World({"peers": lambda number: NXDOMAIN if number < 5 else ["10.0.0.2"]}, ["peers"], own="172.16.0.1")
    world.alone, world.discovery.moved = True, lambda _: None
    await run(world, 1000)
    first, second = [each.getMessage() for each in caplog.records if "gossip.alone" in each.getMessage()]
    assert "DNS has none for peers:7946" in first
    assert "; peers are given 172.16.0.1:7946, of the default route" in first
    assert "nobody answers at 10.0.0.2:7946: not started" in second
    assert "default route" not in second


async def test_an_address_that_can_not_be_found_out_must_be_set(autojump_clock: Clock, modes: dict[str, str]) -> None:
    modes["10.0.0.2"] = "0.0.0.0"
    with pytest.raises(ConfigError, match="advertise"):
        await own_host([("10.0.0.2", 1)], socket.AF_INET)


def test_the_kernel_reports_which_address_of_ours_faces_another() -> None:
    assert discovery.facing("127.0.0.2") == "127.0.0.1"
    assert discovery.facing("255.255.255.255") == ""


async def test_a_node_that_nobody_answers_states_once_what_may_be_wrong(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has another key or cluster_name gets nothing at all, and looks like a cluster of one."""
    world = World({"peers": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}, ["peers", "10.0.0.4"])
    world.alone = True
    async with running(world):
        await trio.sleep(8)
        assert "gossip.alone" not in caplog.text
        await trio.sleep(100)
        assert caplog.text.count("gossip.alone nobody answers at 10.0.0.4:7946 and 2 more: ") == 1
        world.alone = False
        await trio.sleep(60)
        world.alone = True
        await trio.sleep(60)
        assert caplog.text.count("gossip.alone") == 2


async def test_a_first_node_with_nobody_to_ask_is_not_blamed(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world = World({"peers": ["10.0.0.1"]}, ["peers", "10.0.0.1"])
    world.alone = True
    await run(world, 100)
    assert "gossip.alone" not in caplog.text

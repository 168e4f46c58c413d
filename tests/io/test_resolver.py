"""Names: shared, kept, bounded, and never in the way of others."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.abc
import trio.testing

from ranvier_py.core.errors import AddressError, RanvierError
from ranvier_py.io import resolver as module
from ranvier_py.io.resolver import DEADLINE_S, FRESH_S, GONE_S, PATIENCE_S, SLOW_THREADS_MAX, THREADS_MAX, Resolver
from ranvier_py.supervision import Faults
from tests.io.test_discovery import NXDOMAIN, SERVFAIL, Answer, FakeResolver
from tests.waiting import until

Clock = trio.testing.MockClock


@asynccontextmanager
async def resolving(
    answers: dict[str, Answer | Callable[[int], Answer]] | None = None,
) -> AsyncIterator[tuple[Resolver, FakeResolver]]:
    """The resolver, installed over one that answers so."""
    fake = FakeResolver(answers or {})
    if answers is not None:
        trio.socket.set_custom_hostname_resolver(fake)
    resolver = Resolver(Faults())
    async with trio.open_nursery() as nursery:
        with resolver.installed():
            await nursery.start(resolver.run)
            yield resolver, fake
            nursery.cancel_scope.cancel()


async def hosts(name: str, port: int = 80, **more: Any) -> list[str]:
    found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, **more)
    return [str(address[0]) for *_, address in found if address[1] == port]


async def test_a_numeric_address_is_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise AssertionError("a thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", no_thread)
    async with resolving() as (resolver, _):
        assert await hosts("10.0.0.1") == ["10.0.0.1"]
        assert await hosts("fd00::1") == ["fd00::1"]
        assert resolver.counters.lookups == 0


async def test_those_who_want_one_name_at_one_time_share_a_lookup(autojump_clock: Clock) -> None:
    async with resolving({"engine": 0.4}) as (_, fake), trio.open_nursery() as nursery:
        found: list[list[str]] = []

        async def ask() -> None:
            found.append(await hosts("engine"))

        for _ in range(50):
            nursery.start_soon(ask)
        with trio.move_on_after(0.2):  # whoever began it, or another, does not end it
            await hosts("engine")
        await trio.sleep(0.3)
        assert found == [["10.9.9.9"]] * 50
        assert len(fake.asked) == 1
        await trio.sleep(FRESH_S / 2)
        assert await hosts("engine", 443) == ["10.9.9.9"]
        assert len(fake.asked) == 1, "known a moment ago, for any port"


async def test_a_change_is_seen_with_the_first_question_after_a_second(autojump_clock: Clock) -> None:
    async with resolving({"engine": lambda number: ["10.0.0.1"] if number == 0 else ["10.0.0.2"]}):
        assert await hosts("engine") == ["10.0.0.1"]
        await trio.sleep(FRESH_S)
        assert await hosts("engine") == ["10.0.0.2"]


@pytest.mark.parametrize("trouble", [SERVFAIL, OSError("no resolver"), UnicodeError("no such name can be")])
async def test_the_last_good_addresses_are_used_for_as_long_as_lookups_fail(
    autojump_clock: Clock, trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with resolving({"engine": lambda number: trouble if 0 < number < 5 else ["10.0.0.1"]}) as (resolver, fake):
        assert await hosts("engine") == ["10.0.0.1"]
        for _ in range(5):
            await trio.sleep(3600)
            assert await hosts("engine") == ["10.0.0.1"]
        assert len(fake.asked) == 6
        assert (resolver.counters.failures, resolver.counters.stale) == (4, 4)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["name.failed", "name.found"]


async def test_a_name_that_does_not_exist_any_more_is_believed_soon(autojump_clock: Clock) -> None:
    """Its addresses may be another's by then, who is not to get our requests."""
    async with resolving({"engine": lambda number: ["10.0.0.1"] if number == 0 else NXDOMAIN}):
        assert await hosts("engine") == ["10.0.0.1"]
        await trio.sleep(GONE_S - 1)
        assert await hosts("engine") == ["10.0.0.1"]
        await trio.sleep(2)
        with pytest.raises(AddressError, match="engine: Name or service not known"):
            await hosts("engine")


async def test_a_lookup_that_hangs_is_waited_for_once_where_older_addresses_are_known(autojump_clock: Clock) -> None:
    async with resolving({"engine": lambda number: ["10.0.0.1"] if number != 1 else 60.0}) as (resolver, fake):
        await hosts("engine")
        await trio.sleep(10)
        began = trio.current_time()
        for wait_s in (PATIENCE_S, 0.0, 0.0):
            assert await hosts("engine") == ["10.0.0.1"]
            assert trio.current_time() - began == pytest.approx(wait_s)
            began = trio.current_time()
        assert (len(fake.asked), resolver.counters.stale) == (2, 3)
        await trio.sleep(60)
        assert await hosts("engine") == ["10.9.9.9"], "the answer came after all"


async def test_who_knows_no_address_waits_up_to_a_deadline_and_gets_an_error_of_ours(autojump_clock: Clock) -> None:
    async with resolving({"hangs": 1e9, "bad": NXDOMAIN, "empty": [], "odd": UnicodeError("label too long")}):
        began = trio.current_time()
        with pytest.raises(AddressError, match="hangs: no answer in time"):
            await hosts("hangs")
        assert trio.current_time() - began == pytest.approx(DEADLINE_S)
        for name in ("bad", "empty", "odd"):
            with pytest.raises(AddressError, match=name) as caught:
                await hosts(name)
            assert isinstance(caught.value, OSError)
            assert isinstance(caught.value, RanvierError)
        assert trio.current_time() - began == pytest.approx(DEADLINE_S)


async def test_a_family_is_chosen_from_what_is_known(autojump_clock: Clock) -> None:
    async with resolving({"both": ["10.0.0.1", "fd00::1"], "four": ["10.0.0.1"]}) as (_, fake):
        assert await hosts("both") == ["10.0.0.1", "fd00::1"]
        assert await hosts("both", family=socket.AF_INET6) == ["fd00::1"]
        with pytest.raises(AddressError, match="no address of that family"):
            await hosts("four", family=socket.AF_INET6)
        assert len(fake.asked) == 2


async def test_names_are_bounded_and_the_longest_unasked_is_forgotten(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMES_MAX", 3)
    async with resolving({f"n{number}": ["10.0.0.1"] for number in range(5)}) as (resolver, fake):
        for number in (0, 1, 2, 0, 3, 0, 1):
            await hosts(f"n{number}")
        assert [name for name, _ in fake.asked] == ["n0", "n1", "n2", "n3", "n1"]
        assert resolver.counters.names == 3


async def test_one_that_was_installed_over_another_outlives_it(autojump_clock: Clock) -> None:
    """Two nodes in one process, the first of which ends first."""
    async with resolving({"engine": ["10.0.0.1"]}) as (first, fake):
        second = Resolver(Faults())
        with second.installed():
            assert await hosts("engine") == ["10.0.0.1"]
            assert (first.counters.lookups, second.counters.lookups) == (1, 1)
        first_again = trio.socket.set_custom_hostname_resolver(fake)
        assert first_again is first


class Hanging:
    """In place of the system's resolver: hangs for all names but those that are good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: Sequence[bytes] = ()) -> None:
        self.release = threading.Event()
        self.hanging: list[bytes] = []
        self._good = good
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: Any, *arguments: Any, **more: Any) -> list[Any]:
        if threading.current_thread() is threading.main_thread():
            return self._real(host, *arguments, **more)
        if host not in self._good:
            self.hanging.append(host)
            self.release.wait(20)
            raise SERVFAIL
        return self._real("127.0.0.1", *arguments, **more)


async def test_names_that_hang_take_no_thread_of_others_and_leave_room_for_names_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    system, bad = Hanging(monkeypatch, good=[b"good"]), [f"bad{number}" for number in range(2 * THREADS_MAX)]

    async def ask(name: str) -> None:
        with suppress(AddressError):
            await hosts(name)

    try:
        with trio.fail_after(20):
            async with resolving() as (resolver, _), trio.open_nursery() as nursery:
                for name in bad:
                    nursery.start_soon(ask, name)
                await until(lambda: len(system.hanging) == THREADS_MAX)
                assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
                system.release.set()
                await until(lambda: resolver.counters.failures == len(bad))
                system.release.clear()
                for name in bad:  # for the second time: they are known to be slow
                    nursery.start_soon(ask, name)
                await until(lambda: len(system.hanging) == len(bad) + SLOW_THREADS_MAX)
                assert await hosts("good") == ["127.0.0.1"]
                assert len(system.hanging) == len(bad) + SLOW_THREADS_MAX
                nursery.cancel_scope.cancel()
    finally:
        system.release.set()

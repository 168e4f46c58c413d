"""Cyclic garbage is collected before waits, and what serves requests makes none."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio

from ranvier_py.node.garbage import YOUNG_S, collected_in_waits, exempt_once_made
from tests.proxy.wire import CHUNKED_HEAD, TEST_S, Wire, answer, chunk, post, proxying


class Cycle:
    itself: Cycle


async def test_cycles_are_collected_before_waits_and_never_by_the_interpreter() -> None:
    with collected_in_waits(), trio.fail_after(TEST_S):
        assert not gc.isenabled()
        cycle = Cycle()
        cycle.itself = cycle
        freed = weakref.ref(cycle)
        del cycle
        while freed() is not None:  # noqa: ASYNC110  # nobody says so
            await trio.sleep(YOUNG_S)
    assert gc.isenabled()


def test_what_is_made_at_once_is_exempt_without_being_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_command_imports.py has that of the modules of a node."""
    monkeypatch.setattr(gc, "freeze", lambda: exempted.append(gc.isenabled()))
    exempted, before = list[bool](), gc.get_stats()
    with exempt_once_made():
        made = [Cycle() for _ in range(2 * gc.get_threshold()[0])]
        after = gc.get_stats()
    assert exempted == [False]
    assert after == before
    assert gc.isenabled()
    assert made


async def test_what_a_node_exempted_in_a_process_of_tests_is_freed_when_it_is_gone() -> None:
    """Else each node that a test starts would be kept until the end of the run (conftest.py)."""
    cycle = Cycle()
    cycle.itself = cycle
    freed = weakref.ref(cycle)
    with collected_in_waits():
        pass
    del cycle
    gc.collect()
    assert freed() is None


async def test_answers_of_every_kind_and_connections_that_end_leave_no_cycles() -> None:
    chunked = CHUNKED_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n"
    answers = {b"chunked": chunked, b"broken": chunked[:-8], b"garbled": b"HTTP/1.1 what\r\n\r\n"}

    async def engine(wire: Wire) -> None:
        while (request := await wire.next_request()) is not None:
            await wire.send(answers.get(request[1], answer(b"{}")))
            if request[1] in (b"broken", b"garbled"):
                return

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        async with proxying(engine) as (_, _, port):
            async with await Wire.connect(port) as wire:
                await wire.send(post(b"chunked") + post(b"whole", b"connection: close"))
                await wire.rest()
            old = post(b"chunked").replace(b"HTTP/1.1", b"HTTP/1.0")
            bad = b"GET / HTTP/1.1\r\n\r\n", b"\x01\x02\x03\r\n\r\n"
            for request in (post(b"broken"), post(b"garbled", b"connection: close"), old, *bad):
                async with await Wire.connect(port) as wire:
                    await wire.send(request)
                    await wire.cut()
            for begun in (post(b"left"), post(b"body")[:-2], b"GET / HT"):
                async with await Wire.connect(port) as wire:
                    await wire.send(begun)
        gc.collect()
        assert gc.garbage == []
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()

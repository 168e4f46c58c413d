"""Collects cyclic garbage in small steps, just before the event loop waits, and never from within the interpreter.

Objects of a request have no cycles, so reference counting frees them. The interpreter triggers collections by counting
new objects against freed ones: it would collect rarely, and then examine everything made since, in long steps in the
middle of requests. Garbage comes from connections that fail, and from the libraries of the control port.

Rules: an object is examined once while it is young, with the others of YOUNG_S, and again only in moments without
requests (`Node.sweep`). To examine those of middle age would take as long as twenty young collections, in one piece.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from trio.abc import Instrument

YOUNG_S = 0.02
"""Least time between two young collections. A collection also examines the objects of requests in flight, so more
collections would cost more, and fewer would be longer steps: dozens of requests leave ten objects each."""


class WaitCollector(Instrument):
    """Collects young garbage whenever trio is about to wait."""

    def __init__(self) -> None:
        self._next = 0.0

    def before_io_wait(self, timeout: float) -> None:
        now = time.monotonic()
        if now >= self._next:
            gc.collect(0)
            self._next = now + YOUNG_S


@contextmanager
def exempt_once_made() -> Iterator[None]:
    """Exempt what is made within, and do not look through it even once. Use this where modules are imported, which
    stay: of them, garbage are 3,000 objects, a third of a megabyte, and to find these takes a tenth of the start."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def collected_in_waits() -> Iterator[None]:
    """Exempt all present objects, and collect new ones just before waits. Use this within a trio run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    collector = WaitCollector()
    trio.lowlevel.add_instrument(collector)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(collector)
        gc.enable()

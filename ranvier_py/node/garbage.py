"""When cyclic garbage is collected: in small steps, just before the event loop waits, and never by the interpreter.

What a request makes is freed by counting: no cycles. Yet the interpreter, which counts new objects against freed ones,
would look rarely, and then at everything that was made since: long steps, in the middle of requests. Garbage comes from
connections that fail, and from the libraries of the control port.

Rules: an object is looked at once while it is young, with those of YOUNG_S; again only in moments without requests
(`Node.sweep`). A second look at what is a little older would take as long as twenty first ones, in one piece.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from trio.abc import Instrument

YOUNG_S = 0.02
"""Between two looks at what is new. A look takes in what the requests in flight have as well, so more looks would cost
more, and fewer would be longer steps: dozens of requests leave ten objects each."""


class WaitCollector(Instrument):
    """Collects young garbage whenever trio is about to wait."""

    def __init__(self) -> None:
        self._next = 0.0

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now >= self._next:
            gc.collect(0)
            self._next = now + YOUNG_S


@contextmanager
def collected_in_waits() -> Iterator[None]:
    """What is there now stays; what comes is collected just before waits. Within a trio run."""
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

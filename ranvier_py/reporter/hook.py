"""The hook in an engine's process: the EvictionReporter of the Purdue report.

    from ranvier_py.reporter.hook import EvictionReporter

    reporter = EvictionReporter("worker-1", ["http://router:9180"], key=…)
    reporter.start()
    reporter.store_block(hash)      reporter.free_block(hash)      where the engine caches and evicts; an append each
    reporter.stop()

Call `free_block` where a block's content is given up, not where a request releases it: a released block stays in the
cache until it is taken for another content, and is a hit until then.

`hashes` says what a hash is: "given" are the report's prefix hashes, computed by the caller. "prefix_hash" and
"fingerprint" are engine's names of blocks, told with their tokens and the block that each continues; the reporter's
thread makes the report's prefix hashes of them, or the router's own fingerprints at every block.

Rules: the engine's thread appends to a deque, and nothing else: no lock, no wait, no error. A thread of the reporter's
own sends. With `scan`, which is called in that thread every 5 s and says all that is held (of "given" hashes), what the
hook missed is found as well; the engine has to allow that.
Bound: `WAITING_MAX` calls wait; beyond, they are dropped and counted, and what is held is not known any more: it is
taken as nothing until it is told again or scanned. Cost: less than 1 us a call.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import trio

from ranvier_py.reporter.intake import Call, Cleared, Freed, Intake, Stored
from ranvier_py.reporter.report_loop import Hashes, Reporting, ReportingSettings

log = logging.getLogger(__name__)

WAITING_MAX = 1_000_000
"""Calls that wait for 100 ms at most: what no engine does in that time."""


class EvictionReporter:
    """Reports for one worker.

    Args:
        worker_id: as the routers know it: name or URL of their backend.
        routers: URLs of control ports; each is told, or one whose peers hear it from it.
        key: bearer key: the worker's credential (`ranvier reporter --make-key`) or the control key.
        model: name of the base model as clients write it; needed for "fingerprint".
    """

    def __init__(
        self,
        worker_id: str,
        routers: Sequence[str],
        *,
        key: str = "",
        hashes: Literal["given", "prefix_hash", "fingerprint"] = "given",
        model: str = "",
        scan: Callable[[], Iterable[str]] | None = None,
        settings: ReportingSettings | None = None,
    ) -> None:
        """Raises ValueError for what makes no sense."""
        self._waiting: deque[Call] = deque()
        self.dropped = 0  # calls that found no room
        intake = Intake(self._waiting, self._take_dropped, scan)
        self.reporting = Reporting(
            worker_id, routers, intake, key, Hashes(hashes), model, settings or ReportingSettings()
        )
        self._told_dropped = 0
        self._thread: threading.Thread | None = None

    # In the engine's threads

    def store_block(
        self,
        block_hash: str | int | bytes,
        token_ids: Sequence[int] = (),
        parent: int | bytes | None = None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """This can be found in the cache from now on. Tokens and parent are of no use to "given" hashes. The tokens are
        read later, in another thread: they must stay what they are."""
        self._append(Stored(block_hash, token_ids, parent, salt, adapter))

    def free_block(self, block_hash: str | int | bytes) -> None:
        """This can't be found any more."""
        self._append(Freed(block_hash))

    def clear(self) -> None:
        """Nothing can be found any more."""
        self._append(Cleared())

    def _append(self, call: Call) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(call)
        else:
            self.dropped += 1

    # The reporter's own thread

    def start(self) -> None:
        """Begin to send. Raises RuntimeError when it was started before."""
        if self._thread is not None:
            raise RuntimeError("a reporter is started once")
        self._thread = threading.Thread(target=self._run, name="ranvier-reporter", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Say what is still to be said, if that is quick, and end."""
        self.reporting.stopping = True
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            trio.run(self.reporting.run)
        except Exception:  # the engine must not notice
            log.exception("reporter.failed")

    def _take_dropped(self) -> int:
        """How many calls were dropped since this was last asked."""
        dropped = self.dropped
        news, self._told_dropped = dropped - self._told_dropped, dropped
        return news

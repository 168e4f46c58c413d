"""A hook for an engine's process: the EvictionReporter of the Purdue report.

Rule: the engine's thread only appends to a deque: no lock, no wait, no error; a thread of the reporter sends. Calls
that make no sense are counted and ignored.
Bounds: ACTIVE_MAX hashes are reported as held. `WAITING_MAX` calls wait; more are dropped and counted. After that, and
after a bug of ours, nothing counts as held until it is stored again or scanned. PENDING_MAX evictions wait for a
router; above, all hashes that are held are sent instead.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import trio

from ranvier_py.core.engine_cache.sources.event_frames import packed_batch
from ranvier_py.core.engine_cache.sources.event_values import BLOCK_TOKENS_MAX, TEXT_CHARACTERS_MAX
from ranvier_py.core.engine_cache.sources.push_messages import ACTIVE_MAX, EVICTED_MAX, hash_in
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.log_events import event
from ranvier_py.reporter.event_relay import BATCH_S, BEAT_S, CHUNK_BYTES, EventLog, EventRelay, RouterPost
from ranvier_py.reporter.router_link import IDLE_S, RouterLink
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

WAITING_MAX = 1_000_000
"""Calls wait for at most 50 ms: no engine makes so many in that time."""

TURN_CALLS = 20_000
"""Calls taken in before their changes are sent: as many removals as one cache may have at once."""

EVENT_BYTES, TOKEN_BYTES = 200, 5
"""Estimated bytes of an event in a batch without its tokens, and of each token."""

PENDING_MAX = EVICTED_MAX
LAST_WORDS_S = 1.0  # to take in what waits when it ends, and as long to send it
EVICTION_PATH, SYNC_PATH = "/internal/eviction", "/internal/sync"

Block = str | int | bytes


class _Stored(NamedTuple):
    block: Block
    token_ids: Sequence[int]
    parent: int | bytes | None
    salt: str | None
    adapter: str | None


class _Freed(NamedTuple):
    block: Block


_CLEARED = _Freed("")


class PrefixSender:
    """Decides what one router gets of given hashes. `held` has all that the engine holds now; its owner keeps it."""

    def __init__(self, worker: str, model: str, held: Mapping[str, None], sync_s: float = BEAT_S) -> None:
        self.overflowed = 0
        self._head = {"worker_id": worker, **({"model": model} if model else {})}
        self._held, self._sync_s = held, sync_s
        self._pending: dict[str, None] = {}  # evicted since the last report that was answered
        self._sent: Sequence[str] = ()
        self._is_sync = False
        self._is_wanted = True  # whether a sync is wanted: at first the router may know nothing
        self._batch_at = self._sync_at = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._is_wanted and self._sync_at > 0

    def evicted(self, names: Iterable[str]) -> None:
        self._pending.update(dict.fromkeys(names))
        if len(self._pending) > PENDING_MAX:
            self.overflowed += len(self._pending)
            self.sync()

    def sync(self) -> None:
        """Send all that is held soon, instead of single evictions."""
        self._pending.clear()
        self._is_wanted = True

    def next(self, now: float) -> RouterPost | None:
        """Return what to POST now, from the present state. Call `answered` once it was answered."""
        self._is_sync = self._is_wanted or now >= self._sync_at
        if not self._is_sync and (not self._pending or now < self._batch_at):
            return None
        self._sent = list(self._pending)
        if self._is_sync:
            self._is_wanted, self._sync_at = False, 0.0  # due at once until this one is answered
            return RouterPost(SYNC_PATH, {**self._head, "active_hashes": list(self._held)})
        return RouterPost(
            EVICTION_PATH, {**self._head, "evicted_hashes": [one for one in self._sent if one not in self._held]}
        )

    def answered(self, _: Mapping[str, Any], now: float) -> None:
        for name in self._sent:
            self._pending.pop(name, None)
        self._batch_at = now + BATCH_S
        if self._is_sync:
            self._sync_at = now + self._sync_s


class EvictionReporter:
    """Reports for one worker.

        reporter = EvictionReporter("worker-1", ["http://router:9180"], key=…)
        reporter.start()
        reporter.store_block(hash)      reporter.free_block(hash)      where the engine caches and evicts
        reporter.stop()

    Args:
        worker_id: the routers' name for it: name or URL of their backend.
        routers: URLs of control ports, of all routers, or of one whose peers learn from it by gossip.
        key: bearer key: the worker's credential (`ranvier reporter --make-key`) or the control key.
        hashes: "given": the report's prefix hashes, computed by the caller; evictions leave every 100 ms, and all that
            are held every 5 s. "blocks": the engine's own names of blocks, stored with their tokens and the block that
            each continues; they leave as event batches, so routers know every prefix, as if the engine published.
        model: the base model as clients name it; needed if the engine serves several.
        scan: returns all given hashes that are held, which finds what the hook missed. The reporter's thread calls it
            every 5 s, and the engine has to allow that.
    """

    def __init__(
        self,
        worker_id: str,
        routers: Sequence[str],
        *,
        key: str = "",
        hashes: Literal["given", "blocks"] = "given",
        model: str = "",
        scan: Callable[[], Iterable[str]] | None = None,
        sync_s: float = BEAT_S,
    ) -> None:
        """Raises ValueError for arguments that make no sense."""
        if not worker_id or not routers:
            raise ValueError("a reporter needs a worker_id and at least one router")
        if hashes not in ("given", "blocks"):
            raise ValueError("hashes: given or blocks")
        if scan is not None and hashes != "given":
            raise ValueError("scan: only for given hashes")
        key = key.strip()
        if not key.isprintable():
            raise ValueError("key: must be one line of text")
        self.dropped = self.odd = self.scans_failed = 0  # calls without room, calls that make no sense, failed scans
        self.held: dict[str, None] = {}
        self.faults = Faults()
        self.events = EventLog()
        self.links = [RouterLink(url, key) for url in dict.fromkeys(routers)]
        head = {"worker_id": worker_id, "model": model}
        self.senders: list[PrefixSender | EventRelay] = [
            PrefixSender(worker_id, model, self.held, sync_s) if hashes == "given" else EventRelay(head, self.events)
            for _ in self.links
        ]
        self._scan, self._sync_s = scan, sync_s
        self._waiting: deque[_Stored | _Freed] = deque()
        self._dropped_before = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    # Called in the engine's threads

    def store_block(
        self,
        block_hash: Block,
        token_ids: Sequence[int] = (),
        parent: int | bytes | None = None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Note that this block is in the cache from now on. "given" hashes need neither tokens nor parent. Another
        thread reads the tokens later: they must not change."""
        self._append(_Stored(block_hash, token_ids, parent, salt, adapter))

    def free_block(self, block_hash: Block) -> None:
        """Note that this block is not in the cache any more: its content is given up. One that a request just releases
        stays a hit until it is taken for other content."""
        self._append(_Freed(block_hash))

    def clear(self) -> None:
        """Note that no block is in the cache any more."""
        self._append(_CLEARED)

    def _append(self, call: _Stored | _Freed) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(call)
        else:
            self.dropped += 1

    # In the reporter's own thread

    def start(self) -> None:
        """Begin to send. Raises RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("a reporter is started once")
        self._thread = threading.Thread(target=self._run, name="ranvier-reporter", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Take in and send what is left, each within LAST_WORDS_S, and end. Waits for that for at most `timeout_s`."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            trio.run(self._report)
        except Exception:  # the engine must not be affected
            log.exception(event("reporter.failed"))

    async def _report(self) -> None:
        async with trio.open_nursery() as nursery:
            for link, sender in zip(self.links, self.senders, strict=True):
                nursery.start_soon(self.faults.keep, "router_link", link.run, sender)
            await self.faults.keep("hook", self._follow)
            with trio.move_on_after(LAST_WORDS_S), self.faults.caught("hook"):
                while self._waiting:
                    self._take()
                    await trio.lowlevel.checkpoint()
            for sender in self.senders:
                if isinstance(sender, PrefixSender):
                    sender.sync()
            with trio.move_on_after(LAST_WORDS_S):
                while not all(sender.is_idle for sender in self.senders):  # noqa: ASYNC110  # nobody announces it
                    await trio.sleep(IDLE_S)
            nursery.cancel_scope.cancel()

    async def _follow(self) -> None:
        """Take in the engine's calls until `stop`."""
        if self.faults.counters.unexpected_errors.get("hook"):
            self._waiting.appendleft(_CLEARED)  # the fault may have lost some calls
        scan_at = 0.0
        while not self._stopping:
            if self._scan is not None and trio.current_time() >= scan_at:
                scan_at = trio.current_time() + self._sync_s
                self._look(self._scan)
            self._take()
            await trio.sleep(BATCH_S / 2)

    def _take(self) -> None:
        """Take in waiting calls, and give their changes to every sender."""
        if self.dropped != self._dropped_before:
            self._dropped_before = self.dropped
            self._waiting.clear()  # they came before those that were dropped
            self._waiting.appendleft(_CLEARED)  # another may have come since
        gone: dict[str, None] = {}
        events: list[Mapping[str, Any]] = []
        size = 0
        for _ in range(min(TURN_CALLS, len(self._waiting))):
            call = self._waiting.popleft()
            try:
                if isinstance(self.senders[0], PrefixSender):
                    self._hold(call, gone)
                elif call is _CLEARED:
                    self.events.restart()  # all that is held from now on follows from number 0
                    events = [{"type": "AllBlocksCleared"}]
                else:
                    events.append(event_of(call))
                    size += EVENT_BYTES + (TOKEN_BYTES * len(call.token_ids) if isinstance(call, _Stored) else 0)
            except (BadRequest, TypeError, ValueError, OverflowError):
                self.odd += 1
            if size >= CHUNK_BYTES:
                self._publish(events)
                events, size = [], 0
        self._publish(events)
        self._evicted(gone)

    def _publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        if events:
            self.events.append(self.events.next, packed_batch(time.time(), events))

    def _hold(self, call: _Stored | _Freed, gone: dict[str, None]) -> None:
        if call is _CLEARED:
            gone.update(self.held)
            self.held.clear()
            return
        name = f"{hash_in(call.block, 'hash'):064x}"
        if isinstance(call, _Freed):
            self.held.pop(name, None)
            gone[name] = None  # even if it was not held: the router may believe that it is
        elif len(self.held) < ACTIVE_MAX:
            self.held[name] = None

    def _look(self, scan: Callable[[], Iterable[str]]) -> None:
        """Compare what is held with a scan of the engine, and take over the scan."""
        try:
            found = {f"{hash_in(name, 'hash'):064x}": None for name in scan()}
        except Exception:  # from the engine's own code: it ends only this scan
            self.scans_failed += 1
            return
        self._evicted([name for name in self.held if name not in found])
        self.held.clear()
        self.held.update(islice(found.items(), ACTIVE_MAX))

    def _evicted(self, names: Iterable[str]) -> None:
        for sender in self.senders:
            if isinstance(sender, PrefixSender) and names:
                sender.evicted(names)


def event_of(call: _Stored | _Freed) -> Mapping[str, Any]:
    """Return a call as an event of vLLM's. Raises TypeError, ValueError, OverflowError if no router would read it."""
    if not isinstance(call.block, int | bytes):
        raise TypeError("the name of a block is a number or bytes")
    name = call.block % (1 << 64) if isinstance(call.block, int) else call.block
    if isinstance(call, _Freed):
        return {"type": "BlockRemoved", "block_hashes": [name]}
    if max(map(len, (call.salt or "", call.adapter or ""))) > TEXT_CHARACTERS_MAX:
        raise ValueError("a salt or an adapter of so many characters is none")
    if len(call.token_ids) > BLOCK_TOKENS_MAX:
        raise ValueError("a block of so many tokens is none")
    if not isinstance(call.parent, int | bytes | None):
        raise TypeError("the name of a block is a number or bytes")
    for text in (call.salt, call.adapter):
        (text or "").encode()  # a client may have given a text that is no Unicode
    tokens = [int(token) for token in call.token_ids]
    array("I", tokens)
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": call.parent % (1 << 64) if isinstance(call.parent, int) else call.parent,
        "token_ids": tokens,
        "block_size": len(tokens),
        "lora_name": call.adapter,
        "cache_salt": call.salt,
    }

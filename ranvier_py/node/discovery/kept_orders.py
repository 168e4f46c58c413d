"""Keeps what operators ordered of backends in the state folder, and carries it out again at the next start.

Rules: an entry of the configuration, or of another source, that is another one than when the order was given wins, and
a line of the log names that; peers' orders that are no later than what was kept change nothing there. The workers of a
node keep the same, each in its own file, and read the newest. An error of a file is logged once until it
works again; the node goes on. Written a second after a change, and before an order is answered. Bounds:
STATE_BYTES_MAX; an order for each backend that operators have one for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ranvier_py.config.config_endpoints import numbered
from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, counter, gauge, samples
from ranvier_py.core.routing.wanted.backend_reconciler import Override
from ranvier_py.core.routing.wanted.found_backend import API, KINDS, STATIC, FoundBackend, SourceName
from ranvier_py.io.gossip.state_file import set_aside, write_whole
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Node, Part

log = logging.getLogger(__name__)

FILE = "backends.json"
VERSION = 1
STATE_BYTES_MAX = 8 << 20  # 4,096 backends with all of their options
LOOK_S = 1.0

Row = Mapping[str, Any]


@dataclass(slots=True)
class KeptCounters:
    orders: int = gauge("Backends of which an operator's order is kept for the next start.")
    writes: int = counter("Times that the kept orders were written.")
    failures: int = counter("Times that the kept orders could not be read or written.")


class KeptOrders(Part):
    """See the module."""

    name = "kept_orders"

    def __init__(self, node: Node, clustering: ClusterParts | None) -> None:
        self.counters = KeptCounters()
        self._node, config = node, node.config
        folder, index = config.state.state_folder, config.worker_index
        self._path = folder and numbered(folder / FILE, index) if config.workers > 1 else folder and folder / FILE
        self._shared = clustering.orders if clustering is not None else None
        self._written: bytes | None = None
        self._trouble = ""
        self._limiter = trio.CapacityLimiter(1)  # one write at a time, in the order of the changes

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out what an earlier run kept, before the public port opens."""
        if self._path is not None:
            file = await trio.to_thread.run_sync(newest_file, self._path.parent)
            try:
                self._restore(await trio.to_thread.run_sync(state_of, file) if file is not None else {"backends": ()})
            except OSError as error:
                self._not_restored(file, error.strerror or str(error))
            except (ValueError, LookupError, TypeError, ConfigError) as error:
                aside = await trio.to_thread.run_sync(set_aside, file) if file is not None else ""
                self._not_restored(file, plain(error) + (f"; it is {aside} now" if aside else ""))
        task_status.started()

    def _not_restored(self, file: Path | None, why: str) -> None:
        self.counters.failures += 1
        log.error(event("orders.not_restored", file=str(file), why=why))

    async def loop(self) -> None:
        while self._path is not None:
            await trio.sleep(LOOK_S)
            await self.save()

    def metrics(self) -> Iterator[Sample]:
        if self._path is not None:
            yield from samples("kept_orders", self.counters)

    async def save(self) -> bool:
        """Write what operators ordered, if that has changed. Returns whether it is kept for the next start."""
        if self._path is None:
            return False
        rows = [*self._rows()]
        self.counters.orders = len(rows)
        shared = self._shared.stored() if self._shared is not None else {}
        content = json.dumps({"version": VERSION, "backends": rows, **shared}, indent=1).encode()
        if content == self._written:
            return True
        try:
            await trio.to_thread.run_sync(partial(write, self._path, content), limiter=self._limiter)
        except OSError as error:
            self.counters.failures += 1
            if not self._trouble:
                log.error(event("orders.not_kept", file=str(self._path), why=error.strerror or str(error)))
            self._trouble = str(error)
            return False
        self._written, self._trouble = content, ""
        self.counters.writes += 1
        return True

    def _rows(self) -> Iterator[Row]:
        """Yield what differs from what sources want, by operators' orders."""
        reconciler = self._node.sources.reconciler
        added = reconciler.sources[API].found if API in reconciler.sources else {}
        drained = {backend.url: None for backend in self._node.registry if backend.origin.drained}
        for url in dict.fromkeys([*added, *reconciler.overrides, *drained]):
            override = reconciler.overrides.get(url)
            spec = override.spec if override is not None else added[url].spec if url in added else None
            seen = override.seen if override is not None else self._seen(url)
            yield {
                "url": url,
                "added": url in added and override is None,
                "removed": override is not None and override.spec is None,
                "options": spec.model_dump() if spec is not None else None,
                "drained": url in drained,
                "seen": [
                    {"kind": name.kind, "target": name.target, "process": found.process, **found.spec.model_dump()}
                    for name, found in seen.items()
                ],
            }

    def _seen(self, url: str) -> Mapping[SourceName, FoundBackend[BackendSpec]]:
        """Return what sources other than operators have of a backend, but for its key: no order is about that."""
        sources = self._node.sources.reconciler.sources.items()
        return {name: replace(each.found[url], key=None) for name, each in sources if url in each.found and name != API}

    def _restore(self, state: Row) -> None:
        sources, registry = self._node.sources, self._node.registry
        rows: Sequence[Row] = state["backends"]
        added: list[FoundBackend[BackendSpec]] = []
        for row in rows:
            url, seen = row["url"], dict(map(seen_of, row["seen"]))
            if (configured := self._seen(url).get(STATIC)) != seen.get(STATIC) and configured is not None:
                log.warning(event("orders.outdated", url=url, order=words_of(row), source="the configuration"))
                continue
            spec = read_backend(row["options"]) if row["options"] is not None else None
            if row["added"] and spec is not None:
                added.append(FoundBackend(spec))
            elif row["removed"] or spec is not None:
                sources.reconciler.overrides[url] = Override(spec, seen)
                sources.reconciler.changed = True
            log.info(event("orders.restored", url=url, order=words_of(row)))
        if added:
            sources.take(API, added)
        sources.settle()
        for row in rows:
            if row["drained"] and (backend := registry.ids.find(row["url"])) is not None:
                registry.drain(backend.name)
        if self._shared is not None:
            self._shared.restore(state, registry)


def seen_of(row: Row) -> tuple[SourceName, FoundBackend[BackendSpec]]:
    """Return an entry of a source as it was when an order was given. Raises ValueError, LookupError, ConfigError."""
    fields = dict(row)
    name, process = SourceName(fields.pop("kind"), fields.pop("target")), fields.pop("process")
    if name.kind not in KINDS:
        raise ValueError(f"there is no source of kind {name.kind!r}")
    return name, FoundBackend(read_backend(fields), process=process)


def words_of(row: Row) -> str:
    words = ("added", "removed", "drained")
    return ", ".join([word for word in words if row[word]]) or "given other options"


def newest_file(folder: Path) -> Path | None:
    """Return the file of the worker that wrote last, if any. Blocks for a look."""
    with suppress(OSError):
        return max(folder.glob(f"{FILE}*"), key=lambda path: path.stat().st_mtime_ns, default=None)
    return None


def state_of(file: Path) -> Row:
    """Return what a worker kept. Blocks for a file. Raises OSError, ValueError."""
    if file.stat().st_size > STATE_BYTES_MAX:
        raise ValueError(f"it has more than {STATE_BYTES_MAX} bytes")
    state: Row = json.loads(file.read_bytes())
    if state["version"] != VERSION:
        raise ValueError(f"it is of version {state['version']!r}, and this node knows version {VERSION}")
    return state


def plain(error: Exception) -> str:
    """Return what is wrong with the content of a file."""
    is_text = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
    if is_text or isinstance(error, LookupError | TypeError):
        return "it is damaged, or not ours"
    return str(error)


def write(path: Path, content: bytes) -> None:
    """Replace a file as a whole. Blocks for a small file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, content)

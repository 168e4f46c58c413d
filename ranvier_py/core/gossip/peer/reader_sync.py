"""Event streams among peers: ids <-> keys, who reads what, copies to and from peers. Satisfies kv.sharing.Sharing.

Down: what this node says of the streams it reads becomes its standings; gossip tells them. Up: what others say, and who
lives, goes to `Ownership`, which decides whether this node begins or ends. Nothing is asked of anybody, and a node that
hears nobody reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peer_access import CopyCame, Giver, gives_none
from ranvier_py.core.engine_cache.snapshot import Original, Place
from ranvier_py.core.engine_cache.standby import StandbyCopy
from ranvier_py.core.gossip.backend_state.registry_sync import RegistrySync
from ranvier_py.core.gossip.readers.ownership import STANDING_OF, Ownership, OwnershipSettings, Standing
from ranvier_py.core.gossip.readers.reader_gossip import StreamGossip
from ranvier_py.core.gossip.readers.snapshot_transfer import Subject
from ranvier_py.core.ids import BackendId


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """`owned` and `standby_blocks` are gauges: streams that this node reads, blocks of those that it stands by for.
    Copies are asked, taken and given since the start."""

    owned: int
    handovers: int
    copies_asked: int
    copies_taken: int
    copies_failed: int
    copies_given: int
    copies_refused: int
    copies_broken: int
    copies_blocks_left_out: int
    copies_stray_chunks: int
    copies_bad_chunks: int
    copies_sent_bytes: int
    copies_followed: int
    standby_blocks: int
    standby_asked: int
    standby_came: int
    standby_failed: int
    standby_broken: int
    standby_refused: int
    standby_taken: int


LEVEL_OF = {standing: level for level, standing in STANDING_OF.items()}


class SharedStreams:
    """See the module. `moved` is called when this node is to begin or end reading a stream."""

    def __init__(
        self,
        gossip: StreamGossip,
        backends: RegistrySync,
        session: int,
        now: float,
        settings: OwnershipSettings | None = None,
    ) -> None:
        self.give: Giver = gives_none
        self.moved: Callable[[], object] = lambda: None
        self.ownership = Ownership(session, now, settings)
        self._gossip = gossip
        self._backends = backends
        self._session = session
        self._keys: dict[BackendId, int] = {}
        self._ids: dict[int, BackendId] = {}
        self._wanted: Mapping[BackendId, Sequence[int]] = {}
        self._live: Sequence[int] = ()
        self._came: list[CopyCame] = []
        gossip.transfers.source = self._original

    # --- what the reader of streams says and asks: see Sharing ------------------------------------------------------

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:
        ranks_changed = backends != self._wanted
        self._wanted = dict(backends)
        self._rename(now)
        if ranks_changed:
            self._stand_by(now)

    def owns(self, backend: BackendId) -> bool:
        key = self._keys.get(backend)
        return key is not None and self.ownership.reads(key)

    def said(self, backend: BackendId, level: Level, now: float) -> None:
        key = self._keys.get(backend)
        if key is not None and self.ownership.reads(key):
            self._stand(key, STANDING_OF[level], now)

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:
        key = self._keys.get(backend)
        if key is not None and is_unable is not (self.ownership.mine().get(key) is Standing.UNABLE):
            self._stand(key, Standing.UNABLE if is_unable else Standing.NONE, now)

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:
        key = self._keys.get(backend)
        if key is None:
            self._came.append(CopyCame(backend, rank, ask, None))
        else:
            self._gossip.transfers.ask(Subject(key, rank), ask, self.ownership.snapshot_sources(key), now)

    def copies(self) -> list[CopyCame]:
        came, self._came = self._came, []
        taken, self._gossip.transfers.taken = self._gossip.transfers.taken, []
        for (key, rank), ask, copy in taken:
            backend = self._ids.get(key)
            if backend is not None:
                came.append(CopyCame(backend, rank, ask, copy))
        return came

    def standby_copy(self, backend: BackendId, rank: int, now: float) -> StandbyCopy | None:
        key = self._keys.get(backend)
        return self._gossip.following.take(Subject(key, rank), now) if key is not None else None

    def level(self, backend: BackendId) -> Level | None:
        owners = self.ownership.owners(self._keys.get(backend, 0))
        best = max((said for _, said in owners.reading), default=None) if owners is not None else None
        return LEVEL_OF[best] if best is not None else None

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        return self.ownership.wake_at

    def follow(self, now: float, *, synced: bool) -> None:
        """Take in what was heard; begin and end what is due. `synced`: this node knows its peers. Cheap if nothing."""
        standings, ownership = self._gossip.standings, self.ownership
        if self._gossip.live is not self._live:
            self._live = self._gossip.live
            ownership.members(self._live, now)
            self._hear([*standings.all().values()], now)
        if standings.news:
            news, standings.news = standings.news, []
            self._hear(news, now)
        if synced:
            ownership.met(now)
        if ownership.wake_at <= now:
            if ownership.tick(now):
                self.moved()
            for key, standing in ownership.mine().items():
                standings.say(key, standing)
            self._stand_by(now)

    # --- what it shows ----------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """By backend id: who should read it, who would be next, who says that he does, and how well."""
        shown: dict[str, Any] = {}
        for backend, key in self._keys.items():
            owners = self.ownership.owners(key)
            if owners is not None:
                shown[str(backend)] = {
                    "owner": f"{owners.owner:016x}",
                    "standby": f"{owners.standby:016x}" if owners.standby else None,
                    "readers": {f"{member:016x}": said.name.lower() for member, said in owners.reading},
                    "ours": self.ownership.reads(key),
                }
        copies = asdict(self._gossip.transfers.counts)
        return {
            "streams": shown,
            "handovers": self.ownership.handovers,
            "copies": copies,
            "standby_blocks": self._gossip.following.rows,
        }

    def counters(self) -> StreamCounters:
        """For metrics."""
        transfers, ownership = self._gossip.transfers.counts, self.ownership
        owned = sum(standing.reads for standing in ownership.mine().values())
        counts = asdict(transfers)
        standby = {f"standby_{name}": count for name, count in asdict(self._gossip.following.counts).items()}
        return StreamCounters(
            owned=owned,
            handovers=ownership.handovers,
            standby_blocks=self._gossip.following.rows,
            **{f"copies_{k}": v for k, v in counts.items()},
            **standby,
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _hear(self, stands: Iterable[Any], now: float) -> None:
        live = dict.fromkeys(self._live)
        for backend, member, _, standing in stands:
            if member in live:
                self.ownership.said(member, backend, Standing(standing), now)

    def _rename(self, now: float) -> None:
        """Which of the wanted backends are known to peers by which key."""
        keys = {backend: key for backend in self._wanted if (key := self._backends.key_of(backend)) is not None}
        if keys == self._keys:
            return
        gone = [key for key in self._ids if key not in keys.values()]
        self._keys, self._ids = keys, {key: backend for backend, key in keys.items()}
        for key in gone:
            self._gossip.standings.say(key, Standing.NONE)
        if self.ownership.backends(self._ids, now):
            self.moved()
        self._hear([*self._gossip.standings.all().values()], now)

    def _stand_by(self, now: float) -> None:
        """Follow those streams for which this node comes next. What it just began to read stays until it is taken."""
        wanted: dict[Subject, Sequence[int]] = {}
        for backend, key in self._keys.items():
            reads = self.ownership.reads(key)
            if not (reads or self.ownership.stands_by(key)):
                continue
            snapshot_sources = () if reads else self.ownership.snapshot_sources(key)
            for rank in self._wanted.get(backend, ()):
                wanted[Subject(key, rank)] = snapshot_sources
        self._gossip.following.want(wanted, now)

    def _stand(self, key: int, standing: Standing, now: float) -> None:
        self.ownership.reached(key, standing, now)
        self._gossip.standings.say(key, standing)

    def _original(self, subject: Subject, since: Place | None) -> Original | None:
        backend = self._ids.get(subject.backend)
        return self.give(backend, subject.rank, since) if backend is not None else None

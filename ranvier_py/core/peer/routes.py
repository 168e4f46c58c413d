"""The route table among peers: its news become lessons, lessons become REMOTE claims.

Rules: what this node served is told with the boot of the process that served it; served by a process that is gone, it
is not told. What is heard is learned for backends of this node alone, at the age it came with, for the boot it names:
an earlier boot is dropped, a later one makes the registry start that boot first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ranvier_py.core.gossip.facts import BOOT_BITS
from ranvier_py.core.gossip.lessons import TOKENS_MAX, BadLesson, Lesson, decode, encode, pieces
from ranvier_py.core.peer.backends import SharedBackends
from ranvier_py.core.routes import News, RouteTable, Stop, Trust


@dataclass(slots=True)
class SharedRouteCounters:
    told: int = 0  # lessons
    outdated: int = 0  # news of a process or a backend that is gone, not told
    heard: int = 0  # lessons
    bad: int = 0  # bytes that are no lesson
    unknown_backend: int = 0
    earlier_boot: int = 0
    rows: int = 0  # new rows by lessons of peers


class SharedRoutes:
    """Satisfies gossip.route_gossip.RouteMemory."""

    def __init__(self, routes: RouteTable, backends: SharedBackends) -> None:
        self.routes = routes
        self.counters = SharedRouteCounters()
        self._backends = backends

    # --- down -------------------------------------------------------------------------------------------------------

    def lessons(self) -> Iterator[tuple[bytes, float]]:
        """The table's news as lessons, each with the time of its evidence; the news are used up."""
        news = self.routes.news
        while news:
            for lesson in self._lessons_of(each := news.popleft()):
                self.counters.told += 1
                yield encode(lesson), each.at

    def _lessons_of(self, news: News) -> Iterator[Lesson]:
        key = self._backends.key_of(news.backend)
        backend = self._backends.find(key) if key is not None else None
        stops = tuple(stop for stop in news.stops if stop[0] <= TOKENS_MAX)
        if key is None or backend is None or backend.epoch != news.epoch or not stops:
            self.counters.outdated += 1
            return
        boot = self._backends.facts.boot(key) % (1 << BOOT_BITS)
        yield from pieces(Lesson(key, boot, news.parent, stops))

    # --- up ---------------------------------------------------------------------------------------------------------

    def hear(self, lesson: bytes, age_s: float, now: float) -> bool:
        """Learn what a peer told. Returns whether any of it was new here."""
        self.counters.heard += 1
        try:
            key, boot, parent, stops = decode(lesson)
        except BadLesson:
            self.counters.bad += 1
            return False
        epoch = self.epoch_of(key, boot, now)
        backend = self._backends.find(key)
        if epoch is None or backend is None:
            return False
        above = self.routes.stop_of(parent) if parent else None
        path: tuple[Stop, ...] = (*stops, above) if above else stops
        created = self.routes.learn(path, backend.id, epoch, Trust.REMOTE, max(0.0, now - age_s))
        self.counters.rows += created
        return created > 0

    def epoch_of(self, key: int, low_boot: int, now: float) -> int | None:
        """This node's epoch for a boot that a peer names; None, and counted, where there is none."""
        backends = self._backends
        backend = backends.find(key)
        if backend is None:
            self.counters.unknown_backend += 1
            return None
        if backends.facts.boot_of(key, low_boot, now) != backends.facts.boot(key):
            self.counters.earlier_boot += 1
            return None
        backends.follow(now)  # a later boot than ours was adopted
        return backend.epoch

"""Compares what all sources want with what the registry has, and returns what is to be done: by level, never by event.

A backend knows who wants it, and goes when nobody does: it gets no more requests, and is removed once it is idle, after
DRAIN_S at the latest; at once if operators alone wanted it. Where its sources fail, a new process at its address waits
until one of them confirms it.
An operator's override of one backend holds while the sources' entries for it stay as they were when he gave it.
Invariant: in whatever order sets come, the backends are those of the last ones (test_backend_reconciler.py).
Bounds: one set for each source; OVERRIDES_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from ranvier_py.core.routing.wanted.found_backend import (
    API,
    OF_OPERATORS,
    FoundBackend,
    SourceName,
    SpecT,
)
from ranvier_py.core.routing.wanted.source_set import SourceSet

DRAIN_S = 300.0  # a long answer has ended, or never will
LINGER_S = 5.0  # a backend that a source drops for a moment keeps its routes: entries move between a source's pages
OVERRIDES_MAX = 4096  # as many as there can be backends; the oldest goes
OVERRIDE_KEPT_S = 600.0  # for an address that no source names any more: by then another engine may have got it

LENT = frozenset(("kubernetes", "dns"))
"""Sources whose addresses are given to another engine once one is gone."""


class Want(NamedTuple, Generic[SpecT]):
    """`by`: who wants it, the one first whose options it has. `drained`: why it gets no requests; "" if it does."""

    found: FoundBackend[SpecT]
    by: tuple[SourceName, ...]
    drained: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.kind for name in self.by))


@dataclass(slots=True)
class PlacedBackend(Generic[SpecT]):
    """A backend that was added for some source."""

    want: Want[SpecT]
    unwanted_at: float | None = None


@dataclass(slots=True)
class Override(Generic[SpecT]):
    """What an operator decided about one backend, whoever wants it. `spec` None: it is removed. `seen`: the entries of
    sources that this is about; another entry ends it."""

    spec: SpecT | None
    seen: dict[SourceName, FoundBackend[SpecT]]
    unwanted_at: float | None = None


class Ordered(NamedTuple, Generic[SpecT]):
    """What operators' orders make of one backend."""

    found: FoundBackend[SpecT] | None
    override: Override[SpecT] | None


class ToAdd(NamedTuple):
    url: str
    want: Want[Any]


class ToChange(NamedTuple):
    """Its weight, its key, or who wants it, is another one."""

    url: str
    want: Want[Any]


class ToDrain(NamedTuple):
    """Send it no more requests, or again if `why` is empty."""

    url: str
    why: str


class ToRemove(NamedTuple):
    url: str
    why: str


Effect = ToAdd | ToChange | ToDrain | ToRemove


@dataclass(slots=True)
class BackendReconciler(Generic[SpecT]):
    """The sources of one node, and the backends that were added for them. `failed`: what could not be added, by URL."""

    backends_max: int
    drain_s: float = DRAIN_S
    sources: dict[SourceName, SourceSet[SpecT]] = field(default_factory=dict)
    placed: dict[str, PlacedBackend[SpecT]] = field(default_factory=dict)
    overrides: dict[str, Override[SpecT]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unconfirmed: dict[str, None] = field(default_factory=dict)
    changed: bool = False  # since the last `effects`

    def source(self, name: SourceName, now: float) -> SourceSet[SpecT]:
        found = self.sources.get(name)
        if found is None:
            found = self.sources[name] = SourceSet(name, now)
        return found

    def take(
        self, name: SourceName, found: Iterable[FoundBackend[SpecT]], now: float, left_out: Iterable[str] = ()
    ) -> bool:
        """Take what a source wants. Returns False if that is not obeyed."""
        of_it = self.source(name, now)
        if not of_it.take(found, now, backends_max=self.backends_max, left_out=left_out):
            return False
        for url in of_it.found:
            self.unconfirmed.pop(url, None)
        if name.kind not in LENT:  # what is written again was edited
            for url, override in self.overrides.items():
                if url not in of_it.found:
                    override.seen.pop(name, None)
        self.changed = True
        return True

    def give_up(self, name: SourceName) -> None:
        """Forget a source that is no longer configured."""
        self.changed = self.sources.pop(name, None) is not None or self.changed

    def add(self, spec: SpecT, now: float) -> None:
        """Note that an operator wants this backend."""
        self.overrides.pop(spec.url, None)
        self.take(API, {**self._of_api, spec.url: FoundBackend(spec)}.values(), now)

    def change(self, spec: SpecT, now: float) -> None:
        """Note that an operator wants other options for this backend."""
        is_of_others = any(spec.url in each.found for name, each in self.sources.items() if name != API)
        if is_of_others and spec.url not in self._of_api:
            self.override(spec.url, spec)
        else:
            self.add(spec, now)

    def ordered(self, url: str) -> Ordered[SpecT]:
        """Return what operators' orders make of a backend, for `restore`."""
        return Ordered(self._of_api.get(url), self.overrides.get(url))

    def restore(self, url: str, before: Ordered[SpecT], now: float) -> None:
        if before.found is not None:
            self.take(API, {**self._of_api, url: before.found}.values(), now)
        else:
            self.withdraw(url, now)
        self.overrides.pop(url, None)
        if before.override is not None:
            self.overrides[url] = before.override
        self.changed = True

    @property
    def _of_api(self) -> Mapping[str, FoundBackend[SpecT]]:
        return self.sources[API].found if API in self.sources else {}

    def remove(self, url: str, now: float) -> None:
        """Note that an operator removes it, whoever else wants it."""
        self.withdraw(url, now)
        self.override(url, None)

    def withdraw(self, url: str, now: float) -> None:
        """Note that no operator's order wants it any more; others may."""
        if url in self._of_api:
            self.take(API, [each for each in self._of_api.values() if each.url != url], now)

    def override(self, url: str, spec: SpecT | None) -> None:
        """Let a backend have these options instead of those of its sources, or be removed (None), until one of them
        names it anew or otherwise."""
        seen = {name: each.found[url] for name, each in self.sources.items() if url in each.found}
        self.changed = True
        self.overrides.pop(url, None)
        if seen:
            self.overrides[url] = Override(spec, seen)
            while len(self.overrides) > OVERRIDES_MAX:
                del self.overrides[next(iter(self.overrides))]

    def restarted(self, url: str) -> ToDrain | None:
        """Take that another process answers at this address. Returns what is to be done at once."""
        placed = self.placed.get(url)
        if placed is None or any(self.sources[name].confirms for name in placed.want.by if name in self.sources):
            return None
        self.unconfirmed[url] = None
        return ToDrain(url, another_process(placed.want.by))

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be done until a source changes something."""
        waits = bool(self.failed) or any(each.unwanted_at is not None for each in self.placed.values())
        return not self.changed and not waits

    def wanted(self, now: float) -> dict[str, Want[SpecT]]:
        """Return what shall be there, by URL, in the order of the sources."""
        entries: dict[str, dict[SourceName, FoundBackend[SpecT]]] = {}
        for name in sorted(self.sources, key=lambda name: name.rank):
            for url, found in self.sources[name].found.items():
                entries.setdefault(url, {})[name] = found
        self._forget_overrides(entries, now)
        wants: dict[str, Want[SpecT]] = {}
        for url, by in entries.items():
            override = self.overrides.get(url)
            if override is None or override.spec is not None:
                wants[url] = self._want(by, override.spec if override is not None else None)
        return wants

    def _want(self, by: Mapping[SourceName, FoundBackend[SpecT]], spec: SpecT | None) -> Want[SpecT]:
        first = next(iter(by.values()))
        if len(by) == 1 and spec is None and not first.draining and first.url not in self.unconfirmed:
            return Want(first, tuple(by))
        process = next((each.process for each in by.values() if each.process), "")
        about = tuple(dict.fromkeys(pair for each in by.values() for pair in each.about))
        key = next((each.key for each in by.values() if each.key is not None), None)
        found = FoundBackend(spec if spec is not None else first.spec, first.draining, process, about, key)
        ending = next((name for name, each in by.items() if each.draining), None)
        drained = f"it ends, as {ending} has it" if ending is not None else ""
        if found.url in self.unconfirmed:
            drained = another_process(by)
        return Want(found, tuple(by), drained)

    def _forget_overrides(self, entries: Mapping[str, Mapping[SourceName, FoundBackend[SpecT]]], now: float) -> None:
        for url, override in list(self.overrides.items()):
            found = entries.get(url, {})
            edited = any(name not in override.seen or is_another(override.seen[name], found[name]) for name in found)
            if found:
                override.unwanted_at = None
            elif override.unwanted_at is None:
                override.unwanted_at = now
            gone = override.unwanted_at is not None and now - override.unwanted_at >= OVERRIDE_KEPT_S
            if edited or gone or not override.seen:
                del self.overrides[url]

    def effects(self, now: float, busy: Callable[[str], bool]) -> list[Effect]:
        """Return what is to be done now, removals first, so that names and ids are free. `busy`: whether the backend of
        a URL has requests in flight. Each effect that was carried out goes to `done`."""
        self.changed = False
        wanted = self.wanted(now)
        self.failed = {url: why for url, why in self.failed.items() if url in wanted}
        effects: list[Effect] = []
        replaced: dict[str, None] = {}
        for url, placed in self.placed.items():
            want = wanted.get(url)
            if want is None:
                effects += self._let_go(url, placed, now, is_busy=busy(url))
            elif placed.want.found.needs_another(want.found):
                replaced[url] = None
                effects.append(ToRemove(url, "its entry is another one"))
            else:
                effects += self._keep(url, placed, want)
        added = [url for url, want in wanted.items() if not want.found.draining]
        effects += [ToAdd(url, wanted[url]) for url in added if url not in self.placed or url in replaced]
        return sorted(effects, key=lambda effect: not isinstance(effect, ToRemove))

    def _let_go(self, url: str, placed: PlacedBackend[SpecT], now: float, *, is_busy: bool) -> Iterator[Effect]:
        override = self.overrides.get(url)
        if override is not None or OF_OPERATORS.issuperset(placed.want.kinds):  # somebody has decided it
            yield ToRemove(url, "removed by an operator")
            return
        if placed.unwanted_at is None:
            placed.unwanted_at = now
        unwanted_s = now - placed.unwanted_at
        if unwanted_s >= self.drain_s or (unwanted_s >= LINGER_S and not is_busy):
            yield ToRemove(url, f"{', '.join(map(str, placed.want.by))} no longer has it")
        elif not placed.want.drained:
            yield ToDrain(url, f"{', '.join(map(str, placed.want.by))} no longer has it")

    def _keep(self, url: str, placed: PlacedBackend[SpecT], want: Want[SpecT]) -> Iterator[Effect]:
        placed.unwanted_at = None
        before = placed.want
        if (before.found is not want.found and before.found != want.found) or before.by != want.by:
            yield ToChange(url, want)
        if before.drained != want.drained:
            yield ToDrain(url, want.drained)

    def done(self, effect: Effect) -> None:
        """Note that an effect was carried out."""
        url = effect.url
        if isinstance(effect, ToAdd):
            self.failed.pop(url, None)
            self.placed[url] = PlacedBackend(effect.want)
        elif isinstance(effect, ToRemove):
            self.placed.pop(url, None)
            self.unconfirmed.pop(url, None)
        elif isinstance(effect, ToDrain):
            placed = self.placed[url]
            placed.want = placed.want._replace(drained=effect.why)
        else:
            placed = self.placed[url]
            placed.want = effect.want._replace(drained=placed.want.drained)

    def refused(self, effect: Effect, why: str) -> bool:
        """Note that an effect could not be carried out: it is tried again. Returns whether that is new."""
        is_new = self.failed.get(effect.url) != why
        self.failed[effect.url] = why
        return is_new


def is_another(before: FoundBackend[Any], after: FoundBackend[Any]) -> bool:
    return before.spec != after.spec or bool(before.process and after.process and before.process != after.process)


def another_process(by: Iterable[SourceName]) -> str:
    return f"another process answers at its address, and {', '.join(map(str, by))} can't confirm that it is meant"

"""Keeps one list of Kubernetes' API as it is: pages, then watches with bookmarks, each from where the last one ended.

Rules: a watch that ends goes on from its last version; one that the server no longer knows begins a new list, without
pause the first time. What fails is tried again after a pause that doubles; meanwhile the last list holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import trio

from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.wanted.watched_list import ListGone, NotKubernetes, WatchedList
from ranvier_py.io.sources.kubernetes_api import KubernetesApi, NoSuchResource, Resource, ServerAway

PAGE_OBJECTS = 500  # as kubectl asks
WATCH_S, SILENCE_S = 300, 15.0  # how long the server shall watch, and what it may be late
PAUSE_S, PAUSE_S_MAX = 1.0, 30.0


class WatchedObjects(NamedTuple):
    """Which objects: of the first of these kinds that the server has, and chosen by these parameters."""

    resources: Sequence[Resource]
    namespace: str
    query: Mapping[str, str]


class ObjectWatch:
    """See the module. `changed` gets all objects by name whenever they are known anew; `failed`, why they are not."""

    def __init__(
        self,
        api: KubernetesApi,
        chosen: WatchedObjects,
        rng: Random,
        changed: Callable[[Mapping[str, Any]], object],
        failed: Callable[[str], object],
    ) -> None:
        self._api, self._chosen, self._rng = api, chosen, rng
        self._changed, self._failed = changed, failed
        self._list, self._kind = WatchedList(), 0

    async def run(self) -> None:
        failures = 0
        while True:
            began = trio.current_time()
            try:
                await self._follow()
                failures = 0 if trio.current_time() - began >= PAUSE_S else failures + 1
            except NotKubernetes as error:
                self._note(error)
                failures += 1
                if isinstance(error, ListGone) and failures == 1:
                    continue
            if failures:
                await trio.sleep(doubled(PAUSE_S, failures - 1, PAUSE_S_MAX) * (1 - 0.2 * self._rng.random()))

    def _note(self, error: NotKubernetes) -> None:
        if not isinstance(error, ServerAway):  # a new list is surely right
            self._list.version = ""
        if isinstance(error, NoSuchResource):
            self._kind = (self._kind + 1) % len(self._chosen.resources)
        if not isinstance(error, ListGone):
            self._failed(str(error))

    async def _follow(self) -> None:
        """Read the list if that is needed, and watch it until the watch ends. Raises NotKubernetes."""
        resource, namespace, query = self._chosen.resources[self._kind], self._chosen.namespace, self._chosen.query
        watched = self._list
        if not watched.version:
            watched.begin()
            token = ""
            while True:
                more = {"continue": token} if token else {}
                body = await self._api.page(resource, namespace, **query, limit=PAGE_OBJECTS, **more)
                if not (token := watched.page(body)):
                    break
            self._changed(watched.objects or {})
        seconds = int(WATCH_S * (1 - 0.2 * self._rng.random()))
        options: dict[str, str | int] = {
            "allowWatchBookmarks": "true",
            "resourceVersion": watched.version,
            "timeoutSeconds": seconds,
        }
        await self._api.watch(
            resource,
            namespace,
            {**query, **options},
            seconds + SILENCE_S,
            begun=lambda: self._changed(watched.objects or {}),
            take=self._take,
        )

    def _take(self, event: Any) -> None:
        if self._list.event(event):
            self._changed(self._list.objects or {})

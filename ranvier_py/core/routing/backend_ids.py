"""Which backends there are, by id, name and URL. An id is free again only when its backend was removed *and* its last
request has ended; its next backend has a higher generation. Bound: `backends_max`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ranvier_py.core.errors import BadRequest, NotFound, RequestError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend, normal_url


class BackendIds:
    """The backends of one node, in order of id."""

    def __init__(self, backends_max: int) -> None:
        self.backends_max = backends_max
        self.slots: list[Backend | None] = []  # by id; removed backends stay until their last request ended
        self.free_ids: list[int] = []  # a heap
        self.generations_used: list[int] = []  # by id: the highest generation ever given out
        self.by_name: dict[str, Backend] = {}  # in order of id
        self.by_url: dict[str, Backend] = {}

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.by_name.values())

    def __getitem__(self, id: BackendId) -> Backend:  # noqa: A002
        """Return the backend with this id, even if it was removed and is ending its requests. Raises KeyError."""
        backend = self.slots[id] if 0 <= id < len(self.slots) else None
        if backend is None:
            raise KeyError(id)
        return backend

    def current(self, id: BackendId) -> Backend | None:  # noqa: A002
        """Return the backend with this id; None if there is none or it was removed."""
        backend = self.slots[id] if 0 <= id < len(self.slots) else None
        return None if backend is None or backend.removed else backend

    def find(self, name_or_url: str) -> Backend | None:
        found = self.by_name.get(name_or_url)
        if found is None and "://" in name_or_url:
            try:
                found = self.by_url.get(normal_url(name_or_url))
            except RequestError:
                return None
        return found

    def known(self, name_or_url: str) -> Backend:
        backend = self.find(name_or_url)
        if backend is None:
            raise NotFound(f"no backend {name_or_url!r}")
        return backend

    def take_id(self) -> int:
        if self.free_ids:
            return heapq.heappop(self.free_ids)
        if len(self.slots) >= self.backends_max:
            raise BadRequest(f"at most {self.backends_max} backends")
        self.slots.append(None)
        self.generations_used.append(0)
        return len(self.slots) - 1

    def enter(self, backend: Backend) -> None:
        """Take a backend whose id `take_id` gave."""
        self.generations_used[backend.id] = backend.generation
        self.slots[backend.id] = backend
        self.by_name[backend.name] = self.by_url[backend.url] = backend
        if backend.id + 1 < len(self.slots):  # it has the id of one that is gone
            self.by_name = dict(sorted(self.by_name.items(), key=lambda item: item[1].id))

    def leave(self, name_or_url: str) -> Backend:
        """Remove a backend, whose id stays taken until `free`. Raises NotFound."""
        backend = self.known(name_or_url)
        del self.by_name[backend.name], self.by_url[backend.url]
        backend.removed = True
        return backend

    def free(self, backend: Backend) -> None:
        self.slots[backend.id] = None
        self.generations_used[backend.id] = backend.generation
        heapq.heappush(self.free_ids, backend.id)

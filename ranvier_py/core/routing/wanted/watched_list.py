"""A list of Kubernetes' API as pages and watch events make it: what is there now, and from where to watch on.

Rules: a new list counts once its last page is there; until then the one before it does, never an empty one. The version
of each event and bookmark is kept, and never compared. Status or event 410 means that a new list is needed.
Bound: OBJECTS_MAX; a longer list is an error, since a part of it would be a smaller fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranvier_py.core.errors import RanvierError

OBJECTS_MAX = 20_000  # more than backends, since pods that are not ready and slices are among them
GONE = 410

Object = Mapping[str, Any]


class NotKubernetes(RanvierError):
    """Nobody's: the API server sent what is no list or event of its API, or reports an error."""

    status, code = 502, "kubernetes_api"


class ListGone(NotKubernetes):
    """The API server no longer knows the version from which to go on: the list must be read anew."""


@dataclass(slots=True)
class WatchedList:
    """`objects`: by name, None until the first list is complete. `version` "": a list is needed."""

    objects: dict[str, Object] | None = None
    version: str = ""
    _pages: dict[str, Object] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a new list."""
        self._pages, self.version = {}, ""

    def page(self, body: Any) -> str:
        """Take a page. Returns the token of the next one; "" after the last. Raises NotKubernetes."""
        items, about = member(body, "items", list), member(body, "metadata", dict)
        for item in items:
            self._pages[name_of(item)] = item
        if len(self._pages) > OBJECTS_MAX:
            raise NotKubernetes(f"more than {OBJECTS_MAX} objects: choose fewer by labels")
        if token := about.get("continue"):
            return str(token)
        self.version = str(about.get("resourceVersion") or "")
        self.objects, self._pages = self._pages, {}
        return ""

    def event(self, body: Any) -> bool:
        """Take an event of a watch. Returns whether the objects changed. Raises ListGone, NotKubernetes."""
        kind, item = member(body, "type", str), member(body, "object", dict)
        if kind == "ERROR":
            why = f"{item.get('code')} {item.get('reason') or ''}: {item.get('message') or ''}"
            raise ListGone(why) if item.get("code") == GONE else NotKubernetes(why)
        about = member(item, "metadata", dict)
        self.version = str(about.get("resourceVersion") or self.version)
        if kind == "BOOKMARK":
            return False
        if kind not in ("ADDED", "MODIFIED", "DELETED") or self.objects is None:
            raise NotKubernetes(f"event {kind[:20]!r} is unknown")
        if kind == "DELETED":
            return self.objects.pop(name_of(item), None) is not None
        before = self.objects.get(name_of(item))
        self.objects[name_of(item)] = item
        if len(self.objects) > OBJECTS_MAX:
            raise NotKubernetes(f"more than {OBJECTS_MAX} objects: choose fewer by labels")
        return bool(before != item)


def member(body: Any, name: str, kind: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    if value is None and kind in (list, dict) and isinstance(body, dict) and name in body:  # Go writes null for empty
        return kind()
    if not isinstance(value, kind):
        raise NotKubernetes(f"{name} is missing or of another type")
    return value


def name_of(item: Any) -> str:
    return str(member(member(item, "metadata", dict), "name", str))

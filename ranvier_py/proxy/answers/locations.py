"""Where engines' answers lead, told to clients without an engine's name: who followed it would pass the node by.

Rules: a location becomes a path, which clients read as one of the node, if its host is one of a backend, if that means
something in a private network alone (an address, a name without a dot or below PRIVATE), or if its path is the one that
was asked for (with or without a slash at its end). What precedes all paths of the backend goes. Other locations stay as
they came. So do all fields but FIELDS and LISTS, of which the latter name locations among other words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit

from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.http_values import LOCATING, HttpResponseHead

LISTS = frozenset((b"refresh", b"link"))
LISTED = re.compile(rb"(?:https?:)?//[^\s<>\"',;]+|(?<=<)/[^\s<>]*|(?<=url=)/[^\s;]*", re.IGNORECASE)

PRIVATE = (".local", ".localhost", ".internal", ".intranet", ".lan", ".svc", ".home.arpa", ".corp")
"""Ends of names that mean nothing outside: RFC 6762, RFC 8375, clusters, clouds, and what is common (RFC 6762 G)."""


@dataclass(frozen=True, slots=True)
class Places:
    """What tells locations at engines. `path`: of the request; `prefix` precedes all paths of the backend asked."""

    path: bytes
    prefix: str
    hosts: frozenset[str]

    @classmethod
    def of(cls, path: bytes, served: BackendAddress, urls: Iterable[str]) -> Places:
        return cls(path, served.path_prefix, frozenset((urlsplit(url).hostname or "").lower() for url in urls))

    def shown(self, head: HttpResponseHead) -> HttpResponseHead:
        """Return the head for the client."""
        headers = [(name, self._shown(name.lower(), value)) for name, value in head.headers]
        return HttpResponseHead(head.status, head.reason, headers, head.framing)

    def _shown(self, name: bytes, value: bytes) -> bytes:
        if name in LISTS:
            return LISTED.sub(lambda found: self.as_path(found[0]), value)
        return self.as_path(value) if name in LOCATING else value

    def as_path(self, location: bytes) -> bytes:
        """Return the location as a path if it is one of a backend; else as it is."""
        try:
            parts = urlsplit(location.decode("latin-1"))
            host = parts.hostname
        except ValueError:
            return location
        if parts.scheme not in ("", "http", "https"):
            return location
        if host is None and not (self.prefix and parts.path.startswith(self.prefix + "/")):
            return location
        if host is not None and host not in self.hosts and not is_private(host):
            asked = self.path.decode("latin-1").rstrip("/")
            if parts.path.rstrip("/") not in (asked, self.prefix + asked):
                return location
        path = "/" + parts.path.lstrip("/")
        if self.prefix and path.startswith(self.prefix + "/"):
            path = path[len(self.prefix) :]
        return urlunsplit(("", "", "/" + path.lstrip("/"), parts.query, parts.fragment)).encode("latin-1")


def is_private(host: str) -> bool:
    """Whether a host means nothing, or another one, outside of a private network."""
    try:
        return not ip_address(host.partition("%")[0]).is_global
    except ValueError:
        name = host.rstrip(".")
        return "." not in name or name.endswith(PRIVATE)

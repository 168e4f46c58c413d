"""Redirects of engines, told to clients without the engine's name: a client that followed it would pass the node by.

Rules: a location becomes a path, which clients read as one of the node, if its host is one of a backend, if that means
something in a private network alone (an address, a name without a dot), or if its path is the one that was asked for
(with or without a slash at its end). Other locations stay as they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit

from ranvier_py.proxy.http_values import HttpResponseHead

FIELDS = (b"location", b"content-location")


def without_hosts(head: HttpResponseHead, path: bytes, urls: Iterable[str]) -> HttpResponseHead:
    """Return the head for the client. `path`: of the request; `urls`: of all backends."""
    if not any(name.lower() in FIELDS for name, _ in head.headers):
        return head
    hosts = {urlsplit(url).hostname for url in urls}
    headers = [(name, as_path(value, path, hosts) if name.lower() in FIELDS else value) for name, value in head.headers]
    return HttpResponseHead(head.status, head.reason, headers, head.framing)


def as_path(location: bytes, path: bytes, hosts: Iterable[str | None]) -> bytes:
    """Return the location as a path if it is one of a backend; else as it is."""
    try:
        parts = urlsplit(location.decode("latin-1"))
        host = parts.hostname
    except ValueError:
        return location
    if host is None or parts.scheme not in ("", "http", "https"):
        return location
    if host not in hosts and not is_private(host) and parts.path.rstrip("/") != path.decode("latin-1").rstrip("/"):
        return location
    return urlunsplit(("", "", "/" + parts.path.lstrip("/"), parts.query, parts.fragment)).encode("latin-1")


def is_private(host: str) -> bool:
    """Whether a host means nothing, or another one, outside of a private network."""
    try:
        return not ip_address(host.partition("%")[0]).is_global
    except ValueError:
        return "." not in host.rstrip(".")

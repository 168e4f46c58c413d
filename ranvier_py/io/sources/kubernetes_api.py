"""Asks the API server of Kubernetes: pages of lists, and watches, over httpx.

Rules: token and authority are read with each request, since they rotate. The answer to a request that is refused names
what is missing: of 403 the verb and the resource. No token is logged.
Bounds: CONNECT_S, PAGE_S for one page, BODY_BYTES_MAX, LINE_BYTES_MAX of one event.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ranvier_py.core.errors import RanvierError
from ranvier_py.core.routing.wanted.watched_list import GONE, ListGone, NotKubernetes

CONNECT_S = 5.0
PAGE_S = 30.0
BODY_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 8 * 1024 * 1024  # etcd holds objects of 1.5 MiB at most
ERROR_BYTES_MAX = 16 * 1024
MESSAGE_CHARACTERS_MAX = 300


class Resource(NamedTuple):
    """A kind of objects. `group`: "" of the core API."""

    group: str
    version: str
    name: str

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.name}"

    def __str__(self) -> str:
        return f"{self.name}.{self.group}" if self.group else self.name


class ServerAway(NotKubernetes):
    """No answer came, or it broke off: what was read before still holds."""


class NoSuchResource(NotKubernetes):
    """The API server does not have this kind of objects, or no object of this name."""


class KubernetesApi:
    """One API server. `credentials`: a folder with `token` and `ca.crt`, each of which may be missing."""

    def __init__(self, url: str, credentials: Path) -> None:
        self._url, self._credentials = url.rstrip("/"), credentials

    def namespace(self) -> str:
        """Return the namespace of the credentials. Blocks for a small file."""
        return self._read("namespace") or "default"

    def _read(self, name: str) -> str:
        try:
            return (self._credentials / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    async def page(self, resource: Resource, namespace: str, **query: str | int) -> Any:
        """Return one page of a list. Raises ListGone, NotKubernetes."""
        body = bytearray()

        def take(piece: bytes) -> None:
            body.extend(piece)
            if len(body) > BODY_BYTES_MAX:
                raise NotKubernetes(f"a page of {resource} has more than {BODY_BYTES_MAX} bytes")

        async with self._answer("list", resource, namespace, PAGE_S, query) as answer:
            await each_piece(answer, take)
        return parsed(bytes(body))

    async def watch(  # two of them are what it calls
        self,
        resource: Resource,
        namespace: str,
        query: Mapping[str, str | int],
        silence_s: float,
        *,
        begun: Callable[[], object],
        take: Callable[[Any], object],
    ) -> None:
        """Call `begun` once the server watches, and `take` with each event until it ends that. Raises ListGone,
        NotKubernetes, also if nothing comes for `silence_s`, and whatever `take` raises."""
        rest = b""

        def split(piece: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + piece).split(b"\n")
            for line in filter(bytes.strip, lines):
                take(parsed(line))
            if len(rest) > LINE_BYTES_MAX:
                raise NotKubernetes(f"an event of {resource} has more than {LINE_BYTES_MAX} bytes")

        async with self._answer("watch", resource, namespace, silence_s, {**query, "watch": 1}) as answer:
            begun()
            await each_piece(answer, split)
        if rest.strip():
            raise ServerAway(f"watch {resource}: it ended within an event")

    @asynccontextmanager
    async def _answer(
        self, verb: str, resource: Resource, namespace: str, silence_s: float, query: Mapping[str, str | int]
    ) -> AsyncIterator[httpx.Response]:
        token, timeout = self._read("token"), httpx.Timeout(CONNECT_S, read=silence_s)
        headers = {"accept": "application/json", "accept-encoding": "identity"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )
        try:
            async with (
                httpx.AsyncClient(verify=self._trust(), timeout=timeout, trust_env=False) as client,
                client.stream("GET", self._url + resource.path(namespace), params=dict(query), headers=headers) as got,
            ):
                if got.status_code != httpx.codes.OK:
                    raise refusal(verb, resource, namespace, got.status_code, await message_of(got))
                yield got
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ssl.SSLError, ValueError) as error:
            if isinstance(error, RanvierError):
                raise
            raise ServerAway(f"{verb} {resource}: {reason_of(error)}") from error

    def _trust(self) -> ssl.SSLContext | bool:
        authorities = self._read("ca.crt")
        return ssl.create_default_context(cadata=authorities) if authorities else True


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotKubernetes(f"{body[:40]!r} is no JSON") from error


def reason_of(error: BaseException) -> str:
    """Return what the first of a chain of errors that has words says: httpx's often have none."""
    found: BaseException | None = error
    while found is not None and not str(found):
        found = found.__cause__ or found.__context__
    return str(found) if found is not None else type(error).__name__


async def each_piece(answer: httpx.Response, take: Callable[[bytes], object]) -> None:
    """Call `take` with each piece of a body. Raises what that raises."""
    failed: BaseException | None = None
    try:
        async for piece in answer.aiter_raw():
            try:
                take(piece)
            except RanvierError as error:
                failed = error
                await answer.aclose()  # the next read fails, which ends httpx's chain of generators in order
    except (httpx.StreamError, httpx.HTTPError):
        if failed is None:
            raise
    if failed is not None:
        raise failed


async def message_of(answer: httpx.Response) -> str:
    """Return what the API server says of an error."""
    text = bytearray()
    await each_piece(answer, lambda piece: text.extend(piece[: ERROR_BYTES_MAX - len(text)]))
    try:
        found = json.loads(text)
        return str(found["message"])[:MESSAGE_CHARACTERS_MAX]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def refusal(verb: str, resource: Resource, namespace: str, status: int, message: str) -> NotKubernetes:
    place = f"{resource} in namespace {namespace}"
    if status == GONE:
        return ListGone(f"{verb} {place}: 410 {message}")
    if status == 401:
        return NotKubernetes(f"{verb} {place}: 401: the token is refused. {message}".rstrip())
    if status == 403:
        advice = f"403: a Role must allow {verb} on {resource.name} (apiGroup {resource.group!r})"
        return NotKubernetes(f"{verb} {place}: {advice}. {message}".rstrip())
    if status == 404:
        return NoSuchResource(f"{verb} {place}: 404: there is no such resource. {message}".rstrip())
    return NotKubernetes(f"{verb} {place}: {status} {message}".rstrip())

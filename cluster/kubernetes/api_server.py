"""Speaks as much of Kubernetes' API as discovery asks for, as the API's documents and recorded answers have it.

    api = ApiServer(token="t")
    port = await nursery.start(serve, api, None)
    api.put("endpointslices", "vllm-abc", {"addressType": "IPv4", ...}, labels={"kubernetes.io/service-name": "vllm"})

Lists come in pages, watches as lines of JSON in chunks, with bookmarks on demand. Faults: `forbidden`, other `tokens`,
`forget` (410 for old versions, as a status and as an event), `cut` (streams end within a line), `gone_pages`,
`status` for all, `silent` watches, `slow_s`. Watch events are filtered by labels as lists are.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trio

HEAD_BYTES_MAX = 16_384
GROUPS = {
    "endpointslices": "discovery.k8s.io/v1",
    "pods": "v1",
    "services": "v1",
    "inferencepools": "inference.networking.k8s.io/v1",
}


@dataclass
class Change:
    version: int
    kind: str
    resource: str
    item: dict[str, Any]


@dataclass
class ApiServer:
    """The objects of one namespace, their changes, and faults."""

    tokens: set[str] = field(default_factory=lambda: {"token"})
    namespace: str = "llm"
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    version: int = 100
    oldest: int = 0  # versions before it are forgotten
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # verb and resource
    unknown: set[str] = field(default_factory=set)  # resources, or «resource version», that it has not
    status: int = 0  # of all answers; 0: right ones
    gone_status: bool = False  # whether 410 is a status of a watch, else an event
    gone_pages: int = 0  # of so many lists the second page is gone
    slow_s: float = 0.0
    silent: bool = False  # watches give nothing
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # verb, resource, parameters
    moved: trio.Event = field(default_factory=trio.Event)
    breaks: trio.Event = field(default_factory=trio.Event)
    garbage: bytes = b""  # what each stream has before it ends

    def put(self, resource: str, name: str, body: Mapping[str, Any], **meta: Any) -> None:
        """Make or change an object."""
        self.version += 1
        known = self.objects.get((resource, name))
        uid = meta.pop("uid", known["metadata"]["uid"] if known else f"uid-{name}-{self.version}")
        about = {"name": name, "namespace": self.namespace, "uid": uid, "resourceVersion": str(self.version), **meta}
        item = {**body, "metadata": about}
        self.objects[resource, name] = item
        self._change("MODIFIED" if known else "ADDED", resource, item)

    def drop(self, resource: str, name: str) -> None:
        self.version += 1
        item = self.objects.pop((resource, name))
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._change("DELETED", resource, item)

    def bookmark(self, resource: str) -> None:
        """Send all watches of this kind the present version."""
        self.version += 1
        self._change("BOOKMARK", resource, {"metadata": {"resourceVersion": str(self.version)}})

    def forget(self) -> None:
        """Forget all versions but the present one, and end all watches."""
        self.version += 1
        self.oldest = self.version
        self.changes.clear()
        self.cut()

    def cut(self, garbage: bytes = b"") -> None:
        """End all streams, each with this."""
        self.garbage = garbage
        self.breaks.set()
        self.breaks = trio.Event()

    def _change(self, kind: str, resource: str, item: dict[str, Any]) -> None:
        self.changes.append(Change(self.version, kind, resource, item))
        self.moved.set()
        self.moved = trio.Event()

    def listed(self, resource: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        found = [item for (kind, _), item in sorted(self.objects.items()) if kind == resource]
        return [item for item in found if chosen(item, query)]


def chosen(item: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Whether an object has the labels and the name that are asked for."""
    about = item["metadata"]
    labels = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    fits = all(about.get("labels", {}).get(label) == value for label, _, value in labels)
    return fits and name in ("", about.get("name", name))


class Connection:
    """One connection of a client."""

    def __init__(self, api: ApiServer, stream: trio.abc.Stream) -> None:
        self.api, self.stream, self.rest = api, stream, b""

    async def run(self) -> None:
        try:
            while (head := await self.head()) and await self.answer(head):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            pass
        finally:
            await trio.aclose_forcefully(self.stream)

    async def head(self) -> str:
        while b"\r\n\r\n" not in self.rest:
            if len(self.rest) > HEAD_BYTES_MAX or not (data := await self.stream.receive_some()):
                return ""
            self.rest += bytes(data)
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        return head.decode("latin-1")

    async def answer(self, head: str) -> bool:
        """Answer one request. Returns whether the connection goes on."""
        line, *fields = head.split("\r\n")
        target = urlsplit(line.split()[1])
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        resource = target.path.rpartition("/")[2]
        verb = "watch" if query.get("watch") else "list"
        self.api.asked.append((verb, resource, query))
        await trio.sleep(self.api.slow_s)
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        code, why = self.refusal(verb, resource, target.path, headers)
        if code:
            return await self.send(code, failure(code, why))
        return await (self.watch(resource, query) if verb == "watch" else self.page(resource, query))

    def refusal(self, verb: str, resource: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        api, group = self.api, GROUPS.get(resource, "")
        known = f"/{'apis' if '/' in group else 'api'}/{group}/namespaces/{api.namespace}/{resource}"
        if headers.get("authorization", "").removeprefix("Bearer ") not in api.tokens:
            return 401, "Unauthorized"
        if api.status:
            return api.status, "etcdserver: request timed out"
        if (verb, resource) in api.forbidden:
            return 403, f'{resource} is forbidden: User "system:serviceaccount:llm:ranvier" cannot {verb} it'
        if path != known or resource in api.unknown:
            return 404, "the server could not find the requested resource"
        return 0, ""

    async def page(self, resource: str, query: Mapping[str, str]) -> bool:
        api, start, limit = self.api, int(query.get("continue", 0)), int(query.get("limit", 500))
        if start and api.gone_pages:
            api.gone_pages -= 1
            return await self.send(410, failure(410, "The provided continue parameter is too old"))
        found = api.listed(resource, query)
        more = {"continue": str(start + limit)} if start + limit < len(found) else {}
        about = {"resourceVersion": str(api.version), **more}
        group = GROUPS[resource]
        items = found[start : start + limit] or None  # Go writes an empty list so
        return await self.send(200, {"kind": "List", "apiVersion": group, "metadata": about, "items": items})

    async def watch(self, resource: str, query: Mapping[str, str]) -> bool:
        api, version = self.api, int(query["resourceVersion"])
        if version < api.oldest and api.gone_status:
            return await self.send(410, failure(410, "too old resource version"))
        await self.stream.send_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if version < api.oldest:
            await self.event("ERROR", failure(410, "too old resource version"))
            return await self.end()
        breaks = api.breaks
        with trio.move_on_after(float(query["timeoutSeconds"])):
            while not breaks.is_set():
                moved = api.moved
                for change in [each for each in api.changes if each.version > version]:
                    version = change.version
                    fits = change.kind == "BOOKMARK" or chosen(change.item, query)
                    if change.resource == resource and fits and not api.silent:
                        await self.event(change.kind, change.item)
                await either(moved, breaks)
        if api.garbage:
            await self.chunk(api.garbage)
            return False
        return await self.end()

    async def event(self, kind: str, item: Mapping[str, Any]) -> None:
        """Send an event, in two pieces that share a line."""
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        await self.chunk(line[: len(line) // 2])
        await self.chunk(line[len(line) // 2 :])

    async def chunk(self, data: bytes) -> None:
        await self.stream.send_all(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> bool:
        await self.stream.send_all(b"0\r\n\r\n")
        return True

    async def send(self, code: int, body: Mapping[str, Any]) -> bool:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        await self.stream.send_all(head.encode() + data)
        return True


async def either(one: trio.Event, other: trio.Event) -> None:
    """Wait until one of two events is set."""
    async with trio.open_nursery() as nursery:
        for event in (one, other):
            nursery.start_soon(wait_and_cancel, event, nursery.cancel_scope)


async def wait_and_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def failure(code: int, message: str) -> dict[str, Any]:
    reasons = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 410: "Expired"}
    reason = reasons.get(code, "InternalError")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


async def serve(
    api: ApiServer, tls: ssl.SSLContext | None, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer on a free port of 127.0.0.1 until cancelled; `started` gets the port."""

    async def handle(stream: trio.SocketStream) -> None:
        secured = stream if tls is None else trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        await Connection(api, secured).run()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
        task_status.started(listeners[0].socket.getsockname()[1])

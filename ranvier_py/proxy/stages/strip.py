"""Keeps what only routers may set from engines: where to take cached blocks from, and which rank computes.

Invariant: no client sets them, by whatever spelling (test_router_fields.py): it could have an engine fetch blocks from
anywhere, fail, or keep wrong blocks for everybody. Fields of the head and members of a body that was read are removed,
and all other bytes stay as they came. A body that was not read is searched, and what is in it if it is compressed; if
it may have one, it is refused, and so is one in a coding that is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from trio.lowlevel import checkpoint

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.metrics import counter
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.outer_members import without
from ranvier_py.core.prompts.prompt import Prompt
from ranvier_py.core.prompts.reserved_members import (
    CODINGS,
    ID_MEMBERS,
    RANK_MEMBERS,
    SLICE_BYTES,
    TRANSFER_MEMBERS,
    BodySearch,
    inflated_slices,
    slices,
)
from ranvier_py.core.routing.processes.ranks import RANK_FIELD
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import REQUEST_ID, Headers, HttpRequest

FORM = re.compile(rb"\s*--")  # begins a form, whatever its fields call it

AUTO, REMOVE, PASS = "auto", "remove", "pass"


@dataclass(frozen=True, slots=True)
class RouterFieldOptions(Options):
    """What becomes of clients' fields and members that only a router can know the value of."""

    SECTION = "Routing"

    transfer_fields: str = option(
        REMOVE,
        "What is done with clients' fields that say where engines take cached blocks from (kv_transfer_params, "
        "bootstrap_host, x-prefiller-host-port and their like). remove: engines never see them, and a body too large "
        "to be read that may have one is refused. pass: only where all clients are trusted, such as another router.",
        one_of=(REMOVE, PASS),
    )
    client_ranks: str = option(
        AUTO,
        "What is done with clients' x-data-parallel-rank and data_parallel_rank, which choose an engine's rank. auto: "
        "remove where this node chooses ranks, else pass.",
        one_of=(AUTO, REMOVE, PASS),
    )


@dataclass(slots=True)
class RouterFieldCounters:
    """What clients set that only routers may set."""

    removed: dict[str, int] = counter(
        "Fields and members of clients that only routers may set, and that no engine saw.", label="field"
    )
    refused: dict[str, int] = counter(
        "Requests refused because an unread body may have members that only routers may set.", label="field"
    )


class RouterFields:
    """Removes them from requests. `places_ranks`: this node chooses the ranks of engines itself."""

    def __init__(self) -> None:
        self.counters = RouterFieldCounters()
        self.places_ranks = False

    def admitted(self, request: HttpRequest, options: RouterFieldOptions) -> HttpRequest:
        """Return the request with those reserved fields of its head that may pass. Others may share its head."""
        fields, passed, request_id = request.fields, [request.fields.lines], request.fields.request_id
        for name, value in fields.reserved:
            key = name.lower()
            if self._removes_ranks(options) if key == RANK_FIELD else options.transfer_fields == REMOVE:
                self.counters.removed[key.decode()] += 1
                continue
            passed += (name, b": ", value, b"\r\n")
            request_id = value if key == REQUEST_ID else request_id
        fields = fields._replace(lines=b"".join(passed), request_id=request_id, reserved=())
        known = request.http_minor, request.keep_alive, fields, request.path
        return HttpRequest(request.method, request.target, request.headers, request.body, *known)

    def found(self, request: HttpRequest, prompt: Prompt, options: RouterFieldOptions) -> Steps[Sequence[str]]:
        """Return the names of the members to remove. Raises BadRequest for an unread body that may have one."""
        transfers = options.transfer_fields == REMOVE
        names = (*(TRANSFER_MEMBERS if transfers else ()), *(RANK_MEMBERS if self._removes_ranks(options) else ()))
        ids = ID_MEMBERS if transfers else ()
        if prompt.reserved is not None:
            return [name for name in prompt.reserved.router if name in names or name in ids]
        if names and (yield from self._searched(request, names)) and ids:
            yield from self._searched(request, ids)
        return ()

    def _searched(self, request: HttpRequest, names: Sequence[str]) -> Steps[bool]:
        """Return whether a request id in the body may have an engine's address. Raises BadRequest for these names."""
        body = request.body
        search = BodySearch(names, form=FORM.match(body) is not None)
        for piece in chain(slices(body), self._inflated(request, names)):
            if name := search.find(piece):
                self._refuse(name)
            if len(body) > SLICE_BYTES or not request.fields.readable:
                yield checkpoint
        return search.has_address

    def _inflated(self, request: HttpRequest, names: Sequence[str]) -> Iterator[bytes]:
        """Yield what is in a compressed body. Raises BadRequest for one in a coding that is not known here."""
        codings = codings_of(request.headers)
        if not codings:
            return
        if len(codings) > 1 or codings[0] not in CODINGS:
            self._refuse(names[0])
        try:
            yield from inflated_slices(request.body)
        except ValueError:
            self._refuse(names[0])

    def without(self, request: HttpRequest, names: Sequence[str]) -> HttpRequest:
        """Return the request without these members. Raises BadRequest if the body cannot be changed."""
        try:
            body = without(request.body, names)
        except (ValueError, RecursionError):  # in another encoding
            self._refuse(names[0])
        for name in names:
            self.counters.removed[name] += 1
        return request.with_body(body)

    def _removes_ranks(self, options: RouterFieldOptions) -> bool:
        return self.places_ranks if options.client_ranks == AUTO else options.client_ranks == REMOVE

    def _refuse(self, name: str) -> NoReturn:
        self.counters.refused[name] += 1
        raise BadRequest(f"this body cannot be read, and may have a {name}, which only a router may set")


def codings_of(headers: Headers) -> Sequence[bytes]:
    """Return the codings of a body, in lower case."""
    values = [value for name, value in headers if name.lower() == b"content-encoding"]
    codings = [coding.strip().lower() for value in values for coding in value.split(b",")]
    return [coding for coding in codings if coding not in (b"", b"identity")]

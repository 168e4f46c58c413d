"""A head that comes again and again on one connection: who sent it, and what others get of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limits.estimates import TenantLengths
from ranvier_py.core.access.limits.meter_groups import IdentityMeters, MeterGroup
from ranvier_py.proxy.http_values import NO_REQUEST, HttpRequest, RequestFields


class HeadLimits(NamedTuple):
    """What counts the requests of a head, and what it says of them for that. `tokens`: what counts those of the usual
    ones, if nothing but tokens counts beside the head. `lengths`: those of its tenant. `api`: as which a body is read;
    "" of what generates nothing. `may_be_uncounted`: perhaps nobody counts its tokens, though somebody must."""

    meters: IdentityMeters
    tokens: MeterGroup | None
    lengths: TenantLengths
    api: str
    may_be_uncounted: bool


@dataclass(slots=True, eq=False, repr=False)  # no repr, since it would show keys
class SeenHead:
    """What `Gate` has found out of a head, and what it makes of it once it knows who sent it."""

    fields: RequestFields  # as they came
    digests: Sequence[bytes]  # of what may be keys
    named: str  # the tenant that a trusted proxy names
    client: str = ""  # the address that it says that it serves
    is_open: bool = False  # no key is needed
    identity: Identity | None = None
    # what follows gets this, with the body of each of its requests while that runs
    request: HttpRequest = field(default_factory=lambda: NO_REQUEST)
    claims: list[str] = field(default_factory=list)  # names of fields that are not believed
    limits: HeadLimits | None = None  # what counts its requests, if its identity has limits
    limit_lines: Callable[[], bytes] | None = None  # of the heads of its answers, if they show what is left of those

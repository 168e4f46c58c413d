"""Faults on demand: which fault hits a request, how often, and for how long. Pure; the engine carries it out.

`POST /admin/faults` sets a fault, which stays until it is used up (`count`), too old (`lasting_s`), or replaced. Only
one is set at a time: a test that wants two sets one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from random import Random
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from cluster.engine.engine_api import ApiError


class FaultKind(Enum):
    LATENCY = "latency"  # the engine waits `seconds` before it reads the request
    STATUS = "status"  # `status` instead of an answer
    RESET_MID_STREAM = "reset_mid_stream"  # the connection is reset after `after_tokens` tokens
    STALL = "stall"  # nothing is sent for `seconds` (for ever if not given) after `after_tokens` tokens
    REFUSE = "refuse"  # the connection is reset without an answer
    HANG = "hang"  # as if the process were stopped: connections open, and not a byte comes, whatever is asked
    ERROR_INSIDE = "error_inside"  # a failure behind a status of 200, in one of FailureForm
    UNCACHED = "uncached"  # no prefix is found again; answers count 0 cached tokens, or with `counts` false, none


class FailureForm(Enum):
    """How an engine fails within a 200. A whole answer is an error of `status` in each of them."""

    FIRST = "first"  # the first event is an error
    ANNOUNCED = "announced"  # … behind those that announce an answer
    COMMENTED = "commented"  # … behind comments that keep the line open
    EMPTY = "empty"  # no event
    DONE = "done"  # the end alone
    LATE = "late"  # an error after `after_tokens` tokens


ERRORS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        400: ("BadRequestError", "This model does not support what was asked for."),
        401: ("AuthenticationError", "Unauthorized"),
        403: ("PermissionDeniedError", "This key may not use this engine."),
        404: ("NotFoundError", "The model does not exist."),
        429: ("RateLimitError", "Too many requests."),
        503: ("service_unavailable", "The request queue is full."),
        529: ("overloaded_error", "Overloaded"),
    }
)
"""What engines and the proxies before them write when they refuse: type and message, by status."""

POISON = b"[poison]"
"""A request with this in its body makes every engine answer 500, as one that meets a bug of the engine does."""

UNKNOWN_ERROR = ("InternalServerError", "a fault on demand")

NEVER = 1 << 60

Number: TypeAlias = Annotated[float, Field(ge=0)]
Whole: TypeAlias = Annotated[int, Field(ge=0)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Fault:
    """Hits `count` requests (None: no limit), each with `probability`, for `lasting_s` seconds from when it is set.

    `health`: whether /health, /ping and /v1/models are hit like generation; "only": they alone. REFUSE and HANG hit all
    but /admin anyway. `stated`: the metrics page says that prefix caching is off.
    """

    kind: FaultKind
    count: Whole | None = None
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    seconds: Number = inf
    status: Annotated[int, Field(ge=200, le=599)] = 500
    form: FailureForm = FailureForm.FIRST
    after_tokens: Whole = 3
    retry_after_s: Whole | None = None
    counts: bool = True
    stated: bool = False
    lasting_s: Number = inf
    health: bool | Literal["only"] = False

    @property
    def serves(self) -> bool:
        """Whether the engine answers clients all the same."""
        return self.health == "only" or self.kind is FaultKind.UNCACHED

    @property
    def caches(self) -> bool:
        return self.kind is not FaultKind.UNCACHED

    @property
    def error(self) -> ApiError:
        """The error that it stands for."""
        kind, message = ERRORS.get(self.status, UNKNOWN_ERROR)
        return ApiError(self.status, kind, message, retry_after_s=self.retry_after_s)

    @property
    def is_late(self) -> bool:
        return self.kind is FaultKind.ERROR_INSIDE and self.form is FailureForm.LATE

    def depth(self, tokens: int) -> int:
        """Return after how many of an answer's tokens it hits; NEVER for faults that do not hit in mid-answer."""
        is_deep = self.is_late or self.kind in (FaultKind.STALL, FaultKind.RESET_MID_STREAM)
        return min(self.after_tokens, tokens) if is_deep else NEVER

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Fault | None:
        """Read the fault of a request body; None for kind "none". Raises ValueError that says what is wrong."""
        if fields.get("kind") == "none":
            return None
        fault = READER.validate_python({name: value for name, value in fields.items() if value is not None})
        if fault.kind is FaultKind.LATENCY and fault.seconds == inf:
            raise ValueError("latency needs seconds")
        return fault


READER = TypeAdapter(Fault)


class Faults:
    """The fault that is set, and how many requests each kind has hit."""

    def __init__(self, rng: Random) -> None:
        self.hits: dict[str, int] = {kind.value: 0 for kind in FaultKind}
        self._rng = rng
        self._fault: Fault | None = None
        self._left: float = 0
        self._until = 0.0

    def set(self, fault: Fault | None, now: float) -> None:
        self._fault = fault
        if fault is not None:
            self._left = inf if fault.count is None else fault.count
            self._until = now + fault.lasting_s

    def draw(self, now: float, *, health: bool = False) -> Fault | None:
        """Return the fault that hits this request, if any, and count it. `health`: a probe, not a generation."""
        fault = self._fault
        if fault is None:
            return None
        if self._left < 1 or now >= self._until:
            self._fault = None
            return None
        hit = fault.health if health else fault.health != "only"
        if not hit and fault.kind is not FaultKind.REFUSE:
            return None
        if self._rng.random() >= fault.probability:
            return None
        self._left -= 1
        self.hits[fault.kind.value] += 1
        return fault

    def states_no_cache(self, now: float) -> bool:
        """Whether the metrics page says that prefix caching is off."""
        fault = self._fault
        return fault is not None and fault.kind is FaultKind.UNCACHED and fault.stated and now < self._until

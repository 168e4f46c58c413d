"""A span as a value, and batches of them as OTLP/JSON: what a collector takes at /v1/traces.

Rule of the mapping (opentelemetry-proto): ids are in hex, 64-bit numbers and times strings, kinds and codes numbers.
Source: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Kinds of spans."""

ERROR = 2  # code of a status; that of what went well is not set
REMOTE_KNOWN, REMOTE = 0x100, 0x200  # flags: whether the parent is in another process is known, and it is

VALUE_CHARACTERS_MAX = 300  # of a text, as in the log

Attribute = bool | int | float | str


class TraceSpan(NamedTuple):
    """One span. Times are seconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    begin: float
    end: float
    attributes: Mapping[str, Attribute | None]  # None: not known, and left out
    error: str = ""  # why it failed; "" if it did not
    state: str = ""  # tracestate
    is_sampled: bool = True
    is_remote: bool = False  # its parent is in another process


def request_of(spans: Sequence[TraceSpan], resource: Mapping[str, Attribute], version: str, schema: str) -> bytes:
    """Return the body of an export request."""
    scope = {"scope": {"name": "ranvier_py", "version": version}, "spans": [span_json(span) for span in spans]}
    if schema:
        scope["schemaUrl"] = schema
    return orjson.dumps({"resourceSpans": [{"resource": {"attributes": attributes(resource)}, "scopeSpans": [scope]}]})


def span_json(span: TraceSpan) -> Mapping[str, Any]:
    known = REMOTE_KNOWN | (REMOTE if span.is_remote else 0) | span.is_sampled
    made: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "flags": known,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": nanoseconds(span.begin),
        "endTimeUnixNano": nanoseconds(max(span.begin, span.end)),
        "attributes": attributes(span.attributes),
    }
    if span.parent_id:
        made["parentSpanId"] = span.parent_id
    if span.state:
        made["traceState"] = span.state
    if span.error:
        made["status"] = {"code": ERROR, "message": span.error[:VALUE_CHARACTERS_MAX]}
    return made


def nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))


def attributes(values: Mapping[str, Attribute | None]) -> Sequence[Mapping[str, Any]]:
    return [{"key": name, "value": value_json(value)} for name, value in values.items() if value not in (None, "")]


def value_json(value: Attribute | None) -> Mapping[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)[:VALUE_CHARACTERS_MAX].encode("utf-8", "replace").decode()}

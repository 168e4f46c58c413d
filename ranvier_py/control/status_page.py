"""Renders the status page: the answers of a node's control port, as text for one terminal screen.

Pure: JSON values in, lines out. Tables take their columns from the rows, so a new fact about a backend shows by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_COLUMNS = ("name", "url", "health", "state", "circuit", "draining", "load", "in_flight", "weight")
CELL_CHARACTERS_MAX = 40
ADVICE_CHARACTERS_MAX = 1000  # a sentence with some names
LONG = {"why": 120}  # characters of columns that hold a sentence; such a column comes last


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The answers of one node."""

    address: str
    ready: bool
    reason: str
    backends: Sequence[Mapping[str, Any]]
    routes: Mapping[str, Any]
    cluster: Mapping[str, Any] | None = None  # None: the node has no peers
    divergence: str = ""  # in words, if another node was asked, too
    engine_caches: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    responses: Mapping[str, Any] | None = None
    access: Mapping[str, Any] | None = None


def status_page(status: NodeStatus) -> str:
    """Return one page: readiness, backends, routes and counters."""
    ready = "ready" if status.ready else "not ready"
    lines = [f"{status.address}  {ready}" + (f": {status.reason}" if status.reason else ""), "", "Backends"]
    lines += backend_lines(status.backends)
    if status.cluster is not None:
        lines += cluster_lines(status.cluster)
        lines += [f"  divergence  {status.divergence}"] if status.divergence else []
    lines += engine_cache_lines(status.engine_caches) if status.engine_caches is not None else []
    lines += calibration_lines(status.calibration) if status.calibration is not None else []
    lines += response_cache_lines(status.responses) if status.responses and status.responses["enabled"] else []
    lines += access_lines(status.access) if status.access and status.access.get("needs_key") else []
    shadows = status.routes.get("shadows", ())
    lines += ["", "Shadows: what other policies would have done", *table(shadows)] if shadows else []
    lines += ["", "Routes and requests", *pairs({k: v for k, v in status.routes.items() if k != "shadows"})]
    return "\n".join(lines) + "\n"


def backend_lines(backends: Sequence[Mapping[str, Any]]) -> list[str]:
    """Show the backends, and below them in whole sentences what the operator should do about any."""
    rows = [{name: fact for name, fact in backend.items() if name != "advice"} for backend in backends]
    advised = [backend for backend in backends if backend.get("advice")]
    lines = [f"  {word(each['name'])}: {word(each['advice'], ADVICE_CHARACTERS_MAX)}" for each in advised]
    return [*table(rows), *lines] or ["  none; add one with POST /admin/backends"]


def engine_cache_lines(engine_caches: Mapping[str, Any]) -> list[str]:
    """Show how well this node knows what each engine holds."""
    lines = ["", "Engine caches", *table(engine_caches["engines"])]
    counts = {name: count for name, count in engine_caches["counts"].items() if count}
    facts = {"routes": counts, "trouble": engine_caches["trouble"]}
    return [*lines, *pairs({name: fact for name, fact in facts.items() if fact})]


def response_cache_lines(responses: Mapping[str, Any]) -> list[str]:
    """Show what was answered without an engine, and what that saved."""
    hits, prompt, output = (
        responses["requests"]["hit"],
        *(responses[f"saved_{one}_tokens"] for one in ("prompt", "output")),
    )
    saved = f"{hits} requests, {prompt} prompt and {output} output tokens"
    names = ("requests", "hit_rate", "shared", "entries", "size_bytes", "evictions", "unkept")
    facts = {"saved": saved, **{name: responses[name] for name in names}}
    if "peers" in responses:
        facts["peers"] = {name: responses["peers"][name] for name in ("advertised", "known")}
        facts["of peers"] = responses["peers"]["fetches"]
        facts["to peers"] = responses["peers"]["given"]
    if "redis" in responses:
        names = ("connected", "fallback_active", "found", "fallback_hits", "outages", "errors", "last_error")
        facts["redis"] = {name: responses["redis"][name] for name in names}
    return ["", "Response cache", *pairs(facts)]


def access_lines(access: Mapping[str, Any]) -> list[str]:
    """Show how many keys there are, and what is wrong with their file."""
    trouble = [f"  not read, going on with the keys before: {word(access['trouble'], ADVICE_CHARACTERS_MAX)}"]
    facts = {"keys": access["keys"]["count"], **{name: access[name] for name in ("tenants", "refused", "claims")}}
    return ["", f"Access: {access['file']}", *pairs(facts), *(trouble if access["trouble"] else [])]


def calibration_lines(calibration: Mapping[str, Any]) -> list[str]:
    """Show how well this node predicts what each engine has cached, and why where it does not."""
    rows = calibration["backends"]
    known = [{name: row[name] for name in row if any(each[name] is not None for each in rows)} for row in rows]
    lines = ["", "Predictions against answers", *(table(known) or ["  no answer had counts yet"])]
    shares = {name: calibration[name] for name in ("route_precision", "route_recall")}
    counts = {name: calibration[name] for name in ("asking", "polls") if calibration[name]}
    return [*lines, *pairs({name: fact for name, fact in {**shares, **counts}.items() if fact is not None})]


MEMBER_COLUMNS = (
    *("name", "state", "address", "public", "incarnation", "since_s", "silent_s", "rtt_ms"),
    *("datagrams", "routes", "release", "protocol"),
)
CLUSTER_FACTS = (
    *("lag_ms", "routes", "route_sync", "facts", "sessions", "refused"),
    *("discovery", "state_file", "key_file"),
)


def cluster_lines(cluster: Mapping[str, Any]) -> list[str]:
    """Show this node among its peers, and the traffic between them."""
    me = f"{cluster['name']} at {cluster['address']}, incarnation {cluster['incarnation']}"
    members = [{name: member.get(name) for name in MEMBER_COLUMNS} for member in cluster["members"]]
    lines = ["", f"Cluster: {me}", *(table(members) or ["  no peers yet"])]
    others = cluster.get("other_protocols", {})
    lines += [
        f"  {host} speaks gossip protocol {protocol}: nothing is shared with it" for host, protocol in others.items()
    ]
    differing = cluster.get("backend_sets", {}).get("differing", {})
    lines += [f"  {name} has other backends: {word(how, ADVICE_CHARACTERS_MAX)}" for name, how in differing.items()]
    traffic = [
        {"topic": topic, **{f"{name}_{what}": found[what] for name, found in each.items() for what in found}}
        for topic, each in cluster["topics"].items()
    ]
    rates = [
        {"plane": plane, "sent_bytes_per_s": each["sent"], "received_bytes_per_s": each["received"]}
        for plane, each in cluster.get("bytes_per_s", {}).items()
    ]
    lines += ["", "Gossip just now", *table(rates)] if rates else []
    lines += ["", "Gossip since the start", *table(traffic)]
    facts = {name: {key: value for key, value in cluster.get(name, {}).items() if value} for name in CLUSTER_FACTS}
    return [*lines, *pairs({name: fact for name, fact in facts.items() if fact})]


def divergence(sums: bytes, others: bytes) -> str:
    """Describe how far two route tables differ, by their bucket fingerprints of 8 bytes each."""
    if len(sums) != len(others):
        return "not comparable: another number of buckets"
    buckets = len(sums) // 8
    differing = sum(sums[at : at + 8] != others[at : at + 8] for at in range(0, len(sums), 8))
    return f"{differing} of {buckets} buckets differ"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Align rows under a header; numbers to the right."""
    known = dict.fromkeys(column for row in rows for column in row)
    columns = [column for column in FIRST_COLUMNS if column in known]
    columns += [column for column in known if column not in columns]
    cells = [[word(row.get(column), LONG.get(column, CELL_CHARACTERS_MAX)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [all(type(row.get(column)) in (int, float, type(None)) for row in rows) for column in columns]
    return ["  " + aligned(line, widths, right) for line in ([columns, *cells] if rows else [])]


def aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    line = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(line).rstrip()


def pairs(facts: Mapping[str, Any]) -> list[str]:
    """Return one line for each fact; a mapping of facts becomes one line of name=value."""
    width = max(map(len, facts), default=0)
    return [f"  {name.ljust(width)}  {word(value)}" for name, value in facts.items()]


def word(value: Any, characters_max: int = CELL_CHARACTERS_MAX) -> str:
    """Return a JSON value as one short word, without control characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={word(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(word(item) for item in value) or "-"
    text = "".join(character if character.isprintable() else "?" for character in str(value))
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"

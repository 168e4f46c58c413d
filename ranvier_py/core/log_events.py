"""The events of the log: each has one name, fields with names, and the level that fits. `docs/logs.md` lists them.

Rule: who logs names an event of `EVENTS` and gives its fields, as `log.info(event("backend.added", engine=...))`; what
terminals show is made from its text, and JSON has the fields as they are. In a text, {field} is a value, {field|word}
has a word for an empty one, {field:; } joins a list by other than commas, and what is in [brackets] is left out where
its field is empty. Invariant: all places that log keep to this table (test_log_events.py).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

FIELD = re.compile(r"\{(\w+)(?:\|([^}:]*))?(?::([^}]*))?\}")
OPTIONAL = re.compile(r"\[([^\]]*)\]")

MORE = " ({more} more since the last line)"
"""Ends the text of an event of which some were not logged, since they came too fast."""


class LogRow(NamedTuple):
    """One event of the table. `levels`: the usual one first."""

    levels: str
    text: str

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(found[1] for found in FIELD.finditer(self.text)))


class LogEvent:
    """One event with its fields. As a string it is what terminals show."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name, self.fields = name, fields

    def __str__(self) -> str:
        text = EVENTS[self.name].text + (MORE if self.fields.get("more") else "")
        return f"{self.name} {shown(text, self.fields)}".rstrip()


def event(name: str, /, **fields: Any) -> LogEvent:
    """Return an event of the table. `more`: how many of its kind were not logged since the last one."""
    return LogEvent(name, fields)


def shown(text: str, fields: dict[str, Any]) -> str:
    """Return a text with its fields filled in."""
    return "".join([piece(part, fields) for part in parts_of(text)])


def piece(part: str, fields: dict[str, Any]) -> str:
    inner = part[1:-1] if part.startswith("[") else part
    values = {found[1]: fields.get(found[1]) for found in FIELD.finditer(inner)}
    if inner is not part and any(value is None or value == "" for value in values.values()):
        return ""
    return FIELD.sub(lambda found: word(fields.get(found[1]), found[2], found[3] or ""), inner)


@lru_cache(512)
def parts_of(text: str) -> list[str]:
    """Return a text in parts: optional ones in their brackets, and what is between them."""
    return [part for part in re.split(r"(\[[^\]]*\])", text) if part]


def word(value: object, default: str | None, form: str) -> str:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # one with names has a text
        value = (form or ", ").join(map(str, value))
        form = ""
    if default is not None and value in (None, ""):
        return default
    return format(value, form)


INFO, WARNING, ERROR, CRITICAL, DEBUG = "info", "warning", "error", "critical", "debug"
EITHER = "info, warning"

KEEPS_NO_FILE = LogRow(WARNING, "{file}: {why}; going on without")
WRITTEN_AGAIN = LogRow(INFO, "{file} again")
STREAM = LogRow(INFO, "{stream}")
MEMBER, MEMBER_TROUBLE = (LogRow(level, "{peer} at {address}: {why}") for level in (INFO, WARNING))
CHANGE = LogRow(EITHER, "{engine} {before} -> {after}[ (ordered by {by})][ ({why})]")
RULE = "{rule} for {client} and model {model}: {why}[ (found by {found_by})]"
SOCKET = LogRow(EITHER, "[{address} ]{why}")
ORDERED = "[ (ordered by {by})]"

EVENTS = {
    "access.keys_read": LogRow(INFO, "{file}: {keys} keys, {tenants} tenants"),
    "access.keys_refused": LogRow(ERROR, "going on as before: {problems:; }"),
    "access.model_unknown": LogRow(WARNING, "{place} names {model}, which no engine serves and no table of models has"),
    "access.refused": LogRow(WARNING, "{status} {code}: {method} {path} of {client}[ by {key_id}]"),
    "access.restored": LogRow(WARNING, "{key_id}" + ORDERED),
    "access.revoked": LogRow(WARNING, "{key_id}" + ORDERED),
    "backend.added": LogRow(INFO, "{engine} {url} weight {weight:g}" + ORDERED),
    "backend.answers": CHANGE,
    "backend.circuit": CHANGE,
    "backend.command_refused": LogRow(WARNING, "{verb} {url}: {why}"),
    "backend.draining": CHANGE,
    "backend.generation": CHANGE,
    "backend.health": CHANGE,
    "backend.key": CHANGE,
    "backend.key_changed": LogRow(INFO, "{engine} has another key: {before|none} -> {after|none}"),
    "backend.leaving": LogRow(INFO, "{engine}: {why|no longer}"),
    "backend.models": CHANGE,
    "backend.moved": LogRow(WARNING, "{engine} its name has other addresses: {addresses}"),
    "backend.placed_as_ranks": LogRow(INFO, "{engine}: {ranks}, each with a cache of its own"),
    "backend.placed_whole": LogRow(WARNING, "{engine}, not as {ranks} ranks: {why}"),
    "backend.processes": CHANGE,
    "backend.ranks": CHANGE,
    "backend.removed": LogRow(INFO, "{engine} {url}" + ORDERED + "[: {why}]"),
    "backend.reuses_nothing": LogRow(WARNING, "{engine} {why}: requests go there by load alone"),
    "backend.reuses_prefixes": LogRow(INFO, "{engine} again"),
    "backend.set": LogRow(INFO, "{engine} {field} {before} -> {after}" + ORDERED),
    "backend.strangers": CHANGE,
    "backend.twins": CHANGE,
    "backends.empty_ignored": LogRow(WARNING, "{source}: {why}"),
    "backends.gone_already": LogRow(INFO, "{url}"),
    "backends.not_added": LogRow(WARNING, "{url}: {why}"),
    "backends.source_failing": LogRow(WARNING, "{source}, which keeps its last set: {why}"),
    "cache_level.changed": LogRow(INFO, "{stream} {cache_level}: {why}"),
    "calibration.bias_appeared": LogRow(WARNING, "{engine} {bias}[ ({detail})]"),
    "calibration.bias_gone": LogRow(INFO, "{engine} {bias}"),
    "calibration.profile": LogRow(INFO, "{engine} {before} -> {after}"),
    "client_rule.measuring": LogRow(INFO, RULE),
    "client_rule.off": LogRow(WARNING, RULE),
    "client_rule.proved": LogRow(INFO, RULE),
    "config.changed": LogRow(INFO, "{key} {before} -> {after}[ ({note})][; {effect}]"),
    "config.note": LogRow(WARNING, "{note}"),
    "config.refused": LogRow(ERROR, "by {cause}, going on as before: {problems:; }"),
    "config.reloaded": LogRow(
        INFO, "by {cause}: applied {applied|nothing}; restart needed for {restart_needed|nothing}"
    ),
    "config.renewed": LogRow(INFO, "{what}"),
    "connections.refused": LogRow(WARNING, "{refused}: {why}"),
    "control.accept_failed": LogRow(WARNING, "{why}"),
    "control.cut": LogRow(WARNING, "{cut} connections so far, each the oldest of {most}"),
    "control.failed": LogRow(ERROR, "{method} {path}"),
    "control.ordered": LogRow(INFO, "{method} {path} by {by|-}: {status}"),
    "control.refused": LogRow(WARNING, "{status}: {method} {path} of {client}[ by {by}]"),
    "engine.hangs": LogRow(WARNING, "{engine}: {moved} of {in_flight} requests in flight there are placed again"),
    "engine_events.ambiguous": LogRow(
        WARNING, "{engine} serves several base models ({models|none}); its KV events do not say whose they are"
    ),
    "engine_events.level": LogRow(DEBUG, "{engine}: {cache_level}"),
    "engine_events.pushed": LogRow(INFO, "{engine} {source}"),
    "engine_events.read": STREAM,
    "engine_events.snapshot_missing": STREAM,
    "engine_events.snapshot_received": STREAM,
    "engine_events.started": LogRow(INFO, "{stream} at {endpoint}"),
    "engine_events.stood_by": STREAM,
    "engine_events.stopped": STREAM,
    "engine_events.unavailable": LogRow(WARNING, "{why}"),
    "event_stream.connected": LogRow(INFO, "{endpoint}"),
    "event_stream.disconnected": LogRow(INFO, "{endpoint}: {why}; trying again"),
    "event_stream.not_connected": LogRow("warning, debug", "{endpoint}: {why}; trying on"),
    "finding.began": LogRow(EITHER, "{kind} {severity}: {what}"),
    "finding.ended": LogRow(INFO, "{kind} after {seconds:.0f} s: {what}"),
    "gossip.accept_failed": SOCKET,
    "gossip.alone": LogRow(WARNING, "{why}[; peers are given {advertised}, of the default route, until one is known]"),
    "gossip.backends_agree": LogRow(INFO, "{peer}, or it is gone"),
    "gossip.backends_differ": LogRow(WARNING, "{peer}: {why}"),
    "gossip.command_time": LogRow(
        WARNING, "peers sent commands signed long ago or in the future: do the clocks agree?"
    ),
    "gossip.datagrams_blocked": LogRow(
        WARNING, "peers answer over TCP and hardly any over UDP: is the port open for both?"
    ),
    "gossip.fingerprint_line_missing": LogRow(WARNING, "{advice}"),
    "gossip.fingerprints_differ": LogRow(
        WARNING,
        "the keys in {file} make other fingerprints after a restart: write the old first key on a fingerprint line to "
        "share routes with nodes that were not restarted",
    ),
    "gossip.keys_changed": LogRow(INFO, "ids {ids}, first {first}"),
    "gossip.keys_refused": LogRow(ERROR, "{problems:; }; going on with the old ones"),
    "gossip.loopback": LogRow(ERROR, "{address} can't reach a node that advertises loopback"),
    "gossip.moved": LogRow(INFO, "from {before} to {after}, which faces the peers"),
    "gossip.names_ignored": LogRow(WARNING, "{names} of join: at most {most} are looked up"),
    "gossip.other_routes": LogRow(WARNING, "{peer} {why}"),
    "gossip.overflow": LogRow(WARNING, "{datagrams} datagrams found no room in the socket so far"),
    "gossip.receive_failed": SOCKET,
    "gossip.send_failed": SOCKET,
    "gossip.started": LogRow(INFO, "as {name} at {address} in {cluster}"),
    "gossip.state_not_written": KEEPS_NO_FILE,
    "gossip.state_refused": LogRow(WARNING, "{file} {why}; starting without"),
    "gossip.state_written": WRITTEN_AGAIN,
    "gossip.stream_failed": SOCKET,
    "gossip.version": LogRow(WARNING, "nothing is shared with nodes of other protocols than {protocol}: {others}"),
    "gossip.wrong_key": LogRow(WARNING, "a packet from {address}, sealed with another key or cluster_name"),
    "kv_index.alone": LogRow(WARNING, "{store}: {why}"),
    "kv_index.cleared": LogRow(INFO, "{entries} entries (ordered over the control port)"),
    "kv_index.shared": LogRow(INFO, "{store} generation {generation}"),
    "kv_index.stream_begun": LogRow(INFO, "{url}"),
    "kv_index.stream_lost": LogRow(INFO, "{url}: {why}"),
    "library.logged": LogRow("debug, info, warning, error, critical", "{message}"),
    "limits.state_not_written": KEEPS_NO_FILE,
    "limits.state_refused": LogRow(WARNING, "{file} can't be read: {why}; starting without"),
    "limits.state_written": WRITTEN_AGAIN,
    "logs.dropped": LogRow(WARNING, "{lines} lines: whoever reads them was too slow"),
    "member.died": MEMBER_TROUBLE,
    "member.flooding": MEMBER_TROUBLE,
    "member.joined": MEMBER,
    "member.left": MEMBER,
    "member.namesake": LogRow(WARNING, "{peer} at {address} began with the name of this node, and gave it up"),
    "member.refuted": MEMBER,
    "member.regained": LogRow(INFO, "{name}, which no other node has any more; it was {before}"),
    "member.renamed": MEMBER_TROUBLE,
    "member.returned": MEMBER,
    "member.suspected": MEMBER,
    "model.unknown": LogRow(WARNING, "{model} leads to {models}, which no engine serves"),
    "name.failed": LogRow(WARNING, "{host}: {why}; {known} addresses of before"),
    "name.found": LogRow(INFO, "{host}: {found} addresses"),
    "node.announced": LogRow(INFO, "{words}"),
    "node.connections_cut": LogRow(
        WARNING, "connections_max {before} -> {after}: this process may have {descriptors} files open"
    ),
    "node.cut": LogRow(INFO, "at the second signal"),
    "node.drained": LogRow(INFO, "{before} -> {after}" + ORDERED),
    "node.draining": LogRow(INFO, "after {signal}, up to {seconds:g} s"),
    "node.ended": LogRow(ERROR, "{why}"),
    "node.failed": LogRow(CRITICAL, ""),
    "node.manager_not_told": LogRow(WARNING, "{variable} {value}: {why}"),
    "node.no_backends": LogRow(WARNING, "every request gets a 503 until one is added: POST /admin/backends"),
    "node.ready": LogRow(INFO, "on {addresses}"),
    "node.stopped": LogRow(INFO, ""),
    "node.tokenizer": LogRow(EITHER, "{report}"),
    "orders.not_kept": LogRow(ERROR, "{file}: {why}; going on without"),
    "orders.not_restored": LogRow(ERROR, "{file}: {why}; starting without"),
    "orders.outdated": LogRow(WARNING, "{url}: [{order}, but ]{source} was edited since, and holds"),
    "orders.restored": LogRow(INFO, "{url}: {order}"),
    "pool.silent": LogRow(WARNING, "all backends of {model|any model} only time out: they are asked all the same"),
    "publishers.found": LogRow(INFO, "{url}: {places|none any more}"),
    "publishers.refused": LogRow(WARNING, "{url}: {why}; kv_events of the backend can say where"),
    "python.unraisable": LogRow(ERROR, "{what}"),
    "recorder.not_written": KEEPS_NO_FILE,
    "recorder.written": WRITTEN_AGAIN,
    "reporter.failed": LogRow(ERROR, ""),
    "reporter.level": LogRow(INFO, "{cache_level} ({why})"),
    "reporter.no_events": LogRow(WARNING, "{engine} publishes none[, {doubt}]"),
    "reporter.reading": LogRow(INFO, "{endpoint}"),
    "reporter.router": LogRow(EITHER, "{router} {why|takes reports}"),
    "request.failed": LogRow(ERROR, "peer={client}"),
    "response_cache.alone": LogRow(WARNING, "{store}: {why}"),
    "response_cache.invalidated": LogRow(INFO, "{action}, {entries} entries here (ordered over the control port)"),
    "response_cache.shared": LogRow(INFO, "{store}"),
    "tls.refused": LogRow(ERROR, "going on as before: {problems:; }"),
    "tls.renewed": LogRow(INFO, "{part}, since files were replaced: {files}"),
    "tokenizer.changed": LogRow(ERROR, "since this node started, so it is not used: restart the node"),
    "tokenizer.ended": LogRow(WARNING, "with code {code}; the next one starts in {delay_s:.1f} s"),
    "tokenizer.hub": LogRow(WARNING, "{hub} can't be reached, trying its cache: {why}"),
    "tokenizer.killed": LogRow(WARNING, "{why}"),
    "tokenizer.not_restarted": LogRow(ERROR, "{kind}: {why}"),
    "tokenizer.template": LogRow(WARNING, "{why}: chats are placed without tokens"),
    "tokenizer.warned": LogRow(WARNING, "{words}"),
    "traces.not_taken": LogRow(WARNING, "{collector}: {why}; going on without"),
    "traces.taken": LogRow(INFO, "{collector} again"),
    "unexpected.error": LogRow(ERROR, "in {place}"),
    "worker.crashed": LogRow(CRITICAL, ""),
    "worker.ended": LogRow(ERROR, "{index} (process {pid}) with code {code}; next in {delay_s:.1f} s"),
    "worker.failed": LogRow(ERROR, "{index} ended with code {code}: stopping all"),
    "worker.not_started": LogRow(ERROR, "{index}: {why}; next try in {delay_s:.1f} s"),
    "worker.started": LogRow(INFO, "{index}, process {pid}"),
}

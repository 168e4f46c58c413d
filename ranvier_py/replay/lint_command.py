"""`ranvier lint FILE | --url URL` reports where and why clients break their own prefixes, the cost, and what helps.

URL is a node's control port, for what the node saw so far, or an address that serves captured requests. Each line of
those is a request, `{"path": …, "headers": [[name, value], …], "body": {…}}`, or a body alone, in the order of sending;
all of them may also be one such object, or a list of them, over several lines. Both may be gzipped. The requests' text
is not stored; the output has only paths and causes. Tokens are estimated from characters.
A recording (`ranvier serve --record`) has only fingerprints: it shows where prompts depart from their sessions, but not
why. Bodies that no node can compare (nested too deeply, no Unicode) are passed over with a message.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from ranvier_py.core.clients.body_mender import rule_for
from ranvier_py.core.clients.client_rules import RuleBook
from ranvier_py.core.clients.client_watch import ClientWatch, client_rows
from ranvier_py.core.clients.known_clients import client_of, session_of
from ranvier_py.core.prompts.body_members import session_name
from ranvier_py.core.prompts.request_apis import APIS, CHAT, MESSAGES, RESPONSES, Api
from ranvier_py.core.routing.request_record import MARK, BadRecord, Header, RequestRecord, read_header, read_record
from ranvier_py.replay.lint_page import PATHS, page
from ranvier_py.replay.recorded_departures import RecordedDepartures
from ranvier_py.replay.traces.lines import LINE_BYTES_MAX, BodyFile, lines_of
from ranvier_py.replay.traces.trace import TraceError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = range(3)
CHARACTERS_PER_TOKEN = 4.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="captured requests, one JSON object a line, or a recording"
    )
    meaning = "instead: the control port of a node, for its live traffic, or the address of captured requests"
    parser.add_argument("--url", metavar="URL", help=meaning)
    parser.add_argument(
        "--client-rules-file", type=Path, metavar="FILE", help="rules of your own, beside those that ship"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


Lines = Iterable[tuple[int, bytes]]
"""Lines with their ends, numbered from 1 on."""


def lint(sources: Iterable[tuple[str, Lines]], book: RuleBook, *, as_json: bool) -> int:
    """Read named sources of captured requests or recordings and print the report. Returns the exit code: 1 if a prefix
    broke, 2 if a source cannot be read, else 0."""
    watch = ClientWatch(secrets.randbits(64))
    records: list[tuple[float, RequestRecord]] = []
    try:
        for name, lines in sources:
            objects = objects_of(name, lines)
            place, first = next(objects, ("", None))
            if isinstance(first, dict) and MARK in first:
                records += records_of(chain([(place, first)], objects))
            elif place:
                lint_requests(requests_of(chain([(place, first)], objects)), watch, book)
    except (OSError, ValueError, TraceError) as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return EXIT_USAGE
    departures = RecordedDepartures(watch)
    for _, record in sorted(records, key=lambda each: each[0]):
        departures.add(record)
    return report(client_rows(watch), as_json=as_json)


def lint_requests(requests: Iterable[Request], watch: ClientWatch, book: RuleBook) -> None:
    """Count captured requests and their breaks in `watch`. Objects that are no conversation are passed over."""
    others = 0
    for place, fields, body, api in requests:
        if api is None:
            others += 1
            continue
        try:
            text = orjson.dumps(body)
        except TypeError:
            why = "nested too deeply, text that is no Unicode, or a number of more than 64 bits"
            print(f"ranvier: {place}: passed over: {why}", file=sys.stderr)
            continue
        tokens = round(len(text) / CHARACTERS_PER_TOKEN)
        client, session = client_of(fields), session_of(fields) or session_name(body).encode()
        number = int.from_bytes(blake2b(session, digest_size=8).digest()) if session else 0
        watch.turn(client, number, tokens)
        found = watch.observe(client, number, body, api, tokens)
        if found is not None:
            watch.broke(client, found, rule=rule_for(book, found.found, text, api, client))
    if others:
        why = f"with neither a path nor a body of {', '.join(PATHS)}"
        print(f"ranvier: objects passed over: {others}, {why}", file=sys.stderr)


def report(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print the findings of each client. Returns the exit code."""
    if as_json:
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(page(rows)))
    return EXIT_FAILED if any(row["breaks"] for row in rows) else EXIT_OK


def body_of(url: str, pieces: Iterator[bytes]) -> tuple[str, Lines]:
    """Return the name and lines of a body that arrives in pieces, as of a file."""
    return url, lines_of(url, BufferedReader(BodyFile(pieces)))


def objects_of(source: str, lines: Lines) -> Iterator[tuple[str, Any]]:
    """Yield the JSON value of each line with its place; of a list, its items. A document may span all lines.

    A recording's last line is left out if it is incomplete: the node was still writing it. Raises ValueError.
    """
    recorded, is_first, numbered = False, True, iter(lines)
    for number, line in numbered:
        try:
            found = json_of(line)
        except ValueError as error:
            if recorded and not line.endswith(b"\n"):
                return
            found = whole_of(line, numbered) if is_first else None
            if found is None:
                raise ValueError(f"{source}:{number}: {error}") from error
        is_first, recorded = False, recorded or (isinstance(found, dict) and MARK in found)
        for each in found if isinstance(found, list) else [found]:
            yield f"{source}:{number}", each


def whole_of(line: bytes, lines: Iterator[tuple[int, bytes]]) -> Any:
    """Parse a line and all lines after it, up to LINE_BYTES_MAX, as one JSON document; None if they are none."""
    found, size = [line], len(line)
    for _, more in lines:
        found.append(more)
        size += len(more)
        if size > LINE_BYTES_MAX:
            break
    with suppress(ValueError):
        return json_of(b"".join(found))
    return None


def json_of(text: bytes) -> Any:
    """Parse JSON, by the more lenient standard library if orjson refuses it. Raises ValueError with the reason."""
    try:
        return orjson.loads(text)
    except ValueError as error:
        wrong: Exception = error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        wrong = error if isinstance(error, UnicodeDecodeError) else wrong
        raise ValueError(f"not JSON: {wrong}") from error


Request = tuple[str, Mapping[bytes, bytes], Mapping[str, Any], Api | None]
"""A captured request: its place, header fields, body and API; the API is None if it carries no conversation."""


def requests_of(objects: Iterable[tuple[str, Any]]) -> Iterator[Request]:
    """Yield the captured requests. Raises ValueError with the place of an object that is no request."""
    for place, found in objects:
        body = found.get("body", found) if isinstance(found, dict) else None
        if not isinstance(body, dict):
            raise ValueError(f"{place}: expected a request, an object with a body, or a body")
        headers = found.get("headers", ()) if body is not found else ()
        route = found.get("path") if body is not found else None
        api = PATHS.get(route.partition("?")[0]) if isinstance(route, str) else api_of(body)
        yield place, headers_of(headers, place), body, api


def records_of(objects: Iterable[tuple[str, Any]]) -> Iterator[tuple[float, RequestRecord]]:
    """Yield the records of requests that engines served, each with its wall-clock time. Raises ValueError."""
    header: Header | None = None
    for place, found in objects:
        try:
            if not isinstance(found, dict):
                raise BadRecord("expected a line of a recording")
            if MARK in found:
                header = read_header(found)
                continue
            record = read_record(found)
        except BadRecord as error:
            raise ValueError(f"{place}: {error}") from error
        if record.served and header is not None:
            yield header.started + record.at, record


def headers_of(headers: object, place: str) -> Mapping[bytes, bytes]:
    """Return headers by lower-case name, from a list of pairs or an object. Raises ValueError."""
    pairs: Any = headers.items() if isinstance(headers, dict) else headers
    try:
        return {name.lower().encode("latin-1"): value.encode("latin-1", "replace") for name, value in pairs}
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{place}: headers must be an object, or a list of pairs") from None


def api_of(body: Mapping[str, Any]) -> Api | None:
    """Guess the API of a body without a path from its members; None if it is none."""
    if RESPONSES.history in body:
        return RESPONSES
    if CHAT.history not in body:
        return None
    return MESSAGES if MESSAGES.lead in body else APIS["chat"]

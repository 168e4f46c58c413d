"""`ranvier lint FILE | --url URL`: what clients do to their own prefixes: where, why, what it costs, and what helps.

URL is a node's control port, for what the node saw so far, or an address that serves captured requests. A line of those
is a request, `{"path": …, "headers": [[name, value], …], "body": {…}}`, or a body alone, in the order of their sending.
Text is read here and kept nowhere; the page shows paths and causes. Tokens are estimated by characters.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from ranvier_py.core.clients.body_mender import rule_for
from ranvier_py.core.clients.client_rules import RuleBook
from ranvier_py.core.clients.client_watch import ClientWatch, client_rows
from ranvier_py.core.clients.known_clients import client_of, session_of
from ranvier_py.core.prompts.body_members import session_name
from ranvier_py.core.prompts.request_apis import APIS, CHAT, MESSAGES, RESPONSES, Api

EXIT_OK, EXIT_FAILED, EXIT_USAGE = range(3)
LINE_BYTES_MAX = 1 << 26
CHARACTERS_PER_TOKEN = 4.0
PATHS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}

ADVICE = {
    "model": "conversations that change their model begin anew there",
    "tools_reordered": "send the tools in one order: sort them by name",
    "tools_changed": "add tools at the end, or not within a conversation",
    "uuid": "leave the id out, or send it behind the history or in a header",
    "nonce": "leave it out (Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0), or send it in a header",
    "time": "leave the time out, or send it in the last message",
    "date": "send the date in the last message, or leave it as the conversation began with",
    "counter": "send the number behind the history, not before it",
    "system_turn": "send it as a user message: templates move system messages to the front",
    "reasoning_dropped": "keep the thoughts in the history, and have the template keep them (preserve_thinking)",
    "moved_block": "leave the block where it was: append, never insert",
    "compaction": "compact seldom: what is left is computed anew",
    "edited": "append to the history instead of changing it",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="captured requests, one JSON object a line")
    meaning = "instead: the control port of a node, for its live traffic, or the address of captured requests"
    parser.add_argument("--url", metavar="URL", help=meaning)
    parser.add_argument(
        "--client-rules-file", type=Path, metavar="FILE", help="rules of your own, beside those that ship"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


Lines = Iterable[bytes]


def lint(sources: Iterable[tuple[str, Lines]], book: RuleBook, *, as_json: bool) -> int:
    """Of captured requests, with the name of each source. Returns the exit code: 1 where a prefix broke."""
    watch = ClientWatch(secrets.randbits(64))
    try:
        for name, lines in sources:
            for fields, body, api in requests_of(name, lines):
                tokens = round(len(orjson.dumps(body)) / CHARACTERS_PER_TOKEN)
                client, session = client_of(fields), session_of(fields) or session_name(body).encode()
                number = int.from_bytes(blake2b(session, digest_size=8).digest()) if session else 0
                watch.turn(client, number, tokens)
                found = watch.observe(client, number, body, api, tokens)
                if found is not None:
                    rule = rule_for(book, found.found, orjson.dumps(body), api, client)
                    watch.broke(client, found, rule=rule)
    except (OSError, ValueError) as error:
        print(f"ranvier lint: {error}", file=sys.stderr)
        return EXIT_USAGE
    return report(client_rows(watch), as_json=as_json)


def report(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print what was found of each client. Returns the exit code."""
    if as_json:
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(page(rows)))
    return EXIT_FAILED if any(row["breaks"] for row in rows) else EXIT_OK


def files_of(paths: Iterable[Path]) -> Iterator[tuple[str, Lines]]:
    """The lines of files, none longer than LINE_BYTES_MAX. Raises OSError."""
    for path in paths:
        with path.open("rb") as file:
            yield str(path), iter(partial(file.readline, LINE_BYTES_MAX), b"")


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of what comes in pieces."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > LINE_BYTES_MAX:
            raise ValueError(f"a line is longer than {LINE_BYTES_MAX} bytes")
    yield rest


def requests_of(source: str, lines: Lines) -> Iterator[tuple[Mapping[bytes, bytes], Mapping[str, Any], Api]]:
    """Header fields, body and API of each request. Raises ValueError with the place of what is no request."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{source}:{number}"
        try:
            found = orjson.loads(line)
        except ValueError:
            raise ValueError(f"{place}: not JSON") from None
        body = found.get("body", found) if isinstance(found, dict) else None
        if not isinstance(body, dict):
            raise ValueError(f"{place}: expected a request, an object with a body, or a body")
        headers = found.get("headers", ()) if body is not found else ()
        route = found.get("path") if body is not found else None
        api = PATHS.get(route.partition("?")[0]) if isinstance(route, str) else api_of(body)
        if api is not None:  # other paths carry no conversation
            yield headers_of(headers, place), body, api


def headers_of(headers: object, place: str) -> Mapping[bytes, bytes]:
    """By names in small letters, from pairs or from an object."""
    pairs: Any = headers.items() if isinstance(headers, dict) else headers
    try:
        return {name.lower().encode("latin-1"): value.encode("latin-1", "replace") for name, value in pairs}
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{place}: headers must be an object, or a list of pairs") from None


def api_of(body: Mapping[str, Any]) -> Api | None:
    """Which API a body without a path is of, by its members."""
    if RESPONSES.history in body:
        return RESPONSES
    if CHAT.history not in body:
        return None
    return MESSAGES if MESSAGES.lead in body else APIS["chat"]


def page(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What is printed."""
    if not rows:
        yield "no conversations yet: nothing of /v1/chat/completions, /v1/messages or /v1/responses"
    for row in rows:
        lost = row["break_tokens"]
        share = 100 * lost / max(1, row["prompt_tokens"])
        reused, reusable = row["reused_share"], row["reusable_share"]
        yield (
            f"{row['client']}: {row['turns']} turns, about {row['prompt_tokens']:,} prompt tokens, "
            f"{lost:,} ({share:.1f} %) computed again for a broken prefix"
            + (f", {100 * reused:.1f} % reused as engines count it" if reused is not None else "")
            + (f", {100 * reusable:.1f} % were in an earlier prompt" if reusable is not None else "")
        )
        for each in row["breaks"]:
            where = "within a session" if each["scope"] == "turn" else "from session to session"
            where += f", {each['prefill_s']:.1f} s of prefill" if each["prefill_s"] else ""
            yield f"  {each['tokens']:>9,} tokens  {each['count']:>4} x  {each['cause']:17} {each['path']}  {where}"
            yield f"{'':28}{ADVICE[each['cause']]}"
            for rule, tokens in each["rules"].items():
                yield f"{'':28}client_rules {rule}=rewrite would save {tokens:,} tokens"


def trial_page(trials: list[dict[str, Any]]) -> Iterator[str]:
    """How rules that are on have proved themselves."""
    for each in trials:
        why = each["why"] or f"{each['sessions']} sessions, {each['sessions_left_alone']} left alone"
        yield f"rule {each['rule']}, {each['client']}, model {each['model']}: {each['state']}, {why}"

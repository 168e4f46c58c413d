"""`ranvier backend`: the engines of a node, or of all nodes: listed, added, drained, weighed, changed, removed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, CommandError

USAGE = """ranvier backend [list] [--cluster]
       ranvier backend add URL [KEY=VALUE ...]
       ranvier backend set NAME-OR-URL KEY=VALUE ...
       ranvier backend weight NAME-OR-URL WEIGHT
       ranvier backend drain|undrain|remove NAME-OR-URL

each with --cluster for all nodes, and --control URL"""

HEADS = ("backend", "url", "health", "weight", "draining", "in flight", "wanted by")
REQUESTS = {
    "add": ("POST", "/admin/backends"),
    "remove": ("DELETE", "/admin/backends"),
    "drain": ("POST", "/admin/backends/drain"),
    "undrain": ("POST", "/admin/backends/drain"),
    "weight": ("POST", "/admin/backends/weight"),
    "set": ("POST", "/admin/backends/set"),
}
"""What the control port is asked for each action."""

WORDS = {"yes": True, "true": True, "no": False, "false": False}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument("action", nargs="?", choices=("list", *REQUESTS), default="list", help="what to do")
    parser.add_argument("backend", nargs="?", metavar="NAME-OR-URL", help="which engine; for add its URL")
    parser.add_argument("values", nargs="*", metavar="VALUE", help="weight, or options of a backend as KEY=VALUE")
    parser.add_argument("--cluster", action="store_true", help="on all nodes, by a signed order; list: what each has")
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    if options.action == "list":
        if options.backend is not None:
            raise CommandError("backend list takes no name: it lists all engines", EXIT_CONFIG)
        path = "/admin/backends" + ("?cluster=true" if options.cluster else "")
        with control_client(options) as client, of_a_node(client):
            answer = asked(client, "GET", path).json()
            print("\n".join([*lines_of(answer["backends"]), *compared(answer)]))
            return EXIT_FAILED if any(each["why"] or each["differences"] for each in compared_of(answer)) else EXIT_OK
    order = order_of(options.action, options.backend, options.values)
    if options.action not in ("drain", "undrain"):  # which hold on all nodes in any case
        order["cluster"] = options.cluster
    method, path = REQUESTS[options.action]
    with control_client(options) as client, of_a_node(client):
        answer = asked(client, method, path, json=order).json()
        print("\n".join(report_of(options.action, answer)))
    return EXIT_FAILED if any(place["why"] for place in places_of(answer)) else EXIT_OK


def order_of(action: str, backend: str | None, values: Sequence[str]) -> dict[str, Any]:
    """Return the body of the order. Raises CommandError."""
    if backend is None:
        raise CommandError(f"backend {action} needs {'a URL' if action == 'add' else 'a name or a URL'}", EXIT_CONFIG)
    named = {"url" if action == "add" or "://" in backend else "name": backend}
    if action == "weight":
        if len(values) != 1:
            raise CommandError("backend weight needs one number", EXIT_CONFIG)
        return {**named, "weight": value_of(values[0])}
    if action in ("add", "set"):
        return {**named, **options_of(values, fixed=("url",) if action == "add" else ("url", "name"))}
    if values:
        raise CommandError(f"backend {action} takes no more than a name or a URL", EXIT_CONFIG)
    return {**named, "draining": action == "drain"} if "drain" in action else named


def options_of(words: Sequence[str], *, fixed: Sequence[str]) -> dict[str, Any]:
    """Return each option with its value. Raises CommandError for one that stands twice, or says which engine it is."""
    found: dict[str, Any] = {}
    for name, value in map(option_of, words):
        if name in fixed:
            raise CommandError(f"{name} is what the engine goes by: remove it, and add it anew", EXIT_CONFIG)
        if name in found:
            raise CommandError(f"{name} stands twice", EXIT_CONFIG)
        found[name] = value
    return found


def option_of(word: str) -> tuple[str, Any]:
    """ "weight=2" -> ("weight", 2.0). Raises CommandError."""
    name, equals, value = word.partition("=")
    if not equals:
        raise CommandError(f"{word!r} is no option of a backend, expected one like weight=2", EXIT_CONFIG)
    return name, value if name in ("name", "tls_name", "base_path") else value_of(value)


def value_of(text: str) -> Any:
    """Return a number, a truth or a text, as an order has it in JSON."""
    if text in WORDS:
        return WORDS[text]
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float) else text


def lines_of(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [HEADS]
    for each in backends:
        draining = "leaving" if each.get("leaving") else "yes" if each["draining"] else "no"
        numbers = f"{each['weight']:g}", draining, str(each["in_flight"]), " ".join(each.get("wanted_by", ()))
        rows.append((each["name"], each["url"], each["health"], *numbers))
    yield from aligned(rows)


def compared_of(answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return answer.get("places") or ()


def compared(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what other workers and nodes have, and in what they differ from the one that was asked."""
    for each in compared_of(answer):
        differing = [f"  {one['name']} {one['what']}" for one in each["differences"]]
        count = len(each["backends"])
        alike = f"{count} backend{'s' if count != 1 else ''}, as here"
        yield f"{each['place']}: {each['why'] or (f'differs in {len(differing)}' if differing else alike)}"
        yield from differing


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def places_of(answer: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """Return where the order went beside the node that was asked: `place` and `why` not, empty if it was obeyed."""
    return answer.get("reached") or ()


def report_of(action: str, answer: Mapping[str, Any]) -> Iterator[str]:
    done = {"add": "added", "remove": "removed", "drain": "drained", "undrain": "gets requests again"}
    yield f"{answer['name']} at {answer['url']}: {done.get(action, 'set')}"
    if answer.get("kept") is False:
        yield "  not kept: the next start of this node knows nothing of it, without a state_folder that it can write"
    yield from reached_of(answer)


def reached_of(answer: Mapping[str, Any]) -> Sequence[str]:
    return [f"  {each['place']}: {each['why'] or 'done'}" for each in places_of(answer)]

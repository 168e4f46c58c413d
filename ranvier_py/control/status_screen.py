"""Draws the status of a node for a terminal: the verdict, its engines, worst first, its peers.

Pure: values in, lines out. Rule: no line is wider than the terminal, and no character of an answer can play with it.
On a page all findings and all engines are whole. A screen has a given number of rows: each kind of finding is one line
there, the worst also has its remedy, and engines scroll.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from ranvier_py.control.status_page import CELL_CHARACTERS_MAX, word
from ranvier_py.core.findings import counted

Row = Mapping[str, Any]
Status = Mapping[str, Any]

WIDTH_MIN, ROWS_MIN = 40, 12
TEXT_CHARACTERS_MAX = 1000  # of one sentence of a finding

STATES = MappingProxyType(
    {"key_refused": "bad key", "reuses_nothing": "no cache", "url": "two URLs", "draining": "drained"}
)
"""Of engines, where the kind of a finding is too long for the column."""

SORTS: Mapping[str, Callable[[Row], Any]] = MappingProxyType(
    {
        "trouble": lambda _: 0,  # as they come: the worst first
        "name": lambda row: re.sub(r"\d+", lambda number: f"{number[0]:0>9}", word(row["name"])),  # w2 before w10
        "load": lambda row: -(row["load"] or 0),
        "waiting": lambda row: -(row["waiting"] or 0),
        "tokens": lambda row: -(row["tokens_per_s"] or 0.0),
        "hits": lambda row: row["hit_share"] if row["hit_share"] is not None else 2.0,
    }
)
"""Orders of engines by their names; `hits`: the least first."""

SCREENFUL, ALL = 10, 1 << 30
STEPS = MappingProxyType(
    {
        "j": 1,
        "down": 1,
        "k": -1,
        "up": -1,
        " ": SCREENFUL,
        "pagedown": SCREENFUL,
        "pageup": -SCREENFUL,
        "g": -ALL,
        "home": -ALL,
        "G": ALL,
        "end": ALL,
    }
)
"""By how many engines a key moves the cursor."""

ORDERED = ("draining", "leaving")  # states that somebody wants: what is wrong beside them is shown as well
STATE_WIDTH, STATES_WIDTH, NAME_AND_STATE = 9, 15, 28  # of one state, and of two at least
SHORTENED = 10_000  # numbers from here on are shown in thousands
HEAD = f"{'ENGINE':<19} {'STATE':<9} {'CACHE':<9} {'RUN/WAIT':>9} {'TOK/S':>7} {'HITS':>5} {'PRED/COUNT':>13}"


@dataclass(slots=True)
class Looked:
    """What a viewer of a screen has chosen."""

    sort: str = "trouble"
    wanted: str = ""  # engines whose name, state, level or model has this
    top: int = 0  # the first engine that is shown
    chosen: int = 0  # the engine under the cursor
    engine: bool = False  # it is shown in full
    typing: bool = False  # into `wanted`
    help: bool = False
    verdict: bool = False  # the findings are shown in full
    over: bool = False  # the viewer has seen enough


def page(status: Status, address: str, width: int = 80) -> list[str]:
    """Return everything, as long as it gets."""
    lines = [line for each in whole_header(status, address) for line in wrap(each, width, subsequent_indent=" " * 10)]
    lines.append("")
    for found in groups(status["findings"]):
        lines += whole_finding(found, width)
    lines += ["", *engine_table(status["engines"], width)]
    if status["peers"]:
        lines += ["", "PEERS", *[fitted(peer_line(each), width) for each in status["peers"]]]
    return lines


def screen(status: Status, address: str, looked: Looked, width: int, rows: int) -> list[str]:
    """Return exactly what fits into a terminal of this size."""
    width, rows = max(width, WIDTH_MIN), max(rows, ROWS_MIN)
    if looked.help:
        return [fitted(each, width) for each in HELP[:rows]]
    if looked.verdict:
        findings = [line for found in groups(status["findings"]) for line in whole_finding(found, width)]
        return [*[fitted(each, width) for each in findings[: rows - 1]], BACK]
    shown = engines_of(status, looked)
    looked.chosen = min(max(0, looked.chosen), max(0, len(shown) - 1))
    if looked.engine and shown:
        first, _ = header(status, address, width)
        lines = [first, "", *whole_engine(shown[looked.chosen], status["findings"], width)]
        return [*[fitted(each, width) for each in lines[: rows - 1]], BACK]
    top = [*header(status, address, width), *short_findings(status["findings"], width, max(3, rows // 3 - 1))]
    peers = [fitted(each, width) for each in short_peers(status["peers"], max(1, rows // 8))]
    room = max(1, rows - len(top) - len(peers) - 3)  # a blank line, the head of the table, the line of keys
    looked.top = min(max(looked.top, looked.chosen - room + 1), looked.chosen)
    looked.top = max(0, min(looked.top, len(shown) - room))
    seen = shown[looked.top : looked.top + room]
    table = [
        fitted(("> " if looked.top + place == looked.chosen else "  ") + engine_line(each), width)
        for place, each in enumerate(seen)
    ]
    return [*top, "", fitted("  " + HEAD, width), *table, *peers, fitted(keys_line(looked, len(shown), room), width)]


def pressed(looked: Looked, key: str) -> None:
    """Take one key: a character, or the name of one that has none."""
    if looked.typing:
        typed(looked, key)
    elif looked.engine or looked.help or looked.verdict:
        looked.engine = looked.help = looked.verdict = False
    elif key in STEPS:
        looked.chosen = max(0, looked.chosen + STEPS[key])
    elif key == "s":
        names = [*SORTS]
        looked.sort = names[(names.index(looked.sort) + 1) % len(names)]
        looked.chosen = looked.top = 0
    elif key == "/":
        looked.typing, looked.wanted = True, ""
    elif key == "escape":
        looked.wanted = ""
    else:
        looked.engine = key in ("enter", "e")
        looked.help = key in ("?", "h")
        looked.verdict = key == "v"
        looked.over = key == "q"


def typed(looked: Looked, key: str) -> None:
    """Take one key of the filter."""
    looked.chosen = looked.top = 0
    if key in ("enter", "escape"):
        looked.typing = False
    elif key == "backspace":
        looked.wanted = looked.wanted[:-1]
    elif len(key) == 1 and len(looked.wanted) < CELL_CHARACTERS_MAX:
        looked.wanted += key


BACK = "any key: back"
HELP = [
    "j k, arrows, space, PgUp PgDn, g G   move among the engines",
    f"s                                    sort: {', '.join(SORTS)}",
    "/ TEXT Enter                         only engines with TEXT in name, state, cache or model",
    "Escape                               all engines again",
    "Enter, e                             one engine in full",
    "v                                    all findings in full",
    "q                                    leave",
    "",
    "RUN/WAIT  requests that the engine runs, and that wait in its own queue, by its counts",
    "TOK/S     tokens that it generated a second, lately",
    "HITS      share of its prompt tokens found in its cache, by its counts, since it started",
    "PRED/COUNT  tokens that were predicted as cached here, and that answers counted",
]


def header(status: Status, address: str, width: int) -> list[str]:
    """Return who this is and how it is, in two lines."""
    return [fitted(each, width) for each in whole_header(status, address)]


def whole_header(status: Status, address: str) -> tuple[str, str]:
    """Return the same, as long as it gets."""
    severity = word(status["severity"]).upper()
    counts = [f"{len(found)} {found[0]['kind']}" for found in groups(status["findings"])]
    ready = "ready" if status["ready"] else f"not ready: {text(status['reason'])}"
    release = word(status["release"])
    first = f"{severity}  {word(status['node']) or address} {release}, {ready}" + (
        f"; {', '.join(counts)}" if counts else ""
    )
    totals = status["requests"]
    load = sum(each["load"] or 0 for each in status["engines"])
    size = counted(len(status["engines"]), "engine"), f"{load:,} in flight", counted(len(status["peers"]), "peer")
    shares = f"predicted {percent(totals['predicted_share'])}, cached {percent(totals['cached_share'])}"
    second = f"{', '.join(size)}; policy {word(totals['policy'])}, {shares}"
    return first, second


def groups(findings: Sequence[Row]) -> list[list[Row]]:
    """Return the findings by kind, in the order of the worst of each."""
    order = {kind: place for place, kind in reversed([*enumerate(each["kind"] for each in findings)])}
    ordered = sorted(findings, key=lambda each: order[each["kind"]])
    return [[*found] for _, found in groupby(ordered, key=lambda each: each["kind"])]


def whole_finding(found: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the findings of one kind: the first one with all that it says, the others by name."""
    first = found[0]
    yield fitted(f"{first['severity'].upper():<9} {word(first['kind'])}, {since(first)}", width)
    others = [word(each["about"]) for each in found[1:] if each["about"]]
    more = f" (also {', '.join(others)})" if others else ""
    yield from indented("", text(first["what"]) + more, width)
    for label, member in (("touches", "whom"), ("do", "remedy")):
        if first[member]:
            yield from indented(label, text(first[member]), width)
    if first["command"]:
        yield f"          $ {text(first['command'])}"  # whole, so that it can be copied


def short_findings(findings: Sequence[Row], width: int, lines_max: int) -> list[str]:
    """Return a line for each kind, and the remedy of the worst, in at most so many lines."""
    found = groups(findings)
    lines = [""] if found else ["", "Nothing is wrong."]
    kept = found[: max(1, lines_max - 2)]
    for place, each in enumerate(kept):
        first = each[0]
        names = ", ".join(word(one["about"]) for one in each)
        many = f"{len(each)} {first['kind']}: {names}; " if len(each) > 1 else ""
        lines.append(fitted(f"{first['severity'].upper():<8} {since(first):>6} {many}{text(first['what'])}", width))
        if place == 0:
            tries = [f"do: {text(first['remedy'])}", f"$ {text(first['command'])}"][: 2 if first["command"] else 1]
            lines += [fitted(f"         {each}", width) for each in tries]
    if len(found) > len(kept):
        lines.append(f"and {len(found) - len(kept)} kinds more: ranvier status")
    return lines


def indented(label: str, words: str, width: int) -> Iterator[str]:
    for place, line in enumerate(wrap(words, max(20, width - 19)) or [""]):
        yield f"          {label if place == 0 else '':<8} {line}" if label else f"          {line}"


def engine_table(engines: Sequence[Row], width: int) -> list[str]:
    if not engines:
        return ["no engines"]
    return [fitted(HEAD, width), *[fitted(engine_line(each), width) for each in engines]]


def engine_line(row: Row) -> str:
    counted = f"{short(row['predicted_tokens'])}/{short(row['cached_tokens'])}"
    queue = f"{short(row['running'])}/{short(row['waiting'])}"
    name, state = word(row["name"]), state_of(row)
    wide = max(
        STATE_WIDTH, min(len(state), max(STATES_WIDTH, NAME_AND_STATE - len(name)))
    )  # two words take from the name
    named = NAME_AND_STATE - wide
    return (
        f"{cut(name, named):<{named}} {cut(state, wide):<{wide}} {cut(word(row['level']), 9):<9} {queue:>9} "
        f"{short(row['tokens_per_s']):>7} {percent(row['hit_share']):>5} {counted:>13}"
    )


def state_of(row: Row) -> str:
    """Return what was done with an engine, if anything, and the worst that is wrong with it."""
    states = row.get("states") or (row["state"],)
    shown = states[:2] if states[0] in ORDERED else states[:1]
    return " ".join([STATES.get(each, word(each)) for each in shown])


def whole_engine(row: Row, findings: Iterable[Row], width: int) -> list[str]:
    """Return all that is known of one engine, and what is wrong with it."""
    lines = [fitted(f"{name:<17} {word(value, TEXT_CHARACTERS_MAX)}", width) for name, value in row.items()]
    for found in findings:
        if row["name"] == found["about"] or row["name"] in found["what"]:
            lines += ["", *whole_finding([found], width)]
    return lines


def peer_line(row: Row) -> str:
    shares = "" if row["routes"] else ", shares no routes"
    rtt = "" if row["rtt_ms"] is None else f", {row['rtt_ms']:.3g} ms"
    release = f", {word(row['release'])}" if row["release"] else ""
    return f"{cut(word(row['name']), 24):<24} {word(row['state']):<8} {word(row['address'])}{release}{rtt}{shares}"


def short_peers(peers: Sequence[Row], lines_max: int) -> list[str]:
    """Return a line for each peer, those first that are not well; of too many how many there are in each state."""
    if len(peers) <= lines_max:
        return [peer_line(each) for each in peers]
    ill = [each for each in peers if each["state"] != "alive" or not each["routes"]]
    states = Counter(word(each["state"]) for each in peers)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return [*[peer_line(each) for each in ill[: lines_max - 1]], f"peers: {counts}"]


def engines_of(status: Status, looked: Looked) -> list[Row]:
    """Return the engines that the viewer wants to see, in the order that he wants."""
    wanted = looked.wanted.lower()
    rows = [each for each in status["engines"] if not wanted or wanted in searched(each)]
    return sorted(rows, key=SORTS[looked.sort])


def searched(row: Row) -> str:
    words = (row["name"], row["url"], state_of(row), row["level"], row["why"], *(row["models"] or ()))
    return " ".join(map(str, words)).lower()


def keys_line(looked: Looked, engines: int, room: int) -> str:
    if looked.typing:
        return f"/{looked.wanted}_"
    shown = f"{looked.top + 1}-{min(engines, looked.top + room)} of {engines}" if engines else "no engine"
    filtered = f", with «{looked.wanted}»" if looked.wanted else ""
    return f"{shown} by {looked.sort}{filtered}   j k move  s sort  / filter  e engine  v verdict  ? q"


def since(finding: Row) -> str:
    """Return for how long, in at most six characters."""
    seconds = finding["since_s"]
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(number: float | None) -> str:
    """Return a number in at most six characters."""
    if number is None:
        return "-"
    for unit, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit and number >= SHORTENED:
            return f"{number / unit:.1f}{mark}" if number < 100 * unit else f"{number / unit:.0f}{mark}"
    return f"{number:.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def text(value: Any) -> str:
    return word(value, TEXT_CHARACTERS_MAX)


def cut(words: str, characters: int) -> str:
    return words if len(words) <= characters else words[: characters - 1] + "…"


def fitted(line: str, width: int) -> str:
    return cut(line.rstrip(), width)

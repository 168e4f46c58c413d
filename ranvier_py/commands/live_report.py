"""What is wrong with a configuration, and with what it needs of the world: for `ranvier check` and `ranvier config`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap

import trio

from ranvier_py.commands.config_flags import load_from
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from ranvier_py.config.config_loader import Loaded, file_in_use
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.findings import Finding, Severity, worst_of

COLUMNS = 80
INDENT = " " * 10
WORDS = {Severity.DOWN: "DOWN", Severity.DEGRADED: "degraded", Severity.NOTICE: "notice"}


def examined(options: argparse.Namespace) -> tuple[Loaded, Sequence[str]]:
    """Load the configuration of the keys that are each good, with what an operator should know, and check all of its
    files. Returns it and all problems."""
    from ranvier_py.node.config_check import file_notes, file_problems

    found: list[Loaded] = []

    def problems(loaded: Loaded) -> Iterator[str]:
        notes = [*loaded.notes, *file_notes(loaded, file_in_use(options.config))]
        found.append(Loaded(loaded.config, loaded.origins, notes))
        yield from file_problems(loaded.config)

    try:
        load_from(options, also=problems)
    except ConfigError as error:
        return found[0], error.problems
    return found[0], ()


def report(options: argparse.Namespace, *, as_json: bool) -> int:
    """Print all findings, the worst first. Returns the exit code."""
    from ranvier_py.node.checks.live_check import live_findings

    loaded, problems = examined(options)
    remedy = "Correct it: ranvier config explains all keys."
    found = [Finding("config", Severity.DOWN, each, remedy=remedy) for each in problems]
    found += trio.run(live_findings, loaded.config)
    found += [Finding("config", Severity.NOTICE, each) for each in loaded.notes]
    found.sort(key=lambda each: -each.severity)
    if as_json:
        print(json.dumps([{**asdict(each), "severity": each.severity.label} for each in found], indent=2))
    else:
        print("\n".join([*finding_lines(found), f"checked: {counted(found)}"]))
    if problems:
        return EXIT_CONFIG
    worst = worst_of(found)
    return EXIT_OK if worst is None or worst < Severity.DEGRADED else EXIT_FAILED


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for each in findings:
        whom = f" (touches {each.whom})" if each.whom else ""
        yield from wrapped(f"{WORDS[each.severity]:9} {each.what}{whom}")
        for more in (each.remedy, each.command and f"$ {each.command}"):
            if more:
                yield from wrapped(f"{INDENT}-> {more}" if more is each.remedy else f"{INDENT}   {more}")


def wrapped(line: str) -> list[str]:
    follows = INDENT if not line.startswith(INDENT) else INDENT + "   "
    return wrap(line, COLUMNS, subsequent_indent=follows, break_long_words=False, break_on_hyphens=False)


def counted(findings: Iterable[Finding]) -> str:
    """Return how many there are of each severity: "1 down, 2 notices"."""
    found = [each.severity for each in findings]
    named = [(Severity.DOWN, "down"), (Severity.DEGRADED, "degraded"), (Severity.NOTICE, "notice")]
    parts = [f"{found.count(kind)} {word}" for kind, word in named if kind in found]
    return ", ".join(parts) or "nothing found"

"""Makes the table of docs/logs.md of the events that may be logged; what stands before it is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.processes.children import ROOT
from ranvier_py.core.log_events import EVENTS

PAGE = ROOT / "docs" / "logs.md"
BEGIN = "| event | level | its line in a terminal, with its fields |"


def rows() -> Iterator[str]:
    yield BEGIN
    yield "|---|---|---|"
    for name, row in sorted(EVENTS.items()):
        text = re.sub(r"\{(\w+)[^}]*\}", r"{\1}", row.text).replace("|", "\\|")
        yield f"| `{name}` | {row.levels} | {text} |"


def logs_page() -> Mapping[Path, str]:
    head, _, _ = PAGE.read_text().partition(BEGIN)
    return {PAGE: head + "\n".join(rows()) + "\n"}

"""The pages that people read: README.md for a first reading, docs/ for operators, and the pages that these link to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
OPERATORS = "\n".join([README, *DOCS.values()])
"""All that an operator reads, as one text."""

OTHERS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md", "cluster/README.md")
PAGES = ("README.md", *(f"docs/{name}" for name in DOCS), *OTHERS)

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(text: str) -> str:
    """A page without its blocks between fences."""
    return re.sub(r"(?ms)^```.*?^```\n", "", text)


def anchors(text: str) -> set[str]:
    """What links can lead to within a page: its headings, as GitHub names them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tables(text: str) -> list[list[str]]:
    """The rows of each table."""
    return [block.splitlines() for block in re.findall(r"(?m)(?:^\|.*\n)+", prose(text))]

"""Changes that were rehearsed: how many files a feature of each kind touches, tests and documents included.

`tests/rehearsals/` has one patch for each kind of change, made on this tree. Its first lines say what it adds, how many
files it may touch, and which tests show that it works.
Whoever changes the lines around one makes it anew: apply it to the tree before, `git diff -U1` on the tree after.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = re.compile(r"(?P<adds>[^\n]+)\nFiles: (?P<most>\d+)\nShown by: (?P<shown>[^\n]+)\n\n")
TOUCHED = re.compile(r"^diff --git a/(\S+) b/", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One change: what it adds, the files that it touches, how many it may, and what pytest is called with."""

    path: Path
    adds: str
    most: int
    touched: Sequence[str]
    shown_by: Sequence[str]

    @classmethod
    def of(cls, path: Path) -> Rehearsal:
        text = path.read_text()
        head = HEAD.match(text)
        assert head is not None, f"{path.name} does not begin as a rehearsal does"
        return cls(path, head["adds"], int(head["most"]), TOUCHED.findall(text), shlex.split(head["shown"]))

    def apply(self, root: Path, *flags: str) -> str:
        """Apply the patch to this tree. Returns why that is not possible; "" if it is."""
        done = subprocess.run(
            ["git", "apply", *flags, str(self.path)],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr if done.returncode else ""


def rehearsals() -> list[Rehearsal]:
    return [Rehearsal.of(path) for path in sorted((ROOT / "tests" / "rehearsals").glob("*.patch"))]


def rehearsed() -> list[str]:
    """Return one line for each, for the page of the house."""
    return [f"{len(each.touched):4} of {each.most}  {each.adds}" for each in rehearsals()]

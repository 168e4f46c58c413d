"""`python -m cluster upgrade`: a cluster of the previous protocol version is upgraded under load, node by node.

Nodes begin as OLD, from a worktree of its own; each one comes back as this checkout. The first run ends with both
versions side by side, which must hold the same routes; the second replaces all nodes. In both no request fails.
Further words go to `chaos`, as in `python -m cluster upgrade --seed 7 --json out.json`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.processes import chaos
from cluster.processes.children import ROOT
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION

OLD = "bd96951f"
"""The last commit of the previous protocol version."""

SCENARIOS = ("upgrade_half", "rolling_restart")
ASK = "from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION; print(PROTOCOL_VERSION)"


def main(argv: Sequence[str] | None = None) -> int:
    """The codes of `chaos`; 2 as well if there is no such commit here, or it is not of the previous version."""
    words = list(sys.argv[2:] if argv is None else argv)
    try:
        with checkout(OLD) as tree:
            spoken = int(output([sys.executable, "-c", ASK], tree))
            if spoken != PROTOCOL_VERSION - 1:
                raise ValueError(f"{OLD} speaks protocol {spoken}, which this checkout does not upgrade from")
            return chaos.main([*(f"--scenario={name}" for name in SCENARIOS), f"--first-tree={tree}", *words])
    except (subprocess.CalledProcessError, ValueError) as error:
        sys.stderr.write(f"upgrade: {error}\n")
        return chaos.MISUSED


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out beside this one, for as long as it is needed. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="ranvier-old-") as folder:
        tree = Path(folder) / "tree"
        output(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], ROOT)
        try:
            yield tree
        finally:
            output(["git", "worktree", "remove", "--force", str(tree)], ROOT)


def output(command: Sequence[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

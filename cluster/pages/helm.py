"""The chart as Helm renders it, and manifests as kubectl puts them together, both without a cluster.

`make helm` brings both programs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.processes.children import ROOT

CHART = ROOT / "deploy" / "helm" / "ranvier"
RUN_S_MAX = 60


class NotRendered(Exception):
    """The program refused, or is not here. The text is its own."""


def program(name: str) -> str | None:
    """Return `helm` or `kubectl`: the one beside the interpreter, where `make helm` puts it, else the one on PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def rendered(*words: str, release: str = "ranvier", folder: Path = ROOT) -> str:
    """Return the manifests with these further arguments of `helm template`. Raises NotRendered."""
    return run("helm", "template", release, str(CHART), *words, folder=folder)


def run(name: str, *words: str, folder: Path = ROOT) -> str:
    """Return what a command of Helm or kubectl prints. Raises NotRendered."""
    found = program(name)
    if found is None:
        raise NotRendered(f"{name} is not here: make helm")
    command = [found, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S_MAX, cwd=folder)
    if done.returncode:
        raise NotRendered(done.stderr)
    return done.stdout

"""The commands of pages as their tests run them: one indented line each, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import trio

from tests.house import ROOT

RANVIER = f"{quote(sys.executable)} -m ranvier_py"
COMMANDS = r"ranvier|pip|printf|echo|curl|helm|kubectl|docker|openssl|make|python|deploy/\S+"


def section(page: str, title: str) -> str:
    """What follows a heading of a page, up to the next one of its level or a higher one."""
    (found,) = re.findall(rf"(?ms)^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", (ROOT / page).read_text())
    return str(found[1])


def commands(page: str, title: str) -> list[str]:
    """Its commands. One that goes on in the next line, after a backslash, is one."""
    text = re.sub(r" \\\n +", " ", section(page, title))
    return re.findall(rf"(?m)^ {{4,}}((?:{COMMANDS})\b.*)$", text)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


async def shell(command: str, folder: Path, replaced: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder and return what it prints; it must succeed. `ranvier` is this checkout's."""
    for old, new in (replaced or {}).items():
        command = command.replace(old, new)
    command = re.sub(r"^(?:/opt/ranvier/bin/)?ranvier\b", RANVIER, command)
    done = await trio.run_process(["sh", "-ec", command], cwd=folder, capture_stdout=True, env=environment())
    return done.stdout.decode()

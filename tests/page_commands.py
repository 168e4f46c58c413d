"""The commands of pages as their tests run them: one indented line each, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote

import trio

from tests.documents import prose
from tests.house import ROOT

RANVIER = f"{quote(sys.executable)} -m ranvier_py"
COMMANDS = (
    r"(?:[A-Z_]+=\S+ )*(?:ranvier|pip|printf|echo|curl|helm|kubectl|docker|openssl|make|python|chmod|grep|sed|vllm"
    r"|claude|guidellm|deploy/\S+)(?= |$)|\(umask"
)


def section(page: str, title: str) -> str:
    """What follows a heading of a page, up to the next one of its level or a higher one."""
    (found,) = re.findall(rf"(?ms)^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", (ROOT / page).read_text())
    return str(found[1])


def commands(page: str, title: str) -> list[str]:
    """Its commands. One that goes on in the next line, after a backslash, is one."""
    return typed(section(page, title))


def all_commands(page: str) -> list[str]:
    return typed(prose((ROOT / page).read_text()))


def typed(text: str) -> list[str]:
    return re.findall(rf"(?m)^ {{4,}}((?:{COMMANDS}).*)$", re.sub(r" \\\n +", " ", text))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


async def shell(command: str, folder: Path, replaced: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder and return what it prints; it must succeed. `ranvier` is this checkout's."""
    for old, new in (replaced or {}).items():
        command = command.replace(old, new)
    done = await ran(command, folder)
    done.check_returncode()
    return str(done.stdout.decode())


async def status_of(command: str, folder: Path) -> int:
    """Run a command in a folder and return its exit code."""
    return (await ran(command, folder)).returncode


async def ran(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    command = re.sub(r"^(?:/opt/ranvier/bin/)?ranvier\b", RANVIER, command)
    run = partial(trio.run_process, capture_stdout=True, check=False)
    return await run(["sh", "-ec", command], cwd=folder, env=environment())

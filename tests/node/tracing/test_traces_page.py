"""docs/traces.md leads from nothing to a trace: its commands are run as they stand there, on other ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from ranvier_py.core.tracing.span_names import NAMES, VERSIONS
from tests.node.node_lab import ANNOUNCED, Lab, first_lines, opened

PAGE = Path(__file__).parents[3] / "docs" / "traces.md"


def commands() -> list[str]:
    section = PAGE.read_text().partition("## Try it")[2].partition("A second later")[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


def words_of(command: str) -> list[str]:
    """The command with this Python, and each port 0."""
    words = re.sub(r"^(ranvier|python -m)", lambda found: found[0].replace("ranvier", "-m ranvier_py"), command).split()
    return [sys.executable, *(words if words[0] == "-m" else words[1:])]


@pytest.mark.slow
async def test_its_commands_lead_to_a_trace() -> None:
    collect, engine, serve, curl = commands()
    assert collect.startswith("python -m cluster collector --listen 127.0.0.1:4318")
    assert engine.startswith("python -m cluster engine")
    silent = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "check": False}
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    async with opened(Lab, 1, 60) as place:

        async def started(words: list[str]) -> trio.Process:
            run = partial(trio.run_process, words, env=environment, **silent)  # type: ignore[arg-type]
            process: trio.Process = await place.nursery.start(run)
            return process

        collector = await started([word.replace(":4318", ":0") for word in words_of(collect)])
        where = (await first_lines(collector)).split()[-1]
        serve = serve.replace("http://127.0.0.1:8000", place.engines[0]).replace("http://127.0.0.1:4318", where)
        node = await started([*words_of(serve), "--listen=127.0.0.1:0", "--control=127.0.0.1:0"])
        ((public, _),) = ANNOUNCED.findall(await first_lines(node))
        done = await trio.run_process(["sh", "-ec", curl.replace("127.0.0.1:8080", public)], capture_stdout=True)
        assert b"usage" in done.stdout
        shown = await first_lines(collector, 4)
    page = PAGE.read_text().partition("the collector prints")[2].partition("\n## ")[0]
    assert alike(shown.splitlines()[:4]) == alike(re.findall(r"^    (.+)$", page, re.MULTILINE))


def alike(lines: Sequence[str]) -> list[str]:
    """Lines without what differs from run to run."""
    return [re.sub(r"[\d.]+ ms", "N ms", re.sub(r"[0-9a-f]{32}", "ID", line)) for line in lines]


def test_the_page_names_each_version_and_what_differs() -> None:
    text = PAGE.read_text()
    assert all(f"`{version}`" in text for version in VERSIONS)
    differing = {name for name in NAMES[VERSIONS[0]] if len({NAMES[version][name] for version in VERSIONS}) > 1}
    assert all(f"`{NAMES[version][name]}`" in text for version in VERSIONS for name in differing)

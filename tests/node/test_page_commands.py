"""Every command of every page is run as it stands there, in one folder per page, but for those of ELSEWHERE.

`ranvier` commands ask a node of this process. One that serves is checked instead (`config --check`): its flags, their
values and its files are good.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py import cli
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_STATUS_UNKNOWN
from tests.documents import PAGES
from tests.house import ROOT
from tests.node.node_lab import MODEL, Node, cluster_lab
from tests.page_commands import all_commands, status_of

RUN_BY = {
    "docs/first-fleet.md": "test_first_fleet_page",
    "docs/quickstart.md": "test_quickstart_page",
    "docs/kubernetes.md": "test_kubernetes_page",
    "docs/fleet.md": "test_fleet_page",
    "docs/tuning.md": "test_tuning_page",
    "docs/control-api.md": "test_tuning_page",
}
"""Pages whose commands a test of their own runs, one after another."""

ELSEWHERE = {
    r"make\b|pip install ": "what makes this checkout",
    r"vllm serve|.*\bclaude$|.*guidellm": "programs of others: make test-engines, make test-clients",
    r".*docker compose|deploy/image.sh": "Docker: tests/deploy has what can be had without it",
    r"kubectl create|helm install": "as in docs/kubernetes.md",
    r"ranvier reporter": "tests/reporter",
    r"python -m cluster": "tests/cluster",
}

GIVEN = {
    "http://10.0.0.1:9180": "CONTROL",
    "http://10.0.0.2:9180": "CONTROL",
    "http://127.0.0.1:9180": "CONTROL",
    "--url URL": "--url CONTROL",
    "--tokenizer Qwen/Qwen2.5-7B-Instruct": "--tokenizer embedded",
    "-key-file KEYS": "-key-file cluster.key",
    "HOST:": "127.0.0.1:",
}
"""What stands for something of the reader's, and what it is here."""


def wanted(command: str) -> str:
    """The command without its comment, and without dots for what the reader adds."""
    command = command.replace("--backend ...", "--backend http://127.0.0.1:1")
    return re.sub(r"\s+\.\.\.$", "", re.sub(r"\s{2,}# .*$| +#\s.*$", "", command).rstrip())


COMMANDS = {page: [wanted(each) for each in all_commands(page)] for page in PAGES if page not in RUN_BY}
HERE = {
    page: [each for each in found if not any(re.match(form, each) for form in ELSEWHERE)]
    for page, found in COMMANDS.items()
}


def test_pages_with_a_test_of_their_own_have_it() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*_page.py")}
    for page, name in RUN_BY.items():
        assert f'"{page}"' in texts[name]


def test_what_is_run_elsewhere_stands_in_some_page() -> None:
    every = [each for found in COMMANDS.values() for each in found]
    for form in ELSEWHERE:
        assert [each for each in every if re.match(form, each)], form
    assert sum(map(len, HERE.values())) > 35


def folder_of(page: str, folder: Path, cluster_key: str) -> None:
    """The files that commands of pages read, but those that the page makes itself."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who was first?"}]}
    line = {"path": "/v1/chat/completions", "headers": {}, "body": body}
    (folder / "request.json").write_text(json.dumps(body))
    (folder / "requests.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    (folder / "ranvier.toml").write_text('backend = ["http://127.0.0.1:1"]\n')
    (folder / "continuum.yaml").write_text("backend: [http://127.0.0.1:1]\nresponse_cache:\n  enabled: true\n")
    if page != "README.md":
        (folder / "cluster.key").write_text(f"{cluster_key}\n")


def in_process(words: list[str]) -> int:
    """Run `ranvier` here: an interpreter for each of them would take minutes."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


ASKS = ("status", "explain", "clients", "backend", "node", "access")
"""Commands that take the address of a node."""


async def run(command: str, node: Node, folder: Path) -> int:
    """Run one as it stands there; its exit code."""
    for old, new in GIVEN.items():
        command = command.replace(old, new.replace("CONTROL", node.control))
    parts = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)ranvier ((?:(?! >).)*)", command)
    if parts is None:
        return await status_of(command, folder)
    called, *words = shlex.split(parts[2])
    if called == "serve":
        called, words = "config", ["--check", *("--record-file" if word == "--record" else word for word in words)]
    elif called in ASKS and "--control" not in words:
        words += ["--control", node.control]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for setting in parts[1].split():
            patch.setenv(*setting.split("=", 1))
        return await trio.to_thread.run_sync(in_process, [called, *(word for word in words if word != "--watch")])


WRONG = {EXIT_CONFIG, EXIT_STATUS_UNKNOWN, 126, 127}
"""Wrong usage, a node that can't be reached, a program that is not there. A code of 1 is a verdict."""


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(page for page, found in HERE.items() if found))
async def test_the_commands_of_a_page_run_as_they_stand_there(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    settings: dict[str, Any] = {"response_cache": True, "record_file": folder / "traffic.jsonl"}
    if page == "docs/access.md":
        assert await status_of("ranvier keys make bob > ../keys.toml 2> ../bob.key", folder) == 0
        settings |= {"keys_file": tmp_path / "keys.toml", "gossip_admin_key": "k" * 32}
    async with cluster_lab(tmp_path, engines=1, deadline_s=120) as place:
        place.engines = [f"{place.engines[0]},name=w3"]
        node = await place.start(**settings)
        folder_of(page, folder, place.key_file.read_text().strip())
        for _ in range(2):
            await node.http.post(f"{node.url}/v1/chat/completions", content=(folder / "request.json").read_bytes())
        codes = [(command, await run(command, node, folder)) for command in HERE[page]]
        assert [each for each in codes if each[1] in WRONG] == []

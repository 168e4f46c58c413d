"""deploy/image.sh, with a `docker` that writes down what it is asked: no engine is here, so no image is built."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py import __version__
from tests.house import ROOT
from tests.node.node_lab import Lab, opened

SCRIPT = ROOT / "deploy" / "image.sh"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
DIGEST = "sha256:" + "b" * 64


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads, as a repository of its own."""
    root = tmp_path / "checkout"
    for name in ("deploy/image.sh", "deploy/Dockerfile", "ranvier_py/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.test"]
    for words in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message=a"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent / "fake_docker.py"}" "$@"\n')
    docker.chmod(0o755)
    return root


def environment(checkout: Path, plan: Mapping[str, Any]) -> dict[str, str]:
    calls = checkout.parent / "calls"
    calls.touch()
    return {
        "PATH": f"{checkout.parent / 'bin'}:/usr/bin:/bin",
        "FAKE_DOCKER": json.dumps({"ports": {}, "calls": str(calls), **plan}),
        "SMOKE_TRIES": "2",
        "SMOKE_WAIT_S": "0",
        "no_proxy": "*",
    }


def built(checkout: Path, *words: str, **plan: Any) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(checkout / "deploy" / "image.sh"), *words]
    return subprocess.run(
        command, env=environment(checkout, plan), check=False, capture_output=True, text=True, timeout=60
    )


def calls(checkout: Path) -> list[list[str]]:
    return [json.loads(line) for line in (checkout.parent / "calls").read_text().splitlines()]


def revision(checkout: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_base_is_pinned_by_digest_and_is_the_base_of_both_stages() -> None:
    assert re.findall(r"(?m)^ARG BASE=(.*)$", DOCKERFILE) == re.findall(
        r"python:3\.14-slim@sha256:[0-9a-f]{64}", DOCKERFILE
    )
    assert [line.split()[1] for line in re.findall(r"(?m)^FROM .*$", DOCKERFILE)] == ["${BASE}", "${BASE}"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here")
def test_shellcheck_finds_no_fault() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


async def test_an_image_that_serves_a_chat_passes_and_is_pushed(checkout: Path) -> None:
    """What it sends into the container is sent to a real node here."""
    async with opened(Lab, 1, 60) as place:
        node = await place.start()
        ports = {"http://127.0.0.1:9180": node.control, "http://127.0.0.1:8080": node.url}
        command = ["sh", str(checkout / "deploy" / "image.sh"), "--push", "registry.test:5000/ranvier"]
        done = await trio.run_process(command, env=environment(checkout, {"ports": ports}), capture_stdout=True)
    image = f"registry.test:5000/ranvier:{__version__}"
    printed = done.stdout.decode().splitlines()
    assert printed == [f"built and tried: {image} ({revision(checkout)})", "registry.test/ranvier@sha256:dddddddd"]
    made = calls(checkout)
    (build,) = [call for call in made if call[0] == "build"]
    assert f"REVISION={revision(checkout)}" in build
    assert f"VERSION={__version__}" in build
    assert build[-1] == str(checkout)
    engine, runs = [call for call in made if call[0] == "run"]
    assert engine[-6:] == [image, "-m", "cluster", "engine", "--listen", "0.0.0.0:8000"]
    assert {"--read-only", "no-new-privileges", "ALL"} <= set(runs)
    assert made.index(["push", image]) > made.index(runs)
    assert made[-2:][0][:2] == ["rm", "--force"], "nothing is left"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"engine": False}, "no Docker engine answers"),
        ({"version": "0.0.9"}, "the image has another version"),
        ({"revision": "other"}, "the image has another revision"),
        ({"health": "starting"}, "the node is not healthy"),
        ({"user": 0}, "it runs as another user"),
        ({"writable": True}, "it can write to its root"),
        ({"ports": {":9180": ":1", ":8080": ":1", "+ 60": "- 60"}}, "the node does not serve"),
    ],
)
def test_an_image_that_is_wrong_is_not_pushed(checkout: Path, plan: dict[str, Any], reason: str) -> None:
    done = built(checkout, "--push", "ranvier", **plan)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"image.sh: {reason}")
    made = [call[0] for call in calls(checkout)]
    assert "push" not in made
    assert "run" not in made or made[-2:] == ["rm", "network"], "nothing is left"


@pytest.mark.parametrize("words", [(), ("--pull", "ranvier"), ("a", "b")])
def test_a_wrong_command_asks_docker_for_nothing(checkout: Path, words: tuple[str, ...]) -> None:
    assert built(checkout, *words).returncode == 2
    assert calls(checkout) == []


def test_the_base_is_renewed_by_one_word(checkout: Path) -> None:
    done = built(checkout, "--renew", "ranvier:test", digest=DIGEST, version="0")
    assert "another version" in done.stderr
    text = (checkout / "deploy" / "Dockerfile").read_text()
    assert f"\nARG BASE=python:3.14-slim@{DIGEST}\n" in text
    assert text.replace(DIGEST, "") == re.sub("sha256:[0-9a-f]{64}", "", DOCKERFILE)
    (build,) = [call for call in calls(checkout) if call[0] == "build"]
    assert f"BASE=python:3.14-slim@{DIGEST}" in build
    assert "ranvier:test" in build


def test_an_answer_that_is_no_digest_changes_nothing(checkout: Path) -> None:
    assert built(checkout, "--renew", "ranvier", digest="").returncode == 1
    assert (checkout / "deploy" / "Dockerfile").read_text() == DOCKERFILE


def test_an_image_of_a_changed_checkout_carries_that_in_its_revision(checkout: Path) -> None:
    (checkout / "changed").touch()
    built(checkout, "ranvier", engine=True, version="0")
    (build,) = [call for call in calls(checkout) if call[0] == "build"]
    assert f"REVISION={revision(checkout)}-dirty" in build

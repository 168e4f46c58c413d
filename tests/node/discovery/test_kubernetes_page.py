"""docs/kubernetes.md and its manifests: its configuration is followed, its command runs, its Role allows enough."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import trio
from ruamel.yaml import YAML

from ranvier_py.config.config_loader import load
from tests.node.discovery.source_labs import KUBERNETES, KubernetesLab, kubernetes_lab
from tests.node.node_lab import Lab, opened

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
DISCOVERY = ROOT / "deploy" / "kubernetes" / "discovery"


def examples() -> list[str]:
    return re.findall(r"^    (\w+ = .*)$", PAGE, re.MULTILINE)


def documents(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(DISCOVERY / name))


def test_its_lines_of_configuration_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "ranvier.toml"
    path.write_text("\n".join(examples()))
    options = load(file=path).config.discovery
    assert options.backend_kubernetes == ("service=vllm,port=http",)
    assert options.kubernetes_api == "http://127.0.0.1:8001"


async def test_its_command_shows_the_engines_that_were_found(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (ranvier .*)$", PAGE, re.MULTILINE)
    async with opened(Lab, 1, 60) as place, kubernetes_lab("service", tmp_path) as source:
        await source.give(place.engines)
        node = await place.start(backend=[], **{**source.settings, "backend_kubernetes": ["service=vllm,port=http"]})
        await node.until("/admin/backends", lambda answer: answer["backends"])
        words = [sys.executable, "-m", "ranvier_py", *command.split()[1:], "--control", node.control]
        done = await trio.run_process(words, capture_stdout=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        (line,) = [each for each in done.stdout.decode().splitlines() if place.engines[0] in each]
        assert line.endswith("kubernetes")


def test_the_manifests_are_what_kubernetes_accepts() -> None:
    found = documents("rbac.yaml")
    assert [item["kind"] for item in found] == ["ServiceAccount", "Role", "RoleBinding"]
    for item in found:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    (component,), (account,) = documents("kustomization.yaml"), documents("account.yaml")
    named = {*component["resources"], *(patch["path"] for patch in component["patches"]), "kustomization.yaml"}
    assert named == {path.name for path in DISCOVERY.iterdir()}
    assert account["spec"]["template"]["spec"]["serviceAccountName"] == found[0]["metadata"]["name"]


@pytest.mark.parametrize("kind", KUBERNETES)
async def test_the_role_allows_all_that_a_source_asks_for_and_nothing_else(kind: str, tmp_path: Path) -> None:
    role = documents("rbac.yaml")[1]
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for verb, _ in allowed} == {"list", "watch"}
    async with opened(Lab, 1, 60) as place, kubernetes_lab(kind, tmp_path) as source:
        assert isinstance(source, KubernetesLab)
        await source.give(place.engines)
        node = await place.start(backend=[], **source.settings)
        await node.until("/admin/backends", lambda answer: answer["backends"])
        assert {(verb, resource) for verb, resource, _ in source.api.asked} <= allowed

"""docs/kubernetes.md: its commands run as far as they can without a cluster, and the Role allows enough."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from cluster.pages.chart_pages import PLAIN
from cluster.pages.helm import program, rendered, run
from ranvier_py.config.config_loader import load
from tests.deploy.charts import needs_helm, of_kind
from tests.deploy.deployed import loaded
from tests.house import ROOT
from tests.node.discovery.source_labs import KUBERNETES, KubernetesLab, kubernetes_lab
from tests.node.node_lab import MODEL, Lab, cluster_lab, opened
from tests.page_commands import commands, section, shell

NAME = "docs/kubernetes.md"
PAGE = (ROOT / NAME).read_text()
FIRST = "From nothing to a fleet"


def examples() -> list[str]:
    return re.findall(r"^    (\w+ = .*)$", PAGE, re.MULTILINE)


def test_its_lines_of_configuration_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "ranvier.toml"
    path.write_text("\n".join(examples()))
    options = load(file=path).config.discovery
    assert options.backend_kubernetes == ("service=vllm,port=http",)
    assert options.kubernetes_api == "http://127.0.0.1:8001"


async def test_its_command_shows_the_engines_that_were_found(tmp_path: Path) -> None:
    (command,) = commands(NAME, "What it shows")
    async with opened(Lab, 1, 60) as place, kubernetes_lab("service", tmp_path) as source:
        await source.give(place.engines)
        node = await place.start(backend=[], **{**source.settings, "backend_kubernetes": ["service=vllm,port=http"]})
        await node.until("/admin/backends", lambda answer: answer["backends"])
        printed = await shell(f"{command} --control {node.control}", tmp_path)
        (line,) = [each for each in printed.splitlines() if place.engines[0] in each]
        assert line.endswith("kubernetes")


def fleet_values(folder: Path) -> None:
    (text,) = re.findall(r"(?s) {3}```yaml\n(.*?) {3}```", section(NAME, FIRST))
    (folder / "fleet.yaml").write_text(re.sub("(?m)^   ", "", text))


@needs_helm
async def test_its_commands_lead_from_nothing_to_a_fleet(tmp_path: Path) -> None:
    """What asks a cluster is asked of kubectl in a dry run, of Helm as a template, and of a node of the lab."""
    fleet_values(tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    first, rest = commands(NAME, FIRST)[:2], commands(NAME, FIRST)[2:]
    for command in first:
        assert command.startswith("openssl rand")
        await shell(command, tmp_path)
    create, secret, install, rollout, status, forward = rest
    if program("kubectl"):
        dry = ["--dry-run=client", "--output=yaml"]
        (made,) = loaded(run(*create.split(), *dry, folder=tmp_path))
        assert (made["kind"], made["metadata"]["name"]) == ("Namespace", "llm")
        (keys,) = loaded(run(*secret.split(), *dry, folder=tmp_path))
        assert keys["metadata"]["namespace"] == "llm"
    else:
        keys = {"metadata": {"name": "ranvier-keys"}, "data": {"cluster-key": "", "control-key": ""}}
    helm, verb, *words = install.split()
    assert (helm, verb) == ("helm", "install")
    found = tuple(loaded(run(helm, "template", *words, folder=tmp_path)))
    for item in found:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    stateful = of_kind(found, "StatefulSet")
    (volume,) = (each["secret"] for each in stateful["spec"]["template"]["spec"]["volumes"] if each["name"] == "keys")
    assert volume["secretName"] == keys["metadata"]["name"]
    assert {each["key"] for each in volume["items"]} == set(keys["data"])
    assert rollout.endswith(f"rollout status statefulset/{stateful['metadata']['name']}")
    services = [each["metadata"]["name"] for each in found if each["kind"] == "Service"]
    assert re.findall(r"service/(\S+) (\d+)", forward) == [(services[0], "8080")]
    _, _, inner = status.partition(f"exec {stateful['metadata']['name']}-0 -- ")
    async with opened(Lab, 1, 60) as place:
        node = await place.start()
        await node.until("/admin/backends", lambda answer: answer["backends"])
        printed = await shell(f"{inner} --control {node.control}", tmp_path, {"/run/secrets/ranvier": str(tmp_path)})
        assert "engine" in printed


@needs_helm
@pytest.mark.slow
async def test_pods_of_its_fleet_find_their_engines_and_each_other(tmp_path: Path) -> None:
    """By the configuration that Helm renders, but with the ports, folders and addresses of this machine."""
    fleet_values(tmp_path)
    found = tuple(loaded(rendered("--namespace", "llm", "--values", "fleet.yaml", folder=tmp_path)))
    written = tomllib.loads(of_kind(found, "ConfigMap")["data"]["ranvier.toml"])
    assert written["backend_kubernetes"] == ["pods=app=vllm,port=8000"]
    (tmp_path / "control-key").write_text("a-key-of-the-control-port")
    async with cluster_lab(tmp_path, engines=2, deadline_s=90) as place, kubernetes_lab("pods", tmp_path) as source:
        await source.give(place.engines)
        here: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "control": "127.0.0.1:0",
            "gossip": "127.0.0.1:0",
            "tokenizer": "embedded",
            "backend": [],
            "cluster_key_file": place.key_file,
            "control_key_file": None,
            **source.settings,
            "backend_kubernetes": ["pods=app=vllm"],
        }
        nodes = []
        for number in range(2):
            state = tmp_path / f"ranvier-{number}"
            state.mkdir()
            own = {name: state / Path(written[name]).name for name in written if "/var/lib/" in str(written[name])}
            join = list(place.places)
            nodes.append(await place.start(**{**written, **here, **own, "node_name": state.name, "join": join}))
        for node in nodes:
            await node.sees(1)
            await node.until("/admin/backends", lambda answer: len(answer["backends"]) == 2)
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
            answer = await node.http.post(f"{node.url}/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"]
            assert (await node.http.get(f"{node.control}/readyz")).status_code == 200


@pytest.mark.parametrize("kind", KUBERNETES)
async def test_the_role_allows_all_that_a_source_asks_for_and_nothing_else(kind: str, tmp_path: Path) -> None:
    role = of_kind(tuple(loaded(PLAIN / "rbac.yaml")), "Role")
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for verb, _ in allowed} == {"list", "watch"}
    async with opened(Lab, 1, 60) as place, kubernetes_lab(kind, tmp_path) as source:
        assert isinstance(source, KubernetesLab)
        await source.give(place.engines)
        node = await place.start(backend=[], **source.settings)
        await node.until("/admin/backends", lambda answer: answer["backends"])
        assert {(verb, resource) for verb, resource, _ in source.api.asked} <= allowed

"""deploy/compose.yaml: what Compose accepts, nodes that find engines and each other, and what looks at them. Nothing is
started: no engine of Docker is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from ruamel.yaml import YAML

from cluster.engine import engine_process
from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_loader import load
from ranvier_py.config.config_model import Config
from ranvier_py.control.control_port import OPEN_PATHS
from ranvier_py.core.addresses import host_port
from tests.deploy.deployed import DEPLOY, END_MARGIN_S, Object, dockerfile, loaded, most_bytes
from tests.node.node_lab import first_lines

COMPOSE = DEPLOY / "compose.yaml"
KEYS = ("cluster-key", "control-key")

GIVEN = {"BACKENDS": "http://a:1 http://b:2", "CLUSTER_KEY_FILE": "cluster-key", "CONTROL_KEY_FILE": "control-key"}
"""The variables without which compose.yaml refuses to start."""


def checked(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_the_compose_file_is_what_compose_accepts() -> None:
    result = checked(COMPOSE)
    assert result.returncode == 0, result.stdout


def test_a_key_that_compose_does_not_know_is_refused(tmp_path: Path) -> None:
    """Else the test above holds nothing."""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period:", "stop_grace_time:"))
    assert checked(wrong).returncode == 1


def composed() -> Object:
    (item,) = loaded(COMPOSE)
    return item


def service(name: str = "ranvier") -> Object:
    found = composed()["services"][name]
    assert isinstance(found, dict)
    return found


def filled_in(text: str) -> str:
    """The text with ${NAME:-default} and ${NAME:?message} as Compose fills them in. Raises KeyError without a value."""
    return re.sub(
        r"\$\{(\w+):([-?])([^}]*)\}",
        lambda match: GIVEN.get(match[1], match[3]) if match[2] == "-" else GIVEN[match[1]],
        text,
    )


@pytest.fixture
def composed_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """The configuration as a node in a container of the image's loads it."""
    for name, value in service()["environment"].items():
        monkeypatch.setenv(name, filled_in(str(value)))
    (command,) = dockerfile("CMD")
    flag, listen = YAML(typ="safe", pure=True).load(command)
    assert flag == "--listen"
    (tmp_path / "control-key").write_text("a-key-of-the-control-port\n")
    return load({"listen": listen, "control_key_file": str(tmp_path / "control-key")}).config


def tmpfs() -> Iterator[tuple[Path, dict[str, str]]]:
    for entry in service()["tmpfs"]:
        path, _, options = entry.partition(":")
        yield Path(path), dict(option.split("=") for option in options.split(","))


def test_containers_of_compose_find_each_other_by_the_name_of_their_service(composed_config: Config) -> None:
    assert [backend.url for backend in composed_config.backend] == GIVEN["BACKENDS"].split()
    places = gossip_endpoints(composed_config)
    assert places.join == (("ranvier", places.listen[1]),)
    assert places.advertise is None, "each container has an address of its own, which it finds out"
    assert not composed_config.insecure_gossip


def test_compose_publishes_one_port_for_each_node_on_this_machine_only(composed_config: Config) -> None:
    (port,) = service()["ports"]
    host, published, target = port.split(":")
    first, last = published.split("-")
    assert host == "127.0.0.1"
    assert int(last) - int(first) + 1 == service()["deploy"]["replicas"]
    assert int(target) == host_port(composed_config.listen)[1]


def test_compose_asks_for_health_what_the_control_port_reports_without_a_key(composed_config: Config) -> None:
    kind, python, option, program = service()["healthcheck"]["test"]
    assert (kind, python, option) == ("CMD", "/opt/ranvier/bin/python", "-c")
    compile(program, "healthcheck", "exec")
    (url,) = re.findall(r'"(http://[^"]*)"', program)
    port = host_port(composed_config.control)[1]
    assert url in [f"http://127.0.0.1:{port}{path}" for path in OPEN_PATHS]


def test_compose_leaves_time_to_drain(composed_config: Config) -> None:
    (stop_s,) = re.fullmatch(r"(\d+)s", service()["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert int(stop_s) >= composed_config.drain_timeout_s + END_MARGIN_S


def test_compose_mounts_keys_from_files_where_the_node_reads_them(composed_config: Config) -> None:
    """Compose refuses a secret from anything but a file in a container whose file system is read-only."""
    cluster, control = service()["secrets"]
    assert cluster["target"] == str(composed_config.cluster_key_file)
    assert control["target"] == service()["environment"]["RANVIER_CONTROL_KEY_FILE"]
    assert {name: list(secret) for name, secret in composed()["secrets"].items()} == {name: ["file"] for name in KEYS}


def test_a_container_of_compose_writes_to_its_state_and_nowhere_else(composed_config: Config) -> None:
    ((directory, options),) = tmpfs()
    assert composed_config.gossip_state_file.parent == directory
    assert Path(service()["environment"]["HF_HOME"]).parent == directory
    assert f"{options['uid']}:{options['gid']}" == dockerfile("USER")[0]


def test_nothing_but_an_engine_with_a_gpu_may_write_to_its_root_or_has_rights() -> None:
    for name, found in composed()["services"].items():
        if name != "vllm":
            assert (found["read_only"], found["cap_drop"]) == (True, ["ALL"])
            assert found["security_opt"] == ["no-new-privileges:true"]
    assert {port.split(":")[0] for found in composed()["services"].values() for port in found.get("ports", [])} == {
        "127.0.0.1"
    }


def test_a_container_of_compose_fits_its_memory(composed_config: Config) -> None:
    assert service()["deploy"]["resources"]["limits"] == {"memory": "2g"}
    assert most_bytes(composed_config) < 0.75 * 2 * 1024**3


def test_the_image_exposes_the_ports_for_clients_and_peers(composed_config: Config) -> None:
    gossip = gossip_endpoints(composed_config).listen[1]
    assert dockerfile("EXPOSE") == [f"{host_port(composed_config.listen)[1]} {gossip}/tcp {gossip}/udp"]


def test_nodes_find_the_engines_beside_them_by_their_name(composed_config: Config) -> None:
    (target,) = composed_config.discovery.backend_dns
    name, _, port = target.partition(":")
    assert service(name)["command"][0] == f"--listen=0.0.0.0:{port}"
    assert name in service("vllm")["networks"]["default"]["aliases"]
    assert service("vllm")["profiles"], "without a GPU it never starts"
    assert "profiles" not in service(name)


def test_engines_of_compose_are_started_as_the_lab_starts_them() -> None:
    options = engine_process.parser().parse_args(service("engine")["command"])
    assert (options.listen, options.kv_events, options.kv_replay) == ("0.0.0.0:8000", "tcp://*:5557", "tcp://*:5558")
    (mounted,) = service("engine")["volumes"]
    source, target, mode = mounted.split(":")
    assert (DEPLOY / source).resolve() == DEPLOY.parent / "cluster"
    assert (Path(target).parent, mode) == (Path(service("engine")["environment"]["PYTHONPATH"]), "ro")
    assert service("engine")["entrypoint"] == ["/opt/ranvier/bin/python", "-m", "cluster", "engine"]


@pytest.mark.slow
async def test_an_engine_runs_where_its_folder_alone_is_mounted_beside_the_installed_package(tmp_path: Path) -> None:
    """As in the image: files of the package lie where it is installed, not beside the lab."""
    installed, lab = tmp_path / "installed", tmp_path / "lab"
    for folder, name in ((installed, "ranvier_py"), (lab, "cluster")):
        shutil.copytree(DEPLOY.parent / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["--listen=127.0.0.1:0" if each.startswith("--listen") else each for each in service("engine")["command"]]
    command = [sys.executable, "-m", "cluster", "engine", *(each for each in words if "tcp://" not in each)]
    environment = {**os.environ, "PYTHONPATH": f"{lab}{os.pathsep}{installed}"}
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            start = partial(
                trio.run_process, command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=False
            )
            process = await nursery.start(start)
            assert "listening on http://127.0.0.1:" in await first_lines(process)
        nursery.cancel_scope.cancel()


def mounts(name: str) -> dict[str, Path]:
    """Where in the container which file or folder of deploy/ is."""
    found = (volume.split(":") for volume in service(name)["volumes"])
    return {target: DEPLOY / source for source, target, *_ in found if source.startswith(".")}


def test_prometheus_asks_every_node_and_has_the_alerts(composed_config: Config) -> None:
    found = mounts("prometheus")
    (config,) = loaded(found["/etc/prometheus/prometheus.yaml"])
    assert "--config.file=/etc/prometheus/prometheus.yaml" in service("prometheus")["command"]
    assert [found[name] for name in config["rule_files"]] == [DEPLOY / "prometheus" / "alerts.yaml"]
    ((discovery,),) = (job["dns_sd_configs"] for job in config["scrape_configs"])
    assert discovery["names"] == [composed_config.join[0].partition(":")[0]]
    assert discovery["port"] == host_port(composed_config.control)[1]
    assert composed_config.metrics_public


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "compose.yaml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/", f"{DEPLOY}/prometheus/"))
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_has_prometheus_and_each_dashboard_of_the_folder() -> None:
    found = mounts("grafana")
    provisioning = found["/etc/grafana/provisioning"]
    (sources,) = loaded(provisioning / "datasources" / "prometheus.yaml")
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in composed()["services"]
    (providers,) = loaded(provisioning / "dashboards" / "ranvier.yaml")
    assert found[providers["providers"][0]["options"]["path"]].resolve() == DEPLOY / "grafana"

"""What deploy/ holds stays true: its manifests are what their tools accept, and agree with the node and each other.

No container is started. The schemas come with `kubernetes-validate` and `check-jsonschema`; what a schema does not know
(ports, paths, names, times) is compared with the configuration as the real loader reads it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from packaging.requirements import Requirement

from ranvier_py import __version__
from ranvier_py.commands.exit_codes import EXIT_CONFIG
from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_loader import load
from ranvier_py.config.config_model import Config
from ranvier_py.config.config_reference import reference
from ranvier_py.control.control_port import OPEN_PATHS
from ranvier_py.core.addresses import host_port
from ranvier_py.core.errors import ConfigError
from ranvier_py.io.gossip.state_file import LAST_WRITE_S
from ranvier_py.node.cluster_parts import LEAVE_S_MAX
from tests.deploy.deployed import DEPLOY, END_MARGIN_S, Object, dockerfile, loaded, most_bytes
from tests.pages import Pages, serving

KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATION = KUBERNETES / "kustomization.yaml"
MANIFESTS = sorted({*KUBERNETES.glob("*.yaml")} - {KUSTOMIZATION, KUBERNETES / "values.yaml"})

OLDEST_KUBERNETES = "1.27"
"""As deploy/README.md says; the first one that knows unhealthyPodEvictionPolicy without being asked to."""

FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": "ranvier-0"}
"""What Kubernetes puts where a manifest refers to a pod's own fields."""

# --- one node -------------------------------------------------------------------------------------------------------


def test_the_annotated_configuration_is_the_one_that_the_program_prints_and_can_be_loaded() -> None:
    assert (DEPLOY / "ranvier.toml").read_text() == reference()
    config, *_ = load({}, DEPLOY / "ranvier.toml")
    assert config.policy == "affinity"


def test_the_margin_has_room_for_the_goodbye_and_for_what_is_written_last() -> None:
    assert LEAVE_S_MAX + LAST_WRITE_S < END_MARGIN_S


def test_the_unit_leaves_time_to_drain() -> None:
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "ranvier.service").read_text(), re.MULTILINE)
    assert int(stop_s) >= Config().drain_timeout_s + END_MARGIN_S


def unit_value(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", (DEPLOY / "ranvier.service").read_text(), re.MULTILINE)
    assert isinstance(value, str)
    return value


def test_the_unit_is_started_when_a_worker_serves_and_a_wrong_configuration_is_not_tried_again() -> None:
    """A worker is a child of the main process, and without NotifyAccess systemd would wait for ever."""
    assert (unit_value("Type"), unit_value("NotifyAccess")) == ("notify", "all")
    assert unit_value("RestartPreventExitStatus") == str(EXIT_CONFIG)
    assert unit_value("Restart") == "on-failure"


EXPOSURE_MAX = 4.9  # "OK" in the tool's words; a unit without any sandbox has 9.6


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_the_unit_exposes_little_by_the_measure_of_systemd() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(DEPLOY / "ranvier.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr  # it names what it can't read
    (exposure,) = re.findall(r"Overall exposure level for ranvier.service: ([0-9.]+)", done.stdout)
    assert float(exposure) <= EXPOSURE_MAX


def test_the_unit_and_the_image_keep_a_tokenizer_of_the_hub_where_their_user_may_write() -> None:
    unit = (DEPLOY / "ranvier.service").read_text()
    (state,) = re.findall(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
    assert re.findall(r"^Environment=HF_HOME=(.*)/huggingface$", unit, re.MULTILINE) == [f"/var/lib/{state}"]
    (home,) = (line.removeprefix("HF_HOME=") for line in dockerfile("ENV"))
    user, group = dockerfile("USER")[0].split(":")
    assert dockerfile("RUN")[-1] == f"install -d -o {user} -g {group} {Path(home).parent}"


def test_the_image_is_built_from_what_its_ignore_file_lets_through() -> None:
    """A file that is copied and ignored breaks the build; nothing else would tell before it."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [name for line in dockerfile("COPY") if not line.startswith("--from") for name in line.split()[:-1]]
    assert {"pyproject.toml", "ranvier_py"} <= set(copied)
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_the_image_has_the_versions_of_the_lock() -> None:
    (strip,) = re.findall(r"RUN (sed .* requirements\.lock) > /versions", (DEPLOY / "Dockerfile").read_text())
    done = subprocess.run(shlex.split(strip), cwd=DEPLOY.parent, check=True, capture_output=True, text=True)
    pins = [Requirement(line) for line in done.stdout.splitlines() if not line.lstrip().startswith("#")]
    assert all(str(pin.specifier).startswith("==") and not pin.extras for pin in pins)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(each for group in project["optional-dependencies"].values() for each in group),
    ]
    assert {Requirement(each).name for each in needed} <= {pin.name for pin in pins}
    assert "--constraint /versions" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_is_labelled_as_the_wheel_is() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r'image\.(\w+)="(.*)"', "\n".join(dockerfile("LABEL"))))
    assert labels == {
        "title": project["name"],
        "description": project["description"],
        "licenses": project["license"],
        "version": "${VERSION}",
        "revision": "${REVISION}",  # deploy/image.sh gives both
    }


class Healthy(Pages):
    def do_GET(self) -> None:
        self.reply(200 if self.path == "/healthz" else 404, b"")


def test_the_image_is_healthy_while_the_control_port_answers() -> None:
    (check,) = dockerfile("HEALTHCHECK")
    python, option, program = json.loads(check.partition(" CMD ")[2])
    assert (python, option) == ("/opt/ranvier/bin/python", "-c")
    (url,) = re.findall(r"http://[^']+", program)
    assert url == f"http://{Config().control}/healthz"
    assert "/healthz" in OPEN_PATHS
    with serving(Healthy) as server:
        for there, code in ((f"{server.url}/healthz", 0), (f"{server.url}/other", 1)):
            command = [sys.executable, "-c", program.replace(url, there)]
            assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == code


# --- Kubernetes: what the schemas know ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_every_manifest_is_what_kubernetes_accepts(version: str) -> None:
    found = [item for path in MANIFESTS for item in loaded(path)]
    kinds = ["NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", *["Service"] * 3, "ServiceAccount"]
    assert sorted(item["kind"] for item in found) == [*kinds, "StatefulSet"]
    for item in found:
        kubernetes_validate.validate(item, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    """Else the test above holds nothing."""
    item = stateful_set()
    item["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, OLDEST_KUBERNETES, strict=True)


def test_the_kustomization_brings_every_manifest_the_configuration_and_the_image_of_this_version() -> None:
    (item,) = loaded(KUSTOMIZATION)
    assert (item.pop("apiVersion"), item.pop("kind")) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert sorted(item.pop("resources")) == [path.name for path in MANIFESTS]
    (generator,) = item.pop("configMapGenerator")
    assert generator == {"name": volume("configuration")["configMap"]["name"], "files": ["ranvier.toml"]}
    (image,) = item.pop("images")
    assert set(image) == {"name", "newName", "newTag"}
    assert f"{image['name']}:{image['newTag']}" == container()["image"] == f"ranvier:{__version__}"
    assert item == {}


# --- Kubernetes: what has to agree ----------------------------------------------------------------------------------


def objects(kind: str) -> dict[str, Object]:
    """The manifests of a kind by name."""
    found = [item for path in MANIFESTS for item in loaded(path) if item["kind"] == kind]
    return {item["metadata"]["name"]: item for item in found}


def stateful_set() -> Object:
    return objects("StatefulSet")["ranvier"]


def pod() -> Object:
    spec: Object = stateful_set()["spec"]["template"]["spec"]
    return spec


def container() -> Object:
    (only,) = pod()["containers"]
    assert isinstance(only, dict)
    return only


def volume(name: str) -> Object:
    (only,) = (item for item in pod()["volumes"] if item["name"] == name)
    assert isinstance(only, dict)
    return only


def mounted(name: str) -> Path:
    (only,) = (item for item in container()["volumeMounts"] if item["name"] == name)
    return Path(only["mountPath"])


def headless() -> Object:
    (only,) = (item for item in objects("Service").values() if item["spec"].get("clusterIP") == "None")
    return only


def test_services_beside_the_headless_one_are_for_clients_and_for_operators() -> None:
    others = {name: item["spec"] for name, item in objects("Service").items() if item != headless()}
    assert {name: (each["type"], [port["targetPort"] for port in each["ports"]]) for name, each in others.items()} == {
        "ranvier": ("ClusterIP", ["http"]),
        "ranvier-control": ("ClusterIP", ["control"]),
    }


LoadInAPod = Callable[..., Config]


@pytest.fixture
def load_in_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadInAPod:
    """Loads a configuration as the node of a pod with these fields does."""

    def loaded(fields: Mapping[str, str] = FIELDS, written: Path = KUBERNETES / "ranvier.toml") -> Config:
        for variable in container()["env"]:
            value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            monkeypatch.setenv(variable["name"], value)
        key_file = tmp_path / "control-key"
        key_file.write_text("a-key-of-the-control-port\n")
        config, *_ = load({"control_key_file": str(key_file)}, written)
        return config

    return loaded


@pytest.fixture
def pods_config(load_in_a_pod: LoadInAPod) -> Config:
    return load_in_a_pod()


def port_numbers() -> dict[str, tuple[int, str]]:
    """The container's ports: name -> (number, protocol)."""
    return {port["name"]: (port["containerPort"], port.get("protocol", "TCP")) for port in container()["ports"]}


def test_a_pod_advertises_its_own_address_and_name(load_in_a_pod: LoadInAPod) -> None:
    config = load_in_a_pod({"status.podIP": "10.1.2.9", "metadata.name": "ranvier-2"})
    assert gossip_endpoints(config).advertise == ("10.1.2.9", gossip_endpoints(config).listen[1])
    assert config.node_name == "ranvier-2"
    assert not config.insecure_gossip


def test_ipv6_pods_need_what_the_configuration_states_of_them(load_in_a_pod: LoadInAPod, tmp_path: Path) -> None:
    """Else each of them would be a cluster of its own, on a port that nobody can write to."""
    fields = {"status.podIP": "fd00::7", "metadata.name": "ranvier-2"}
    with pytest.raises(ConfigError, match="gossip on \\[::\\]"):
        load_in_a_pod(fields)
    written = (KUBERNETES / "ranvier.toml").read_text()
    assert written.count('= "0.0.0.0:') == 3
    (tmp_path / "ranvier.toml").write_text(written.replace('= "0.0.0.0:', '= "[::]:'))
    config = load_in_a_pod(fields, tmp_path / "ranvier.toml")
    assert gossip_endpoints(config).advertise == ("fd00::7", gossip_endpoints(config).listen[1])


def test_a_pod_fits_its_memory(pods_config: Config) -> None:
    """A node that is killed for its memory fails all that it serves."""
    assert container()["resources"]["limits"] == {"memory": "2Gi"}
    assert most_bytes(pods_config) < 0.75 * 2 * 1024**3


def test_the_image_has_all_that_is_optional() -> None:
    """A node without it runs, says nothing, and knows less of its engines."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (install,) = re.findall(r"pip install .*'\.\[([a-z,]*)\]'", (DEPLOY / "Dockerfile").read_text())
    assert install.split(",") == list(project["optional-dependencies"])


def test_the_arguments_name_the_mounted_configuration() -> None:
    assert container()["args"] == ["--config", str(mounted("configuration") / "ranvier.toml")]


def test_the_container_has_the_ports_of_its_configuration(pods_config: Config) -> None:
    gossip = gossip_endpoints(pods_config).listen[1]
    assert port_numbers() == {
        "http": (host_port(pods_config.listen)[1], "TCP"),
        "control": (host_port(pods_config.control)[1], "TCP"),
        "gossip-tcp": (gossip, "TCP"),
        "gossip-udp": (gossip, "UDP"),
    }


@pytest.mark.parametrize(
    ("probe", "path"), [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
)
def test_probes_ask_the_control_port_what_it_reports_without_a_key(probe: str, path: str) -> None:
    """A probe that needs the key ends every pod. A liveness probe of /readyz ends it with the engines."""
    assert container()[probe]["httpGet"] == {"path": path, "port": "control"}
    assert path in OPEN_PATHS


def test_what_selects_pods_selects_ours() -> None:
    labels = stateful_set()["spec"]["template"]["metadata"]["labels"]
    (policy,) = objects("NetworkPolicy").values()
    ((gossip,),) = (rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 7946)
    selectors = [
        *(item["spec"]["selector"] for item in objects("Service").values()),
        *(item["spec"]["selector"]["matchLabels"] for item in objects("PodDisruptionBudget").values()),
        stateful_set()["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in pod()["topologySpreadConstraints"]),
        policy["spec"]["podSelector"]["matchLabels"],
        gossip["podSelector"]["matchLabels"],
    ]
    assert selectors == [labels] * 9


def test_services_lead_to_ports_of_the_container() -> None:
    """A headless Service moves no port: its number must be the container's own."""
    ports = port_numbers()
    for service in objects("Service").values():
        for port in service["spec"]["ports"]:
            assert (port["port"], port.get("protocol", "TCP")) == ports[port["targetPort"]]


def test_pods_find_each_other_by_the_headless_service(pods_config: Config) -> None:
    """Without publishNotReadyAddresses, pods that wait for each other never start."""
    service = headless()
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert stateful_set()["spec"]["serviceName"] == service["metadata"]["name"]
    (port,) = {item["port"] for item in service["spec"]["ports"] if item["name"].startswith("gossip")}
    assert pods_config.join == (f"{service['metadata']['name']}:{port}",)


def test_a_pod_has_time_to_leave_its_services_and_to_drain(pods_config: Config) -> None:
    command, wait_s = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain_s = pods_config.drain_timeout_s
    assert pod()["terminationGracePeriodSeconds"] >= int(wait_s) + drain_s + END_MARGIN_S


def test_keys_come_from_the_secret_that_the_readme_shows_how_to_make() -> None:
    secret = volume("keys")["secret"]
    (command,) = re.findall(r"kubectl create secret generic (.*)", (DEPLOY / "README.md").read_text())
    name, *files = shlex.split(command)
    assert secret["secretName"] == name
    assert [f"--from-file={item['key']}" for item in secret["items"]] == files
    values = tomllib.loads((KUBERNETES / "ranvier.toml").read_text())
    paths = {str(mounted("keys") / item["path"]) for item in secret["items"]}
    assert {values["cluster_key_file"], values["control_key_file"]} == paths


def test_the_group_of_the_pod_may_read_the_keys_and_nobody_else() -> None:
    assert volume("keys")["secret"]["defaultMode"] == 0o440
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsGroup"]


def test_no_key_is_kept_in_these_files() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            key = r"(?<!sha256:)\b[0-9a-fA-F]{32,}"
            form = key if path.name == "secret.yaml" else rf"{key}|^kind: Secret$"
            assert not re.search(form, path.read_text(), re.MULTILINE), path


def test_a_pod_writes_to_its_state_and_nowhere_else(pods_config: Config) -> None:
    writable = [item["name"] for item in container()["volumeMounts"] if not item.get("readOnly")]
    assert writable == ["state"]
    assert "emptyDir" in volume("state")
    assert pods_config.gossip_state_file.parent == mounted("state")
    assert Path(os.environ["HF_HOME"]).parent == mounted("state")
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_pod_has_no_more_rights_than_it_needs() -> None:
    user, group = dockerfile("USER")[0].split(":")
    context = pod()["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
    assert context["runAsNonRoot"] is True
    (account,) = objects("ServiceAccount").values()
    assert account["automountServiceAccountToken"] is False, "only a pod of ours has its token, to find engines"
    assert pod()["serviceAccountName"] == account["metadata"]["name"]
    assert container()["securityContext"]["allowPrivilegeEscalation"] is False
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_while_one_pod_is_away_two_others_serve() -> None:
    budget = objects("PodDisruptionBudget")["ranvier"]["spec"]
    assert stateful_set()["spec"]["replicas"] - budget["maxUnavailable"] >= 2


def test_prometheus_asks_every_pod_by_the_name_of_the_headless_service(pods_config: Config) -> None:
    (item,) = loaded(DEPLOY / "prometheus" / "scrape.yaml")
    (job,) = item["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert discovery["names"] == [headless()["metadata"]["name"]]
    assert (discovery["type"], discovery["port"]) == ("A", host_port(pods_config.control)[1])
    assert pods_config.metrics_public or "authorization" in job

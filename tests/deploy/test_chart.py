"""The Helm chart: every option has its effect, what it renders is what Kubernetes accepts, its configuration loads."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from jsonschema import Draft7Validator
from ruamel.yaml import YAML

from cluster.pages import chart_pages
from cluster.pages.helm import CHART, NotRendered, rendered, run
from ranvier_py import __version__
from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_loader import load
from ranvier_py.config.config_model import KEYS, SECRETS, Config
from ranvier_py.node.cluster_parts import LEAVE_S_MAX
from ranvier_py.proxy.client import ServerCounters
from tests.deploy.charts import (
    BY_NAME,
    VALUES,
    at,
    chart_of,
    defaults,
    leaves,
    needs_helm,
    needs_kubectl,
    of_kind,
)
from tests.deploy.deployed import Object, loaded

VERSIONS = ("1.27", kubernetes_validate.latest_version())
NAMES = [path.stem for path in VALUES]
SECRETS_MOUNTED = "/run/secrets/ranvier"


def container(objects: tuple[Object, ...]) -> Object:
    found = next(each for each in pod(objects)["containers"] if each["name"] == "ranvier")
    assert isinstance(found, dict)
    return found


def pod(objects: tuple[Object, ...]) -> Object:
    found = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def written(objects: tuple[Object, ...]) -> str:
    return str(of_kind(objects, "ConfigMap")["data"]["ranvier.toml"])


# --- without Helm: what lies in the repository ----------------------------------------------------------------------


def test_what_is_made_of_the_chart_is_current() -> None:
    """`make pages` makes it. Where Helm is, the test below compares the manifests themselves."""
    assert chart_pages.SCHEMA.read_text() == chart_pages.schema()
    assert chart_pages.README.read_text() == chart_pages.readme()
    made = [path for path in chart_pages.PLAIN.iterdir() if path.name not in ("kustomization.yaml", "values.yaml")]
    assert len(made) == 6
    for path in made:
        assert f"of {chart_pages.chart_digest()}." in path.read_text().partition("\n")[0], path


def test_the_chart_is_of_this_version() -> None:
    (chart,) = loaded(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def validator() -> Draft7Validator:
    schema = json.loads(chart_pages.SCHEMA.read_text())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def merged(values: Object, more: Object) -> Object:
    """As Helm does: tables by their entries, all else whole."""
    found = dict(values)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


@pytest.mark.parametrize("path", VALUES, ids=NAMES)
def test_good_values_pass_the_schema(path: Path) -> None:
    (values,) = loaded(path)
    assert list(validator().iter_errors(merged(defaults(), values))) == []


BAD = [
    "replica: 3",
    "replicas: 0",
    "replicas: three",
    "fullnameOverride: Router",
    "image: {digest: 'sha256:abc'}",
    "image: {pullPolicy: always}",
    "engines: {kubernetes: [{service: vllm, pods: {app: vllm}}]}",
    "engines: {kubernetes: [{port: 8000}]}",
    "engines: {kubernetes: [{service: vllm, port: 70000}]}",
    "engines: {kubernetes: [{pods: {}}]}",
    "engines: {kubernetes: [{pods: {app: 'a,weight=9'}}]}",
    "engines: {urls: ['engine:8000']}",
    "engines: {urls: ['http://user:password@engine:8000']}",
    "config: {drain_timeout: 5}",
    "config: {drain_timeout_s: '120'}",
    "config: {listen: '0.0.0.0:80'}",
    "config: {workers: 4}",
    "config: {control_client_ca_file: /tls/ca.crt}",
    "config: {insecure_gossip: true}",
    "config: {model: [{name: a, to: b, api_key: secret}]}",
    "listenAddress: 10.0.0.1",
    "keys: {made: {cluster: 5}}",
    "keys: {entries: {clusterKey: a}}",
    "service: {port: 0}",
    "service: {type: ExternalName}",
    "state: {size: five}",
    "preStopSeconds: -1",
    "probes: {readiness: {httpGet: {path: /}}}",
    "probes: {readiness: {periodSeconds: 0}}",
    "podDisruptionBudget: {maxUnavailable: most}",
    "topologySpread: [{maxSkew: 1}]",
    "networkPolicy: {clients: everybody}",
    "podMonitor: {interval: 15}",
    "autoscaling: {minReplicas: 0}",
    "extraArgs: --workers",
    "extraEnv: [{value: a}]",
    "podLabels: {a: 1}",
    *(f"config: {{{name}: aaaa}}" for name in SECRETS),
]


@pytest.mark.parametrize("text", BAD)
def test_bad_values_are_refused_by_the_schema(text: str) -> None:
    (values,) = loaded(text)
    assert list(validator().iter_errors(merged(defaults(), values)))


def test_every_key_of_the_configuration_is_the_charts_own_a_secret_or_may_be_written() -> None:
    """No name in the list of the chart's own is one of a key that is gone."""
    assert set(KEYS) >= chart_pages.CHARTS_OWN
    kept = chart_pages.configuration_schema()["properties"]
    assert {*kept, *chart_pages.CHARTS_OWN, *SECRETS} == {*KEYS}
    assert Draft7Validator(chart_pages.configuration_schema()).is_valid(
        {name: value for name, value in Config().masked().items() if name in kept and value is not None}
    )


def test_every_option_is_set_by_some_file_of_values() -> None:
    """So that each is rendered at least once."""
    given = [loaded(path)[0] for path in VALUES]
    unset = [
        ".".join(path)
        for path, default in leaves(defaults())
        if all(at(values, path) in (None, default) for values in given)
    ]
    assert unset == []


# --- with Helm ------------------------------------------------------------------------------------------------------


@needs_helm
def test_the_plain_manifests_are_the_chart() -> None:
    for path, text in chart_pages.plain_manifests().items():
        assert path.read_text() == text, path


@needs_helm
@pytest.mark.parametrize("path", VALUES, ids=NAMES)
def test_helm_finds_no_fault(path: Path) -> None:
    printed = run("helm", "lint", "--strict", str(CHART), "--values", str(path))
    assert "0 chart(s) failed" in printed
    assert "[WARNING]" not in printed


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_what_is_rendered_is_what_kubernetes_accepts(name: str) -> None:
    kinds = []
    for item in chart_of(name):
        kinds.append((item["kind"], item["metadata"]["name"], item["metadata"].get("namespace")))
        if item["kind"] != "PodMonitor":  # of the Prometheus operator
            for version in VERSIONS:
                kubernetes_validate.validate(item, version, strict=True)
    assert len(kinds) == len(set(kinds))


@needs_kubectl
def test_the_kustomization_is_what_kubectl_puts_together() -> None:
    objects = loaded(run("kubectl", "kustomize", str(chart_pages.PLAIN)))
    for item in objects:
        kubernetes_validate.validate(item, VERSIONS[0], strict=True)
    found = tuple(objects)
    assert container(found)["image"] == f"registry.example/ranvier:{__version__}"
    (configuration,) = (each["configMap"]["name"] for each in pod(found)["volumes"] if each["name"] == "configuration")
    assert re.fullmatch(r"ranvier-\w+", configuration), "its hash rolls the pods"
    assert of_kind(found, "ConfigMap")["metadata"]["name"] == configuration


def without(values: Object, path: tuple[str, ...]) -> Object:
    """The values with the default at a path."""
    found = deepcopy(values)
    at(found, path[:-1])[path[-1]] = at(defaults(), path)
    return found


def setters() -> list[tuple[str, tuple[str, ...]]]:
    """(file of values, path) of each value that is not the default's."""
    kept = {name: loaded(path)[0] for name, path in BY_NAME.items()}
    return [
        (name, path)
        for name, values in kept.items()
        for path, default in leaves(defaults())
        if at(values, path) not in (None, default)
    ]


@needs_helm
@pytest.mark.slow
def test_every_option_changes_what_is_rendered(tmp_path: Path) -> None:
    """One that changes nothing is a promise that nobody keeps."""
    effective: dict[tuple[str, ...], bool] = {}
    for name, path in setters():
        file = tmp_path / "values.yaml"
        with file.open("w") as out:
            YAML().dump(without(loaded(BY_NAME[name])[0], path), out)
        try:
            changed = loaded(rendered("--values", str(file), release="fleet")) != list(chart_of(name))
        except NotRendered:
            changed = True  # it is needed
        effective[path] = effective.get(path, False) or changed
    assert sorted(".".join(path) for path, changed in effective.items() if not changed) == []


def files_of(objects: tuple[Object, ...], folder: Path) -> Path:
    """The files of the Secret, as the pod has them: those that the chart makes, else some of the same names."""
    (secret,) = (each["secret"] for each in pod(objects)["volumes"] if each["name"] == "keys")
    made = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"}
    for item in secret["items"]:
        if made:
            text = b64decode(made[secret["secretName"]][item["key"]]).decode()
        else:
            text = "" if item["key"].endswith(".toml") else f"{'0123456789abcdef' * 4}\n"
        (folder / item["path"]).write_text(text)
    return folder


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_loads_in_the_pod(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = chart_of(name)
    address = "fd00::7" if "[::]" in written(objects) else "10.1.2.3"
    fields = {"status.podIP": address, "metadata.name": "fleet-ranvier-0"}
    for variable in container(objects)["env"]:
        monkeypatch.setenv(
            variable["name"], variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        )
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = files_of(objects, tmp_path)
    text = written(objects).replace(SECRETS_MOUNTED, str(folder)).replace("/tls/", f"{tmp_path}/")
    (tmp_path / "ranvier.toml").write_text(text)
    config = load(file=tmp_path / "ranvier.toml").config
    assert gossip_endpoints(config).advertise == (address, 7946)
    assert config.join == (f"{of_kind(objects, 'StatefulSet')['spec']['serviceName']}:7946",)
    assert not config.insecure_gossip
    grace_s = pod(objects)["terminationGracePeriodSeconds"]
    wait_s = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert wait_s + config.drain_timeout_s + LEAVE_S_MAX < grace_s <= wait_s + config.drain_timeout_s + 20
    ((values,),) = [loaded(BY_NAME[name])]
    expected = merged(defaults(), values)["engines"]
    assert len(config.discovery.backend_kubernetes) == len(expected["kubernetes"])
    assert len(config.backend) == len(expected["urls"])
    assert len(config.discovery.backend_dns) == len(expected["dns"])


@needs_helm
def test_sources_are_written_as_a_node_takes_them() -> None:
    assert re.findall(r'^  "(.*)",$', written(chart_of("everything")), re.MULTILINE) == [
        "service=vllm,port=http,any_model=true,weight=2",
        "pool=llama,namespace=models",
        "pods=app=sglang&tier=gpu,port=30000,namespace=models,scheme=https,family=4",
    ]


@needs_helm
def test_keys_are_in_a_secret_and_nowhere_else() -> None:
    (values,) = loaded(BY_NAME["one_node"])
    objects = chart_of("one_node")
    data = {name: b64decode(text).decode() for name, text in of_kind(objects, "Secret")["data"].items()}
    assert sorted(data.values()) == sorted(values["keys"]["made"].values())
    elsewhere = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert [text for text in data.values() if json.dumps(text)[1:-1] in elsewhere] == []
    assert sorted(re.findall(rf'= "{SECRETS_MOUNTED}/(.*)"', written(objects))) == sorted(data)
    assert [each for each in chart_of("everything") if each["kind"] == "Secret"] == []
    entries = loaded(BY_NAME["everything"])[0]["keys"]["entries"]
    assert sorted(re.findall(rf'= "{SECRETS_MOUNTED}/(.*)"', written(chart_of("everything")))) == sorted(
        entries.values()
    )


@needs_helm
@pytest.mark.parametrize("missing", ["cluster", "control"])
def test_a_key_that_is_missing_is_named_with_the_remedy(missing: str) -> None:
    with pytest.raises(NotRendered, match=rf"the {missing} key is missing: .*--set-file keys.made.{missing}=FILE"):
        rendered("--values", str(BY_NAME["one_node"]), "--set", f"keys.made.{missing}=")


@needs_helm
def test_helm_itself_refuses_what_the_schema_does() -> None:
    with pytest.raises(NotRendered, match="replica"):
        rendered("--values", str(BY_NAME["by_labels"]), "--set", "replica=3")


@needs_helm
def test_changed_configuration_rolls_the_pods_and_nothing_else_does() -> None:
    def annotations(*words: str) -> Any:
        template = of_kind(chart_of("by_labels", *words), "StatefulSet")["spec"]["template"]
        return template["metadata"]["annotations"]

    assert annotations("--set", "config.policy=ttft") != annotations()
    assert annotations("--set", "replicas=7") == annotations()


@needs_helm
def test_each_namespace_with_engines_has_a_role_and_none_reaches_further() -> None:
    objects = chart_of("everything")
    roles = [each for each in objects if each["kind"] == "Role"]
    bindings = [each for each in objects if each["kind"] == "RoleBinding"]
    assert [each["metadata"].get("namespace") for each in roles] == [None, "models"]
    assert [each["metadata"].get("namespace") for each in bindings] == [None, "models"]
    assert [each["subjects"][0].get("namespace") for each in bindings] == [None, "default"]
    assert {verb for role in roles for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    for name in NAMES:
        assert not [each for each in chart_of(name) if each["kind"].startswith("Cluster")]
    assert not [each for each in chart_of("by_labels") if each["kind"] == "Role"]
    assert pod(chart_of("one_node"))["automountServiceAccountToken"] is False, "it finds no engines there"


@needs_helm
def test_gossip_is_open_to_pods_of_the_release_alone() -> None:
    policy = of_kind(chart_of("everything"), "NetworkPolicy")["spec"]
    own = [
        {
            "podSelector": {
                "matchLabels": of_kind(chart_of("everything"), "StatefulSet")["spec"]["selector"]["matchLabels"]
            }
        }
    ]
    by_port = {rule["ports"][0]["port"]: rule for rule in policy["ingress"]}
    assert set(by_port) == {"http", "control", 7946}
    assert by_port[7946]["from"] == own
    assert all("from" in rule for rule in by_port.values())
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    plain = of_kind(chart_of("by_labels"), "NetworkPolicy")["spec"]
    assert plain["policyTypes"] == ["Ingress"]
    assert {rule["ports"][0]["port"]: "from" in rule for rule in plain["ingress"]} == {
        "http": False,
        "control": True,
        7946: True,
    }


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_a_pod_may_nothing_that_it_does_not_need(name: str) -> None:
    objects = chart_of(name)
    assert pod(objects)["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65534,
        "runAsGroup": 65534,
        "fsGroup": 65534,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@needs_helm
def test_two_releases_in_one_namespace_leave_each_other_alone() -> None:
    one, two = chart_of("by_labels"), chart_of("by_labels", release="other")
    assert not {(each["kind"], each["metadata"]["name"]) for each in one} & {
        (each["kind"], each["metadata"]["name"]) for each in two
    }
    selectors = [of_kind(each, "StatefulSet")["spec"]["selector"]["matchLabels"] for each in (one, two)]
    assert selectors[0] != selectors[1]


@needs_helm
def test_state_is_a_volume_of_each_pod_or_ends_with_it() -> None:
    stateful = of_kind(chart_of("everything"), "StatefulSet")["spec"]
    (claim,) = stateful["volumeClaimTemplates"]
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("state", "fast")
    assert "state" not in [each["name"] for each in pod(chart_of("everything"))["volumes"]]
    (volume,) = (each for each in pod(chart_of("by_labels"))["volumes"] if each["name"] == "state")
    assert "emptyDir" in volume


@needs_helm
def test_it_scales_by_a_metric_that_a_node_has_and_the_readme_has_the_adapters_rule() -> None:
    scaler = of_kind(chart_of("everything"), "HorizontalPodAutoscaler")["spec"]
    name = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert "replicas" not in of_kind(chart_of("everything"), "StatefulSet")["spec"]
    readme = chart_pages.README.read_text()
    ((rule,),) = [loaded(block)[0]["rules"] for block in re.findall(r"(?s)```yaml\n(.*?)```", readme)]
    assert rule["name"]["matches"] == name
    assert rule["seriesQuery"].startswith(name)
    assert name == f"ranvier_server_{next(each.name for each in fields(ServerCounters) if each.name == 'in_flight')}"


@needs_helm
@pytest.mark.parametrize(
    ("name", "step"), [("one_node", "exec router-0"), ("by_labels", "label pods POD ranvier.io/engine=true")]
)
def test_what_helm_prints_last_names_the_next_step(name: str, step: str) -> None:
    printed = run("helm", "install", "fleet", str(CHART), "--values", str(BY_NAME[name]), "--dry-run=client")
    assert step in printed.partition("\nNOTES:\n")[2]

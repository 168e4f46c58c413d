"""Made of the Helm chart: its table of values, the configuration's part of its schema, and the plain manifests.

The manifests are the chart with deploy/kubernetes/values.yaml, without what only Helm reads. Their first line names a
digest of what they are made of, so that a machine without Helm sees as well that they are current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.pages.helm import CHART, rendered
from cluster.processes.children import ROOT
from ranvier_py.config.config_model import SECRETS, Config

PLAIN = ROOT / "deploy" / "kubernetes"
PLAIN_VALUES = PLAIN / "values.yaml"
README, SCHEMA, VALUES = CHART / "README.md", CHART / "values.schema.json", CHART / "values.yaml"

CHARTS_OWN = frozenset(
    """
    listen control control_key_file control_keys_file keys_file backend_api_key_file workers backend backend_dns
    backend_kubernetes gossip advertise join cluster_key_file insecure_gossip node_name gossip_state_file state_folder
    limit_state_file gossip_admin_key_file control_client_ca_file kubernetes_credentials
    """.split()  # noqa: SIM905  # a list of words reads better than a list of strings
)
"""Keys of the configuration that the chart writes itself, or that can't be kept with it: one worker a pod, and a
control port that asks for certificates, which kubelet has none of."""

TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", list: "array", str: "string"}
TABLE = re.compile(r"(?s)(?<=<!-- values -->\n).*?(?=<!-- end of values -->)")
SPLIT = re.compile(r"(?m)^---\n# Source: ranvier/templates/(.*)\n")
HELMS_OWN = re.compile(
    r" *(?:app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n| *annotations:\n *checksum/config: .*\n"
)


def configuration_schema() -> dict[str, Any]:
    """Return what `config` may have: every key that is no secret and not the chart's own, with its type."""
    kept = {name: value for name, value in Config().masked().items() if name not in CHARTS_OWN | {*SECRETS}}
    properties: dict[str, Any] = {
        name: {"type": TYPES[type("" if value is None else value)]} for name, value in sorted(kept.items())
    }
    properties["model"]["items"] = {"not": {"required": ["api_key"]}}  # a secret: api_key_file
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema() -> str:
    """Return the schema of the values with its part on the configuration renewed, a small object on one line."""
    found = json.loads(SCHEMA.read_text())
    found["definitions"]["config"] = configuration_schema()
    return in_lines(found) + "\n"


def in_lines(value: Any, indent: str = "", width: int = 120) -> str:
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) <= width - len(indent) - 20:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        members = [f"{inner}{json.dumps(name)}: {in_lines(each, inner, width)}" for name, each in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + in_lines(each, inner, width) for each in value) + f"\n{indent}]"


def commented(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, comment) of each key of a YAML file: the comment is the lines right above the key."""
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if comment := re.fullmatch(r" *# (.*)", line):
            above.append(comment[1])
        elif key := re.match(r"( *)([\w.-]+):(?: |$)", line):
            path = [(indent, name) for indent, name in path if indent < len(key[1])]
            path.append((len(key[1]), key[2]))
            yield tuple(name for _, name in path), " ".join(above)
            above = []
        else:
            above = []


def values_table() -> str:
    """Return every value with its default and its comment. What stands inside a list has no row."""
    values = YAML(typ="safe", pure=True).load(VALUES.read_text())
    rows = ["| value | default | what it is |", "|---|---|---|"]
    for path, comment in commented(VALUES.read_text()):
        value: Any = values
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or (isinstance(value, dict) and value and not comment):
            continue
        shown = "" if isinstance(value, dict) and value else f"`{json.dumps(value)}`"
        rows.append(f"| `{'.'.join(path)}` | {shown} | {comment.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def readme() -> str:
    return TABLE.sub(lambda _: values_table(), README.read_text())


def chart_digest() -> str:
    """Of all that the plain manifests are made of."""
    made_of = [PLAIN_VALUES, VALUES, CHART / "Chart.yaml", *sorted((CHART / "templates").iterdir())]
    return sha256(b"\0".join(path.read_bytes() for path in made_of)).hexdigest()[:16]


def plain_manifests() -> dict[Path, str]:
    """Return the plain manifests by their files. Raises NotRendered."""
    text = rendered("--values", str(PLAIN_VALUES))
    found: dict[str, str] = {}
    for name, manifest in zip(*[iter(SPLIT.split(text)[1:])] * 2, strict=True):
        found[name] = "---\n".join(filter(None, [found.get(name), HELMS_OWN.sub("", manifest).strip() + "\n"]))
    head = f"# Made of deploy/helm/ranvier by `make pages`; of {chart_digest()}.\n"
    configuration = YAML(typ="safe", pure=True).load(found.pop("configmap.yaml"))["data"]["ranvier.toml"]
    return {
        PLAIN / "ranvier.toml": head + configuration,
        **{PLAIN / name: head + manifest for name, manifest in sorted(found.items())},
    }

"""Places where a node looks for backends, as an operator writes them: in DNS, in a cluster of Kubernetes.

Each is a text of a place and options, which all its backends have in common: "engines.llm:8000,weight=2".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranvier_py.config.config_values import OWN_FILES_ONLY, BackendSpec
from ranvier_py.core.addresses import PORT_MAX, checked_host, is_address, spelled

SCHEMES = ("http", "https")
OPTIONS = frozenset(BackendSpec.model_fields) - {"url", "name", "kv_index", "api_key_file"}
OBJECT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
PORT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,13}[a-z0-9])?")
LABEL = r"[A-Za-z0-9][-A-Za-z0-9._/]{0,316}=[-A-Za-z0-9._]{0,63}"

CHOSEN_BY = {
    "service": (OBJECT_NAME, "service must be the name of one"),
    "pool": (OBJECT_NAME, "pool must be the name of an InferencePool"),
    "pods": (re.compile(f"{LABEL}(?:&{LABEL})*"), "pods must be labels, as app=vllm&tier=gpu"),
}
"""Kinds of objects of Kubernetes that choose engines."""

ANY_URL = "https://192.0.2.1:1"  # https, with which all options go


@dataclass(frozen=True, slots=True)
class Common:
    """What all backends of one place have in common: how they are spoken to, and options of backends."""

    scheme: str = "http"
    options: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, host: str, port: int, **own: Any) -> BackendSpec:
        """Return one of them. Raises ValueError for options of its own that are wrong."""
        return BackendSpec.model_validate({**self.options, **own, "url": f"{self.scheme}://{spelled((host, port))}"})


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """A name of DNS. `port` 0: its SRV records name ports. `family` 0: the one that the name has, A first."""

    text: str
    name: str
    port: int = 0
    family: int = 0
    common: Common = field(default_factory=Common)

    @classmethod
    def parse(cls, text: str) -> DnsTarget:
        """Read `NAME:PORT`, or the name of SRV records, and options. Raises ValueError."""
        place, *items = text.split(",")
        fields = fields_of(items)
        family = {"": 0, "4": 4, "6": 6}.get(fields.pop("family", ""))
        if family is None:
            raise ValueError("family must be 4 or 6")
        name, colon, port = place.partition(":")
        name = checked_host(name)
        if is_address(name):
            raise ValueError("must begin with a name, not an address")
        if not colon and not name.startswith("_"):
            raise ValueError("must be NAME:PORT, or the name of SRV records, which begins with _")
        if colon and not (port.isdecimal() and 0 < int(port) <= PORT_MAX):
            raise ValueError(f"the port must be 1 to {PORT_MAX}")
        common = common_of(fields, tls_name="" if name.startswith("_") else name.removesuffix("."))
        return cls(place, name, int(port or 0), family, common)


def fields_of(items: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE items. Raises ValueError."""
    fields: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name or name in fields:
            raise ValueError("after the place there must be options such as weight=2, each once")
        fields[name] = value
    return fields


def common_of(fields: dict[str, str], *, tls_name: str = "") -> Common:
    """Return what is common, with `tls_name` for https where none is written. Raises ValueError."""
    scheme = fields.pop("scheme", "http")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be {' or '.join(SCHEMES)}")
    if "api_key_file" in fields:
        raise ValueError(f"api_key_file: {OWN_FILES_ONLY}")
    if unknown := sorted(set(fields) - OPTIONS):
        raise ValueError(f"{unknown[0]} is no option: scheme, and {', '.join(sorted(OPTIONS))} are")
    if scheme == "https" and tls_name:
        fields = {"tls_name": tls_name, **fields}
    spec = BackendSpec.model_validate({**fields, "url": ANY_URL.replace("https", scheme)})
    return Common(scheme, {name: getattr(spec, name) for name in fields})


def dns_text(text: str) -> str:
    DnsTarget.parse(text)
    return text


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    """What chooses engines in Kubernetes: a Service, an InferencePool, or labels of pods. `namespace` "": the node's
    own. `port`: by name or number; "" if there is only one."""

    text: str
    kind: str
    name: str  # of labels: as the API writes a selector
    namespace: str = ""
    port: str = ""
    family: int = 0
    common: Common = field(default_factory=Common)

    @classmethod
    def parse(cls, text: str) -> KubernetesTarget:
        """Read `service=NAME`, `pods=LABEL=VALUE&LABEL=VALUE` or `pool=NAME`, and what follows. Raises ValueError."""
        place, *items = text.split(",")
        kind, equals, name = place.partition("=")
        fields = fields_of(items)
        if kind not in CHOSEN_BY or not equals or not name:
            raise ValueError(f"must begin with {', '.join(f'{each}=' for each in CHOSEN_BY)} and a name")
        pattern, words = CHOSEN_BY[kind]
        if not pattern.fullmatch(name):
            raise ValueError(words)
        family = {"": 0, "4": 4, "6": 6}.get(fields.pop("family", ""))
        if family is None:
            raise ValueError("family must be 4 or 6")
        namespace, port = fields.pop("namespace", ""), fields.pop("port", "")
        if namespace and not OBJECT_NAME.fullmatch(namespace):
            raise ValueError("namespace must be the name of one")
        if port and not (0 < int(port) <= PORT_MAX if port.isdecimal() else PORT_NAME.fullmatch(port)):
            raise ValueError("port must be the name or the number of one")
        shown = f"{kind}/{namespace}/{name}" if namespace else f"{kind}/{name}"
        return cls(shown, kind, name.replace("&", ","), namespace, port, family, common_of(fields))


def kubernetes_text(text: str) -> str:
    KubernetesTarget.parse(text)
    return text

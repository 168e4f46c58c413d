"""Where a node finds backends beside its configuration, and where it keeps what operators order of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ranvier_py.config.config_values import OptionalPath, Place, empty_is_none, key, split_text
from ranvier_py.config.source_targets import dns_text, kubernetes_text
from ranvier_py.core.addresses import checked_url
from ranvier_py.core.options import Options


def api_url(text: str | None) -> str | None:
    if text is not None:
        checked_url(text, ("http", "https"))
    return text


DnsTexts = Annotated[tuple[Annotated[str, AfterValidator(dns_text)], ...], BeforeValidator(split_text)]
KubernetesTexts = Annotated[tuple[Annotated[str, AfterValidator(kubernetes_text)], ...], BeforeValidator(split_text)]
OptionalUrl = Annotated[str | None, AfterValidator(api_url), BeforeValidator(empty_is_none)]


@dataclass(frozen=True, slots=True)
class DiscoveryOptions(Options):
    """Sources of backends."""

    backends_file: OptionalPath = key(
        None,
        "Backends",
        "File of backends that a node follows: TOML or YAML with backend as here, or a manifest of SMG in JSON. It is "
        "looked at each second, and taken whole once it has settled, or not at all: then its last good content holds.",
    )
    backend_dns: DnsTexts = key(
        (),
        "Backends",
        "Names of DNS whose every address is a backend: NAME:PORT, or the name of SRV records, as _http._tcp.NAME. "
        "Options of backends may follow, and scheme=https and family=6: engines.llm:8000,weight=2. Looked up again "
        "when the answer expires, within 1 to 60 s. The flag repeats; the variable separates by blanks. Needs "
        "ranvier-py[dns].",
    )
    backend_dns_server: Place = key(
        None, "Backends", "HOST:PORT of the server of names for backend_dns; not set: those of /etc/resolv.conf."
    )
    backend_kubernetes: KubernetesTexts = key(
        (),
        "Backends",
        "What chooses engines in Kubernetes: service=NAME, by its EndpointSlices; pods=LABEL=VALUE&LABEL=VALUE; or "
        "pool=NAME, an InferencePool. May follow: namespace, port (its name or number), family, scheme, and options of "
        "backends: service=vllm,port=http,weight=2. Annotations of pods go before these. The flag repeats; the "
        "variable separates by blanks.",
    )
    kubernetes_api: OptionalUrl = key(
        None, "Backends", "URL of the API server of Kubernetes; not set: the one of the cluster that the node runs in."
    )
    kubernetes_credentials: Path = key(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        "Backends",
        "Folder with token, ca.crt and namespace for the API server, each read again as it rotates.",
    )


@dataclass(frozen=True, slots=True)
class StateOptions(Options):
    """The folder of a node's state."""

    state_folder: OptionalPath = key(
        None,
        "Backends",
        "Folder that keeps what operators order of backends while nodes run, for the next start; it is made if it is "
        "missing. What the configuration has of a backend wins where that was edited since. Without, orders end with "
        "the process.",
    )

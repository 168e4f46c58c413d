"""Where a node finds backends beside its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ranvier_py.config.config_values import OptionalPath, Place, key, split_text
from ranvier_py.config.source_targets import dns_text
from ranvier_py.core.options import Options

DnsTexts = Annotated[tuple[Annotated[str, AfterValidator(dns_text)], ...], BeforeValidator(split_text)]


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

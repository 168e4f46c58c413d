"""Where traces go, and how many: our own options, then the standard variables of OpenTelemetry for what is not set.

Rule: `otel_endpoint`, or one of the variables, turns traces on; OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER=none turn
them off. Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from ranvier_py.config.config_values import OptionalPath, key
from ranvier_py.config.discovery_settings import OptionalUrl
from ranvier_py.core.addresses import checked_url
from ranvier_py.core.errors import BadRequest, ConfigError
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.core.tracing.span_names import RELEASED, VERSIONS

SECTION = "Traces"
TRACES_PATH = "/v1/traces"
HEADERS_BYTES_MAX = 16 * 1024
QUEUE_MAX = 1 << 20  # spans: a gigabyte of them
SERVICE = "ranvier"

PREFIX, OWN = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"


@dataclass(frozen=True, slots=True)
class OtelOptions(Options):
    """Traces of requests, for a collector of OpenTelemetry."""

    SECTION = SECTION

    otel_endpoint: OptionalUrl = key(
        None,
        SECTION,
        "URL of a collector that takes OTLP over HTTP, without /v1/traces: http://collector:4318. Turns traces on, as "
        "OTEL_EXPORTER_OTLP_ENDPOINT does.",
    )
    otel_headers_file: OptionalPath = key(
        None, SECTION, "File of headers for the collector, NAME=VALUE on each line, as OTEL_EXPORTER_OTLP_HEADERS."
    )
    otel_ca_file: OptionalPath = key(
        None, SECTION, "PEM certificates of the authorities that the collector is proved by; not set: the system's."
    )
    otel_certificate_file: OptionalPath = key(None, SECTION, "PEM certificate chain by which the node proves itself.")
    otel_key_file: OptionalPath = key(None, SECTION, "PEM private key that belongs to that certificate.")
    otel_sample_ratio: float = option(
        0.01,
        "Share of the requests without a parent of which a trace is kept. A parent's decision is obeyed, and what "
        "failed is kept always.",
        most=1.0,
    )
    otel_semconv: str = option(
        RELEASED, "Version of the conventions that names attributes, see docs/traces.md.", one_of=VERSIONS
    )
    otel_queue_max: int = option(
        4096, "Spans that wait for the collector; more are dropped and counted.", least=64, most=QUEUE_MAX
    )
    otel_timeout_s: float = seconds(10.0, "Longest wait for the collector's answer.")


class TraceTarget(NamedTuple):
    """Where traces go, all variables read."""

    url: str
    headers: Mapping[str, str]
    resource: Mapping[str, str]
    ca_file: Path | None
    certificate: tuple[Path, Path] | None
    timeout_s: float
    is_compressed: bool


def target_of(options: OtelOptions, variables: Mapping[str, str]) -> TraceTarget | None:
    """Return where traces go; None: nowhere. Reads the file of headers. Raises ConfigError."""
    is_off = variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or variables.get("OTEL_TRACES_EXPORTER") == "none"
    base = options.otel_endpoint or variables.get(f"{PREFIX}ENDPOINT", "")
    whole = "" if options.otel_endpoint else variables.get(f"{OWN}ENDPOINT", "")
    if not options.otel_endpoint and (is_off or not (base or whole)):
        return None

    def variable(name: str) -> str:
        return variables.get(OWN + name) or variables.get(PREFIX + name, "")

    url = whole or base.rstrip("/") + TRACES_PATH
    try:
        checked_url(url, ("http", "https"))
    except (BadRequest, ValueError) as error:
        raise ConfigError([f"otel_endpoint: {error}"]) from error
    certificate = options.otel_certificate_file or path_of(variable("CLIENT_CERTIFICATE"))
    private_key = options.otel_key_file or path_of(variable("CLIENT_KEY"))
    timeout = variable("TIMEOUT")
    return TraceTarget(
        url=url,
        headers=headers_of(options.otel_headers_file, variable("HEADERS")),
        resource=resource_of(variables),
        ca_file=options.otel_ca_file or path_of(variable("CERTIFICATE")),
        certificate=(certificate, private_key) if certificate is not None and private_key is not None else None,
        timeout_s=float(timeout) / 1000 if timeout.isdigit() and int(timeout) else options.otel_timeout_s,
        is_compressed=variable("COMPRESSION") != "none",
    )


def path_of(text: str) -> Path | None:
    return Path(text) if text else None


def headers_of(file: Path | None, variable: str) -> Mapping[str, str]:
    """Return headers of a file, or of the variable, whose values are percent-encoded. Raises ConfigError; its message
    shows none of them."""
    if file is None:
        pairs, where = [each.partition("=") for each in variable.split(",") if each.strip()], f"{PREFIX}HEADERS"
        found = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    else:
        where = f"otel_headers_file: {file}"
        try:
            lines = file.read_bytes()[:HEADERS_BYTES_MAX].decode("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{where} can't be read: {type(error).__name__}"]) from error
        pairs = [line.partition("=") for line in lines if line.strip() and not line.startswith("#")]
        found = {name.strip(): value.strip() for name, _, value in pairs}
    if not all(
        name.replace("-", "").replace("_", "").isalnum() and value.isprintable() for name, value in found.items()
    ):
        raise ConfigError([f"{where} must have NAME=VALUE"])
    return found


def resource_of(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return what the operator says that the service is."""
    listed = [each.partition("=") for each in variables.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in each]
    found = {name.strip(): unquote(value.strip()) for name, _, value in listed}
    return {"service.name": SERVICE, **found} | (
        {"service.name": name} if (name := variables.get("OTEL_SERVICE_NAME")) else {}
    )

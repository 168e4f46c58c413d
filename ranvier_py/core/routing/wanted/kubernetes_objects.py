"""Reads EndpointSlices, Pods and InferencePools: which engines there are, how they are reached, and what they are.

Rules: an endpoint is ready unless it is called not ready; one that terminates is drained. Of a pod with addresses of
two families one counts. Annotations go before labels, ours before others'. What is wrong in an object leaves out that
object alone, with a sentence that names it; so are engines for the prefill or encode half of requests.
Sources: kubernetes.io (EndpointSlice, Pod), gateway-api-inference-extension (InferencePool), and routers' own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ranvier_py.core.addresses import PORT_MAX, is_address

OURS = "ranvier.io/"
PORTS = ("ranvier.io/ports", "ranvier.io/port", "smg.ai/worker-ports")
ROLE = "llm-d.ai/role"
HALVES = frozenset(("prefill", "encode", "encode-prefill"))
ABOUT = {
    "model": "model",
    ROLE: "role",
    "smg.ai/kv-connector": "kv_connector",
    "smg.ai/kv-engine-id": "kv_engine_id",
    "sglang.ai/bootstrap-port": "bootstrap_port",
    "vllm.ai/bootstrap-port": "bootstrap_port",
    "ranvier.io/priority": "priority",
}
"""What is shown of a pod, by annotation or label."""

NOT_OPTIONS = frozenset(("ranvier.io/scheme", *PORTS, *ABOUT))
HTTP_NAMES = ("http", "https", "api", "openai", "http-api", "web")
"""Names of the port to take where a Service has several and none is named."""


class EngineEndpoint(NamedTuple):
    """One engine. `pod` and `process`: name and UID of its pod, "" if there is none."""

    host: str
    port: int
    pod: str = ""
    process: str = ""
    draining: bool = False


class PodFacts(NamedTuple):
    """What annotations and labels say: options of backends as text, with «scheme», and what is shown."""

    options: Mapping[str, str] = {}
    about: tuple[tuple[str, str], ...] = ()
    ports: Sequence[int] = ()
    left_out: str = ""  # why it can't be used


@dataclass(slots=True)
class Endpoints:
    """Those found, and in words what can't be used."""

    found: list[EngineEndpoint] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def at(item: Any, *path: str) -> Any:
    """Return what stands there; None where anything on the path is missing or no object."""
    for name in path:
        item = item.get(name) if isinstance(item, dict) else None
    return item


def table(item: Any, *path: str) -> Mapping[str, Any]:
    found = at(item, *path)
    return found if isinstance(found, dict) else {}


def rows(item: Any, *path: str) -> Sequence[Any]:
    found = at(item, *path)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else ()


def word(item: Any, *path: str) -> str:
    found = at(item, *path)
    return found if isinstance(found, str) else ""


def endpoints_of_slices(slices: Iterable[Any], port: str = "", family: int = 0) -> Endpoints:
    """Return the engines of a Service: the union of its slices. `port`: by name or number."""
    found, chosen = Endpoints(), dict[tuple[str, int], EngineEndpoint]()
    by_family: dict[int, list[EngineEndpoint]] = {4: [], 6: []}
    for each in sorted(slices, key=lambda item: word(item, "metadata", "name")):
        version = {"IPv4": 4, "IPv6": 6}.get(word(each, "addressType"), 0)
        number, why = port_of(rows(each, "ports"), port)
        if not version or (family and version != family) or (not number and not rows(each, "endpoints")):
            continue
        if not number:
            found.left_out.append(f"slice {word(each, 'metadata', 'name')}: {why}")
            continue
        by_family[version] += endpoints_of_slice(each, number)
    seen: dict[str, int] = {}
    lonely = 4 if by_family[4] else 6  # of endpoints without a pod, all addresses of one family are
    for version, listed in by_family.items():
        for endpoint in listed:
            key, other = (endpoint.host, endpoint.port), seen.setdefault(endpoint.process, version)
            if (endpoint.process and other != version) or (not endpoint.process and version != lonely):
                continue
            if key not in chosen or (chosen[key].draining and not endpoint.draining):
                chosen[key] = endpoint
    found.found = list(chosen.values())
    return found


def endpoints_of_slice(item: Any, port: int) -> Iterator[EngineEndpoint]:
    for each in rows(item, "endpoints"):
        addresses, conditions = at(each, "addresses"), table(each, "conditions")
        is_ending = conditions.get("terminating") is True
        if not is_ending and conditions.get("ready") is False:
            continue
        if isinstance(addresses, list) and addresses and isinstance(addresses[0], str) and is_address(addresses[0]):
            is_pod = word(each, "targetRef", "kind") == "Pod"
            pod, uid = (word(each, "targetRef", name) if is_pod else "" for name in ("name", "uid"))
            yield EngineEndpoint(addresses[0], port, pod, uid, is_ending)


def port_of(ports: Sequence[Any], wanted: str) -> tuple[int, str]:
    """Return the port to use; or 0, and why there is none. A slice whose port is null serves any."""
    numbers = {word(each, "name"): each.get("port") for each in ports if each.get("protocol") in (None, "TCP")}
    if not ports or None in numbers.values():
        return (int(wanted), "") if wanted.isdecimal() else (0, "it has no port: write its number")
    usable = {name: number for name, number in numbers.items() if is_port(number)}
    if wanted.isdecimal():
        return (int(wanted), "") if int(wanted) in usable.values() else (0, f"it has no port {wanted}")
    if wanted:
        return (usable[wanted], "") if wanted in usable else (0, f"it has no port named {wanted}")
    if len(usable) == 1:
        return next(iter(usable.values())), ""
    named = next((name for name in HTTP_NAMES if name in usable), "")
    return (usable[named], "") if named else (0, f"it has several ports: name one of {', '.join(sorted(usable))}")


def is_port(number: object) -> bool:
    return type(number) is int and 0 < number <= PORT_MAX


def endpoints_of_pods(pods: Iterable[Any], ports: Sequence[str] = (), family: int = 0) -> Endpoints:
    """Return the engines that pods are. `ports`: by name or number, where a pod has no annotation of its own."""
    found = Endpoints()
    for pod in sorted(pods, key=lambda item: word(item, "metadata", "name")):
        name, is_ending = word(pod, "metadata", "name"), bool(at(pod, "metadata", "deletionTimestamp"))
        host = address_of(pod, family)
        if not host or word(pod, "status", "phase") != "Running" or not (is_ending or is_ready(pod)):
            continue
        numbers, why = ports_of(pod, ports)
        if not numbers:
            found.left_out.append(f"pod {name}: {why}")
        uid = word(pod, "metadata", "uid")
        found.found += [EngineEndpoint(host, number, name, uid, is_ending) for number in numbers]
    return found


def is_ready(pod: Any) -> bool:
    return any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in rows(pod, "status", "conditions")
    )


def address_of(pod: Any, family: int) -> str:
    addresses = [word(pod, "status", "podIP"), *(word(each, "ip") for each in rows(pod, "status", "podIPs"))]
    fitting = [each for each in addresses if is_address(each) and family in (0, 6 if ":" in each else 4)]
    return fitting[0] if fitting else ""


def ports_of(pod: Any, wanted: Sequence[str]) -> tuple[Sequence[int], str]:
    """Return the ports of a pod's engines: by its annotation, by what is configured, or the only one that it has."""
    if own := facts_of(pod).ports:
        return own, ""
    declared = [
        each
        for container in rows(pod, "spec", "containers")
        for each in rows(container, "ports")
        if is_port(each.get("containerPort")) and each.get("protocol") in (None, "TCP")
    ]
    if wanted:
        by_name = {word(each, "name"): each["containerPort"] for each in declared}
        numbers = [int(each) if each.isdecimal() else by_name.get(each, 0) for each in wanted]
        return (numbers, "") if all(numbers) else ((), f"it has no port named {wanted[numbers.index(0)]}")
    number, why = port_of([{**each, "port": each["containerPort"]} for each in declared], "")
    return ((number,), "") if number else ((), why)


def facts_of(pod: Any) -> PodFacts:
    """Return what a pod's annotations and labels say."""
    labels, annotations = table(pod, "metadata", "labels"), table(pod, "metadata", "annotations")
    marks = {name: value for name, value in {**labels, **annotations}.items() if isinstance(value, str)}
    options = {
        name.removeprefix(OURS).replace("-", "_"): value
        for name, value in marks.items()
        if name.startswith(OURS) and name not in NOT_OPTIONS
    }
    if "ranvier.io/scheme" in marks:
        options["scheme"] = marks["ranvier.io/scheme"]
    about = dict.fromkeys(ABOUT.values(), "")
    for name, shown in ABOUT.items():
        about[shown] = about[shown] or marks.get(name, "")
    ports = next((marks[name] for name in PORTS if name in marks), "")
    numbers = [int(each) for each in ports.replace(",", " ").split() if each.isdecimal() and is_port(int(each))]
    half = marks.get(ROLE, "")
    left_out = f"it serves the {half} half of requests, and this node sends whole ones" if half in HALVES else ""
    return PodFacts(options, tuple((name, value) for name, value in about.items() if value), numbers, left_out)


class PoolFacts(NamedTuple):
    """What an InferencePool chooses: a label selector, and ports."""

    selector: str
    ports: Sequence[str]


def pool_of(item: Any) -> PoolFacts | str:
    """Read an InferencePool, of v1 or before. Returns why it can't be used, if so."""
    spec = table(item, "spec")
    labels = table(spec, "selector", "matchLabels") or table(spec, "selector")
    ports = [each.get("number") for each in rows(spec, "targetPorts")] or [spec.get("targetPortNumber")]
    if spec.get("appProtocol") not in (None, "http"):
        return f"its appProtocol is {spec['appProtocol']}, and this node speaks HTTP/1.1"
    if not labels or not all(isinstance(value, str) for value in labels.values()) or not all(map(is_port, ports)):
        return "it has no selector of labels, or no target port"
    return PoolFacts(selector_text(labels), tuple(map(str, ports)))


def selector_text(labels: Mapping[str, Any]) -> str:
    """Return labels as a selector of the API."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))

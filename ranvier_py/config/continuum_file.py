"""Translates a configuration file of Continuum Router, by the keys of its document, to keys of ours.

What this router does differently from the document is an error, or a note that names it: nothing is dropped silently.
Our own keys may stand beside the document's sections, so that one file is enough. The document does not show where
backends are listed: our key `backend` may list them; without it, each event source stands for the engine at its
endpoint.

Source: Continuum Router, «KV cache optimization», configuration reference and deployment guide (CR31, CR34).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ranvier_py.config.config_model import KEYS
from ranvier_py.config.config_names import RENAMED
from ranvier_py.config.config_values import INDEX_SCHEMES, BackendSpec, did_you_mean
from ranvier_py.config.yaml_file import YamlValue, read_yaml
from ranvier_py.core.addresses import checked_url
from ranvier_py.core.options import Option, expected, fits, options_of
from ranvier_py.core.routing.placement.kv_score import KvScoreOptions

PREFIX, RESPONSES, REDIS, INDEX = "prefix_routing", "response_cache", "response_cache.redis", "kv_cache_index"
SOURCES = f"{INDEX}.event_sources"
SOURCE_FIELDS = ("backend_name", "endpoint", "reconnect_interval_ms")

DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*(?:ms|s|m|h|d))+\s*")
DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


class Target(NamedTuple):
    """What a key of the document is here: an option of policies, or a key whose value is `factor` times theirs."""

    key: str
    factor: float = 1.0
    is_duration: bool = False
    is_policys: bool = False

    @property
    def option(self) -> Option:
        return options_of(KvScoreOptions)[self.key] if self.is_policys else KEYS[self.key].option


def policy_targets(section: str, *names: str) -> dict[str, Target]:
    return {f"{section}.{name}": Target(name, is_policys=True) for name in names}


SCORING = ("overlap_weight", "load_weight", "health_weight", "min_overlap_threshold")
TIERS = ("gpu_tier_weight", "storage_tier_weight")

TARGETS: Mapping[str, Target] = {
    **policy_targets(PREFIX, "max_prefix_length", "load_factor_epsilon", "virtual_nodes"),
    f"{PREFIX}.anthropic_cache_control_injection": Target("anthropic_cache_control"),
    f"{RESPONSES}.backend": Target("response_cache_backend"),
    f"{RESPONSES}.capacity": Target("response_cache_capacity"),
    f"{RESPONSES}.ttl": Target("response_cache_ttl_s", is_duration=True),
    f"{RESPONSES}.max_response_size": Target("response_cache_answer_bytes_max"),
    f"{RESPONSES}.max_stream_buffer_size": Target("response_cache_stream_bytes_max"),
    f"{INDEX}.backend": Target("kv_index_backend"),
    f"{INDEX}.max_entries": Target("kv_index_entries_max"),
    f"{INDEX}.entry_ttl_seconds": Target("kv_index_ttl_s"),
    **policy_targets(f"{INDEX}.scoring", *SCORING, *TIERS),
    f"{INDEX}.storage_offloading.enabled": Target("kv_index_offloading"),
    f"{INDEX}.storage_offloading.treat_eviction_as_offload": Target("kv_index_eviction_is_offload"),
}
"""Targets by the document's name; those of `REDIS` are in REDIS_TARGETS."""

OF_RESPONSES, OF_INDEX = "response_cache_", "kv_"
"""Beginnings of our keys for the Redis of tier 2, and of tier 4."""

REDIS_TARGETS: Mapping[str, Sequence[Target]] = {
    f"{REDIS}.command_timeout_ms": (
        Target("response_cache_redis_timeout_s", 0.001),
        Target("kv_redis_timeout_s", 0.001),
    ),
    f"{REDIS}.connect_timeout_ms": (
        Target("response_cache_redis_connect_timeout_s", 0.001),
        Target("kv_redis_connect_timeout_s", 0.001),
    ),
    f"{REDIS}.pool_size": (Target("response_cache_redis_connections_max"),),
    f"{REDIS}.key_prefix": (Target("response_cache_redis_prefix"),),
    f"{REDIS}.fallback_to_memory": (Target("response_cache_fallback_to_memory"),),
    f"{REDIS}.fallback_capacity": (Target("response_cache_fallback_capacity"),),
    f"{REDIS}.fallback_ttl_seconds": (Target("response_cache_fallback_ttl_s"),),
}
"""Settings that tiers 2 and 4 share in the document. Here each tier has its own, and one pool if both use one Redis."""

SWITCHES = (f"{PREFIX}.enabled", f"{RESPONSES}.enabled", f"{INDEX}.enabled")
SECTIONS = (PREFIX, RESPONSES, REDIS, INDEX, f"{INDEX}.scoring", f"{INDEX}.storage_offloading")
OTHERS = (f"{REDIS}.url", f"{REDIS}.tls", SOURCES)
KNOWN = (*SWITCHES, *TARGETS, *REDIS_TARGETS, *SECTIONS, *OTHERS)


class EventSourceEntry(NamedTuple):
    """One entry of `event_sources`."""

    name: str
    endpoint: str
    place: str  # file and line


@dataclass(slots=True)
class ContinuumFile:
    """Our keys for what a file asks for; `origins` says where each was written."""

    file: Path
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[EventSourceEntry] = field(default_factory=list)
    given: dict[str, YamlValue] = field(default_factory=dict)  # by the document's names
    bad: dict[str, None] = field(default_factory=dict)  # keys of the root of which some could not be read

    def read(self) -> None:
        """Read the file. All that is wrong becomes `problems`."""
        written = read_yaml(self.file)
        tree, self.bad = written.tree, written.bad
        self.problems += written.problems
        for name, value in (tree.value if tree is not None else {}).items():
            if name in (PREFIX, RESPONSES, INDEX) and not (name in KEYS and type(value.value) is bool):
                self._section(name, value)
            elif (key := RENAMED.get(name, name)) in KEYS:
                self.put(key, plain(value, KEYS[key].option), value.line, name)
            else:
                self._unknown(name, value.line, (PREFIX, RESPONSES, INDEX, *KEYS))
        self._translate()

    def _section(self, path: str, section: YamlValue) -> None:
        if not isinstance(section.value, dict):
            if section.value is None and path.partition(".")[0] in self.bad:
                return  # what stood there could not be read
            self._problem(section.line, path, "must be keys with their values")
            return
        for name, inner in section.value.items():
            full = f"{path}.{name}"
            if full in SECTIONS:
                self._section(full, inner)
            elif full in KNOWN:
                self.given[full] = inner
            else:
                known = [each[len(path) + 1 :] for each in KNOWN if each.startswith(path + ".")]
                self._unknown(full, inner.line, [each for each in known if "." not in each])

    def _translate(self) -> None:
        on = {name.partition(".")[0]: self._switch(name) for name in SWITCHES}
        for section, is_on in on.items():
            if not is_on and any(name.startswith(section + ".") and name not in SWITCHES for name in self.given):
                self.notes.append(f"{self.file}: {section} is not enabled: what stands there has no effect")
        checked = {name: self._checked(name, target) for name, target in TARGETS.items()}
        good = {name: value for name, value in checked.items() if value is not None and on[name.partition(".")[0]]}
        self._policy(good, prefix=on[PREFIX], index=on[INDEX])
        if f"{RESPONSES}.enabled" in self.given:
            self._put_given("response_cache", on[RESPONSES], f"{RESPONSES}.enabled")
        for name, value in good.items():
            if not TARGETS[name].is_policys:
                self._put_given(TARGETS[name].key, value, name)
        self._redis(responses=on[RESPONSES], index=on[INDEX])
        self._event_sources(is_on=on[INDEX])

    def _policy(self, good: Mapping[str, Any], *, prefix: bool, index: bool) -> None:
        """Put the policy of these tiers, with its options."""
        if not prefix and not index:
            return
        self._put_given("policy", "kv_score" if index else "chwbl", SWITCHES[2] if index else SWITCHES[0])
        if index and not prefix:
            self.notes.append(
                f"{self.file}: {INDEX} without {PREFIX}: below the threshold the ring places all the same"
            )
        options = {name: f"{TARGETS[name].key}={value}" for name, value in good.items() if TARGETS[name].is_policys}
        if options:
            self._put_given("policy_option", tuple(options.values()), next(iter(options)))

    def _redis(self, *, responses: bool, index: bool) -> None:
        """Put where Redis is and how it is used, for those tiers that use it."""
        wants = [
            section
            for section, is_on in ((RESPONSES, responses), (INDEX, index))
            if is_on and (found := self.given.get(f"{section}.backend")) is not None and found.value == "redis"
        ]
        named = [name for name in self.given if name.startswith(REDIS + ".")]
        if not wants:
            if named:
                self.notes.append(f"{self.file}: {REDIS} has no effect: no backend is redis")
            return
        url = self._text(f"{REDIS}.url")
        if url is None:
            self._problem(self.given[f"{wants[0]}.backend"].line, f"{wants[0]}.backend", f"redis needs {REDIS}.url")
            return
        if self._switch(f"{REDIS}.tls") and url.startswith("redis://"):
            url = "rediss://" + url.removeprefix("redis://")
        users = [{INDEX: OF_INDEX, RESPONSES: OF_RESPONSES}[section] for section in wants]
        for user in users:
            self._put_given(f"{user}redis_url", url, f"{REDIS}.url")
        for name, targets in REDIS_TARGETS.items():
            values = [(each.key, self._checked(name, each)) for each in targets if each.key.startswith(tuple(users))]
            for key, value in values:
                if value is not None:
                    self._put_given(key, value, name)
            if name in self.given and not values:
                self.notes.append(f"{self.file}: {name} has no effect: it is for the response cache in Redis")

    def _event_sources(self, *, is_on: bool) -> None:
        listed = self.given.get(SOURCES)
        if listed is None:
            return
        if not isinstance(listed.value, list):
            self._problem(listed.line, SOURCES, "must be a list")
            return
        waits: dict[float, str] = {}
        for index, entry in enumerate(listed.value):
            self._event_source(f"{SOURCES}[{index}]", entry, waits)
        if len(waits) > 1:
            self._problem(listed.line, SOURCES, "reconnect_interval_ms must be the same for all of them")
        elif waits and is_on:
            ((wait_s, name),) = waits.items()
            self.put("kv_index_reconnect_s", wait_s, listed.line, name)
        if not is_on:
            self.sources.clear()

    def _event_source(self, path: str, entry: YamlValue, waits: dict[float, str]) -> None:
        if not isinstance(entry.value, dict):
            self._problem(entry.line, path, f"must be keys with their values: {', '.join(SOURCE_FIELDS)}")
            return
        for name, inner in entry.value.items():
            if name not in SOURCE_FIELDS:
                self._unknown(f"{path}.{name}", inner.line, SOURCE_FIELDS)
        texts = {}
        for name in SOURCE_FIELDS[:2]:
            found = entry.value.get(name)
            if found is None or not isinstance(found.value, str):
                self._problem(found.line if found else entry.line, f"{path}.{name}", "must be a text")
            else:
                texts[name] = found.value
        wait = entry.value.get(SOURCE_FIELDS[2])
        if wait is not None and (type(wait.value) not in (int, float) or not 0 < wait.value <= 60_000):
            self._problem(wait.line, f"{path}.{SOURCE_FIELDS[2]}", "must be a number, above 0, at most 60000")
        elif wait is not None:
            waits.setdefault(wait.value / 1000, f"{path}.{SOURCE_FIELDS[2]}")
        if len(texts) == 2:
            try:
                checked_url(texts["endpoint"], INDEX_SCHEMES)
            except ValueError as error:
                self._problem(entry.value["endpoint"].line, f"{path}.endpoint", str(error))
            else:
                self.sources.append(
                    EventSourceEntry(texts["backend_name"], texts["endpoint"], f"{self.file}:{entry.line}")
                )

    def _switch(self, name: str) -> bool:
        found = self.given.get(name)
        if found is not None and type(found.value) is not bool:
            self._problem(found.line, name, "must be true or false")
        return found is not None and found.value is True

    def _text(self, name: str) -> str | None:
        found = self.given.get(name)
        if found is None or isinstance(found.value, str):
            return found.value if found is not None else None
        self._problem(found.line, name, "must be a text")
        return None

    def _checked(self, name: str, target: Target) -> Any:
        """Return the value in our unit; None if it is missing or wrong."""
        found = self.given.get(name)
        if found is None:
            return None
        value, limits = found.value, target.option
        if target.is_duration:
            value = seconds_of(value) if isinstance(value, str) else None
            if value is None:
                self._problem(found.line, name, "must be a time with its unit, as 300s or 5m")
                return None
        if type(value) in (int, float) and target.factor != 1.0:
            value *= target.factor
        if isinstance(limits.default, float) and type(value) is int:
            value = float(value)
        if isinstance(limits.default, bool | int | float) and not fits(value, limits):
            self._problem(found.line, name, f"must be {expected(limits)}")
            return None
        return value

    def put(self, key: str, value: Any, line: int, name: str) -> None:
        """Set a key of ours, which the file calls `name`."""
        if key in self.values:
            self._problem(line, name, f"{key} is set twice: here, and by {self.origins[key]}")
            return
        self.values[key] = value
        self.origins[key] = f"{self.file}:{line}" + (f" {name}" if name != key else "")

    def _put_given(self, key: str, value: Any, name: str) -> None:
        self.put(key, value, self.given[name].line, name)

    def _problem(self, line: int, name: str, message: str) -> None:
        self.problems.append(f"{self.file}:{line}: {name}: {message}")

    def _unknown(self, name: str, line: int, known: Iterable[str]) -> None:
        if self.bad:  # a part of something that could not be read may look like a key
            return
        self._problem(line, name, f"no such key{did_you_mean(name.rpartition('.')[2], known)}")


def read_continuum(file: Path) -> ContinuumFile:
    """Read and translate a YAML file."""
    found = ContinuumFile(file)
    found.read()
    return found


def with_sources(
    backends: Sequence[BackendSpec], sources: Sequence[EventSourceEntry]
) -> tuple[tuple[BackendSpec, ...], list[str], list[str]]:
    """Return backends with their event sources, problems, notes. Without backends, the endpoints define them."""
    problems: list[str] = []
    notes: list[str] = []
    if not backends:
        for name, endpoint, place in sources:
            url = engine_at(endpoint)
            try:
                backends = (*backends, BackendSpec(url=url, name=name))
            except ValueError:  # Pydantic's error, of many lines
                problems.append(f"{place}: {name!r} at {url} can be no backend")
            else:
                notes.append(f"{place}: no backend is configured: {name} is taken to be at {url}")
    by_name = {spec.label: spec for spec in backends}
    taken: dict[str, str] = {}
    for name, endpoint, place in sources:
        if name not in by_name:
            problems.append(f"{place}: {name} is no backend{did_you_mean(name, by_name)}")
        elif name in taken or by_name[name].kv_index:
            problems.append(f"{place}: {name} has an event source already")
        taken[name] = endpoint
    made = (spec.model_copy(update={"kv_index": taken.get(spec.label, spec.kv_index)}) for spec in backends)
    return tuple(made), problems, notes


def engine_at(endpoint: str) -> str:
    """Return the URL of the engine that an event stream belongs to: its scheme, host and port."""
    parts = urlsplit(endpoint)
    return f"{'https' if parts.scheme in ('https', 'wss') else 'http'}://{parts.netloc.rpartition('@')[2]}"


def seconds_of(text: str) -> float | None:
    """ "1h30m" -> 5400.0; None if the text is no time."""
    if not DURATION.fullmatch(text):
        return None
    return sum(float(number) * DURATION_UNITS_S[unit] for number, unit in DURATION_PART.findall(text))


def plain(value: YamlValue, limits: Option) -> Any:
    """Return the plain value for a key of ours. YAML reads «off» as false; if the key is no switch, it is a word."""
    if isinstance(value.value, list):
        return [plain(item, limits) for item in value.value]
    if isinstance(value.value, dict):
        return {name: plain(inner, limits) for name, inner in value.value.items()}
    if value.value is None:
        return ""
    if isinstance(value.value, bool) and not isinstance(limits.default, bool):
        return "on" if value.value else "off"
    return value.value

"""Loads the configuration: flags, environment and a file become one Config, or a list of all that is wrong.

The first source that has a key wins: flag, variable, file; then the default. A secret and its `_file` are one key in
this. Every problem is reported at once, with the key and where it came from, and never shows a secret. Unknown keys are
errors. The only files read are that of the configuration, those of secrets and that of the rules. A file is TOML, or
YAML if its name says so; YAML may be a file of Continuum Router (`continuum_file`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_origin

from pydantic import BeforeValidator, SecretStr, TypeAdapter, ValidationError

from ranvier_py.config.config_endpoints import gossip_endpoints, ports_meet
from ranvier_py.config.config_endpoints import problems as cluster_problems
from ranvier_py.config.config_model import KEYS, SECRETS, Config, Key, assembled
from ranvier_py.config.config_names import ENV_PREFIX, FILE_VARIABLE, RENAMED, flag_of, keys_of, variable_of
from ranvier_py.config.config_values import NEEDS_EVENTS, OWN_FILES_ONLY, BackendSpec, did_you_mean, split_items
from ranvier_py.config.model_tables import ModelSpec, problems_among, with_keys
from ranvier_py.config.model_tables import problems as model_problems
from ranvier_py.config.rule_files import rule_book
from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.config.toml_file import YAML_SUFFIXES, read_toml
from ranvier_py.core.addresses import OFF, host_port, is_address, is_loopback
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.options import expected, fits

if TYPE_CHECKING:
    from ranvier_py.config.continuum_file import EventSourceEntry

OTHER_VARIABLES = ("RANVIER_REPORTER_KEY", "RANVIER_REPORTER_KEY_FILE")  # of `ranvier reporter`, in the same shell


SECRET_BYTES_MIN = 16
OF_FILE = 2  # the rank of what a file has, behind that of flags and variables

KUBERNETES_LINK = re.compile(
    r"RANVIER(_\w+)?_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT=\w+://|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=).*", re.DOTALL
)
"""Variables that Kubernetes sets in every pod beside a Service whose name begins with «ranvier»; they are ignored."""

WORDS = {
    "Input should be a valid tuple": "must be a list",
    "Input should be": "must be",
    "String should have": "must have",
    "Input is not a valid path for <class 'pathlib.Path'>": "must be a path",
}
"""Phrases of Pydantic -> ours."""

PRINTABLE = "printable characters of ASCII, without blanks"
PATTERNS = {
    r"^[\x21-\x7e]*$": PRINTABLE,
    r"^[\x21-\x7e]+$": PRINTABLE,
    r"^[A-Za-z0-9._:-]*$": "letters, digits and . _ : -",
    r"^(?:/[A-Za-z0-9._~-]+)*$": "parts such as /v2, of letters, digits and . _ ~ -, without a slash at the end",
}
"""What the values of the configuration may consist of (test_a_value_of_other_characters_is_refused_in_words)."""


@dataclass(slots=True)
class FoundValues:
    """What loading has found so far."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # the operator's name for a key where it was set
    problems: list[str] = field(default_factory=list)
    bad: dict[str, None] = field(default_factory=dict)  # keys with a problem
    notes: list[str] = field(default_factory=list)  # effects that the operator may not expect
    sources: Sequence[EventSourceEntry] = ()  # for backends, matched by name
    typed: Collection[str] = ()  # keys taken from a file, which has numbers and switches; other sources have text
    places: Mapping[str, str] = field(default_factory=dict)  # of an item of a key, more exactly than its origin
    ranks: dict[str, int] = field(default_factory=dict)  # of the source of a key; 0, a flag, is the highest

    def add(self, key_name: str, message: str) -> None:
        item = key_name.partition(".")[0]
        name = item.partition("[")[0]
        self.bad[name] = None
        origin = self.places.get(item) or self.origins.get(name)
        origin = origin or self.origins.get(f"{name}_file")  # of a secret that its file holds
        self.problems.append(f"{key_name}: {message}" + (f" (from {origin})" if origin else ""))


class Loaded(NamedTuple):
    """A configuration, where each key that was set came from, and effects that the operator may not expect."""

    config: Config
    origins: Mapping[str, str]
    notes: Sequence[str]


def load(
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    also: Callable[[Loaded], Iterable[str]] = lambda _: (),
) -> Loaded:
    """Load all sources. `flags` are values of the command line by key. Without a `file`, $RANVIER_CONFIG may name one.

    `also` returns further problems, each as «key: what is wrong»; it gets the configuration of keys that are each good.
    Raises ConfigError with every problem found.
    """
    found = FoundValues()
    file = file_in_use(file)
    found.problems.extend(unknown_variables())
    variables = {name: text for name in (*KEYS, *RENAMED) if (text := of_environment(name))}
    for rank, (values, origin) in enumerate(((flags or {}, flag_of), (variables, variable_of), read_file(file, found))):
        for key, name in keys_of(values).items():
            if key not in found.values:
                found.values[key], found.ranks[key] = values[name], rank
                found.origins[key] = origin(name)
    found.typed = {key for key, rank in found.ranks.items() if rank == OF_FILE}
    found.places = {item: place for item, place in found.places.items() if item.partition("[")[0] in found.typed}
    result = Loaded(checked(found), found.origins, found.notes)
    for problem in also(result):
        name, _, message = problem.partition(": ")
        found.add(name, message)
    if found.problems:
        raise ConfigError(found.problems)
    return result


def of_environment(name: str) -> str | None:
    """Return the variable of a key. RANVIER_CONTROL may be a URL, since it is what other commands ask, too."""
    text = os.environ.get(variable_of(name))
    return re.sub(r"^https?://|/$", "", text) if text and name == "control" else text


def file_in_use(file: Path | None) -> Path | None:
    """Return the file that is read, if a flag names this one."""
    named = os.environ.get(FILE_VARIABLE)
    return Path(named) if file is None and named else file


def config_of(**values: Any) -> Config:
    """Return the configuration of these keys alone, without the environment. Raises ConfigError with all problems."""
    found = FoundValues({key: values[name] for key, name in keys_of(values).items()})
    config = checked(found)
    if found.problems:
        raise ConfigError(found.problems)
    return config


def read_file(file: Path | None, found: FoundValues) -> tuple[Mapping[str, Any], Callable[[str], str]]:
    """Return the values in a file by key, and a function that says where a key is written."""
    if file is None:
        return {}, str
    if file.suffix.lower() not in YAML_SUFFIXES:
        toml = read_toml(file)
        found.problems += toml.problems
        found.bad |= toml.bad
        places = {name: f"{file}:{line}" for name, line in toml.lines.items()}
        found.places = {item: place for item, place in places.items() if "[" in item}
        return toml.values, lambda name: places.get(name, str(file))
    from ranvier_py.config.continuum_file import read_continuum  # noqa: PLC0415  # with PyYAML, which few files need

    written = read_continuum(file)
    found.problems += written.problems
    found.bad |= written.bad
    found.notes += written.notes
    found.sources = written.sources
    return written.values, written.origins.__getitem__


def unknown_variables() -> Iterator[str]:
    """Yield a problem for each variable with our prefix that names no key."""
    known = {variable_of(name) for name in (*KEYS, *RENAMED)} | {FILE_VARIABLE, *OTHER_VARIABLES}
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENV_PREFIX) and name not in known and not KUBERNETES_LINK.fullmatch(f"{name}={value}"):
            yield f"{name}: no such key{did_you_mean(name, known)} (from the environment)"


def checked(found: FoundValues) -> Config:
    """Return a Config of the good values, and add a problem for each bad one."""
    values: dict[str, Any] = {}
    for name in [
        *(each for each in KEYS if each in found.values),
        *(each for each in found.values if each not in KEYS),
    ]:
        if name not in KEYS:
            found.add(name, f"no such key{did_you_mean(name, KEYS)}")
            continue
        value, limits = found.values[name], KEYS[name].option
        if name in found.typed and isinstance(limits.default, bool | int | float) and not fits(value, limits):
            found.add(name, f"must be {expected(limits, value)}")
            continue
        try:
            value = values[name] = parsed(KEYS[name], value)
        except ValidationError as error:
            for item in error.errors():
                found.add(place((name, *item["loc"])), reworded(item))
            for item_name, message in problems_among(value) if name == "model" else ():
                found.add(item_name, message)
            continue
        if not fits(value, limits):
            found.add(name, f"must be {expected(limits, value)}")
            del values[name]
    values |= secrets_of_files(values, found)
    values["model"] = with_keys(values.get("model", ()), found.add)
    values |= {"backend": with_own_keys(values["backend"], found.add)} if "backend" in values else {}
    if found.sources and "backend" not in found.bad:
        from ranvier_py.config.continuum_file import with_sources  # noqa: PLC0415  # it has read them

        values["backend"], problems, notes = with_sources(values.get("backend", ()), found.sources)
        found.problems += problems
        found.notes += notes
    config = made(values, found)
    for involved, message in contradictions(config):
        if not any(name in found.bad for name in involved):
            found.add(involved[0], message)
    return config


def parsed(key: Key, value: Any) -> Any:
    """Convert a value, maybe from text, to the type of its key. Raises ValidationError."""
    kind = key.annotation
    if get_origin(kind) is tuple:
        kind = Annotated[kind, BeforeValidator(split_items)]
    return TypeAdapter(kind, config={"hide_input_in_errors": True}).validate_python(value)


def made(values: Mapping[str, Any], found: FoundValues) -> Config:
    """Return the Config of values that are each good; if a component's don't fit together, without all components'."""
    try:
        return assembled(values)
    except ConfigError as error:
        for problem in error.problems:
            key_name, _, message = problem.partition(": ")
            found.add(key_name, message)
        return assembled({name: value for name, value in values.items() if len(KEYS[name].path) == 1})


def secrets_of_files(values: dict[str, Any], found: FoundValues) -> dict[str, SecretStr]:
    """Read the secrets that are given by a file.

    A secret and its file are two spellings of one key, so that the source of higher rank counts; the other one, which
    is taken out of `values`, is not opened.
    """
    read: dict[str, SecretStr] = {}
    for name in SECRETS:
        twin = f"{name}_file"
        path: Path | None = values.get(twin)
        if path is None:
            continue
        if values.get(name) is not None:
            own, other = found.ranks.get(name, 0), found.ranks.get(twin, 0)
            if own == other:
                found.add(twin, f"{found.origins.get(name, name)} is set as well; set one of them")
                found.bad[name] = None
                continue
            unused, used = (twin, name) if own < other else (name, twin)
            del values[unused]
            found.notes.append(f"{unused} (from {found.origins.pop(unused)}) is not used: {found.origins[used]} is set")
            if unused == twin:
                continue
        try:
            read[name] = SecretStr(read_secret_file(path))
        except ConfigError as error:
            found.add(twin, str(error))
            found.bad[name] = None
    return read


def with_own_keys(specs: Sequence[BackendSpec], add: Callable[[str, str], None]) -> tuple[BackendSpec, ...]:
    """Return the backends with the keys that their files hold. `add` takes the key of a problem, and what is wrong."""
    made = list[BackendSpec]()
    for number, spec in enumerate(specs):
        try:
            made.append(spec.with_key_read())
        except ConfigError as error:
            add(f"backend[{number}].api_key_file", str(error))
            made.append(spec)
    return tuple(made)


def parted(config: Config, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield these keys if only some of them are set."""
    if len({KEYS[name].value_in(config) is None for name in names}) > 1:
        yield names, f"set {' and '.join(names)} together"


def contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys involved, what is wrong) for keys that are each good alone but not together."""
    host, port = host_port(config.control)
    if not is_loopback(host) and config.control_key is None and config.ports.control_keys_file is None:
        yield ("control", "control_key"), f"{host} is reachable from elsewhere: set control_key or control_key_file"
    for side in ("tls", "control_tls", "upstream"):
        yield from parted(config, f"{side}_certificate_file", f"{side}_key_file")
    if config.workers > 1 and host_port(config.listen)[1] == 0:
        yield ("listen", "workers"), "several workers can't share port 0"
    if port and port + config.workers - 1 > 65535:
        yield ("control", "workers"), "the last worker's control port is above 65535"
    public = host_port(config.listen)
    families = {ip_address(each).version for each in (host, public[0]) if is_address(each)}  # two can't collide
    if len(families) < 2 and ports_meet((host, port), config.workers, public, 1):
        yield ("control", "listen"), f"meets listen, {config.listen}: each port needs an address of its own"
    if config.server.in_flight_bytes_max < config.server.body_bytes_max:
        yield ("in_flight_bytes_max", "body_bytes_max"), "is below body_bytes_max: the largest bodies would never pass"
    retries = config.pipeline.retries
    if retries.total_retries_max < retries.worker_retries_max:
        yield ("worker_retries_max", "total_retries_max"), "is above total_retries_max"
    if config.kv_redis_url is None and config.response_cache_redis_url is None:
        if config.kv_index_backend == "redis":
            yield ("kv_index_backend", "kv_redis_url"), "set kv_redis_url or kv_redis_url_file"
        if config.responses.backend == "redis":
            names = ("response_cache_backend", "response_cache_redis_url")
            yield names, "set response_cache_redis_url or response_cache_redis_url_file"
    for name in ("cluster_secret", "gossip_admin_key"):
        secret: SecretStr | None = getattr(config, name)
        if secret is not None and len(secret.get_secret_value().encode()) < SECRET_BYTES_MIN:
            yield (name,), f"must be at least {SECRET_BYTES_MIN} bytes long"
    yield from access_problems(config)
    yield from rule_problems(config)
    yield from cluster_problems(config)
    yield from model_problems(config.model)
    yield from shared_answer_problems(config)
    yield from listed_twice(config)


def access_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield why nobody would be named, or asked for a certificate."""
    for authority, side in (("tls_client_ca_file", "tls"), ("control_client_ca_file", "control_tls")):
        if KEYS[authority].value_in(config) and not KEYS[f"{side}_certificate_file"].value_in(config):
            yield (authority, f"{side}_certificate_file"), f"has no effect without {side}_certificate_file"


def rule_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong in the operator's rules, or in the settings of any rules."""
    try:
        rule_book(config.client_rules_file, config.client_rules)
    except ConfigError as error:
        name, _, message = error.problems[0].partition(": ")
        yield (name,), message


def shared_answer_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield why a node can't share its answers with peers."""
    key = "response_cache_backend"
    if not config.responses.enabled or config.responses.backend != "cluster":
        return
    if gossip_endpoints(config) is None:
        yield (key, "gossip"), "cluster needs gossip: set cluster_key_file and join, or several workers"
    if config.insecure_gossip:
        yield (key, "insecure_gossip"), "with insecure_gossip anybody can ask for answers: set cluster_key_file"
    if config.tenant_isolation != OFF:
        yield (key, "tenant_isolation"), "with tenant_isolation no answer leaves its node: use memory"


def listed_twice(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield a problem if two backends share a URL or a name, or if there are too many."""
    if len(config.backend) > config.health.backends_max:
        yield ("backend",), f"must be at most {config.health.backends_max} backends"
    for what, values in (("URL", [item.url for item in config.backend]), ("name", [b.label for b in config.backend])):
        first = {value: index for index, value in reversed(list(enumerate(values)))}
        for index, value in enumerate(values):
            if first[value] < index:
                yield (f"backend[{index}]", "backend"), f"{value} has the {what} of an earlier backend"
                return


def read_backend(fields: Mapping[str, Any], *, is_operators_file: bool = False) -> BackendSpec:
    """Validate one backend that came as JSON: no number may be a text. Raises ConfigError with all that is wrong.

    Who orders something from elsewhere names no file to be read here and sent to an engine, which may be his.
    """
    if "api_key_file" in fields and not is_operators_file:
        raise ConfigError([f"api_key_file: {OWN_FILES_ONLY}"])
    try:
        return BackendSpec.model_validate(dict(fields), strict=True)
    except ValidationError as error:
        problems = [f"{place(item['loc'])}: {reworded(item)}".removeprefix(": ") for item in error.errors()]
        if any(item["loc"] for item in error.errors()) and lacks_events(fields):
            problems.append(NEEDS_EVENTS)  # Pydantic checks it only when all fields are right
        raise ConfigError(problems) from error


def lacks_events(fields: Mapping[str, Any]) -> bool:
    """Whether options that need `kv_events` are there without it."""
    return fields.get("kv_events", "") in ("", OFF) and ("kv_replay" in fields or "kv_ranks" in fields)


def place(location: Iterable[int | str]) -> str:
    """Spell a location: ("backend", 1, "weight") -> backend[1].weight."""
    text = ""
    for part in location:
        if part != "[key]":  # as Pydantic marks that the name itself is wrong
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def reworded(item: Mapping[str, Any]) -> str:
    """Return Pydantic's message in our words."""
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])
        known = {*BackendSpec.model_fields, *ModelSpec.model_fields} - {name}
        return "no such key" + did_you_mean(name, sorted(known))
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "string_pattern_mismatch":
        return f"must consist of {PATTERNS[item['ctx']['pattern']]}"
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message

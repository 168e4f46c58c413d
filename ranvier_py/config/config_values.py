"""The types of the configuration's values: how each is written, and what is refused.

Flags and the environment have texts, the file has typed values; both become the same value. Messages never repeat what
was written, which may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.core.addresses import (
    DEFAULT_PORTS,
    OFF,
    checked_url,
    host_port,
    is_address,
    parse_host_port,
    without_secrets,
)
from ranvier_py.core.clients.client_rules import RuleSetting
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX, endpoint_of
from ranvier_py.core.errors import BadRequest, ConfigError
from ranvier_py.core.options import option
from ranvier_py.core.prompts.tenants import checked_isolation
from ranvier_py.core.routing.backend import NAME_CHARS_MAX, normal_url
from ranvier_py.core.routing.checkpoints.cache_profile import AUTO, profile_named
from ranvier_py.core.routing.placement.policies import POLICIES, PlacementOptions
from ranvier_py.core.routing.processes.ranks import without_rank
from ranvier_py.core.routing.wanted.found_backend import EngineKey, FoundBackend

NAME_CHARACTERS_MAX = 100  # twice the longest of ours; comparing long names takes the square of their length

INDEX_SCHEMES = ("http", "https", "ws", "wss")


def policy_name(text: str) -> str:
    if text not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}")
    return text


def policy_options(items: tuple[str, ...]) -> tuple[str, ...]:
    try:
        PlacementOptions.parse(items)
    except ConfigError as error:
        raise ValueError("; ".join(error.problems)) from error
    return items


def address(text: str) -> str:
    host_port(text)
    return text


def place_text(text: str | None) -> str | None:
    if text is not None:
        parse_host_port(text)
    return text


def place_or_off(text: str | None) -> str | None:
    return text if text == OFF else place_text(text)


def literal_place(text: str | None) -> str | None:
    """Check a place whose host must be an address, because peers do not look it up."""
    if text is not None and not is_address(parse_host_port(text)[0]):
        raise ValueError("must be an IP address, with or without a port")
    return text


def backend_url(text: str) -> str:
    """Return the URL as the registry spells it."""
    try:
        return normal_url(text)
    except BadRequest as error:
        raise ValueError(str(error)) from error


def empty_is_none(value: object) -> object:
    return None if value == "" else value


def file_name(value: object) -> object:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must be a path, which has no NUL")
    return empty_is_none(value)


def file_text(value: object) -> object:
    """A path as text, which a file of JSON can hold, too."""
    file_name(value)
    return value


def secret_line(value: object) -> object:
    """Strip the blanks and the line end that files and variables often end with: no header could carry them."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text.isprintable():
        raise ValueError("must be one line of text")
    return text or None


def origin_text(text: str) -> str:
    """Check an origin as browsers write it (RFC 6454 6.2)."""
    text = text.lower().rstrip("/")
    if text in ("*", "null"):
        return text
    parts = checked_url(text, ("http", "https", "chrome-extension", "moz-extension"))
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("must be an origin such as https://chat.example:8443, without a path, or *")
    is_default = parts.port is not None and parts.port == DEFAULT_PORTS.get(parts.scheme)
    return text.rpartition(":")[0] if is_default else text


def network(text: str) -> str:
    """Check a network, 10.0.0.0/8, or one address."""
    try:
        return str(ip_network(text))
    except ValueError as error:
        raise ValueError("must be an address, or a network such as 10.0.0.0/8") from error


def split_text(value: object) -> object:
    """Split a list in the environment at blanks."""
    return value.split() if isinstance(value, str) else value


def split_items(value: object) -> object:
    """Split at blanks and commas. Flags may repeat."""
    if isinstance(value, list):
        return [piece for item in value for piece in str(item).replace(",", " ").split()]
    return value.replace(",", " ").split() if isinstance(value, str) else value


def backend_fields(value: object) -> object:
    """ "URL,weight=2,name=a" -> its fields. A table of a file has fields already; there a number may not be a text."""
    if isinstance(value, dict):
        for name, kinds, expected in (
            ("weight", (int, float), "a number"),
            ("kv_ranks", (int,), "a whole number"),
            ("hosted", (bool,), "true or false"),
            ("any_model", (bool,), "true or false"),
        ):
            if name in value and type(value[name]) not in kinds:
                raise ValueError(f"{name} must be {expected}")
    if not isinstance(value, str):
        return value
    url, *items = value.split(",")
    fields: dict[str, str] = {"url": url}
    for item in items:
        name, equals, content = item.partition("=")
        if not equals or name in fields:
            raise ValueError("must be URL or URL,weight=2,name=a,kv_events=tcp://HOST:5557")
        fields[name] = content
    return fields


def rule_settings(items: tuple[str, ...]) -> tuple[str, ...]:
    for item in items:
        RuleSetting.parse(item)
    return items


def kv_endpoint(text: str) -> str:
    if text:
        endpoint_of(text)
    return text


def index_endpoint(text: str) -> str:
    if text:
        checked_url(text, INDEX_SCHEMES)
    return text


def kv_endpoint_or_off(text: str) -> str:
    return text if text == OFF else kv_endpoint(text)


def cache_profile(text: str) -> str:
    if text != AUTO:
        profile_named(text)
    return text


SHOWN = ("url", "weight", "name")

OWN_FILES_ONLY = "only the backends of a node's own configuration, or of its backends_file, may name one"
"""Of a file that holds a key."""

NEEDS_EVENTS = "kv_replay and kv_ranks need kv_events, the endpoint of rank 0"


BACKEND_HELP = (
    "Engines to route to: URL or URL,weight=2,name=a. The flag repeats; the variable separates by blanks. "
    "More can be added over the control port. Where an engine publishes its KV events is asked of it; for one that "
    "does not say, kv_events=tcp://HOST:5557, kv_replay=tcp://HOST:5558 and kv_ranks=2 do; kv_events=off turns "
    "them off. kv_index=http://HOST/v1/kv_events names an event stream of Continuum's shape. What its prefix cache "
    "is, which decides what of a hybrid model's prefix can be reused, is recognised; kv_profile=vllm-align:528 (or "
    "vllm-all, sglang-no-buffer, sglang-extra-buffer, attention) names it. "
    "URL#rank=N is one data-parallel rank of an engine; without it a node finds vLLM's itself (split_ranks). "
    "hosted=yes is for a provider, or a gateway to one, that its name does not show. any_model=yes is for an "
    "engine that ignores the names of models, such as llama.cpp's server: it gets those that no engine lists. "
    "tls_name=NAME is the name that the certificate of an https engine must have, where that is not its host. "
    "base_path=/PATH precedes all paths of an engine that stands behind a gateway. "
    "api_key_file=PATH holds the engine's own key, which goes before those of models and backend_api_key."
)


class BackendSpec(BaseModel):
    """One backend as configured or as added over the control port. `name` defaults to its URL without scheme.

    `kv_events` is where the engine publishes its KV events, `kv_replay` where it repeats them; with `kv_ranks`
    data-parallel ranks, rank r is at port + r. Empty: the engine is asked. `off`: no events are used. `kv_index` is an
    event stream of Continuum's shape; empty: none. `kv_profile` names the kind of prefix cache; `auto`: it is
    recognised. `hosted`: whether a provider runs the backend; None: its URL decides. `any_model`: its engine
    ignores the names of models. `tls_name`: whose certificate it has; empty: that of its URL's host. `base_path`
    precedes all of its paths. `api_key_file` holds its engine's own key: only files of this node's operator may
    name it, since it is read here and sent there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(backend_url)]
    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    name: str = Field(default="", max_length=NAME_CHARS_MAX, pattern=r"^[\x21-\x7e]*$")
    kv_events: Annotated[str, AfterValidator(kv_endpoint_or_off)] = ""
    kv_replay: Annotated[str, AfterValidator(kv_endpoint)] = ""
    kv_ranks: int = Field(default=1, ge=1, le=RANKS_MAX)
    kv_index: Annotated[str, AfterValidator(index_endpoint)] = ""
    kv_profile: Annotated[str, AfterValidator(cache_profile)] = AUTO
    hosted: bool | None = None
    any_model: bool = False
    tls_name: str = Field(default="", max_length=253, pattern=r"^[A-Za-z0-9._:-]*$")
    base_path: str = Field(default="", max_length=200, pattern=r"^(?:/[A-Za-z0-9._~-]+)*$")
    api_key_file: Annotated[str, BeforeValidator(file_text)] = ""
    _api_key: str = PrivateAttr(default="")  # so that no input names it, and nothing shows it

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.label) > NAME_CHARS_MAX:
            raise ValueError(f"name is missing, and the URL has more than {NAME_CHARS_MAX} characters to stand for it")
        if self.tls_name and not self.url.startswith("https:"):
            raise ValueError("tls_name needs an https URL")
        if self.kv_events in ("", OFF) and (self.kv_replay or self.kv_ranks != 1):
            raise ValueError(NEEDS_EVENTS)
        return self

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Show options that few backends need only where they are set."""
        values: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {key: value for key, value in values.items() if key in SHOWN or value != fields[key].default}

    @property
    def place(self) -> str:
        """Where its pages are: its URL without a rank, and what precedes their paths."""
        return without_rank(self.url) + self.base_path

    @property
    def key(self) -> EngineKey | None:
        """Its engine's own key, once its file was read."""
        return EngineKey(self.api_key_file, self._api_key) if self._api_key else None

    def with_key(self, key: EngineKey | None) -> BackendSpec:
        """Return the same with the key that its file holds, or without any."""
        made = self.model_copy(update={"api_key_file": key.file if key is not None else ""})
        made._api_key = key.content if key is not None else ""
        return made

    def with_key_read(self) -> BackendSpec:
        """Return the same with the key that its file holds now. Raises ConfigError."""
        if not self.api_key_file:
            return self
        return self.with_key(EngineKey(self.api_key_file, read_secret_file(Path(self.api_key_file))))

    @property
    def found(self) -> FoundBackend[BackendSpec]:
        """What its source found: the options, and beside them the key, which changes in place."""
        return FoundBackend(self.with_key(None) if self.api_key_file else self, key=self.key)

    @property
    def label(self) -> str:
        return self.name or self.url.partition("://")[2]

    def is_but_for_weight(self, other: BackendSpec) -> bool:
        """Whether a backend of this configuration becomes the other one by its weight alone."""
        return self.model_copy(update={"weight": other.weight}) == other


Address = Annotated[str, AfterValidator(address)]
OptionalPath = Annotated[Path | None, BeforeValidator(file_name)]
Secret = Annotated[SecretStr | None, BeforeValidator(secret_line)]
Backends = Annotated[tuple[Annotated[BackendSpec, BeforeValidator(backend_fields)], ...], BeforeValidator(split_text)]
Place = Annotated[str | None, AfterValidator(place_or_off), BeforeValidator(empty_is_none)]
LiteralPlace = Annotated[str | None, AfterValidator(literal_place), BeforeValidator(empty_is_none)]
Places = tuple[Annotated[str, AfterValidator(place_text)], ...]
Origins = Annotated[tuple[Annotated[str, AfterValidator(origin_text)], ...], BeforeValidator(split_items)]
Networks = Annotated[tuple[Annotated[str, AfterValidator(network)], ...], BeforeValidator(split_items)]
Text = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[\x21-\x7e]+$")]
OptionalLabel = Annotated[Label | None, BeforeValidator(empty_is_none)]
Isolation = Annotated[str, AfterValidator(checked_isolation)]
RuleSettings = Annotated[tuple[str, ...], BeforeValidator(split_text), AfterValidator(rule_settings)]
PolicyName = Annotated[str, AfterValidator(policy_name)]
PolicyNames = tuple[PolicyName, ...]
PolicyOptions = Annotated[tuple[str, ...], BeforeValidator(split_items), AfterValidator(policy_options)]


def key(default: Any, section: str, meaning: str, **limits: Any) -> Any:
    """Declare a key of the node as a whole. The field's name is the key."""
    return option(default, meaning, section=section, **limits)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the closest known name, or nothing."""
    if len(name) > NAME_CHARACTERS_MAX:
        return ""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def jsonable(value: Any) -> Any:
    """Return a value of the configuration as JSON, secrets masked."""
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    return [jsonable(item) for item in value] if isinstance(value, tuple) else value


def shown(value: Any) -> Any:
    """Return a value as `jsonable` does, with no secret in the URLs of its texts."""
    value = jsonable(value)
    if isinstance(value, dict):
        return {name: shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(item) for item in value]
    return without_secrets(value) if isinstance(value, str) and "://" in value else value

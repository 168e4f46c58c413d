"""The model of the configuration: a tree of components' options, plus the options of a whole node.

Each option is declared once, as a field: here, or in the component that owns it (`core/options.py`). An option with a
key is `--listen` on the command line, `RANVIER_LISTEN` in the environment and `listen` in the file. Keys are flat, and
their names include the unit. `config_loader` collects the values and reports what is wrong with them.

Rule: secrets have no flag, because any user of a machine can see command lines. They come from the environment, the
file, or a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_type_hints

from ranvier_py.config.config_values import (
    BACKEND_HELP,
    Address,
    Backends,
    Isolation,
    Label,
    LiteralPlace,
    OptionalLabel,
    OptionalPath,
    Origins,
    Place,
    Places,
    PolicyName,
    PolicyNames,
    PolicyOptions,
    RuleSettings,
    Secret,
    Text,
    jsonable,
    key,
    shown,
)
from ranvier_py.config.discovery_settings import DiscoveryOptions, StateOptions
from ranvier_py.config.model_tables import MODEL_HELP, Models, secrets_of
from ranvier_py.config.port_security import PortSecurity
from ranvier_py.config.trace_options import OtelOptions
from ranvier_py.core.access.limits.shares import LimitOptions
from ranvier_py.core.addresses import OFF
from ranvier_py.core.clients.body_mender import ProofOptions
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexSettings
from ranvier_py.core.engine_cache.sources.engine_polls import PollOptions
from ranvier_py.core.engine_cache.sources.server_events import SourceOptions
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.mesh.mesh import MeshSettings
from ranvier_py.core.options import SECONDS_MAX, Option, Options, options_of, part, seconds
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.response_cache.answer_store import ResponseCacheOptions
from ranvier_py.core.response_cache.redis_answer_options import RedisAnswerOptions
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.health import BackendLimits
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.placement.affinity import AffinityOptions
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.core.routing.processes.ranks import RankOptions
from ranvier_py.core.routing.route_table import RouteTable, RouteTableOptions
from ranvier_py.core.routing.router import Router
from ranvier_py.io.redis_index import RedisOptions
from ranvier_py.proxy.call import PipelineLimits
from ranvier_py.proxy.connection_pool import UpstreamLimits
from ranvier_py.proxy.heads import ServerLimits

SECRETS = (
    "control_key",
    "backend_api_key",
    "cluster_secret",
    "gossip_admin_key",
    "response_cache_redis_url",
    "kv_redis_url",
)
"""Each of these keys has a twin `<key>_file`, which names a file that holds the secret."""

SECTIONS = (
    "Ports",
    "Access",
    "Backends",
    "Models",
    "Tokens",
    "Routing",
    "Clients",
    "Responses",
    "Index",
    "Cluster",
    "Limits",
    "Retries",
    "Logs",
    "Traces",
)
"""Sections of the reference, in this order."""


def default_of(kind: Any, parameter: str) -> Any:
    """Return the default of a component's own parameter, for a key that is passed to it."""
    return signature(kind).parameters[parameter].default


@dataclass(frozen=True, slots=True)
class Config(Options):
    """Everything an operator may set. `config_loader.load` builds it; the constructor reads nothing else."""

    listen: Address = key("0.0.0.0:8080", "Ports", "Address of the public port, HOST:PORT. Port 0 takes any free one.")
    control: Address = key(
        "127.0.0.1:9180",
        "Ports",
        "Address of the control port (health, metrics, admin). An address that others can reach needs a control key. "
        "With several workers, worker i has this port + i.",
    )
    control_key: Secret = key(None, "Ports", "Bearer key of the control port.")
    control_key_file: OptionalPath = key(None, "Ports", "File that holds the control key.")
    metrics_public: bool = key(False, "Ports", "Serve /metrics without the control key.")
    metric_names: Literal["ranvier", "continuum"] = key(
        "ranvier",
        "Ports",
        "continuum: metrics that the document of Continuum Router names have its names, which begin with continuum_, "
        "instead of ranvier_.",
    )
    debug_headers: bool = key(
        False,
        "Ports",
        "Name backend, reason and matched tokens of each answer in x-ranvier- headers. They name hosts, and tell what "
        "others have prompted. Without, who sends the control key as x-ranvier-control-key gets them.",
    )
    tls_certificate_file: OptionalPath = key(None, "Ports", "PEM certificate chain of the public port; turns TLS on.")
    tls_key_file: OptionalPath = key(None, "Ports", "PEM private key that belongs to the certificate.")
    ports: PortSecurity = part(PortSecurity)
    cors_origins: Origins = key((), "Ports", "Origins of pages that may read answers; * is all. Else engines decide.")
    workers: int = key(
        1,
        "Ports",
        "Nodes that share the public port, each a process of its own (SO_REUSEPORT). What is ordered of backends "
        "over the control port of one is done by all, if they gossip, and so is a reload.",
        least=1,
        most=256,
    )

    keys_file: OptionalPath = key(
        None,
        "Access",
        "File of the clients' keys and tenants, TOML or YAML: the public port needs a key, which goes no further. Read "
        "again once it changes, and at each reload: whole, or not at all. ranvier keys makes and checks keys.",
    )
    limit_state_file: OptionalPath = key(None, "Access", "File that keeps what was taken of budgets; worker i adds .i.")
    limits: LimitOptions = part(LimitOptions)

    backend: Backends = key((), "Backends", BACKEND_HELP)
    discovery: DiscoveryOptions = part(DiscoveryOptions)
    upstream_ca_file: OptionalPath = key(
        None, "Backends", "PEM certificates of the authorities that https engines must prove; without, the system's."
    )
    upstream_certificate_file: OptionalPath = key(
        None,
        "Backends",
        "PEM certificate chain by which the node proves itself to https engines that ask. Like all files of TLS it is "
        "read again within seconds once it is replaced.",
    )
    upstream_key_file: OptionalPath = key(None, "Backends", "PEM key of upstream_certificate_file, not encrypted.")
    reload_allow_empty: bool = key(
        False,
        "Backends",
        "Let a reload remove the last backend. Without, a configuration that names none is refused while there are "
        "some: mostly its file is being written. It counts as the new configuration has it.",
    )
    backend_api_key: Secret = key(
        None, "Backends", "Sent as bearer key to backends where the client sends no Authorization, and in probes."
    )
    backend_api_key_file: OptionalPath = key(None, "Backends", "File that holds the backends' API key.")
    kv_events: Literal["auto", "off"] = key(
        "auto",
        "Backends",
        "auto: read what engines publish of their KV caches, so that the router knows what they hold. Needs "
        "ranvier-py[zmq]. off: no engine is asked for its events, and none are read.",
    )
    state: StateOptions = part(StateOptions)
    polls: PollOptions = part(PollOptions)
    ranks: RankOptions = part(RankOptions)
    health: BackendLimits = part(BackendLimits)
    ask_usage: bool = key(
        True,
        "Backends",
        "Ask the engines for token counts in streams, too, and take them out again where the client did not ask: they "
        "show how much of a prompt was really cached. Off: the body of a stream reaches the engine as it came.",
    )
    anthropic_cache_control: bool = key(
        False,
        "Backends",
        "Mark the system prompt of bodies for /v1/messages that have no cache_control there, so that it is cached.",
    )

    model: Models = key((), "Models", MODEL_HELP)

    tokenizer: Text = key(
        "embedded", "Tokens", 'Tokenizer of the engines: a directory, a hub id, or "embedded" for trials.'
    )
    chat_template: OptionalPath = key(None, "Tokens", "File with the chat template, if not the tokenizer's own.")
    block_size_tokens: int = key(
        default_of(TokenHasher, "block_tokens"),
        "Tokens",
        "Unit of cache reuse. Best equal to the engines' block size.",
        least=1,
        most=1024,
    )
    learn_queue_max: int = key(
        1024, "Tokens", "Prompts waiting to be tokenized for learning; more are not learned.", least=1
    )

    policy: PolicyName = key("affinity", "Routing", f"Placement: {', '.join(POLICIES)}.")
    policy_option: PolicyOptions = key((), "Routing", 'Options of policies, as ["cache_threshold=0.5"]. There are:')
    shadow: PolicyNames = key(
        (),
        "Routing",
        "Policies that place the same requests without effect, so that metrics and status can show what they would "
        "have saved. Each costs a route table and about one more placement for each request.",
    )
    load_factor: float = key(
        default_of(AffinityOptions, "divert_factor"),
        "Routing",
        "affinity leaves a chat's best holder if more than this times the median of the others' work, in seconds, is "
        "ahead there, and another would answer sooner. While no speeds are known, requests count, with load_floor.",
        least=1,
        most=1000,
    )
    load_floor: int = key(
        default_of(AffinityOptions, "divert_floor"),
        "Routing",
        "Requests beyond load_factor times the median that affinity accepts at the best holder while no speeds are "
        "known: they delay a first token less than computing the prefix elsewhere.",
    )
    placement_compatibility: Literal["off", "ranvier"] = key(
        "off",
        "Routing",
        "ranvier: affinity to its document's letter: any match, one home, load is requests alone, no load_floor.",
    )
    route_capacity: int = key(
        default_of(RouteTable, "capacity"), "Routing", "Most routes kept; about 250 bytes each.", least=16
    )
    route_ttl_s: float = seconds(
        default_of(RouteTable, "ttl_s"), "A route is forgotten this long after it was last served.", section="Routing"
    )
    routes: RouteTableOptions = part(RouteTableOptions)
    checkpoint_ttl_s: float = seconds(
        default_of(Checkpoints, "ttl_s"),
        "A hybrid model's checkpoint is forgotten this long after the last evidence of it, unless events have it: "
        "engines give them up without a message.",
        section="Routing",
    )
    prompt_memory_entries: int = key(
        default_of(PromptMemory, "entries_max"),
        "Routing",
        "Conversations whose boundaries are remembered, so that only their new text is read.",
        least=16,
    )
    tenant_isolation: Isolation = key(
        OFF,
        "Routing",
        "Whose prompts share nothing with those of others, neither routes nor engine caches: credential, by "
        "Authorization, x-api-key or api-key; header:NAME, by a field that a proxy in front sets. With a keys_file "
        "either is by the tenant of the key, or by that field of a trusted proxy. Engines get a "
        "cache_salt; it stays the same over a restart only with a cluster secret or key. A stored response is its "
        "tenant's alone: one that no node knows of is refused, as is what may lead to one unseen, and all else that "
        "engines keep: files, batches, stored completions, conversations.",
    )
    cluster_secret: Secret = key(
        None,
        "Routing",
        "Keys the fingerprints; at least 16 bytes. Only nodes with the same one share routes. When not set it follows "
        "from cluster_key_file: from its fingerprint line, else from its first key. To change that key and keep what "
        "was learned, first write the old key on a fingerprint line, which stays. With insecure_gossip it follows from "
        "cluster_name. A node alone, or its workers together, make a random one.",
    )
    cluster_secret_file: OptionalPath = key(None, "Routing", "File that holds the cluster secret.")
    recent_decisions: int = key(
        default_of(Router, "recent_max"),
        "Routing",
        "Latest routing decisions that are kept for /admin/decisions.",
        least=1,
    )

    client_rules: RuleSettings = key(
        (),
        "Clients",
        "What rules do to bodies with which clients break their own prefixes: RULE=MODE or "
        "RULE=MODE,client=NAME,model=PATTERN; the last one that fits counts. observe, the default: name the rule "
        "beside the breaks that it would mend. rewrite: change the body before an engine sees it. key: leave out of "
        "fingerprints what engines are known to leave out. off: not even named. Nothing is changed while a hosted "
        "provider may serve the model. The flag repeats; the variable separates by blanks.",
    )
    client_rules_file: OptionalPath = key(
        None, "Clients", "File with rules of your own, which stand beside those that ship, or in place of their names."
    )
    proof: ProofOptions = part(ProofOptions)

    responses: ResponseCacheOptions = part(ResponseCacheOptions)
    response_cache_redis_url: Secret = key(
        None,
        "Responses",
        "Redis or Valkey for response_cache_backend = redis, as kv_redis_url, which stands in for it where it is not "
        "set. Where both are the same, all share its connections. Needs ranvier-py[redis].",
    )
    response_cache_redis_url_file: OptionalPath = key(None, "Responses", "File that holds response_cache_redis_url.")
    redis_answers: RedisAnswerOptions = part(RedisAnswerOptions)

    index: IndexSettings = part(IndexSettings)
    events: SourceOptions = part(SourceOptions)
    kv_index_backend: Literal["memory", "redis"] = key(
        "memory",
        "Index",
        "redis: nodes with the same kv_redis_url share what their event streams say. Each keeps its own index as well, "
        "and goes on with that while Redis is away. Needs ranvier-py[redis].",
    )
    kv_redis_url: Secret = key(
        None,
        "Index",
        "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// for TLS, or unix:///SOCKET. No Redis Cluster. Not set: "
        "response_cache_redis_url.",
    )
    kv_redis_url_file: OptionalPath = key(None, "Index", "File that holds kv_redis_url.")
    redis: RedisOptions = part(RedisOptions)

    gossip: Place = key(
        None,
        "Cluster",
        "Where peers reach this node, HOST or HOST:PORT, over UDP and TCP. Not set: 0.0.0.0:7946 when join, "
        "cluster_key_file or insecure_gossip is, 127.0.0.1:7946 among several workers, else no gossip. off: none at "
        "all. With several workers, worker i has this port + i.",
    )
    advertise: LiteralPlace = key(
        None,
        "Cluster",
        "Address that peers are given, an IP with or without a port, where it is not the one of gossip. For 0.0.0.0 "
        "the one that faces the peers is found out.",
    )
    join: Places = key(
        (),
        "Cluster",
        "Peers to begin with: HOST or HOST:PORT (7946). A name may have many addresses, this node's among them; it is "
        "looked up again for ever. The flag repeats; blanks and commas separate.",
    )
    cluster_key_file: OptionalPath = key(
        None,
        "Cluster",
        "File with the keys of the cluster, at most 4, each on its own line as 64 hex digits or base64. The first one "
        "encrypts, all of them open. Read again when it changes and at SIGHUP.",
    )
    insecure_gossip: bool = key(
        False, "Cluster", "Gossip without a key: whoever reaches the port can read and change routes. For trials."
    )
    cluster_name: Label = key(
        default_of(MeshSettings, "label"),
        "Cluster",
        "Nodes of another cluster's name are not understood, even with the same key.",
    )
    node_name: OptionalLabel = key(
        None,
        "Cluster",
        "Name of this node among its peers, no two the same. The advertised address when not set. With several "
        "workers, -i is added.",
    )
    gossip_profile: Literal["lan", "wan"] = key(
        "lan", "Cluster", "Intervals of probes and of suspicion: lan within a site, wan across sites."
    )
    gossip_udp: bool = key(True, "Cluster", "Probe over UDP. Without, over TCP alone, where UDP is blocked.")
    gossip_bytes_per_s_max: int = key(
        default_of(RouteGossipSettings, "node_bytes_per_s"),
        "Cluster",
        "Most that this node spends on sending its peers what it learned.",
        least=4096,
    )
    gossip_state_file: OptionalPath = key(
        None,
        "Cluster",
        "File that remembers the peers across restarts, at most 64 KiB. With several workers, .i is added.",
    )
    gossip_admin_key: Secret = key(
        None,
        "Cluster",
        "Signs administration between nodes; at least 16 bytes. With it, a backend added on one node is added on all "
        "that have this key. Without, no backend's address is ever taken from a peer.",
    )
    gossip_admin_key_file: OptionalPath = key(None, "Cluster", "File that holds gossip_admin_key.")

    server: ServerLimits = part(ServerLimits)
    upstream: UpstreamLimits = part(UpstreamLimits)
    pipeline: PipelineLimits = part(PipelineLimits)
    drain_timeout_s: float = key(30.0, "Limits", "Time that answers have to finish after SIGTERM.", most=SECONDS_MAX)

    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", "Logs", "Least severe lines that are logged: debug, info, warning or error."
    )
    log_format: Literal["text", "json"] = key("text", "Logs", "text or json: one line for each event.")
    record_file: OptionalPath = key(
        None,
        "Logs",
        "File for a line about each request, which ranvier replay reads: fingerprints, sizes, decision and outcome, "
        "never text. Also --record. With several workers, .i is added.",
    )
    record_bytes_max: int = key(
        64 << 20, "Logs", "When the file has grown to this it becomes FILE.1, and a new one is begun.", least=4096
    )
    record_files_max: int = key(8, "Logs", "Files of one recording that are kept; the oldest goes.", least=1)
    traces: OtelOptions = part(OtelOptions)

    worker_key: bytes | None = field(default=None, repr=False)
    """Cluster key of workers that have no other (see `config_endpoints`). It appears in no file, flag, dump or log."""
    worker_index: int = 0
    siblings_key: bytes | None = field(default=None, repr=False)  # signs what workers of one node order each other

    @property
    def api_key(self) -> str:
        """The API key of the backends; empty if they need none."""
        return self.backend_api_key.get_secret_value() if self.backend_api_key else ""

    def masked(self) -> dict[str, Any]:
        """Return every key with its value as JSON; secrets that are set are "***"."""
        return {name: jsonable(one.value_in(self)) for name, one in KEYS.items()}

    def shown(self) -> dict[str, Any]:
        """Return every key as `masked` does, and the URLs in values without user, password and query."""
        return {name: shown(one.value_in(self)) for name, one in KEYS.items()}

    def secret_values(self) -> list[str]:
        """Return the secrets themselves. Only the log's filter may use them."""
        secrets = (getattr(self, name) for name in SECRETS)
        own = [spec.key.content for spec in self.backend if spec.key is not None]
        return [*(secret.get_secret_value() for secret in secrets if secret is not None), *secrets_of(self.model), *own]


class Key(NamedTuple):
    """One key: the place of its value in a Config, its type, and its option."""

    name: str
    path: tuple[str, ...]  # attributes, from the Config on
    annotation: Any
    option: Option

    def value_in(self, config: Config) -> Any:
        value: Any = config
        for name in self.path:
            value = getattr(value, name)
        return value


def keys_of(kind: type[Any], above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield all keys of a tree of options, in the order of declaration."""
    hints, options = get_type_hints(kind, include_extras=True), options_of(kind)
    for one in fields(kind):
        path = (*above, one.name)
        if one.name in options:
            found = options[one.name]
            section = found.section or (kind.SECTION if found.meaning else "")
            if section:
                name = found.key or kind.PREFIX + one.name
                yield Key(name, path, hints[one.name], found._replace(section=section))
        elif is_dataclass(hints[one.name]):
            yield from keys_of(hints[one.name], path)


KEYS: Mapping[str, Key] = MappingProxyType(
    {one.name: one for one in sorted(keys_of(Config), key=lambda one: SECTIONS.index(one.option.section))}
)
"""All keys by name, in the order of the reference."""


def assembled(values: Mapping[str, Any]) -> Config:
    """Build a Config from values by key. Raises ConfigError, which names keys."""
    config: Config = grown(Config, {KEYS[name].path: value for name, value in values.items()})
    return config


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values for these keys. Raises ConfigError as `assembled` does."""
    whole = {name: one.value_in(config) for name, one in KEYS.items()}
    return assembled({**whole, **values})


def grown(kind: type[Any], found: Mapping[tuple[str, ...], Any], at: tuple[str, ...] = ()) -> Any:
    """Build an Options from values by path, with all below it; `at` is its own path."""
    own = {path[0]: value for path, value in found.items() if len(path) == 1}
    hints = get_type_hints(kind)
    for name in dict.fromkeys(path[0] for path in found if len(path) > 1):
        below = {path[1:]: value for path, value in found.items() if path[0] == name}
        own[name] = grown(hints[name], below, (*at, name))
    try:
        return kind(**own)
    except ConfigError as error:
        raise ConfigError([with_key(at, problem) for problem in error.problems]) from error


def with_key(at: tuple[str, ...], problem: str) -> str:
    """Replace the field name in a component's problem by the key, since other components may have such a field."""
    field_name, colon, message = problem.partition(": ")
    path = (*at, field_name)
    return next((name for name, key in KEYS.items() if key.path == path), field_name) + colon + message

"""The configuration: one model, from which the TOML file, the environment, the flags and the reference follow.

A key is written once, as a field below. `listen` is `--listen` on the command line, `RANVIER_LISTEN` in the environment
and `listen` in the file; the first of these that has it wins, then the default. Keys are flat and carry their unit.

Rules: secrets have no flag, because a command line is public on its machine: they come from the environment, the file,
or a file of their own. `config_loading` finds the values and reports what is wrong with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ranvier_py.config.config_values import (
    Address,
    Backends,
    Count,
    CountOrNone,
    KeyPrefix,
    Label,
    LiteralPlace,
    OptionalLabel,
    OptionalPath,
    Place,
    Places,
    PolicyName,
    PolicyNames,
    PolicyOptions,
    Seconds,
    Secret,
    Statuses,
)
from ranvier_py.core.addresses import host_port
from ranvier_py.core.engine_cache.prefix_index.prefix_index import ENTRIES_MAX, ENTRIES_MIN, TTL_MAX_S, TTL_MIN_S
from ranvier_py.core.gossip.endpoints import (
    ClusterKeys,
    GossipEndpoints,
    gossip_endpoints,
    key_of_their_own,
    of_worker,
    spelled,
)
from ranvier_py.core.routing.placement.policies import POLICIES

ENV_PREFIX = "RANVIER_"
SECRETS = ("control_key", "backend_api_key", "cluster_secret", "gossip_admin_key", "kv_redis_url")
"""Each of these has a twin `<key>_file` that names a file holding it."""


def key(default: Any, section: str, help_text: str) -> Any:
    """A field with what the reference says about it."""
    if isinstance(default, list):
        return Field(
            default_factory=lambda: list(default), description=help_text, json_schema_extra={"section": section}
        )
    return Field(default=default, description=help_text, json_schema_extra={"section": section})


def numbered(file: Path | None, worker: int) -> Path | None:
    """A worker's own file, where all are told one name."""
    return file and file.with_name(f"{file.name}.{worker}")


class Config(BaseSettings):
    """Everything an operator may set. Frozen; `config_loading.load` builds it. The constructor reads nothing else."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True, case_sensitive=False
    )

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
    tls_certificate_file: OptionalPath = key(None, "Ports", "PEM certificate chain of the public port; turns TLS on.")
    tls_key_file: OptionalPath = key(None, "Ports", "PEM private key that belongs to the certificate.")
    workers: Annotated[int, Field(ge=1, le=256)] = key(
        1,
        "Ports",
        "Nodes that share the public port, each a process of its own (SO_REUSEPORT). What is changed over a control "
        "port is changed for that worker alone.",
    )

    backend: Backends = key(
        [],
        "Backends",
        "Engines to route to: URL or URL,weight=2,name=a. The flag repeats; the variable separates by blanks. "
        "More can be added over the control port. Where an engine publishes its KV events is asked of it; for one that "
        "does not say, kv_events=tcp://HOST:5557, kv_replay=tcp://HOST:5558 and kv_ranks=2 do; kv_events=off turns "
        "them off. kv_index=http://HOST/v1/kv_events names an event stream of Continuum's shape.",
    )
    backend_api_key: Secret = key(
        None, "Backends", "Sent as bearer key to backends where the client sends no Authorization, and in probes."
    )
    backend_api_key_file: OptionalPath = key(None, "Backends", "File that holds the backends' API key.")
    kv_events: Literal["auto", "off"] = key(
        "auto",
        "Backends",
        "auto: hear what engines publish of their KV caches, so that the router knows what they hold. Needs "
        "ranvier-py[zmq]. off: no engine is asked or heard.",
    )
    probe_interval_s: Seconds = key(5.0, "Backends", "Time between two health probes of one backend.")
    probe_timeout_s: Seconds = key(3.0, "Backends", "A probe that takes longer has failed.")
    probe_failures: Count = key(3, "Backends", "Failed probes in a row that make a backend unhealthy.")
    probe_successes: Count = key(2, "Backends", "Good probes in a row that make it healthy again.")
    circuit_failures: Count = key(
        5, "Backends", "Failed requests in a row (5xx, no connection; not 429) that open the circuit of a backend."
    )
    circuit_open_s: Seconds = key(30.0, "Backends", "Time an open circuit waits before it lets one request try.")

    ask_usage: bool = key(
        True,
        "Backends",
        "Ask the engines for token counts in streams, too, and take them out again where the client did not ask: they "
        "tell how much of a prompt was really cached. Off: the body of a stream reaches the engine as it came.",
    )

    engine_metrics_interval_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = key(
        5.0,
        "Backends",
        "Time between two looks at the metrics of one engine: size of its cache, hits, queues. It grows where the page "
        "is slow. One node of a cluster looks at each engine. 0: none does.",
    )

    tokenizer: Annotated[str, Field(min_length=1)] = key(
        "embedded", "Tokens", 'Tokenizer of the engines: a directory, a hub id, or "embedded" for trials.'
    )
    chat_template: OptionalPath = key(
        None, "Tokens", "File with the chat template, where the tokenizer's own is not used."
    )
    block_size_tokens: Annotated[int, Field(ge=1, le=1024)] = key(
        16, "Tokens", "Unit of cache reuse. Best equal to the engines' block size."
    )
    tokenize_deadline_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = key(
        0.15, "Tokens", "Longest wait for tokens before placing by load. 0 never waits."
    )
    learn_queue_max: Count = key(1024, "Tokens", "Prompts waiting to be tokenized for learning; more are not learned.")

    policy: PolicyName = key("affinity", "Routing", f"Placement: {', '.join(POLICIES)}.")
    policy_option: PolicyOptions = key([], "Routing", 'Options of policies, as ["cache_threshold=0.5"]. There are:')
    shadow: PolicyNames = key(
        [],
        "Routing",
        "Policies that place the same requests without effect, so that metrics and status can tell what they would "
        "have saved. Each costs a route table and about one more placement for each request.",
    )
    load_factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = key(
        2.0, "Routing", "affinity leaves the best holder when its load is above this times the median."
    )
    load_floor: CountOrNone = key(
        2, "Routing", "... and above the median by this many requests, so that idle ones stay."
    )
    route_capacity: Annotated[int, Field(ge=16)] = key(1_000_000, "Routing", "Most routes kept; about 250 bytes each.")
    route_ttl_s: Seconds = key(3600.0, "Routing", "A route is forgotten this long after it was last served.")
    prompt_memory_entries: Annotated[int, Field(ge=16)] = key(
        65_536, "Routing", "Conversations whose boundaries are remembered, so that only their new text is read."
    )
    kv_index_entries_max: Annotated[int, Field(ge=ENTRIES_MIN, le=ENTRIES_MAX)] = key(
        100_000, "Index", "Pairs of prefix and backend that event streams (kv_index of a backend) may fill."
    )
    kv_index_ttl_s: Annotated[float, Field(ge=TTL_MIN_S, le=TTL_MAX_S, allow_inf_nan=False)] = key(
        600.0, "Index", "An entry is forgotten this long after its last event."
    )
    kv_index_offloading: bool = key(
        False, "Index", "Engines keep what they evict in slower storage: such entries count for less, not for nothing."
    )
    kv_index_eviction_is_offload: bool = key(
        True, "Index", "With kv_index_offloading, an eviction that does not say more is an offload."
    )
    kv_index_reconnect_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = key(
        1.0, "Index", "First wait before a lost event stream is connected again; it doubles up to 60 s."
    )
    kv_index_backend: Literal["memory", "redis"] = key(
        "memory",
        "Index",
        "redis: nodes with the same kv_redis_url share what their event streams say. Each keeps its own index as well, "
        "and goes on with that while Redis is away. Needs ranvier-py[redis].",
    )
    kv_redis_url: Secret = key(
        None,
        "Index",
        "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// for TLS, or unix:///SOCKET. No Redis Cluster.",
    )
    kv_redis_url_file: OptionalPath = key(None, "Index", "File that holds this URL.")
    kv_redis_prefix: KeyPrefix = key("ranvier:kvidx:", "Index", "Begins every key in Redis; all nodes need the same.")
    kv_redis_timeout_s: Seconds = key(1.0, "Index", "A round trip to Redis that takes longer means that it is away.")
    kv_redis_connect_timeout_s: Seconds = key(3.0, "Index", "Longest wait for a connection to Redis.")

    cluster_secret: Secret = key(
        None,
        "Routing",
        "Keys the fingerprints; at least 16 bytes. Only nodes with the same one share routes. When not set it follows "
        "from cluster_key_file: from its fingerprint line, else from its first key. To change that key and keep what "
        "was learned, write the old key on a fingerprint line. With insecure_gossip it follows from cluster_name. "
        "A node alone, or its workers together, make a random one.",
    )
    cluster_secret_file: OptionalPath = key(None, "Routing", "File that holds the cluster secret.")
    recent_decisions: Count = key(256, "Routing", "Decisions kept for /admin/decisions.")

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
        "Address told to peers, an IP with or without a port, where it is not the one of gossip. For 0.0.0.0 the one "
        "that faces the peers is found out.",
    )
    join: Places = key(
        [],
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
        "ranvier", "Cluster", "Nodes of another cluster's name are not understood, even with the same key."
    )
    node_name: OptionalLabel = key(
        None,
        "Cluster",
        "Name of this node among its peers, no two the same. The advertised address when not set. With several "
        "workers, -i is added.",
    )
    gossip_profile: Literal["lan", "wan"] = key(
        "lan", "Cluster", "Pace of probes and of suspicion: lan within a site, wan across sites."
    )
    gossip_udp: bool = key(True, "Cluster", "Probe over UDP. Without, over TCP alone, where UDP is blocked.")
    gossip_bytes_per_s_max: Annotated[int, Field(ge=4096)] = key(
        256 * 1024, "Cluster", "Most that this node spends on telling its peers what it learned."
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
    gossip_admin_key_file: OptionalPath = key(None, "Cluster", "File that holds this key.")

    header_timeout_s: Seconds = key(10.0, "Limits", "A request's header must be complete by then.")
    body_timeout_s: Seconds = key(60.0, "Limits", "... and its body by then.")
    idle_timeout_s: Seconds = key(75.0, "Limits", "A connection without a request is closed after this.")
    connect_timeout_s: Seconds = key(5.0, "Limits", "Longest wait for a connection to a backend.")
    first_byte_timeout_s: Seconds = key(600.0, "Limits", "Longest wait for a backend to begin its answer.")
    stall_timeout_s: Seconds = key(120.0, "Limits", "Longest silence within an answer.")
    send_timeout_s: Seconds = key(30.0, "Limits", "A client that takes no byte for this long is cut off.")
    header_bytes_max: Annotated[int, Field(ge=1024)] = key(65_536, "Limits", "Largest request header: 431 above.")
    body_bytes_max: Annotated[int, Field(ge=1024)] = key(64 * 1024 * 1024, "Limits", "Largest request body: 413 above.")
    connections_max: Count = key(10_000, "Limits", "Client connections at once; 503 above.")
    in_flight_max: Count = key(4096, "Limits", "Requests at once; 503 above.")
    in_flight_bytes_max: Annotated[int, Field(ge=1024)] = key(
        1024**3,
        "Limits",
        "Bodies of all requests at once, each kept until its answer ends; 503 above. At least body_bytes_max. With "
        "several workers, of each.",
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = key(
        30.0, "Limits", "Time that answers have to finish after SIGTERM."
    )

    worker_retries_max: Count = key(
        1, "Retries", "Failed tries at one backend, before the first byte, that move a request on to the next backend."
    )
    total_retries_max: CountOrNone = key(3, "Retries", "Further tries altogether.")
    retry_statuses: Statuses = key([429, 500, 502, 503, 504], "Retries", "Answers that are worth another try.")

    log_level: Literal["debug", "info", "warning", "error"] = key("info", "Logs", "debug, info, warning or error.")
    log_format: Literal["text", "json"] = key("text", "Logs", "text or json: one line for each event.")
    record_file: OptionalPath = key(
        None,
        "Logs",
        "File for a line about each request, which ranvier replay reads: fingerprints, sizes, decision and outcome, "
        "never text. Also --record. With several workers, .i is added.",
    )
    record_bytes_max: Annotated[int, Field(ge=4096)] = key(
        64 * 1024 * 1024, "Logs", "When the file has grown to this it becomes FILE.1, and a new one is begun."
    )
    record_files_max: Count = key(8, "Logs", "Files kept of one recording.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  # the parent calls with these names
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `config_loading` asks the other sources, to know where each value came from."""
        return (init_settings,)

    _worker_key: bytes | None = PrivateAttr(default=None)  # in no file, flag, dump or log

    @property
    def worker_key(self) -> bytes | None:
        """Cluster key of workers that have no other: see `for_worker`."""
        return self._worker_key

    @property
    def gossip_endpoints(self) -> GossipEndpoints | None:
        """Where this node gossips; None when it does not."""
        return gossip_endpoints(self._cluster_keys)

    @property
    def _cluster_keys(self) -> ClusterKeys:
        return ClusterKeys(
            gossip=self.gossip or "",
            advertise=self.advertise or "",
            join=self.join,
            keyed=self.cluster_key_file is not None,
            insecure=self.insecure_gossip,
            workers=self.workers,
            listen=host_port(self.listen),
            control=host_port(self.control),
        )

    def for_worker(self, index: int, key: bytes) -> Self:
        """The configuration of worker `index`: its own ports, its siblings as peers.

        `key` is 32 random bytes that the workers share by being forked from one parent; it serves those whose only
        peers are each other. `workers` stays, it means a shared public port.
        """
        host, port = host_port(self.control)
        update: dict[str, Any] = {"control": spelled((host, port + index if port else 0))}
        places = self.gossip_endpoints
        if places is not None:
            places = of_worker(places, index, self.workers)
            update["gossip"] = spelled(places.listen)
            update["advertise"] = spelled(places.advertise) if places.advertise else None
            update["join"] = [spelled(where) for where in places.join]
            update["node_name"] = self.node_name and f"{self.node_name}-{index}"
            update["gossip_state_file"] = numbered(self.gossip_state_file, index)
        update["record_file"] = numbered(self.record_file, index)
        worker = self.model_copy(update=update)
        worker._worker_key = key if key_of_their_own(self._cluster_keys) else None
        return worker

    def masked(self) -> dict[str, Any]:
        """Every key with its value as JSON has it; secrets that are set are "***"."""
        values = self.model_dump(mode="json")
        return {name: "***" if name in SECRETS and value is not None else value for name, value in values.items()}

    def secret_values(self) -> list[str]:
        """The secrets themselves, for the log's filter and for nothing else."""
        secrets = (getattr(self, name) for name in SECRETS)
        return [secret.get_secret_value() for secret in secrets if secret is not None]

"""Reads where an engine publishes its KV events, from its HTTP answer: one Publisher for each data-parallel rank.

Rule: an engine chooses ports, never hosts: an endpoint (`tcp://HOST:PORT`; a wildcard means the host by which we reach
the engine) that is not on one of its own addresses is refused, or an engine could make us connect anywhere. An
operator's may be anywhere. No answer of an engine raises anything. If one rank can't be read, no rank is: the requests
that it serves would seem to have left nothing behind. Bounds: RANKS_MAX publishers, and lengths of names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import islice
from typing import Any, NamedTuple

from ranvier_py.core.addresses import PORT, PORT_MAX, beside_port, is_address
from ranvier_py.core.prompts.body_json import engine_json

RANKS_MAX = 64
"""Data-parallel ranks of one engine: each is a connection."""

TOPIC_CHARACTERS_MAX = 256  # llm-d's are kv@HOST:PORT@MODEL

OWN = ""
"""Stands for the host by which we reach the engine."""

WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104  # read, not bound


class Endpoint(NamedTuple):
    """Where to connect. The host may be OWN until `at_home` replaces it."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def of(self, host: str) -> Endpoint:
        """Return this endpoint with `host` in place of a wildcard."""
        return self if self.host != OWN else self._replace(host=host)

    def shifted(self, by: int) -> Endpoint | None:
        """Return the endpoint `by` ports further; None if there is no such port."""
        return self._replace(port=self.port + by) if 0 < self.port + by <= PORT_MAX else None


class Publisher(NamedTuple):
    """One event stream. SGLang's LoadStat comes from `load`."""

    rank: int
    events: Endpoint
    replay: Endpoint | None = None
    topic: str = ""
    load: Endpoint | None = None
    load_topic: str = ""


class FoundPublishers(NamedTuple):
    """The ranks in an engine's answer: all of them, or none. `refused` names in our words why some were refused."""

    publishers: tuple[Publisher, ...] = ()
    refused: tuple[str, ...] = ()


NOTHING = FoundPublishers()


def endpoint_of(text: str) -> Endpoint:
    """ "tcp://*:5557" -> its Endpoint. Raises ValueError that says what is wrong."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not colon or not PORT.fullmatch(port):
        raise ValueError("must be tcp://HOST:PORT, or tcp://*:PORT on the backend's own host")
    number = int(port)
    if not 0 < number <= PORT_MAX:
        raise ValueError(f"the port must be 1 to {PORT_MAX}")
    if host.strip("[]") in WILDCARDS:
        return Endpoint(OWN, number)
    plain = beside_port(host)
    return Endpoint(str(ip_address(plain)) if is_address(plain) else plain.lower(), number)


def parse_endpoint(text: object) -> Endpoint | None:
    """Read an endpoint in an engine's answer; None if it is none."""
    try:
        return endpoint_of(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _endpoint(host: object, port: object) -> Endpoint | None:
    if not isinstance(host, str) or type(port) is not int:
        return None
    return parse_endpoint(f"tcp://[{host}]:{port}" if ":" in host and "[" not in host else f"tcp://{host}:{port}")


def of_operator(events: str, replay: str, ranks: int, host: str) -> tuple[Publisher, ...]:
    """Return the publishers that the configuration names. `host` is the engine's, and replaces wildcards."""
    first, answers = parse_endpoint(events), parse_endpoint(replay)
    assert first is not None, "checked where it was written"
    found = []
    for rank in range(ranks):
        where, again = first.shifted(rank), answers.shifted(rank) if answers else None
        if where is not None:
            found.append(Publisher(rank, where.of(host), again.of(host) if again else None))
    return tuple(found)


def at_home(found: FoundPublishers, host: str, addresses: Collection[str]) -> FoundPublishers:
    """Replace wildcards with the engine's host, and refuse everything that is on another one.

    `host` is how we reach the engine; `addresses` are the IP addresses that it resolves to now, as texts.
    """
    kept, refused, is_whole = [], list(found.refused), True
    for publisher in found.publishers:
        events = _home(publisher.events, host, addresses)
        if events is None:
            refused.append(f"rank {publisher.rank}: its events are on another host")
            is_whole = False
            continue
        replay, load = _home(publisher.replay, host, addresses), _home(publisher.load, host, addresses)
        if replay is None and publisher.replay is not None:
            refused.append(f"rank {publisher.rank}: its replay is on another host")
        kept.append(publisher._replace(events=events, replay=replay, load=load))
    return FoundPublishers(tuple(kept) if is_whole else (), tuple(refused))


def _home(where: Endpoint | None, host: str, addresses: Collection[str]) -> Endpoint | None:
    if where is None or (where.host not in (OWN, host.lower()) and where.host not in addresses):
        return None
    return where._replace(host=host)


def read_event_sources(body: bytes) -> FoundPublishers:
    """Read vLLM's GET /kv_event_sources: a map by rank (0.32), a list, or a list under `sources`, by version."""
    reported = _json(body)
    if isinstance(reported, dict) and isinstance(reported.get("sources"), list):
        reported = reported["sources"]
    if not isinstance(reported, dict | list):
        return NOTHING
    by_rank = islice(reported.items() if isinstance(reported, dict) else enumerate(reported), RANKS_MAX + 1)
    entries = [{"data_parallel_rank": rank, **value} for rank, value in by_rank if isinstance(value, dict)]
    if not any(_publishes(entry) for entry in entries):
        return NOTHING
    return _checked([_of_vllm(entry) for entry in entries])


def read_server_info(body: bytes) -> FoundPublishers:
    """Read SGLang's GET /server_info, or /get_server_info of older releases. Rank r is at the base port + r."""
    reported = _json(body)
    if not isinstance(reported, dict):
        return NOTHING
    option = _json(reported.get("kv_events_config"))
    option = option if isinstance(option, dict) else {}
    block = reported.get("kv_events")
    if isinstance(block, dict):
        first = _endpoint(block.get("endpoint_host"), block.get("endpoint_port_base"))
    elif "kv_events" in reported or option.get("publisher") != "zmq":
        return NOTHING
    else:  # releases without the block
        block = {"topic": option.get("topic", ""), "dp_size": reported.get("dp_size")}
        first = parse_endpoint(option.get("endpoint", "tcp://*:5557"))
    return _checked(list(_of_sglang(block, first, parse_endpoint(option.get("replay_endpoint")))))


def reuse_of_server_info(body: bytes) -> bool | None:
    """Return whether SGLang keeps prefixes, by its server info; None if that does not say."""
    reported = _json(body)
    off = reported.get("disable_radix_cache") if isinstance(reported, dict) else None
    return not off if isinstance(off, bool) else None


def _of_vllm(entry: Mapping[str, Any]) -> Publisher | str:
    rank, events = _rank(entry.get("data_parallel_rank")), parse_endpoint(entry.get("endpoint"))
    if rank is None:
        return "a source without a rank"
    if events is None or not _publishes(entry):
        return f"rank {rank}: not a TCP endpoint"
    return Publisher(rank, events, parse_endpoint(entry.get("replay_endpoint")), _topic(entry.get("topic")))


def _of_sglang(block: Mapping[str, Any], first: Endpoint | None, replay: Endpoint | None) -> Iterator[Publisher | str]:
    if block.get("publisher", "zmq") != "zmq" or first is None:
        yield "not a TCP endpoint"
        return
    ranks = _rank(block.get("dp_size")) or 1
    load = _endpoint(first.host or "*", block.get("load_endpoint_port_base"))
    for rank in range(min(ranks, RANKS_MAX + 1)):
        events = first.shifted(rank)
        if events is None:
            yield f"rank {rank}: no such port"
            continue
        yield Publisher(
            rank=rank,
            events=events,
            replay=replay.shifted(rank) if replay else None,
            topic=_topic(block.get("topic")),
            load=load.shifted(rank) if load else None,
            load_topic=_topic(block.get("load_topic")),
        )


def _checked(reported: Sequence[Publisher | str]) -> FoundPublishers:
    """Return each rank once, in order; no rank if one was refused. Ranks that are reported with one port are at port +
    rank, as vLLM places them."""
    refused = [item for item in reported if isinstance(item, str)]
    by_rank: dict[int, Publisher] = {}
    for item in reported[:RANKS_MAX]:
        if isinstance(item, Publisher):
            by_rank.setdefault(item.rank, item)
    if len(reported) > RANKS_MAX:
        refused.append(f"more than {RANKS_MAX} ranks")
    publishers = [by_rank[rank] for rank in sorted(by_rank)]
    if len(publishers) > 1 and len({each.events for each in publishers}) == 1:
        spread = [_spread(each) for each in publishers]
        refused.extend(f"rank {each.rank}: no such port" for each, at in zip(publishers, spread, strict=True) if not at)
        publishers = [each for each in spread if each]
    return FoundPublishers(() if refused else tuple(publishers), tuple(refused))


def _spread(publisher: Publisher) -> Publisher | None:
    events = publisher.events.shifted(publisher.rank)
    replay = publisher.replay.shifted(publisher.rank) if publisher.replay else None
    return publisher._replace(events=events, replay=replay) if events else None


def _publishes(entry: Mapping[str, Any]) -> bool:
    return entry.get("enable_kv_cache_events", True) is not False and entry.get("publisher", "zmq") == "zmq"


def _rank(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 6:
        value = int(value)
    return value if type(value) is int and 0 <= value <= PORT_MAX else None


def _topic(value: object) -> str:
    """Return a topic; an invalid one becomes empty, which receives all topics."""
    return value if isinstance(value, str) and len(value) <= TOPIC_CHARACTERS_MAX else ""


def _json(text: object) -> Any:
    """Parse JSON; None if it is none, or has too many parts."""
    data = text.encode(errors="replace") if isinstance(text, str) else text
    return engine_json(data) if isinstance(data, bytes) else None


class Room(NamedTuple):
    """How much may wait for us in libzmq."""

    messages_max: int
    bytes_max: int


ROOM = Room(64, 128 << 20)
"""More than that waits at the engine, which keeps 100,000 messages for each subscriber."""

REPLAY_ROOM = Room(20_000, 256 << 20)
"""Twice vLLM's replay buffer: an engine drops answers for which there is no room."""


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """How an engine's events are received. All times in seconds."""

    retry_s: float = 0.2  # first pause before another connection
    retry_s_max: float = 5.0  # starting an engine takes longer than that
    steady_s: float = 5.0
    room: Room = ROOM
    replay_room: Room = REPLAY_ROOM
    replay_bytes_max: int = 256 << 20  # of one answer
    replay_silence_s: float = 10.0
    replay_s_max: float = 120.0

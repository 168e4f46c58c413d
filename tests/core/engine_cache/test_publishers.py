from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources.publishers import (
    NOTHING,
    OWN,
    RANKS_MAX,
    Endpoint,
    FoundPublishers,
    Publisher,
    at_home,
    of_operator,
    parse_endpoint,
    read_event_sources,
    read_server_info,
)
from tests.examples import examples

VLLM_032 = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv@127.0.0.1@tiny",
    }
}
"""As vLLM 0.32 answers."""

VLLM_LIST = [
    {"data_parallel_rank": 1, "endpoint": "tcp://0.0.0.0:41002", "replay_endpoint": None, "topic": "kv"},
    {"data_parallel_rank": 0, "endpoint": "tcp://0.0.0.0:41001", "replay_endpoint": "tcp://0.0.0.0:41003", "topic": ""},
]
"""As other revisions of it do, bare or under `sources`."""

SGLANG = {
    "version": "0.5.23",
    "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5561"}',
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 64,
        "dp_size": 2,
        "load_endpoint_port_base": 5559,
        "load_topic": "load",
    },
}
"""What SGLang's /server_info says of its publishers."""


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def home(found: FoundPublishers, host: str = "engine", *addresses: str) -> FoundPublishers:
    return at_home(found, host, addresses)


def test_vllm_reports_each_rank() -> None:
    expected = Publisher(0, Endpoint("engine", 5557), Endpoint("engine", 5558), "kv@127.0.0.1@tiny")
    assert home(read_event_sources(body(VLLM_032))) == FoundPublishers((expected,))


@pytest.mark.parametrize("reported", [VLLM_LIST, {"sources": VLLM_LIST}])
def test_a_list_of_sources_is_read_too(reported: Any) -> None:
    found = home(read_event_sources(body(reported)))
    assert found == FoundPublishers(
        (
            Publisher(0, Endpoint("engine", 41001), Endpoint("engine", 41003)),
            Publisher(1, Endpoint("engine", 41002), None, "kv"),
        )
    )


def test_ranks_that_are_reported_with_one_port_are_at_port_and_rank() -> None:
    """vLLM shows the option it was started with, and binds port + rank."""
    option = VLLM_032["0"]
    found = home(read_event_sources(body({"0": option, "1": option, "3": option})))
    assert [(each.rank, each.events.port, each.replay and each.replay.port) for each in found.publishers] == [
        (0, 5557, 5558),
        (1, 5558, 5559),
        (3, 5560, 5561),
    ]


def test_sglang_reports_a_base_port_and_where_its_load_is() -> None:
    found = home(read_server_info(body(SGLANG)))
    assert found == FoundPublishers(
        (
            Publisher(0, Endpoint("engine", 5557), Endpoint("engine", 5561), "kv", Endpoint("engine", 5559), "load"),
            Publisher(1, Endpoint("engine", 5558), Endpoint("engine", 5562), "kv", Endpoint("engine", 5560), "load"),
        )
    )


def test_an_older_sglang_reports_only_its_option() -> None:
    reported = {"dp_size": 1, "kv_events_config": SGLANG["kv_events_config"]}
    assert home(read_server_info(body(reported))).publishers == (
        Publisher(0, Endpoint("engine", 5557), Endpoint("engine", 5561)),
    )


@pytest.mark.parametrize(
    ("read", "reported"),
    [
        *((read, reported) for read in (read_event_sources, read_server_info) for reported in ({}, [])),
        (read_event_sources, {"sources": []}),
        (read_event_sources, {"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}),
        (read_event_sources, {"0": {"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"}}),
        *((read_server_info, {"kv_events_config": option}) for option in ("{}", None)),
        (read_server_info, {"kv_events": None}),
    ],
)
def test_an_engine_without_events_has_no_publisher(read: Callable[[bytes], FoundPublishers], reported: Any) -> None:
    assert read(body(reported)) == NOTHING


# --- whom to believe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["10.0.0.9", "evil.example", "169.254.169.254", "[::ffff:10.0.0.9]"])
def test_an_engine_can_not_send_us_elsewhere(host: str) -> None:
    reported = read_event_sources(body([{"data_parallel_rank": 0, "endpoint": f"tcp://{host}:5557"}]))
    assert home(reported, "engine", "10.0.0.1") == FoundPublishers((), ("rank 0: its events are on another host",))


def test_an_address_that_the_backends_name_stands_for_is_its_own() -> None:
    """vLLM with port 0 shows the address of its machine."""
    reported = read_event_sources(body([{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:5557"}]))
    assert home(reported, "engine", "10.0.0.1").publishers == (Publisher(0, Endpoint("engine", 5557)),)


def test_a_replay_or_a_load_elsewhere_is_left_out_and_the_events_are_received() -> None:
    elsewhere = Endpoint("10.0.0.9", 1)
    found = home(FoundPublishers((Publisher(0, Endpoint(OWN, 5557), elsewhere, "", elsewhere),)))
    assert found.publishers == (Publisher(0, Endpoint("engine", 5557)),)
    assert found.refused == ("rank 0: its replay is on another host",)


def test_an_operator_may_name_any_host() -> None:
    assert of_operator("tcp://10.0.0.9:5557", "tcp://*:6000", 2, "engine") == (
        Publisher(0, Endpoint("10.0.0.9", 5557), Endpoint("engine", 6000)),
        Publisher(1, Endpoint("10.0.0.9", 5558), Endpoint("engine", 6001)),
    )
    assert len(of_operator("tcp://*:65535", "", 2, "engine")) == 1, "there is no port above"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://*:5557", Endpoint(OWN, 5557)),
        ("tcp://0.0.0.0:1", Endpoint(OWN, 1)),
        ("tcp://[::]:1", Endpoint(OWN, 1)),
        ("tcp://10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
        ("tcp://[FE80::1]:5", Endpoint("fe80::1", 5)),
        ("tcp://Engine-1.svc.cluster.local:5557", Endpoint("engine-1.svc.cluster.local", 5557)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(text: str, found: Endpoint) -> None:
    assert parse_endpoint(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "ipc:///tmp/kv",
        "inproc://kv",
        "tcp://eth0;10.0.0.1:5557",  # libzmq would bind to an interface of ours first
        "tcp://a b:1",
        "tcp://:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://a:１",  # noqa: RUF001
        "tcp://a:-1",
        "tcp://[engine]:1",
        "tcp://fe80::1%eth0:1",
        "tcp://" + "a" * 400 + ":1",
        "http://a:1",
        5557,
        None,
    ],
)
def test_what_is_no_endpoint_is_none(text: object) -> None:
    assert parse_endpoint(text) is None


def test_a_list_without_an_end_is_cut() -> None:
    entries = [{"data_parallel_rank": rank, "endpoint": f"tcp://*:{1000 + rank}"} for rank in range(10_000)]
    assert len(read_event_sources(body(entries[:RANKS_MAX])).publishers) == RANKS_MAX
    many = {**SGLANG, "kv_events": {**SGLANG["kv_events"], "dp_size": 60_000}}  # type: ignore[dict-item]
    for found in (read_event_sources(body(entries)), read_server_info(body(many))):
        assert found == FoundPublishers((), (f"more than {RANKS_MAX} ranks",))


RANK_0 = {"data_parallel_rank": 0, "endpoint": "tcp://*:41001"}


@pytest.mark.parametrize(
    "other",
    [
        {"endpoint": "tcp://10.0.0.2:41003"},
        {"endpoint": "ipc:///tmp/kv"},
        {"endpoint": "tcp://*:41003", "enable_kv_cache_events": False},
        {"endpoint": "tcp://*:41003", "publisher": "null"},
        {"endpoint": "tcp://*:41003", "data_parallel_rank": "one"},
    ],
)
def test_of_an_engine_with_a_rank_that_can_not_be_read_none_is(other: dict[str, Any]) -> None:
    """Its other ranks' requests would be learned, and withdrawn again as what no event has named."""
    found = home(read_event_sources(body([RANK_0, {"data_parallel_rank": 1, **other}])), "engine", "10.0.0.1")
    assert found.publishers == ()
    assert len(found.refused) == 1


def test_a_rank_of_sglang_without_a_port_leaves_none_to_be_read() -> None:
    high = {**SGLANG, "kv_events": {**SGLANG["kv_events"], "endpoint_port_base": 65535}}  # type: ignore[dict-item]
    assert home(read_server_info(body(high))) == FoundPublishers((), ("rank 1: no such port",))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["zmq", "tcp://*:5557", "tcp://*:65535", "*", "{}", '{"publisher": "zmq"}', "\ud800"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("0", "1", "sources", "data_parallel_rank", "endpoint", "replay_endpoint", "topic", "publisher"),
                    *("kv_events", "kv_events_config", "dp_size", "endpoint_host", "endpoint_port_base", "load_topic"),
                    *("load_endpoint_port_base", "enable_kv_cache_events"),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=examples(300))
@given(JSON | st.just(SGLANG))
def test_whatever_an_engine_answers_is_read_or_refused(reported: Any) -> None:
    for read in (read_event_sources, read_server_info):
        found = at_home(read(body(reported)), "engine", ["10.0.0.1"])
        assert len(found.publishers) <= RANKS_MAX
        assert len({each.rank for each in found.publishers}) == len(found.publishers)
        for each in found.publishers:
            for where in (each.events, each.replay, each.load):
                assert where is None or (where.host == "engine" and 0 < where.port < 65536)


@settings(max_examples=examples(200))
@given(st.binary(max_size=60))
def test_bytes_that_are_no_json_report_nothing(data: bytes) -> None:
    read_event_sources(data)
    read_server_info(data)
    assert read_event_sources(b"[" * 100_000) == NOTHING

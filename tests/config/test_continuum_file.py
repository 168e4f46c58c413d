"""Configurations of Continuum Router, as its document writes them. CR1 and so on: docs/sources.md."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from pydantic import SecretStr

from ranvier_py import cli
from ranvier_py.commands import exit_codes
from ranvier_py.config.config_loader import Loaded, load
from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.config.continuum_file import REDIS_TARGETS, SWITCHES, TARGETS
from ranvier_py.config.yaml_file import DEPTH_MAX, FILE_BYTES_MAX
from ranvier_py.core.errors import ConfigError

TIER_1 = """\
prefix_routing:
  enabled: true
  load_factor_epsilon: 0.25
  virtual_nodes: 150
"""
TIER_1_2 = """\
prefix_routing:
  enabled: true

response_cache:
  enabled: true
  backend: memory
  capacity: 5000
  ttl: "10m"
"""
INDEX = """\
kv_cache_index:
  enabled: true
  max_entries: 500000
  entry_ttl_seconds: 900
  scoring:
    overlap_weight: 0.6
    load_weight: 0.3
    health_weight: 0.1
    min_overlap_threshold: 0.25
    gpu_tier_weight: 1.0       # GPU-resident data gets full overlap credit
    storage_tier_weight: 0.6   # Offloaded data is still valuable but discounted
  storage_offloading:
    enabled: true              # Track GPU hot vs. storage warm tiers
    treat_eviction_as_offload: true
  event_sources:
    - backend_name: vllm-1
      endpoint: "http://vllm-1:8000/v1/kv_events"
      reconnect_interval_ms: 5000
    - backend_name: vllm-2
      endpoint: "wss://vllm-2:8000/v1/kv_events"
      reconnect_interval_ms: 5000
"""


def loaded(folder: Path, text: str | bytes, **flags: object) -> Loaded:
    file = folder / "router.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(flags, file)


def problems(folder: Path, text: str | bytes) -> list[str]:
    """Without the file's name, which begins each of them or stands in it."""
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text)
    return [line.replace(str(folder / "router.yaml"), "F") for line in caught.value.problems]


def test_cr34_tier_one_alone_is_the_ring(tmp_path: Path) -> None:
    config, origins, notes = loaded(tmp_path, TIER_1)
    assert config.policy == "chwbl"
    assert config.policy_option == ("load_factor_epsilon=0.25", "virtual_nodes=150")
    assert origins["policy"].endswith("router.yaml:2 prefix_routing.enabled")
    assert not config.responses.enabled
    assert not notes


def test_cr34_tiers_one_and_two_are_the_ring_and_a_response_cache(tmp_path: Path) -> None:
    config = loaded(tmp_path, TIER_1_2).config
    assert config.policy == "chwbl"
    found = config.responses
    assert (found.enabled, found.capacity, found.ttl_s) == (True, 5000, 600.0)


def test_cr34_tier_four_scores_by_an_index_that_event_sources_fill(tmp_path: Path) -> None:
    config, _, notes = loaded(tmp_path, TIER_1.replace("0.25", "0.20") + INDEX)
    assert config.policy == "kv_score"
    assert {"load_factor_epsilon=0.2", "min_overlap_threshold=0.25"} <= set(config.policy_option)
    index = config.index
    assert (index.entries_max, index.ttl_s) == (500_000, 900.0)
    assert (index.offloading, index.eviction_is_offload) == (True, True)
    assert config.events.reconnect_s == 5.0
    assert [(each.label, each.url, each.kv_index) for each in config.backend] == [
        ("vllm-1", "http://vllm-1:8000", "http://vllm-1:8000/v1/kv_events"),
        ("vllm-2", "https://vllm-2:8000", "wss://vllm-2:8000/v1/kv_events"),
    ]
    assert len(notes) == 2, "that no backend is configured is no surprise, and worth a line"
    assert "router.yaml:20: no backend is configured: vllm-1 is taken to be at http://vllm-1:8000" in notes[0]


REDIS = """\
response_cache:
  enabled: true
  backend: redis
  ttl: "30m"
  redis:
    url: "redis://redis-service:6379"
    pool_size: 16
    key_prefix: "cr:resp:"
    fallback_to_memory: true
    fallback_capacity: 2000
"""


def test_cr34_tier_three_keeps_answers_in_redis(tmp_path: Path) -> None:
    config, _, notes = loaded(tmp_path, TIER_1 + REDIS)
    assert (config.responses.backend, config.responses.ttl_s) == ("redis", 1800.0)
    assert url_of(config.response_cache_redis_url) == "redis://redis-service:6379"
    assert config.kv_redis_url is None
    own = config.redis_answers
    assert (own.connections_max, own.key_prefix, own.fallback, own.fallback_capacity) == (16, "cr:resp:", True, 2000)
    assert not notes


def test_cr34_all_tiers_share_one_redis(tmp_path: Path) -> None:
    text = TIER_1 + REDIS + INDEX.replace("enabled: true\n  max", "enabled: true\n  backend: redis\n  max")
    config = loaded(tmp_path, text).config
    assert (config.policy, config.responses.backend, config.kv_index_backend) == ("kv_score", "redis", "redis")
    assert url_of(config.response_cache_redis_url) == url_of(config.kv_redis_url) == "redis://redis-service:6379"
    assert len(config.backend) == 2


def url_of(secret: SecretStr | None) -> str:
    assert secret is not None
    return secret.get_secret_value()


def test_cr12_the_reference_of_tier_three_is_our_defaults_but_for_the_prefix(tmp_path: Path) -> None:
    rest = """
    connect_timeout_ms: 3000
    command_timeout_ms: 1000
    fallback_ttl_seconds: 300
    tls: true
"""
    text = REDIS.replace("16", "8").replace("2000", "1000").rstrip() + rest
    config = loaded(tmp_path, text).config
    assert url_of(config.response_cache_redis_url) == "rediss://redis-service:6379"
    assert replace(config.redis_answers, key_prefix=Config().redis_answers.key_prefix) == Config().redis_answers


def test_an_index_alone_in_redis_takes_what_it_needs_and_a_note_names_the_rest(tmp_path: Path) -> None:
    text = REDIS.replace("backend: redis", "backend: memory") + "    command_timeout_ms: 250\n" + INDEX
    config, _, notes = loaded(tmp_path, text.replace("true\n  max", "true\n  backend: redis\n  max"))
    assert url_of(config.kv_redis_url) == "redis://redis-service:6379"
    assert (config.response_cache_redis_url, config.redis.timeout_s) == (None, 0.25)
    file = tmp_path / "router.yaml"
    assert f"{file}: response_cache.redis.pool_size has no effect: it is for the response cache in Redis" in notes
    assert len([note for note in notes if "has no effect" in note]) == 4


def test_a_redis_that_nobody_uses_is_noted(tmp_path: Path) -> None:
    notes = loaded(tmp_path, REDIS.replace("backend: redis", "backend: memory")).notes
    assert notes == [f"{tmp_path / 'router.yaml'}: response_cache.redis has no effect: no backend is redis"]


def test_the_reference_of_the_document_is_our_defaults(tmp_path: Path) -> None:
    reference = """
prefix_routing: {enabled: true, max_prefix_length: 1024, load_factor_epsilon: 0.25, virtual_nodes: 150,
  anthropic_cache_control_injection: false}
response_cache: {enabled: true, backend: memory, capacity: 1000, ttl: "5m", max_response_size: 1048576,
  max_stream_buffer_size: 10485760}
kv_cache_index: {enabled: true, backend: memory, max_entries: 100000, entry_ttl_seconds: 600,
  scoring: {overlap_weight: 0.6, load_weight: 0.3, health_weight: 0.1, min_overlap_threshold: 0.3,
    gpu_tier_weight: 1.0, storage_tier_weight: 0.6},
  storage_offloading: {enabled: false, treat_eviction_as_offload: true}}
"""
    config, origins, _ = loaded(tmp_path, reference)
    expected = {**Config().masked(), "policy": "kv_score", "response_cache": True}
    assert {**config.masked(), "policy_option": []} == expected
    assert all(f"{name}=" in " ".join(config.policy_option) for name in ("max_prefix_length", "storage_tier_weight"))
    assert len(origins) > 12


def test_cr5_the_injection_of_cache_control_is_turned_on_where_the_document_does(tmp_path: Path) -> None:
    text = TIER_1 + "  anthropic_cache_control_injection: true\n"
    assert loaded(tmp_path, text).config.anthropic_cache_control
    assert not loaded(tmp_path, text.replace("enabled: true", "enabled: false")).config.anthropic_cache_control


def test_every_key_of_the_document_has_its_own_here(tmp_path: Path) -> None:
    """One that names a key of ours that is gone would be found by nobody else."""
    targets = [*TARGETS.values(), *chain.from_iterable(REDIS_TARGETS.values())]
    assert [target.key for target in targets if not target.is_policys and target.key not in KEYS] == []
    for name in SWITCHES:
        assert loaded(tmp_path, f"{name.partition('.')[0]}: {{enabled: false}}").config.policy == "affinity"


def test_our_own_keys_stand_beside_the_documents(tmp_path: Path) -> None:
    text = "listen: 127.0.0.1:0\ngossip: off\nroute_ttl_s: 60\nbackend:\n  - {url: http://a:1, name: vllm-1}\n  - "
    config = loaded(tmp_path, f"{text}http://b:1,name=vllm-2,weight=2\n{INDEX}").config
    assert (config.listen, config.gossip, config.route_ttl_s) == ("127.0.0.1:0", "off", 60.0)
    assert [(each.url, each.weight) for each in config.backend] == [("http://a:1", 1.0), ("http://b:1", 2.0)]
    assert config.backend[1].kv_index == "wss://vllm-2:8000/v1/kv_events"


def test_a_flag_wins_over_the_file_and_its_backends_get_the_event_sources(tmp_path: Path) -> None:
    flags = {"backend": ["http://c:1,name=vllm-2", "http://d:1,name=vllm-1"], "policy": "ttft"}
    config, origins, notes = loaded(tmp_path, TIER_1 + INDEX, **flags)
    assert config.policy == "ttft"
    assert [each.kv_index[:2] for each in config.backend] == ["ws", "ht"]
    assert origins["policy"] == "--policy"
    assert not notes


def test_a_toml_file_is_read_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('policy = "random"')
    assert load({}, file).config.policy == "random"


def test_what_is_not_enabled_has_no_effect_and_a_note_names_it(tmp_path: Path) -> None:
    text = "prefix_routing:\n  virtual_nodes: 7\nresponse_cache:\n  enabled: false\n  capacity: 7\n" + INDEX
    config, _, notes = loaded(tmp_path, text.replace("kv_cache_index:\n  enabled: true", "kv_cache_index:"))
    assert {**config.masked(), "response_cache": False} == Config().masked()
    words = "is not enabled: what stands there has no effect"
    file = tmp_path / "router.yaml"
    assert notes == [f"{file}: {name} {words}" for name in ("prefix_routing", "response_cache", "kv_cache_index")]


def test_an_index_without_prefix_routing_is_placed_by_the_ring_below_its_threshold(tmp_path: Path) -> None:
    config, _, notes = loaded(tmp_path, "kv_cache_index:\n  enabled: true\n")
    assert config.policy == "kv_score"
    assert "without prefix_routing: below the threshold the ring places" in notes[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polcy: ttft", "F:1: polcy: no such key; did you mean policy?"),
        ("prefix_routin: {}", "F:1: prefix_routin: no such key; did you mean prefix_routing?"),
        ("prefix_routing:\n\n  virtual: 3", "F:3: prefix_routing.virtual: no such key; did you mean virtual_nodes?"),
        ("kv_cache_index:\n  scoring: {overlap: 1}", "F:2: kv_cache_index.scoring.overlap: no such key"),
        ("response_cache:\n  reddis: {}", "F:2: response_cache.reddis: no such key; did you mean redis?"),
        ("response_cache: 5", "F:1: response_cache: must be keys with their values"),
        ("prefix_routing: [1]", "F:1: prefix_routing: must be keys with their values"),
        ("prefix_routing: {enabled: 1}", "F:1: prefix_routing.enabled: must be true or false"),
        (
            "prefix_routing: {virtual_nodes: big}",
            "F:1: prefix_routing.virtual_nodes: must be a whole number, 1 to 1000",
        ),
        ("response_cache: {ttl: 300}", "F:1: response_cache.ttl: must be a time with its unit, as 300s or 5m"),
        ("response_cache: {ttl: 5 min}", "F:1: response_cache.ttl: must be a time with its unit, as 300s or 5m"),
        ("response_cache: {ttl: 2d}", "F:1: response_cache.ttl: must be above 0, at most 86400"),
        ("response_cache: {capacity: yes}", "F:1: response_cache.capacity: must be a whole number, at least 1"),
        ("kv_cache_index: {event_sources: 3}", "F:1: kv_cache_index.event_sources: must be a list"),
        (
            "kv_cache_index:\n  event_sources:\n    - backend_nam: b\n      backend_name: a\n      endpoint: http://a",
            "F:3: kv_cache_index.event_sources[0].backend_nam: no such key; did you mean backend_name?",
        ),
        (
            "kv_cache_index:\n  event_sources:\n    - {backend_name: a}",
            "F:3: kv_cache_index.event_sources[0].endpoint: must be a text",
        ),
        (
            "kv_cache_index: {event_sources: [a]}",
            (
                "F:1: kv_cache_index.event_sources[0]: must be keys with their values: "
                "backend_name, endpoint, reconnect_interval_ms"
            ),
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_the_nearest_key(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("response_cache: {enabled: true, backend: redis}", "F:1: response_cache.backend: redis needs"),
        (REDIS.replace("cr:resp:", "cr:*"), "response_cache_redis_prefix: must not hold any of"),
        ("prefix_routing: {load_factor_epsilon: 0.009}", "F:1: prefix_routing.load_factor_epsilon: must be 0.01 to 10"),
        ("prefix_routing: {load_factor_epsilon: 10.1}", "F:1: prefix_routing.load_factor_epsilon: must be 0.01 to 10"),
        (
            "kv_cache_index: {max_entries: 99}",
            "F:1: kv_cache_index.max_entries: must be a whole number, 100 to 10000000",
        ),
        ("kv_cache_index: {entry_ttl_seconds: 0}", "F:1: kv_cache_index.entry_ttl_seconds: must be 1 to 86400"),
        (
            "kv_cache_index: {enabled: true, backend: s3}",
            ("kv_index_backend: must be 'memory' or 'redis' (from F:1 kv_cache_index.backend)"),
        ),
        (
            "kv_cache_index: {enabled: true, scoring: {load_weight: 0.5}}",
            (
                "policy_option: overlap_weight, load_weight, "
                "health_weight: must sum to 1, not 1.2 (from F:1 kv_cache_index.scoring.load_weight)"
            ),
        ),
        (
            "kv_cache_index: {event_sources: [{backend_name: a, endpoint: ftp://a}]}",
            (
                "F:1: kv_cache_index.event_sources[0].endpoint: must be a URL that begins with http:// or https:// or "
                "ws:// or wss://"
            ),
        ),
        (f"backend: ['http://h:1,name=vllm-1']\n{INDEX}", "F:20: vllm-2 is no backend; did you mean vllm-1?"),
    ],
)
def test_cr31_what_is_out_of_range_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text)[0].startswith(expected)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "polcy: x\nworkers: 0\nprefix_routing: {enabled: true, virtual_nodes: 0}\n")
    assert [line.partition(": ")[0] for line in found] == ["F:1", "F:3", "workers"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy: ttft\nprefix_routing: {enabled: true}", "policy is set twice: here, and by F:1"),
        (
            (
                "backend: ['http://h:1,name=a']\nkv_cache_index:\n  enabled: true\n  event_sources:\n"
                "    - {backend_name: a, endpoint: http://a}\n    - {backend_name: a, endpoint: http://b}"
            ),
            "F:6: a has an event source already",
        ),
        (
            (
                "kv_cache_index:\n  enabled: true\n  event_sources:\n    - {backend_name: a, endpoint: http://a, "
                "reconnect_interval_ms: 1}\n    - {backend_name: b, endpoint: http://b, reconnect_interval_ms: 2}"
            ),
            "reconnect_interval_ms must be the same for all of them",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (found,) = problems(tmp_path, text)
    assert expected in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"policy: ttft\npolicy: chwbl", "F:2: policy is written twice, first in line 1"),
        (b"prefix_routing:\n  enabled: true\n  enabled: false", "F:3: enabled is written twice, first in line 2"),
        (b"a: &a [x]\nb: [*a, *a]", "F:2: an alias, *a: write out what it stands for"),
        (b"a: !!python/name:os.system x", "F:1: the tag tag:yaml.org,2002:python/name:os.system is not read"),
        (b"a: !secret x", "F:1: the tag !secret is not read"),
        (b"a: 1\n---\nb: 2", "F:2: a second document begins; one is read"),
        (b"- 1", "F:1: must be keys with their values"),
        (b"? [a]\n: 1", "F:1: a key must be a text"),
        (b"a: [1\nb: 2", "F:2: not YAML: expected ',' or ']', but got ':'"),
        (b"a: b: c", "F:1: not YAML: mapping values are not allowed here"),
        (b"a: \x00", "F: not YAML: it has characters that no text has"),
        ("policy: ttft".encode("utf-16"), "F: is not UTF-8"),
        (b"[" * 20_000, f"F:1: more than {DEPTH_MAX} levels deep"),
        (b"#" * (FILE_BYTES_MAX + 1), f"F: is larger than {FILE_BYTES_MAX} bytes"),
    ],
)
def test_yaml_that_could_mean_more_than_it_shows_is_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    assert problems(tmp_path, text) == [expected]


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """What can't be read, and what has a bad value, wherever it stands."""
    text = """\
policy: [affinity
listen: 127.0.0.1:1
probe_interval_s: -1
backend:
- url: http://a:1
  url: http://b:1
- !secret x
- url: http://c:1
  weight: many
response_cache:
  enabled: true
  ttl: &ttl 5m
  capacity: *ttl
  backend: nowhere
control: "127.0.0.1:2
log_format: xml
"""
    found = problems(tmp_path, text.encode())
    assert [problem.partition(": ")[0] for problem in found[:5]] == ["F:2", "F:6", "F:7", "F:13", "F:17"]
    assert "not YAML" in found[0]
    assert [problem for problem in found[5:] if "backend" in problem], found
    assert any(problem.startswith("probe_interval_s: ") and problem.endswith("(from F:3)") for problem in found)
    assert any("response_cache.backend" in problem for problem in found)


@pytest.mark.parametrize(
    "broken",
    [
        b"policy: [a",
        b"policy: {a: 1",
        b"policy: 'a",
        b'policy: "a',
        b"policy: a: b",
        b"policy: *a",
        b"policy: !a b",
        b"policy: @a",
        b"policy: `a`",
        b"\tpolicy: a",
        b"policy:\n - a\n b: c",
        b"policy:\n  a: 1\n a: 2",
        b"policy: |\n  a\n b",
        b"policy: %",
        b"policy",
        b"policy: a\npolicy: b",
        b"? [policy]\n: 1",
        b"policy: ]",
        b"policy:\n  - {a: 1,\n     b: *x}\n  - c",
    ],
)
def test_what_cannot_be_read_hides_no_other_problem(tmp_path: Path, broken: bytes) -> None:
    """Before it and behind it."""
    found = problems(tmp_path, b"probe_interval_s: -1\n" + broken + b"\nlog_format: xml\n")
    assert any(problem.startswith("probe_interval_s: ") for problem in found), found
    assert any(problem.startswith("log_format: ") for problem in found), found
    assert any(problem.startswith("F:") for problem in found)


def test_an_empty_file_sets_nothing_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert loaded(tmp_path, "# nothing\n").config == Config()
    assert loaded(tmp_path, "\ufeffpolicy: ttft").config.policy == "ttft"
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load({}, tmp_path / "gone.yml")


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1500ms", 1.5), ("1 h", 3600)]
)
def test_times_are_read_as_the_document_writes_them(tmp_path: Path, text: str, expected: float) -> None:
    config = loaded(tmp_path, f"response_cache: {{enabled: true, ttl: '{text}'}}").config
    assert config.responses.ttl_s == expected


def test_a_file_is_printed_as_toml_that_loads_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TIER_1_2 + INDEX + "tokenizer: embedded\ncontrol_key: a-secret-of-somebody\n"
    config = loaded(tmp_path, text).config
    assert cli.main(["config", "--from", str(tmp_path / "router.yaml")]) == exit_codes.EXIT_OK
    printed = capsys.readouterr().out
    assert "a-secret" not in printed
    assert "# control_key is a secret: write it into a file that control_key_file names" in printed
    assert tomllib.loads(printed)["response_cache_capacity"] == 5000
    file = tmp_path / "router.toml"
    file.write_text(printed)
    again, _, notes = load({}, file)
    assert {**again.masked(), "control_key": "***"} == config.masked()
    assert not notes


@pytest.mark.parametrize("url", ["redis://:s3cret@a", "redis://a?password=s3cret", "redis://s3cret@["])
def test_no_address_with_a_secret_is_printed(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f'kv_index_backend: redis\nkv_redis_url: "{url}"\n')
    assert cli.main(["config", "--from", str(file)]) == exit_codes.EXIT_OK
    assert "s3cret" not in capsys.readouterr().out


def test_a_broken_file_is_not_printed_but_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("polcy: ttft\n")
    assert cli.main(["config", "--from", str(file)]) == exit_codes.EXIT_CONFIG
    found = capsys.readouterr()
    assert found.out == ""
    assert "1: polcy: no such key; did you mean policy?" in found.err


def test_notes_are_shown_by_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("prefix_routing:\n  virtual_nodes: 7\n")
    assert cli.main(["config", "--check", "--config", str(file)]) == exit_codes.EXIT_OK
    assert "note: " in capsys.readouterr().out

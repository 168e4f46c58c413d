from __future__ import annotations

import argparse
import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.commands.config_flags import add_config_flags
from ranvier_py.config.config_endpoints import GossipEndpoints, config_of_worker, gossip_endpoints
from ranvier_py.config.config_loader import config_of, load
from ranvier_py.config.config_model import KEYS, SECRETS, Config, assembled
from ranvier_py.config.config_names import variable_of
from ranvier_py.config.config_reference import reference, toml_value, unit_of
from ranvier_py.core.errors import ConfigError

SECRET, OTHER_SECRET = "s3cret-value-of-a-test", "an0ther-value-of-a-test"
KEY = b"thirty-two bytes of a random key"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "ranvier.toml"
    file.write_text(text)
    return file


def problems(flags: dict[str, Any] | None = None, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(flags, file)
    return caught.value.problems


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, 'policy = "random"\nload_factor = 3.0\nload_floor = 7\n')
    monkeypatch.setenv("RANVIER_POLICY", "round_robin")
    monkeypatch.setenv("RANVIER_LOAD_FACTOR", "4")
    config, origins, _ = load({"policy": "least_loaded"}, file)
    assert (config.policy, config.load_factor, config.load_floor) == ("least_loaded", 4.0, 7)
    assert origins == {"policy": "--policy", "load_factor": "RANVIER_LOAD_FACTOR", "load_floor": f"{file}:3"}
    assert config.block_size_tokens == 16


def test_every_key_can_be_set_in_all_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Config().masked()
    for name, value in defaults.items():
        if value is None or isinstance(value, list):
            continue
        spelled = str(value).lower() if isinstance(value, bool) else str(value)
        assert load({name: spelled})[0].masked() == defaults
        assert load(None, written(tmp_path, f"{name} = {toml_value(value)}"))[0].masked() == defaults
        with monkeypatch.context() as patch:
            patch.setenv(variable_of(name), spelled)
            config, origins, _ = load()
            assert config.masked() == defaults
            assert origins == {name: variable_of(name)}


def test_backends_are_written_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [("http://a:1", 1.0, "a:1"), ("http://b:1", 2.5, "big")]
    flags = {"backend": ["http://a:1/", "http://b:1,weight=2.5,name=big"]}
    table = 'backend = ["http://a:1", {url = "http://b:1", weight = 2.5, name = "big"}]'
    assert seen(load(flags)[0]) == expected
    assert seen(load(None, written(tmp_path, table))[0]) == expected
    monkeypatch.setenv("RANVIER_BACKEND", "  http://a:1 http://b:1,name=big,weight=2.5\n")
    assert seen(load()[0]) == expected


def seen(config: Config) -> list[tuple[str, float, str]]:
    return [(spec.url, spec.weight, spec.label) for spec in config.backend]


def test_statuses_may_be_separated_by_commas_or_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_RETRY_STATUSES", "429, 503 504")
    assert load()[0].pipeline.retries.statuses == (429, 503, 504)
    assert load({"retry_statuses": ["500,502", "503"]})[0].pipeline.retries.statuses == (500, 502, 503)


def test_a_variable_names_the_file_unless_a_flag_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_CONFIG", str(written(tmp_path, "workers = 3")))
    assert load()[0].workers == 3
    other = tmp_path / "other.toml"
    other.write_text("workers = 4")
    assert load(None, other)[0].workers == 4


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_WORKERS", "")
    monkeypatch.setenv("RANVIER_CONTROL_KEY", "")
    config, origins, _ = load()
    assert (config.workers, config.control_key, origins) == (1, None, {})


def test_all_problems_are_reported_at_once_each_with_its_key_and_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, 'route_capacity = "many"\nload_facto = 2.0\n')
    monkeypatch.setenv("RANVIER_WORKERS", "0")
    monkeypatch.setenv("RANVIER_LISTN", "0.0.0.0:80")
    found = problems({"backend": ["http://a", "ftp://b"], "control": "0.0.0.0:1", "worker_retries_max": "9"}, file)
    assert found == [
        "RANVIER_LISTN: no such key; did you mean RANVIER_LISTEN? (from the environment)",
        "workers: must be a whole number, 1 to 256 (from RANVIER_WORKERS)",
        "backend[1].url: must be a URL that begins with http:// or https:// (from --backend)",
        f"route_capacity: must be a whole number, at least 16 (from {file}:1)",
        f"load_facto: no such key; did you mean load_factor? (from {file}:2)",
        "control: 0.0.0.0 is reachable from elsewhere: set control_key or control_key_file (from --control)",
        "worker_retries_max: is above total_retries_max (from --worker-retries-max)",
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"listen": "8080"}, "listen: must be HOST:PORT, like 127.0.0.1:8080 or [::1]:8080 (from --listen)"),
        ({"listen": "a:99999"}, "listen: the port must be 0 to 65535 (from --listen)"),
        ({"listen": "::1:80"}, "listen: must be HOST:PORT"),
        ({"policy": "best"}, "policy: must be one of affinity,"),
        ({"load_factor": "nan"}, "load_factor: must be 1 to 1000"),
        ({"stall_timeout_s": "-1"}, "stall_timeout_s: must be above 0, at most 86400"),
        ({"retry_statuses": ["200"]}, "retry_statuses: must be 400 to 599 (from --retry-statuses)"),
        ({"backend": ["http://a,weight"]}, "backend[0]: must be URL or URL,weight=2,name=a"),
        ({"backend": ["http://a,wieght=2"]}, "backend[0].wieght: no such key; did you mean weight?"),
        ({"backend": ["http://a,weight=0"]}, "backend[0].weight: must be greater than 0"),
        (
            {"backend": ["http://a", "http://A/"]},
            "backend[1]: http://a:80 has the URL of an earlier backend (from --backend)",
        ),
        ({"backend": ["http://a,name=x", "http://b,name=x"]}, "backend[1]: x has the name of an earlier backend"),
        ({"backend": [f"http://{'a.' * 64}b"]}, "backend[0]: name is missing, and the URL has more than 128"),
        ({"backend": [f"http://a:{port}" for port in range(1, 4098)]}, "backend: must be at most 4096 backends"),
        ({"record_file": "a\0b"}, "record_file: must be a path, which has no NUL (from --record-file)"),
        ({"tls_key_file": "k.pem"}, "tls_certificate_file: set tls_certificate_file and tls_key_file together"),
        ({"workers": "2", "listen": "127.0.0.1:0"}, "listen: several workers can't share port 0 (from --listen)"),
        ({"workers": "2", "control": "127.0.0.1:65535"}, "control: the last worker's control port is above 65535"),
        ({"body_bytes_max": "2000000000"}, "in_flight_bytes_max: is below body_bytes_max"),
        ({"listen": "127.0.0.1:5", "control": "127.0.0.1:5"}, "control: meets listen, 127.0.0.1:5: each port needs"),
        ({"listen": "0.0.0.0:5", "control": "127.0.0.1:5"}, "control: meets listen, 0.0.0.0:5: each port needs"),
        (
            {"workers": "4", "listen": "[::]:8", "control": "[::1]:5"},
            "control: meets listen, [::]:8: each port needs",
        ),
    ],
)
def test_what_can_not_work_is_refused_with_the_reason(flags: dict[str, Any], problem: str) -> None:
    (found,) = problems(flags)
    assert found.startswith(problem)


def test_a_file_that_is_missing_or_no_toml_is_one_problem_among_the_others(tmp_path: Path) -> None:
    missing, found = problems({"workers": "0"}, tmp_path / "none.toml")
    assert missing == f"{tmp_path / 'none.toml'}: can't be read: No such file or directory"
    assert found.startswith("workers: ")
    assert "not TOML" in problems({}, written(tmp_path, "listen ="))[0]
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not TOML" in problems({}, tmp_path / "bytes.toml")[0]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name, text in (("a.toml", "workers = 2\r\n"), ("a.yaml", "workers: 2\r\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load({}, tmp_path / name)[0].workers == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("workers = true", "workers: must be a whole number, 1 to 256"),
        ("workers = 2.0", "workers: must be a whole number, 1 to 256"),
        ("workers = '2'", "workers: must be a whole number, 1 to 256"),
        ("probe_interval_s = true", "probe_interval_s: must be above 0, at most 86400"),
        ("debug_headers = 1", "debug_headers: must be true or false"),
        ("debug_headers = 'yes'", "debug_headers: must be true or false"),
        ("backend = [{url = 'http://a:1', weight = true}]", "backend[0]: weight must be a number"),
        ("backend = [{url = 'http://a:1', hosted = 1}]", "backend[0]: hosted must be true or false"),
    ],
)
@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_a_number_or_a_switch_in_a_file_is_no_other_and_no_text(
    line: str, problem: str, form: str, tmp_path: Path
) -> None:
    file = tmp_path / f"ranvier.{form}"
    file.write_text(line if form == "toml" else re.sub(" ?= ?", ": ", line))
    (found,) = problems(file=file)
    assert found.startswith(problem)


def test_variables_that_kubernetes_sets_for_a_service_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service named «ranvier» puts these into each pod of its namespace, our own included."""
    for name, value in {
        "RANVIER_SERVICE_HOST": "10.0.0.1",
        "RANVIER_SERVICE_PORT": "8080",
        "RANVIER_SERVICE_PORT_HTTP": "8080",
        "RANVIER_PORT": "tcp://10.0.0.1:8080",
        "RANVIER_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "RANVIER_PORT_8080_TCP_ADDR": "10.0.0.1",
        "RANVIER_CONTROL_SERVICE_HOST": "10.0.0.2",
        "RANVIER_CONTROL_PORT": "tcp://10.0.0.2:9180",
    }.items():
        monkeypatch.setenv(name, value)
    assert load()[1] == {}
    monkeypatch.setenv("RANVIER_PORT", "8080")
    assert problems()[0].startswith("RANVIER_PORT: no such key")


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_comes_from_its_file_and_is_never_shown(name: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    config, *_ = load({f"{name}_file": str(path)})
    assert getattr(config, name).get_secret_value() == SECRET
    assert config.secret_values() == [SECRET]
    assert config.masked()[name] == "***"
    for text in (repr(config), str(config), str(config.masked()), f"{config!r:s}"):
        assert SECRET not in text


def test_no_problem_shows_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n{SECRET}\n")
    file = written(tmp_path, f'control_key = ["{SECRET}"]\ncluster_secret = 5\n')
    monkeypatch.setenv("RANVIER_CLUSTER_SECRET", SECRET[:8])
    flags = {"backend_api_key_file": str(path), "backend": [f"http://user:{SECRET}@a", f"{SECRET}://b"]}
    found = problems(flags, file)
    assert len(found) == 5
    assert not any(SECRET in line or SECRET[:8] in line.replace(str(path), "") for line in found)


SOURCES = ("flag", "variable", "file")
"""Of a key, highest rank first."""


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(("direct", "by_file"), list(product(SOURCES[1:], SOURCES)))
def test_of_a_secret_and_its_file_the_source_of_higher_rank_counts(
    name: str, direct: str, by_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tools' help recommends to set in a shell must not keep a node with a file of keys from starting."""
    path, twin, lines, flags = tmp_path / "secret", f"{name}_file", [], {}
    path.write_text(SECRET)
    for key, value, source in ((name, OTHER_SECRET, direct), (twin, str(path), by_file)):
        if source == "flag":
            flags[key] = value
        elif source == "variable":
            monkeypatch.setenv(variable_of(key), value)
        else:
            lines.append(f"{key} = {toml_value(value)}")
    file = written(tmp_path, "\n".join(lines))
    if direct == by_file:
        (found,) = problems(flags, file)
        place = variable_of(name) if direct == "variable" else str(file)
        assert (twin in found, place in found, "set one of them" in found) == (True, True, True)
        return
    config, origins, notes = load(flags, file)
    is_direct = SOURCES.index(direct) < SOURCES.index(by_file)
    used, unused = (name, twin) if is_direct else (twin, name)
    assert config.secret_values() == [OTHER_SECRET if is_direct else SECRET]
    assert list(origins) == [used]
    assert getattr(config, twin) == (None if is_direct else path)
    (note,) = notes
    assert note.startswith(f"{unused} (from ")
    assert note.endswith(f"is not used: {origins[used]} is set")


def test_the_file_of_a_secret_that_does_not_count_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL_KEY", SECRET)
    file = written(tmp_path, f'control_key_file = "{tmp_path}/none"')
    assert load({}, file)[0].secret_values() == [SECRET]
    monkeypatch.setenv("RANVIER_CONTROL_KEY", " ")  # nothing, so that the file counts
    assert problems({}, file) == [
        f"control_key_file: {tmp_path}/none can't be read: No such file or directory (from {file}:1)"
    ]


def test_a_problem_of_a_secret_names_where_its_file_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short").write_text("short")
    monkeypatch.setenv("RANVIER_CLUSTER_SECRET_FILE", str(tmp_path / "short"))
    assert problems() == ["cluster_secret: must be at least 16 bytes long (from RANVIER_CLUSTER_SECRET_FILE)"]


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"a\0b", b"\xff\xfe\xfd", b"x" * 5000])
def test_a_secret_file_holds_one_line_of_text(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    (found,) = problems({"control_key_file": str(path)})
    assert found.startswith(f"control_key_file: {path} ")


def test_problems_are_reported_in_words_of_an_operator(tmp_path: Path) -> None:
    file = written(tmp_path, 'tokenizer = ""\nrecord_file = 3\nworkers = 1.5\nlisten = 8080\nbackend = 3\n')
    reported = problems({}, file)
    assert len(reported) == 5
    assert not any(word in line for line in reported for word in ("Input", "String", "class", "pathlib"))


def test_a_secret_of_a_variable_or_the_file_is_one_line_of_text_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that was filled from a file ends with its line end, which no header could carry."""
    monkeypatch.setenv("RANVIER_CONTROL_KEY", f" {SECRET}\n")
    assert load()[0].secret_values() == [SECRET]
    monkeypatch.setenv("RANVIER_CONTROL_KEY", f"{SECRET}\n{SECRET}")
    assert problems({}) == ["control_key: must be one line of text (from RANVIER_CONTROL_KEY)"]
    monkeypatch.delenv("RANVIER_CONTROL_KEY")
    assert problems({}, written(tmp_path, 'backend_api_key = "a\\u0000b"')) == [
        f"backend_api_key: must be one line of text (from {tmp_path / 'ranvier.toml'}:1)"
    ]


def test_a_reachable_control_port_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    for control in ("0.0.0.0:9180", "[::]:9180", "10.0.0.1:9180", "example.org:9180"):
        assert "reachable from elsewhere" in problems({"control": control})[0]
        assert load({"control": control, "control_key_file": str(path)})[0].control == control
    for control in ("127.0.0.1:9180", "[::1]:9180", "localhost:9180", "127.0.0.2:0"):
        assert load({"control": control})[0].control == control


@pytest.mark.parametrize("spelled", ["127.0.0.1:9999", "http://127.0.0.1:9999", "https://127.0.0.1:9999/"])
def test_the_variable_with_the_port_that_all_commands_ask_may_be_a_url(
    spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL", spelled)
    assert load()[0].control == "127.0.0.1:9999"


def test_the_reference_has_every_key_with_its_help_and_loads_to_the_defaults(tmp_path: Path) -> None:
    text = reference()
    assert list(tomllib.loads(text)) == list(KEYS)
    config, origins, _ = load(None, written(tmp_path, text))
    assert config == Config()
    assert set(origins) == set(KEYS)
    for key in KEYS.values():
        assert key.option.meaning.split()[0] in text


def test_every_key_that_is_a_time_or_a_size_carries_its_unit() -> None:
    """A number without a unit is a guess."""
    assert unit_of("stall_timeout_s") == "seconds"
    assert unit_of("body_bytes_max") == "bytes"
    assert unit_of("block_size_tokens") == "tokens"
    assert unit_of("gossip_bytes_per_s_max") == "bytes per second"
    for name in KEYS:
        if any(word in name for word in ("timeout", "interval", "deadline", "ttl", "size", "bytes")):
            assert unit_of(name), name


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc"))))
def test_texts_survive_toml(text: str) -> None:
    assert tomllib.loads(f"key = {toml_value(text)}") == {"key": text}


@pytest.mark.parametrize("control", ["127.0.0.1:4", "[::1]:8", "127.0.0.1:9"])
def test_a_control_port_may_be_beside_the_public_one(control: str) -> None:
    assert load({"workers": "4", "listen": "0.0.0.0:8", "control": control})[0].control == control


def test_each_worker_has_its_own_control_port() -> None:
    config = Config(control="[::1]:9180", workers=3)
    assert [config_of_worker(config, index, KEY).control for index in range(3)] == [
        "[::1]:9180",
        "[::1]:9181",
        "[::1]:9182",
    ]
    assert config_of_worker(Config(control="127.0.0.1:0"), 2, KEY).control == "127.0.0.1:0"


def test_workers_alone_are_peers_with_a_key_that_nothing_shows() -> None:
    workers = [config_of_worker(Config(workers=3), index, KEY) for index in range(3)]
    assert [worker.worker_key for worker in workers] == [KEY] * 3
    assert [worker.gossip for worker in workers] == ["127.0.0.1:7946", "127.0.0.1:7947", "127.0.0.1:7948"]
    assert workers[1].join == ("127.0.0.1:7946", "127.0.0.1:7948")
    assert gossip_endpoints(workers[1]) == GossipEndpoints(
        ("127.0.0.1", 7947), ("127.0.0.1", 7947), (("127.0.0.1", 7946), ("127.0.0.1", 7948))
    )
    for text in (repr(workers[0]), str(workers[0].masked())):
        assert repr(KEY)[2:-1] not in text
        assert KEY.hex() not in text


def test_workers_of_a_cluster_use_its_key_and_have_names_and_files_of_their_own(tmp_path: Path) -> None:
    flags = {
        "workers": "2",
        "gossip": "[::]",
        "advertise": "10.0.0.1",
        "join": ["router.example,10.0.0.2:9"],
        "cluster_key_file": str(tmp_path / "key"),
        "node_name": "a",
        "gossip_state_file": str(tmp_path / "state"),
    }
    worker = config_of_worker(load(flags)[0], 1, KEY)
    assert worker.worker_key is None
    assert (worker.gossip, worker.advertise, worker.node_name) == ("[::]:7947", "10.0.0.1:7947", "a-1")
    assert worker.join == ("router.example:7946", "10.0.0.2:9", "[::1]:7946")
    assert worker.gossip_state_file == tmp_path / "state.1"


def test_the_peers_of_a_worker_can_be_switched_off() -> None:
    worker = config_of_worker(Config(workers=2, gossip="off"), 1, KEY)
    assert (gossip_endpoints(worker), worker.worker_key, worker.join) == (None, None, ())


def test_peers_are_written_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_INSECURE_GOSSIP", "true")
    expected = ("a", "b:1", "::1")
    assert load({"join": ["a", "b:1,::1"]})[0].join == expected
    assert load(None, written(tmp_path, 'join = ["a", "b:1", "::1"]'))[0].join == expected
    monkeypatch.setenv("RANVIER_JOIN", " a, b:1\n::1")
    assert load()[0].join == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"join": ["a"]}, "join: peers need a cluster_key_file"),
        ({"join": ["a:b"]}, "join[0]: must be HOST:PORT"),
        ({"join": ["peers", "a..b"]}, "join[1]: the host must have no empty label"),
        ({"gossip": "10.0.0.1:70000"}, "gossip: the port must be 0 to 65535 (from --gossip)"),
        ({"advertise": "router.example"}, "advertise: must be an IP address, with or without a port"),
        ({"node_name": "two words"}, "node_name: "),
        ({"cluster_name": ""}, "cluster_name: "),
        ({"gossip_profile": "moon"}, "gossip_profile: must be 'lan' or 'wan'"),
        ({"gossip_bytes_per_s_max": "10"}, "gossip_bytes_per_s_max: must be a whole number, at least 4096"),
    ],
)
def test_a_cluster_that_can_not_work_is_refused(flags: dict[str, Any], problem: str) -> None:
    (found,) = problems(flags)
    assert found.startswith(problem)


def test_the_admin_key_of_gossip_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_GOSSIP_ADMIN_KEY", "short")
    assert problems() == ["gossip_admin_key: must be at least 16 bytes long (from RANVIER_GOSSIP_ADMIN_KEY)"]


def test_a_backend_may_name_where_its_kv_events_are(tmp_path: Path) -> None:
    flag = "http://a:1,kv_events=tcp://*:5557,kv_replay=tcp://10.0.0.1:5558,kv_ranks=2"
    table = 'backend = [{url = "http://a:1", kv_events = "off"}, "http://b:1"]'
    reported = load({"backend": [flag]})[0].backend[0]
    assert (reported.kv_events, reported.kv_replay, reported.kv_ranks) == ("tcp://*:5557", "tcp://10.0.0.1:5558", 2)
    off, asked = load(None, written(tmp_path, table))[0].backend
    assert (off.kv_events, asked.kv_events) == ("off", "")
    assert "kv_events" in off.model_dump()
    assert "kv_events" not in asked.model_dump(), "shown where it is set"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("kv_events=http://a:1", "backend[0].kv_events: must be tcp://HOST:PORT"),
        ("kv_events=tcp://eth0;a:1", "backend[0].kv_events: a label of the host must be letters"),
        ("kv_replay=tcp://a..b:1,kv_events=tcp://*:1", "backend[0].kv_replay: the host must have no empty label"),
        ("kv_events=tcp://10.0.0.256:1", "backend[0].kv_events: the host must be a name or an IP address"),
        ("kv_index=ws://a..b:1/events", "backend[0].kv_index: the host must have no empty label"),
        ("kv_index=http://a:0", "backend[0].kv_index: the port must be 1 to 65535"),
        ("kv_events=tcp://a:1,kv_replay=off", "backend[0].kv_replay: must be tcp://HOST:PORT"),
        ("kv_replay=tcp://a:1", "backend[0]: kv_replay and kv_ranks need kv_events"),
        ("kv_events=off,kv_ranks=2", "backend[0]: kv_replay and kv_ranks need kv_events"),
        ("kv_events=tcp://a:1,kv_ranks=65", "backend[0].kv_ranks: must be less than or equal to 64"),
    ],
)
def test_where_kv_events_can_not_be_is_refused(options: str, problem: str) -> None:
    found = problems({"backend": [f"http://a:1,{options}"]})
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_policies_and_their_options_are_checked_by_name() -> None:
    config, *_ = load({"policy": "cache_aware", "policy_option": ["cache_threshold=0.5"], "shadow": "ttft,chwbl"})
    assert (config.policy, config.shadow) == ("cache_aware", ("ttft", "chwbl"))
    with pytest.raises(ConfigError) as caught:
        load({"policy": "best", "policy_option": ["cache_threshold"], "shadow": ["ttft", "worse"]})
    problems = "\n".join(caught.value.problems)
    assert "policy: must be one of affinity, ttft, " in problems
    assert "policy_option: expected NAME=VALUE, not 'cache_threshold'" in problems
    assert "shadow[1]: must be one of " in problems
    with pytest.raises(ConfigError, match="cache_treshold: no policy has this option"):
        load({"policy_option": ["cache_treshold=0.5"]})


SHARED = {key.path[-1] for key in KEYS.values() if sum(key.path[-1] == other.path[-1] for other in KEYS.values()) > 1}


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.path[-1] in SHARED and name != "backend"])
def test_what_a_component_refuses_is_named_by_its_own_key_though_others_have_such_a_field(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assembled({name: -1})
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [name]


@pytest.mark.parametrize("name", ["first_byte_timeout_s", "first_event_timeout_s"])
def test_a_key_is_read_by_the_name_that_it_had_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_event_s(flags: dict[str, Any] | None = None, file: Path | None = None) -> float:
        config, origins, _ = load(flags, file)
        assert set(origins) == {"first_event_timeout_s"}
        return config.pipeline.first_event_s

    toml, yaml = written(tmp_path, f"{name} = 7"), tmp_path / "a.yaml"
    yaml.write_text(f"{name}: 7\n")
    assert [first_event_s(file=file) for file in (toml, yaml)] == [7.0, 7.0]
    monkeypatch.setenv(f"RANVIER_{name.upper()}", "8")
    assert first_event_s(file=toml) == 8.0
    assert config_of(**{name: 9}).pipeline.first_event_s == 9.0
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    flags = vars(parser.parse_args([f"--{name.replace('_', '-')}", "6"]))
    assert first_event_s({key: value for key, value in flags.items() if value is not None}) == 6.0


def test_of_two_names_of_a_key_in_one_place_the_new_one_counts(tmp_path: Path) -> None:
    lines = ["first_byte_timeout_s = 7", "first_event_timeout_s = 8"]
    for text in ("\n".join(lines), "\n".join(reversed(lines))):
        assert load({}, written(tmp_path, text))[0].pipeline.first_event_s == 8.0
    found = problems({}, written(tmp_path, "first_byte_timeout_s = -1"))
    assert found == [f"first_event_timeout_s: must be above 0, at most 86400 (from {tmp_path / 'ranvier.toml'}:1)"]


@pytest.mark.parametrize("key", ["route_capacity", "recent_decisions", "learn_queue_max", "response_cache_bytes_max"])
def test_a_number_is_no_greater_than_any_counter_holds(key: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"{key} = {2**53 + 1}\n")
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    assert [problem.endswith(f", at most {2**53} (from {file}:1)") for problem in caught.value.problems] == [True]

"""Files of backends: ours and SMG's manifest, whole or not at all, with the line of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.config.backend_files import BackendFile, read_backend_file
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.wanted.found_backend import EngineKey
from tests.examples import examples

TOML = """
[[backend]]
url = "http://10.0.0.1:8000"
weight = 2

[[backend]]
url = "https://engine.test"
name = "two"
tls_name = "other.test"
any_model = true
"""

YAML = """
backend:
- url: http://10.0.0.1:8000
  weight: 2
- {url: https://engine.test, name: two, tls_name: other.test, any_model: true}
"""

MANIFEST = """{
  "version": 1,
  "workers": [
    {"id": "w0", "url": "http://10.0.0.1:8000"},
    {"id": "w1", "url": "http://10.0.0.2:8000/", "worker_type": "regular", "kv_connector": "nixl"},
    {"id": "p0", "url": "http://10.0.0.3:8000", "worker_type": "prefill", "bootstrap_port": 8998},
    {"id": "g0", "url": "grpc://10.0.0.4:8000"},
    {"id": "w2", "url": "http://10.0.0.5:8000", "priority": 3}
  ]
}"""


def read(folder: Path, text: str, suffix: str = ".toml") -> BackendFile:
    path = folder / f"backends{suffix}"
    path.write_text(text)
    return read_backend_file(path)


def found(file: BackendFile) -> list[dict[str, Any]]:
    return [each.spec.model_dump() for each in file.found]


@pytest.mark.parametrize(("text", "suffix"), [(TOML, ".toml"), (YAML, ".yaml"), (YAML, ".yml")])
def test_our_form_has_every_option_of_a_backend(tmp_path: Path, text: str, suffix: str) -> None:
    assert found(read(tmp_path, text, suffix)) == [
        {"url": "http://10.0.0.1:8000", "weight": 2.0, "name": ""},
        {
            "url": "https://engine.test:443",
            "weight": 1.0,
            "name": "two",
            "any_model": True,
            "tls_name": "other.test",
        },
    ]


def test_a_backend_may_be_one_text_and_a_list_may_be_empty(tmp_path: Path) -> None:
    assert found(read(tmp_path, 'backend = ["http://a:1,weight=3,hosted=yes"]')) == [
        {"url": "http://a:1", "weight": 3.0, "name": "", "hosted": True}
    ]
    assert read(tmp_path, "backend = []") == BackendFile([])


def test_a_manifest_of_smg_is_read_as_it_is_and_what_can_not_be_used_is_named(tmp_path: Path) -> None:
    file = read(tmp_path, MANIFEST, ".json")
    assert [(each.spec.name, each.url) for each in file.found] == [
        ("w0", "http://10.0.0.1:8000"),
        ("w1", "http://10.0.0.2:8000"),
        ("w2", "http://10.0.0.5:8000"),
    ]
    assert dict(file.found[1].about) == {"worker_type": "regular", "kv_connector": "nixl"}
    assert [sentence.partition(":")[0] for sentence in file.left_out] == [
        "workers[2] p0",
        "workers[3] g0",
        "workers[4]",
    ]
    assert "prefill half" in file.left_out[0]


def test_a_key_of_an_engine_is_read_from_its_file_and_a_manifest_has_none(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(" the-engines-own\n")
    entry = f"[[backend]]\nurl = 'http://a:1'\napi_key_file = '{key}'\n"
    (one,) = read(tmp_path, entry).found
    assert one.key == EngineKey(str(key), "the-engines-own")
    assert one.spec.model_dump() == {"url": "http://a:1", "weight": 1.0, "name": ""}
    key.write_text("")
    with pytest.raises(ConfigError, match=r":3: backend\[0\]\.api_key_file: .* must hold one line of text"):
        read(tmp_path, entry)
    with pytest.raises(ConfigError, match="did you mean api_key_file") as refused:
        read(tmp_path, "[[backend]]\nurl = 'http://a:1'\napi_key = 'plain-secret'\n")
    assert "plain-secret" not in str(refused.value)
    workers = {"version": 1, "workers": [{"id": "w", "url": "http://a:1", "api_key": "x", "api_key_file": str(key)}]}
    file = read(tmp_path, json.dumps(workers), ".json")
    assert file.found[0].key is None
    assert file.left_out == ["workers[0]: api_key, api_key_file not known, ignored"]


@pytest.mark.parametrize(
    ("text", "suffix", "problems"),
    [
        ("", ".toml", ["has no list of backends: is it being written?"]),
        ("[[backend]]\nurl = 'http://a:1'\nweigth = 2\n", ".toml", [":3: backend[0].weigth: no such key"]),
        (
            "[[backend]]\nurl = 'http://a:1'\n\n[[backend]]\nurl = 'a:1'\n",
            ".toml",
            [":5: backend[1].url: must be a URL"],
        ),
        ("[[backend]]\nurl = 'http://a:1'\n[[backend]]\nurl = 'http://a:1/'\n", ".toml", ["http://a:1 is the url of"]),
        ("[[backend]]\nurl = 'http://a:1'\nweight = -1\n[[backend]\n", ".toml", [":4: not TOML"]),
        ("backend = [3]", ".toml", [":1: backend[0]: must be a table"]),
        ("backend = []\nlisten = '0.0.0.0:1'", ".toml", [":2: listen: no such key"]),
        ("backend:\n- url: http://a:1\n- url: [\n", ".yaml", [":"]),
        ("backend:\n- url: http://a:1\n  weight: heavy\n", ".yaml", [":3: backend[0].weight"]),
        ('{"version": 1,\n"workers": [\n{"id": "a"}]}', ".json", [":3: workers[0]: url must be a text"]),
        ('{"version": 1,\n"workers": [\n{"id": "a", "url": "x"}\n]}', ".json", [":3: workers[0].url"]),
        ('{"version": 2, "workers": []}', ".json", ["version must be 1"]),
        ('{"version": 1}', ".json", ["has no list of workers"]),
        ('{"version": 1,\n"workers": [', ".json", [":2: not JSON"]),
        ('{"version": 1, "version": 1, "workers": []}', ".json", ["twice"]),
        ('{"version": 1, "workers": [{"id": "a", "url": "http://a", "worker_type": "odd"}]}', ".json", ["worker_type"]),
        ("[" * 100_000, ".json", ["not JSON"]),
    ],
)
def test_a_file_with_an_error_is_refused_and_the_line_is_named(
    tmp_path: Path, text: str, suffix: str, problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text, suffix)
    for problem in problems:
        assert problem in str(refused.value)


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@settings(max_examples=examples(100), deadline=None)
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_whatever_a_file_has_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("files") / f"file{suffix}"
    path.write_bytes(content)
    try:
        read_backend_file(path)
    except ConfigError as refused:
        named = str(refused)
    else:
        named = str(path)
    assert str(path) in named


@settings(max_examples=examples(100), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "url", "x"]), inner),
    )
)
def test_whatever_a_worker_is_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, worker: object) -> None:
    path = tmp_path_factory.mktemp("files") / "file.json"
    path.write_text(json.dumps({"version": 1, "workers": [worker]}))
    with pytest.raises(ConfigError):
        read_backend_file(path)

"""A node reads its file of keys when it starts and whenever it changes: whole or not at all, beside its requests."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from cluster.local_tokenizer import local_tokenizer
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import ControlPort
from ranvier_py.core.errors import ConfigError, leaves
from ranvier_py.io.keys import FollowedFile
from ranvier_py.node.access import key_reader
from ranvier_py.node.access.key_reader import SMALL_BYTES, read_keys
from ranvier_py.node.access.keys_files import KeysFile
from ranvier_py.node.run_node import run
from tests.node.access.key_lab import BLUE, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, PLACES, Node, lab
from tests.node.test_reload import reloadable
from tests.node.turns import OCCUPIED_S_MAX, watched
from tests.proxy.wire import GOOD, Scripted


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FollowedFile.__init__.__kwdefaults__, "interval_s", 0.05)


async def status(node: Node, key: str) -> int:
    return (await asked(node, bearer(key))).status_code


async def until_status(node: Node, key: str, wanted: int) -> None:
    while await status(node, key) != wanted:  # noqa: ASYNC110
        await trio.sleep(BETWEEN_LOOKS_S)


def replaced(path: Path, text: str) -> None:
    """As editors and Kubernetes replace a file."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_a_new_file_is_taken_within_a_look_and_a_key_that_is_gone_is_refused(tmp_path: Path) -> None:
    path = keys_file(tmp_path, key_lines(RED))
    async with lab(Scripted(GOOD), keys_file=path) as node:
        assert [await status(node, key) for key in (RED, BLUE)] == [200, 401]
        replaced(path, key_lines(BLUE))
        await until_status(node, BLUE, 200)
        assert await status(node, RED) == 401
        replaced(path, key_lines(BLUE, disabled=True))
        await until_status(node, BLUE, 401)


async def test_a_file_with_an_error_changes_nothing_and_its_line_is_in_the_log_and_in_the_view(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, key_lines(RED))
    async with lab(Scripted(GOOD), keys_file=path) as node:
        replaced(path, key_lines(BLUE) + key_lines("rk-other-x", requests_per_minute=-1))
        view = await node.until("/admin/access", lambda view: view["trouble"])
        assert f"{path}:8: key[1].requests_per_minute: must be a whole number" in view["trouble"]
        await trio.sleep(0.2)
        assert [await status(node, key) for key in (RED, BLUE)] == [200, 401]
        assert [record.getMessage().count(":8: key[1]") for record in caplog.records].count(1) == 1, "it is said once"
        path.unlink()
        await node.until("/admin/access", lambda view: "can't be read" in view["trouble"])
        assert await status(node, RED) == 200
        replaced(path, key_lines(BLUE))
        assert (await node.until("/admin/access", lambda view: not view["trouble"]))["keys"]["count"] == 1
        assert [await status(node, key) for key in (RED, BLUE)] == [401, 200]


async def test_a_file_that_is_being_written_is_taken_once_it_stays_as_it_is_and_never_without_any_key(
    tmp_path: Path,
) -> None:
    path = keys_file(tmp_path, key_lines(RED))
    file = KeysFile(path, "keys_file", (found := []).append)
    await file.read()
    path.write_text(key_lines(BLUE))
    for text in (key_lines(BLUE), key_lines(BLUE) + "\n", key_lines(BLUE) + key_lines(RED)):
        path.write_text(text)
        await file.look()
        assert len(found) == 1
    await file.look()
    assert [len(table) for table in found] == [1, 2]
    path.write_text("")
    for _ in range(3):
        await file.look()
    assert "has no key any more" in file.trouble
    path.write_text(key_lines(RED))
    await file.look(asked=True)
    assert [len(table) for table in found] == [1, 2, 1]


async def test_a_large_file_with_an_error_is_not_read_again_until_it_changes(tmp_path: Path) -> None:
    path = many_keys(tmp_path, 1200, 20)
    file = KeysFile(path, "keys_file", lambda _: None)
    await file.read()
    path.write_text(path.read_text() + "[[key]]\n")
    for _ in range(5):
        await file.look()
    assert file.counters.file_failures == 1


async def test_a_node_does_not_start_with_a_file_that_has_an_error(tmp_path: Path) -> None:
    path = keys_file(tmp_path, key_lines(RED, models=[]))
    config = config_of(**PLACES, keys_file=path)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, lambda: ControlPort, tokenizer_of=local_tokenizer)
    (error,) = leaves(caught.value)
    assert isinstance(error, ConfigError)
    assert "keys.toml:4: key[0].models" in str(error)


async def test_a_reload_may_name_another_file_and_other_proxies_but_never_opens_the_port(tmp_path: Path) -> None:
    path, other = keys_file(tmp_path, key_lines(RED)), tmp_path / "other.toml"
    other.write_text(key_lines(BLUE))
    named = {"tenant_isolation": "header:X-Tenant", "trusted_proxies": ["127.0.0.1"]}
    async with reloadable(tmp_path, keys_file=str(path), **named) as (node, changed):
        assert [await status(node, key) for key in (RED, BLUE)] == [200, 401]
        assert (await asked(node, {"x-tenant": "t"})).status_code == 200
        answer = await changed(keys_file=str(other), trusted_proxies=["10.0.0.0/8"])
        assert (sorted(answer["applied"]), answer["restart_needed"]) == (["keys_file", "trusted_proxies"], [])
        assert [await status(node, key) for key in (RED, BLUE)] == [401, 200], "at once"
        assert (await asked(node, {"x-tenant": "t"})).status_code == 401
        answer = await changed(keys_file="", trusted_proxies=["10.0.0.0/8"])
        assert "keys_file" in answer["restart_needed"]
        assert await status(node, RED) == 401


BAD_FILES = {"missing": None, "empty": "", "bad": key_lines(BLUE, tenant="nobody")}


@pytest.mark.parametrize("kind", BAD_FILES)
async def test_a_reload_that_names_a_file_that_can_not_be_used_changes_nothing_at_all(
    tmp_path: Path, kind: str
) -> None:
    path, other, text = keys_file(tmp_path, key_lines(RED)), tmp_path / "other.toml", BAD_FILES[kind]
    if text is not None:
        other.write_text(text)
    async with reloadable(tmp_path, keys_file=str(path)) as (node, changed):
        refused = await changed(status=400, keys_file=str(other), log_level="debug")
        assert f"keys_file: {other}" in str(refused["error"])
        assert [await status(node, key) for key in (RED, BLUE)] == [200, 401]
        shown = await node.ask("/admin/config")
        assert (shown["keys_file"], shown["log_level"]) == (str(path), "info")
        assert (await node.ask("/admin/access"))["trouble"] == ""
        other.write_text(key_lines(BLUE))
        assert sorted((await changed(keys_file=str(other), log_level="debug"))["applied"]) == ["keys_file", "log_level"]
        assert [await status(node, key) for key in (RED, BLUE)] == [401, 200]


def many_keys(folder: Path, count: int, tenants: int) -> Path:
    path = folder / "keys.toml"
    with path.open("w") as file:
        for number in range(tenants):
            file.write(f'[[tenant]]\nname = "tenant-{number}"\nrequests_per_minute = 600\n\n')
        for number in range(count):
            key = sha256(f"rk-{number}".encode()).hexdigest()
            members = f'tenant = "tenant-{number % tenants}"\nmodels = ["llama-*", "lab-model"]\nexpires = 2501-01-01\n'
            file.write(f'[[key]]\nid = "key-{number}"\nsha256 = "{key}"\n{members}\n')
    return path


async def test_a_pipe_is_no_file_of_keys(tmp_path: Path) -> None:
    """A reload that names one would wait for ever, and all later ones with it."""
    os.mkfifo(tmp_path / "keys.toml")
    with trio.fail_after(5), pytest.raises(ConfigError, match="is no regular file"):
        await read_keys(tmp_path / "keys.toml", "keys_file")


@pytest.mark.parametrize("line", ["", "expires = 1\n"])
async def test_a_large_file_is_read_by_a_child_as_a_small_one_is(tmp_path: Path, line: str) -> None:
    path = many_keys(tmp_path, 1200, 20)
    assert path.stat().st_size > SMALL_BYTES
    path.write_text(path.read_text() + key_lines(RED) + line)
    found = []
    for read in (read_keys, partial(trio.to_thread.run_sync, key_reader.read_key_file)):
        try:
            table = await read(path, "keys_file")
        except ConfigError as error:
            found.append(error.problems)
        else:
            found.append([*table.patterns.items(), *[(each.key, each.tenant) for each in table.identities(0, 2000)]])
    assert found[0] == found[1]
    assert len(found[0]) == (1203 if not line else 1)


async def test_a_child_that_ends_without_a_table_is_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_keys(tmp_path, 1200, 20)
    monkeypatch.setattr(key_reader, "COMMAND", ("false",))
    with pytest.raises(ConfigError, match="could not be read"):
        await read_keys(path, "keys_file")
    monkeypatch.setattr(key_reader, "COMMAND", ("sh", "-c", "exec sleep 100"))
    monkeypatch.setattr(key_reader, "READ_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=r"could not be read within 0\.1 s"):
        await read_keys(path, "keys_file")


KEYS, TENANTS = 50_000, 2000
BYTES_MAX = 100_000_000


@pytest.mark.slow
async def test_fifty_thousand_keys_are_read_without_holding_up_a_request(tmp_path: Path) -> None:
    path = many_keys(tmp_path, KEYS, TENANTS)
    async with lab(Scripted(GOOD), keys_file=path, deadline_s=120) as node:
        assert (await node.ask("/admin/access"))["keys"]["count"] == KEYS
        assert [await status(node, f"rk-{number}") for number in (0, KEYS - 1, KEYS)] == [200, 200, 401]
        text, longest = path.read_text(), (9.0, "")
        for number in range(1, 4):
            async with watched() as turns:
                replaced(path, text + "".join(key_lines(f"rk-more{each}-x") for each in range(number)))
                await node.until("/admin/access", lambda view, count=KEYS + number: view["keys"]["count"] == count)
            longest = min(turns.take(), longest)
            if longest[0] <= OCCUPIED_S_MAX:
                break
        assert longest[0] <= OCCUPIED_S_MAX, longest[1]


@pytest.mark.slow
async def test_fifty_thousand_keys_take_little_memory_in_the_node_and_in_the_child(tmp_path: Path) -> None:
    path = many_keys(tmp_path, KEYS, TENANTS)
    tracemalloc.start()
    try:
        table = await read_keys(path, "keys_file")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == KEYS
    assert kept < BYTES_MAX // 2
    done = await trio.run_process([sys.executable, "-c", CHILD, path], stdout=subprocess.DEVNULL, capture_stderr=True)
    kilobytes = int(done.stderr.partition(b"VmHWM:")[2].split()[0])
    assert kilobytes * 1024 < BYTES_MAX


CHILD = """
import sys
from ranvier_py.node.access.key_child import main
assert main(sys.argv[1], "keys_file") == 0
print(open("/proc/self/status").read(), file=sys.stderr)
"""

"""What a reload refuses because a file was being written, and what it reports of its changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import trustme

from ranvier_py.config.config_loader import config_of
from ranvier_py.config.config_model import SECRETS
from ranvier_py.node.reload import VALUE_CHARACTERS_MAX, changes
from tests.node.node_lab import Node
from tests.node.test_reload import ReloadLab, reloadable

SECRET, OTHER_SECRET = "s3cret-value-of-a-test", "an0ther-value-of-a-test"


def file_of(node: Node) -> Path:
    assert isinstance(node.lab, ReloadLab)
    return node.lab.file


async def reloaded(node: Node) -> tuple[int, str]:
    answer = await node.http.post(f"{node.control}/admin/reload")
    return answer.status_code, answer.text


@pytest.mark.parametrize("kept", [0, 1, 3])
async def test_a_file_that_is_empty_or_half_written_takes_no_node_its_last_backends(kept: int, tmp_path: Path) -> None:
    """Editors and tools empty a file first; all of its beginnings may be seen."""
    async with reloadable(tmp_path) as (node, _):
        lines = file_of(node).read_text().splitlines(keepends=True)
        backends = [line for line in lines if line.startswith("backend")]
        file_of(node).write_text("".join([each for each in lines if each not in backends][:kept]))
        status, text = await reloaded(node)
        assert (status, "backend: none would be left" in text) == (400, True)
        assert "reload_allow_empty" in text
        assert len(await node.backends()) == 2
        assert (await node.chat()).status_code == 200


async def test_backends_may_all_go_if_that_is_meant_or_others_are_left(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (node, changed):
        first, second = node.engines
        await changed(backend=[first])
        await node.http.post(f"{node.control}/admin/backends", json={"url": second})
        assert (await changed(backend=[]))["applied"] == ["backend"]  # another one was added while the node ran
        assert [each["url"] for each in await node.backends()] == [second]
        await changed(backend=[first])
        await node.http.delete(f"{node.control}/admin/backends?url={second}")
        assert (await changed(backend=[], reload_allow_empty=True))["applied"] == ["backend", "reload_allow_empty"]
        assert await node.backends() == []
        assert (await changed(backend=[]))["applied"] == ["reload_allow_empty"]  # there are none to lose


def lines_of(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    messages = (record.getMessage() for record in caplog.records)
    return [text.removeprefix(f"{event} ") for text in messages if text.startswith(f"{event} ")]


async def test_a_reload_logs_every_changed_key_with_its_old_and_its_new_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with reloadable(tmp_path, load_factor=2.0) as (node, changed):
        specs = [f'{{url = "{url}", weight = 1.0, name = ""}}' for url in node.engines]
        await changed(
            policy="ttft", load_factor=3.5, block_size_tokens=32, backend=node.engines[:1], control_key=SECRET
        )
        assert sorted(lines_of(caplog, "config.changed")) == [
            f"backend [{', '.join(specs)}] -> [{specs[0]}]",
            "block_size_tokens 16 -> 32; needs a restart",
            'control_key "" -> "***"',
            "load_factor 2.0 -> 3.5",
            'policy "affinity" -> "ttft"',
        ]
        caplog.clear()
        await changed({"authorization": f"Bearer {SECRET}"}, control_key=OTHER_SECRET)
        assert 'control_key "***" -> "***" (what is not shown differs)' in caplog.text
        assert SECRET not in caplog.text
        assert OTHER_SECRET not in caplog.text


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: SECRET}, {name: OTHER_SECRET}) for name in SECRETS),
    *(({name: f"redis://u:{SECRET}@a:1"}, {name: f"redis://u:{OTHER_SECRET}@a:1"}) for name in SECRETS[-2:]),
    *(
        ({"backend": (f"http://a:1,kv_index={one}",)}, {"backend": (f"http://a:1,kv_index={other}",)})
        for one, other in (
            (f"ws://u:{SECRET}@a:1/x", f"ws://u:{OTHER_SECRET}@a:1/x"),
            (f"http://{SECRET}@[::1]:1/x", f"http://{OTHER_SECRET}@[::1]:1/x"),
            (f"https://a/x?token={SECRET}", f"https://a/x?token={OTHER_SECRET}&b=1"),
            (f"https://a/x#{SECRET}", f"https://a/x#{OTHER_SECRET}"),
        )
    ),
]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_no_report_of_a_change_shows_a_secret(one: dict[str, Any], other: dict[str, Any]) -> None:
    before, after = config_of(**one), config_of(**other)
    text = " ".join(next(changes(before, after, one)))
    assert "what is not shown differs" in text
    for shown in (text, str(before.shown()), str(after.shown())):
        assert SECRET not in shown
        assert OTHER_SECRET not in shown


def test_a_long_value_is_cut_and_only_items_that_differ_are_named() -> None:
    many = tuple(f"http://a:{port}" for port in range(1, 500))
    text = " ".join(next(changes(config_of(backend=many), config_of(backend=("http://b:1", *many[1:])), ["backend"])))
    assert text.count("url") == 2
    text = " ".join(next(changes(config_of(backend=many), config_of(), ["backend"])))
    assert VALUE_CHARACTERS_MAX < len(text) < VALUE_CHARACTERS_MAX + 100
    _, old, new, _ = next(changes(config_of(backend=many[:2]), config_of(backend=many[1::-1]), ["backend"]))
    assert old.index("a:1") < old.index("a:2")
    assert new.index("a:2") < new.index("a:1")


async def test_a_renewed_certificate_is_named_with_its_end_and_its_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = trustme.CA()

    def issue() -> None:
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(tmp_path / "key.pem")
        made.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")

    issue()
    files = {"tls_certificate_file": str(tmp_path / "chain.pem"), "tls_key_file": str(tmp_path / "key.pem")}
    async with reloadable(tmp_path, engines=1, **files) as (_, changed):
        await changed()
        assert lines_of(caplog, "config.renewed") == []
        issue()
        await changed()
        (line,) = lines_of(caplog, "config.renewed")
        assert line.startswith(f"tls_certificate_file {tmp_path / 'chain.pem'}: valid until ")
        assert ", sha256 " in line


async def test_a_template_that_was_written_anew_needs_a_restart_each_time(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    async with reloadable(tmp_path, engines=1, chat_template=str(tmp_path / "template")) as (_, changed):
        assert (await changed())["restart_needed"] == []
        (tmp_path / "template").write_text("{{ messages }} ")
        for _ in range(2):
            assert (await changed())["restart_needed"] == ["chat_template"]

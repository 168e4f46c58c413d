"""`ranvier lint` on captured requests: the page, the JSON, the exit codes, and what is no capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from ranvier_py.cli import main

QUESTION = "Where is my secret plan, the one that nobody may read?"


def captured(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines))
    return str(path)


def turn(nonce: str, *answers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    system = f"You help. Request {nonce}."
    return {
        "path": "/v1/messages?beta=true",
        "headers": {"X-Session-Id": "s"},
        "body": {"system": system, "messages": messages},
    }


def test_a_nonce_is_shown_with_its_place_its_cost_and_a_cure_and_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = captured(tmp_path, turn("4be01"), turn("91c2f", "Here."), b"", {"path": "/v1/embeddings", "body": {}})
    assert main(["lint", file]) == 1
    page = capsys.readouterr().out
    assert "other: 2 turns" in page
    assert "1 x  nonce             $.system  within a session" in page
    assert "send it in a header" in page
    assert "secret" not in page
    assert "4be01" not in page
    assert main(["lint", "--json", file]) == 1
    (row,) = orjson.loads(capsys.readouterr().out)
    assert row["breaks"][0]["tokens"] == row["break_tokens"] > 5


def test_requests_that_only_grow_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [turn("4be01")["body"], turn("4be01", "Here.")["body"], {"input": "Hello."}, {"prompt": "x"}]
    assert main(["lint", captured(tmp_path, *bodies)]) == 0
    assert "0 (0.0 %) computed again" in capsys.readouterr().out
    assert main(["lint", captured(tmp_path)]) == 0
    assert "no conversations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a request"),
        (b'{"body": 3}', "expected a request"),
        (b'{"body": {"messages": []}, "headers": 5}', "headers must be"),
        (b'{"body": {"messages": []}, "headers": [["a"]]}', "headers must be"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_what_is_no_capture_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    assert main(["lint", captured(tmp_path, turn("4be01"), line)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert "requests.jsonl:2" in error


def test_a_capture_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err

"""`ranvier lint` on captured requests: the page, the JSON, the exit codes, and what is no capture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from ranvier_py.cli import main
from ranvier_py.core.routing.request_record import Header, RequestRecord
from ranvier_py.replay.lint_command import body_of
from ranvier_py.replay.traces import lines
from ranvier_py.replay.traces.trace import TraceError
from tests.core.routing.recorded import a_record
from tests.pages import Pages, serving

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


NONCE = "x-anthropic-billing-header: cc_version=2.1.161.1ab; cc_entrypoint=cli; cch=%s;"


def billed(nonce: str, *answers: str) -> dict[str, Any]:
    found = turn("4be01", *answers)
    system = [{"type": "text", "text": NONCE % nonce}, {"type": "text", "text": "You help." * 40}]
    headers = {"X-Claude-Code-Session-Id": "s", "User-Agent": "claude-cli/2.1.161"}
    return {**found, "headers": headers, "body": {**found["body"], "system": system}}


def test_the_rule_that_would_mend_a_break_is_named_and_own_rules_beside_those_that_ship(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = captured(tmp_path, billed("5fa2b"), billed("77a1c", "Here."), turn("4be01"), turn("91c2f", "Here."))
    assert main(["lint", file]) == 1
    page = capsys.readouterr().out
    assert "client_rules claude-code-billing=rewrite would save" in page
    assert page.count("would save") == 1, "no rule that ships is of the other nonce"
    own = tmp_path / "rules.toml"
    own.write_text(OWN)
    assert main(["lint", "--client-rules-file", str(own), file]) == 1
    assert "client_rules request-number=rewrite would save" in capsys.readouterr().out
    own.write_text(OWN.replace('"replace"', '"rewrite"'))
    assert main(["lint", "--client-rules-file", str(own), file]) == 2
    assert "action must be one of" in capsys.readouterr().err


OWN = """
format = 1
[[rule]]
name = "request-number"
client = "*"
apis = ["messages"]
causes = ["nonce"]
action = "replace"
pattern = "Request [0-9a-f]+"
replacement = "A request"
source = "ours"
"""


def page_of(content: bytes, status: int = 200) -> type[Pages]:
    class Page(Pages):
        def do_GET(self) -> None:
            self.reply(status, content)

    return Page


def test_captured_requests_are_read_from_an_address_as_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = captured(tmp_path, billed("5fa2b"), billed("77a1c", "Here."))
    assert main(["lint", "--json", file]) == 1
    expected = capsys.readouterr().out
    content = Path(file).read_bytes()
    for served in (content, gzip.compress(content)):
        with serving(page_of(served)) as server:
            url = server.url
            assert main(["lint", "--json", "--url", f"{url}/requests.jsonl"]) == 1
        assert capsys.readouterr().out == expected
    with serving(page_of(b"{", 404)) as server:
        url = server.url
        assert main(["lint", "--url", f"{url}/none"]) == 1
    assert "answered 404" in capsys.readouterr().err
    assert main(["lint", "--url", f"{url}/none"]) == 4
    assert main(["lint"]) == main(["lint", "--url", url, file]) == 2


def test_requests_that_only_grow_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [turn("4be01")["body"], turn("4be01", "Here.")["body"], {"input": "Hello."}, {"prompt": "x"}]
    assert main(["lint", captured(tmp_path, *bodies)]) == 0
    assert "0 (0.0 %) computed again" in capsys.readouterr().out
    assert main(["lint", captured(tmp_path)]) == 0
    assert "no conversations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"messages": [', "not JSON: unexpected end of data"),
        (b"[" * 100_000, "not JSON: depth limit exceeded"),
        (b"null", "expected a request"),
        (b"[1]", "expected a request"),
        (b'{"body": 3}', "expected a request"),
        (b'{"body": {"messages": []}, "headers": 5}', "headers must be"),
        (b'{"body": {"messages": []}, "headers": [["a"]]}', "headers must be"),
        (b'{"messages": "\xe4"}', "not JSON: 'utf-8' codec can't decode byte 0xe4 in position 14"),
    ],
)
def test_what_is_no_capture_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    assert main(["lint", captured(tmp_path, turn("4be01"), line)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ranvier: ")
    assert why in error
    assert "requests.jsonl:2" in error


def test_what_carries_no_conversation_or_none_that_a_node_can_compare_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = b'{"messages": [], "seed": 1%s}' % (b"0" * 400)
    assert main(["lint", captured(tmp_path, {"log": {"entries": []}}, {"path": "/v1/models", "body": {}}, large)]) == 0
    found = capsys.readouterr()
    assert found.out == "no conversations: nothing of /v1/chat/completions, /v1/messages, /v1/responses\n"
    assert "objects passed over: 2, with neither a path nor a body of /v1/chat/completions" in found.err
    assert (
        "requests.jsonl:3: passed over: nested too deeply, text that is no Unicode, or a number of more than"
        in found.err
    )


def test_lines_of_an_address_are_bounded_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*pieces: bytes) -> list[tuple[int, bytes]]:
        return list(body_of("url", iter(pieces))[1])

    assert read(b"a", b"b\n\n", b" \nc", b"\nd", b"e") == [(1, b"ab\n"), (4, b"c\n"), (5, b"de")]
    packed = gzip.compress(b"a\nb\n")
    assert read(*(packed[at : at + 1] for at in range(len(packed)))) == [(1, b"a\n"), (2, b"b\n")]
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 5)
    assert read(b"1234\n12", b"34") == [(1, b"1234\n"), (2, b"1234")]
    for pieces in ([b"12345\n"], [b"123", b"456"], [b"123", b"45\n"]):
        with pytest.raises(TraceError, match="url:1: found a line of more than 5 bytes"):
            read(*pieces)


def test_a_capture_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("spelled", ["gzipped", "one over several lines", "a list over several lines", "marked"])
def test_captures_are_read_as_tools_leave_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spelled: str
) -> None:
    requests = [billed("5fa2b"), billed("77a1c", "Here.")]
    lines = b"\n".join(map(orjson.dumps, requests))
    assert main(["lint", "--json", captured(tmp_path, lines)]) == 1
    expected = capsys.readouterr().out
    path = tmp_path / "capture"
    if spelled == "gzipped":
        path.write_bytes(gzip.compress(lines))
    elif spelled == "marked":
        path.write_bytes(b"\xef\xbb\xbf" + lines)
    elif spelled == "a list over several lines":
        path.write_text(json.dumps(requests, indent=1))
    else:
        (tmp_path / "other").write_text(json.dumps(requests[1], indent=1))
        path.write_text(json.dumps(requests[0], indent=1))
    files = [str(each) for each in (path, tmp_path / "other") if each.exists()]
    assert main(["lint", "--json", *files]) == 1
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 900 + "]" * 900], ids=["no Unicode", "deep"])
def test_what_no_node_can_compare_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    odd = f'{{"model":"m","messages":[{{"role":"user","content":{value}}}]}}'.encode()
    assert main(["lint", captured(tmp_path, odd, turn("4be01"), b'{"messages":[{"n":NaN}]}')]) == 0
    out, error = capsys.readouterr()
    assert "requests.jsonl:1: passed over" in error
    assert error.count("passed over") == 1, "what other libraries take is read"
    assert "1 turns" in out or "2 turns" in out


# --- recordings -------------------------------------------------------------------------------------------------------

KEYS = ((16, 1), (32, 2), (64, 3), (96, 4), (160, 5))


def recording(tmp_path: Path, *records: RequestRecord, end: bytes = b"") -> str:
    path = tmp_path / "node.jsonl"
    path.write_bytes(Header(1.0, 16, "00").line() + b"".join(record.line() for record in records) + end)
    return str(path)


def recorded(at: float, keys: tuple[tuple[int, int], ...], **fields: Any) -> RequestRecord:
    named = {"client": "codex", "session": "00000000000000aa", "ends": tuple(range(len(keys)))}
    return a_record(**{**named, "at": at, "chain": keys, "prompt_tokens": keys[-1][0] + 4, **fields})


def test_a_recording_shows_where_sessions_break_their_prefixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, broken = recorded(1, KEYS[:4], cached_tokens=0), recorded(2, (*KEYS[:2], (64, 33), (96, 34), (160, 35)))
    file = recording(tmp_path, broken, first, end=b'{"at": 3, "mod')  # a line comes when its answer has ended
    assert main(["lint", file]) == 1
    page = capsys.readouterr().out
    assert "64 tokens     1 x  unseen            behind token 32  within a session" in page
    assert "lint captured requests" in page
    assert main(["lint", "--json", file]) == 1
    (row,) = orjson.loads(capsys.readouterr().out)
    assert (row["client"], row["sessions"], row["turns"]) == ("codex", 1, 2)
    assert (row["prompt_tokens"], row["break_tokens"], row["reused_share"]) == (264, 64, 0.0)
    assert row["reusable_share"] == pytest.approx(32 / 264, abs=1e-3)


@pytest.mark.parametrize(
    "second",
    [
        recorded(2, KEYS),
        recorded(2, ((16, 71), (32, 72))),
        recorded(2, (*KEYS[:2], (64, 33), (96, 34), (160, 35)), session="00000000000000bb"),
        recorded(2, (*KEYS[:2], (64, 33), (96, 34), (160, 35)), session=""),
        recorded(2, (*KEYS[:2], (64, 33), (96, 34), (160, 35)), model="another"),
        recorded(2, (*KEYS[:2], (160, 35)), outcome="connect_error", status=0, first_token_s=None),
    ],
    ids=["continues", "a short task", "another session", "no session", "another model", "not served"],
)
def test_other_tasks_and_continuations_are_no_departures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: RequestRecord
) -> None:
    assert main(["lint", recording(tmp_path, recorded(1, KEYS[:4]), second)]) == 0
    assert "0 (0.0 %) computed again" in capsys.readouterr().out


def test_a_side_branch_is_no_break_and_neither_is_the_turn_after_it(tmp_path: Path) -> None:
    branch, later = recorded(2, (*KEYS[:4], (112, 41))), recorded(3, (*KEYS, (176, 6)))
    assert main(["lint", recording(tmp_path, recorded(1, KEYS[:4]), branch, later)]) == 0


@pytest.mark.parametrize(
    ("line", "why"), [(b'{"at": 3}\n', "found no chain"), (b"[1]\n", "expected a line"), (b"{\n", "not JSON")]
)
def test_what_is_no_recording_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    assert main(["lint", recording(tmp_path, recorded(1, KEYS[:4]), end=line)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert "node.jsonl:3" in error

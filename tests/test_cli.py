"""The command line as a user has it: arguments in, output and exit code out. The control port is a real one."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ranvier_py import __version__, cli
from ranvier_py.commands import exit_codes, run_serve
from ranvier_py.config.config_model import KEYS, SECRETS, Config
from ranvier_py.config.config_names import flag_of
from ranvier_py.core.errors import ConfigError, ListenError
from tests.fake_control import KEY, FakeControl
from tests.pages import Pages, PageServer, serving

ROOT = Path(__file__).parents[1]


@pytest.fixture
def control() -> Iterator[PageServer]:
    with serving(FakeControl) as place:
        yield place


# --- config and version ---------------------------------------------------------------------------------------------


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == exit_codes.EXIT_OK
    assert capsys.readouterr().out == f"{__version__}\n"


def test_config_prints_a_reference_that_config_check_accepts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["config"]) == exit_codes.EXIT_OK
    file = tmp_path / "ranvier.toml"
    file.write_text(capsys.readouterr().out)
    assert cli.main(["config", "--check", "--config", str(file)]) == exit_codes.EXIT_OK
    assert f"good: {len(KEYS)} keys are set, 0 have their defaults\n" in capsys.readouterr().out


def test_config_check_shows_what_is_set_and_from_where_but_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL_KEY", KEY)
    assert cli.main(["config", "--check", "--backend", "http://a:1,weight=2", "--metrics-public"]) == exit_codes.EXIT_OK
    assert capsys.readouterr().out.splitlines()[:3] == [
        "metrics_public = true  # from --metrics-public",
        'backend = [{url = "http://a:1", weight = 2.0, name = ""}]  # from --backend',
        'control_key = "***"  # from RANVIER_CONTROL_KEY',
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--cluster-key-file {}/none", "cluster_key_file: {}/none can't be read: No such file"),
        ("--tls-certificate-file {}/none --tls-key-file {}/none", "tls_certificate_file, tls_key_file: can't be used"),
        ("--chat-template {}/none", "chat_template: '{}/none' can't be read"),
        ("--chat-template {}/broken", "chat_template: does not compile"),
        ("--tokenizer {}/none", "tokenizer: '{}/none' can't be loaded: it is no directory, and can be no hub id"),
        ("--tokenizer {}", "tokenizer: '{}' can't be loaded: there is no tokenizer.json in it"),
        ("--tokenizer {}/broken", "tokenizer: '{}/broken' is a file"),
    ],
)
def test_config_check_reads_the_files_that_a_node_would(
    flags: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").write_text("{% if %}")
    assert cli.main(["config", "--check", *flags.replace("{}", str(tmp_path)).split()]) == exit_codes.EXIT_CONFIG
    assert problem.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_config_check_refuses_an_address_of_redis_that_a_node_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, code in (("http://10.0.0.1:6379", exit_codes.EXIT_CONFIG), ("redis://10.0.0.1:6379", exit_codes.EXIT_OK)):
        monkeypatch.setenv("RANVIER_KV_REDIS_URL", url)
        assert cli.main(["config", "--check", "--kv-index-backend", "redis"]) == code


def test_config_check_lists_all_files_of_no_use_and_asks_no_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "--check", "--tokenizer", "acme/none"]) == exit_codes.EXIT_OK
    flags = [part for name in ("cluster-key-file", "chat-template") for part in (f"--{name}", str(tmp_path / "none"))]
    assert cli.main(["config", "--check", *flags]) == exit_codes.EXIT_CONFIG
    assert capsys.readouterr().err.count("can't be read") == 2


def test_a_full_disk_behind_the_output_is_stated_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ranvier_py", "config"]
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ranvier: the output can't be written: No space left on device\n")


def test_every_problem_of_a_command_line_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lisen", "0.0.0.0:1", "--control-key", KEY, "stray", "--workers", "0", "--policy", "best"]
    assert cli.main(["serve", *flags]) == exit_codes.EXIT_CONFIG
    captured = capsys.readouterr()
    reported = captured.err.splitlines()
    assert reported[0] == "ranvier: the configuration has problems:"
    assert [line.split()[0] for line in reported[1:]] == ["--lisen:", "--control-key:", "stray:", "workers:", "policy:"]
    assert "did you mean --listen?" in reported[1]
    assert "use --control-key-file or $RANVIER_CONTROL_KEY" in reported[2]
    assert KEY not in captured.err


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [("replay x", "--polcy", "--policy"), ("status", "--wach", "--watch"), ("reporter", "--worker-d", "--worker-id")],
)
def test_who_mistypes_a_flag_is_shown_the_right_one(
    command: str, typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = exit_codes.EXIT_STATUS_UNKNOWN if command == "status" else exit_codes.EXIT_CONFIG
    assert cli.main([*command.split(), typed, "3"]) == wrong
    assert f"{typed}: no such flag; did you mean {meant}?" in capsys.readouterr().err


def test_every_key_but_the_secrets_is_a_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.replace(",", " ").split())
    for name, key in KEYS.items():
        assert (f"{flag_of(name)} " in text) == (name not in SECRETS), name
        if name not in SECRETS:
            assert " ".join(key.option.meaning.replace(",", " ").split()[:3]) in text, name
    assert "exit codes: 0 done" in text


# --- explain and status ---------------------------------------------------------------------------------------------


def test_explain_asks_the_node_and_prints_its_answer(
    control: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"messages": []}')))
    assert cli.main(["explain", "--json", "--control", control.url]) == exit_codes.EXIT_OK
    assert capsys.readouterr().out == '{"chosen": "a"}\n'
    key, body = tmp_path / "key", tmp_path / "body.json"
    key.write_text(KEY + "\n")
    body.write_bytes(b"{}")
    arguments = [
        "explain",
        "--json",
        str(body),
        "--control",
        control.url.removeprefix("http://"),
        "--control-key-file",
        str(key),
    ]
    assert cli.main(arguments) == exit_codes.EXIT_OK
    assert control.asked == [("/explain", None, b'{"messages": []}'), ("/explain", f"Bearer {KEY}", b"{}")]


def test_a_refusal_is_reported_in_the_words_of_the_node(
    control: PageServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"no")
    assert cli.main(["explain", str(body), "--control", control.url]) == exit_codes.EXIT_FAILED
    assert capsys.readouterr().err == "ranvier: 400: the body is not JSON\n"


@pytest.mark.parametrize("command", [["clients", "--control"], ["lint", "--url"], ["status", "--control"]])
@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"clients": null}',
        b'{"clients": [{}], "trials": [3]}',
        b"[" * 100_000,
    ],
    ids=lambda page: repr(page[:20]),
)
def test_an_address_that_is_no_control_port_is_named_so(
    capsys: pytest.CaptureFixture[str], command: Sequence[str], page: bytes
) -> None:
    class Other(Pages):
        def do_GET(self) -> None:
            self.reply(200, page)

    with serving(Other) as place:
        codes = {"status": exit_codes.EXIT_STATUS_UNKNOWN}
        assert cli.main([*command, place.url]) == codes.get(command[0], exit_codes.EXIT_FAILED)
    assert f"{place.url} answers, but not as the control port of a node" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "lint", "replay"])
def test_a_file_that_can_not_be_read_is_named_once_with_the_reason(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, why in ((tmp_path / "none", "no"), (tmp_path, "directory")):
        assert cli.main([command, str(name)]) == exit_codes.EXIT_CONFIG
        shown = capsys.readouterr().err
        assert (shown.count(str(name)), why in shown.lower(), "Errno" in shown) == (1, True, False), shown


@pytest.mark.parametrize("word", ["http://ann:secret@127.0.0.1:9180", "ann:secret@127.0.0.1", "http://ann:secret@[bad"])
def test_a_password_in_the_address_of_a_control_port_is_refused_and_not_shown(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL", word)
    for command in (["status"], ["access"], ["backend", "list", "--control", word], ["lint", "--url", word]):
        assert cli.main(command) in (exit_codes.EXIT_CONFIG, exit_codes.EXIT_STATUS_UNKNOWN)
        assert "secret" not in capsys.readouterr().err


NO_JSON = [
    ["access", "revoke", "red", "--hours", "nan"],
    ["backend", "weight", "a", "1e999"],
    ["backend", "add", "http://a:1", "weight=NaN"],
    ["backend", "drain", "\udcff"],
]


@pytest.mark.parametrize("words", NO_JSON, ids=repr)
def test_an_argument_that_json_lacks_is_refused_by_a_sentence(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--control", "http://127.0.0.1:1"]) == exit_codes.EXIT_CONFIG
    assert capsys.readouterr().err.startswith("ranvier: what was given can't be sent to a node: ")


@pytest.mark.parametrize("header", ["foo", ":x", "a b: x", "", "a: x\ny: z"])
def test_a_field_that_is_none_is_refused_and_not_shown(header: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--header", header]) == exit_codes.EXIT_CONFIG
    assert capsys.readouterr().err == "ranvier: --header takes NAME:VALUE\n"


def test_any_text_may_be_the_value_of_a_field(control: PageServer, tmp_path: Path) -> None:
    (tmp_path / "body").write_text("{}")
    field = ["--header", "authorization: schl\u00fcssel", "--control", control.url]
    assert cli.main(["explain", "--json", str(tmp_path / "body"), *field]) == exit_codes.EXIT_OK
    assert control.asked[-1][1].encode("latin-1").decode() == "schl\u00fcssel"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_may_be_started_without_its_standard_streams(closed: str) -> None:
    command = [sys.executable, "-m", "ranvier_py", "explain", "--control", "http://127.0.0.1:1"]
    done = subprocess.run(f"{shlex.join(command)} {closed}", shell=True, stderr=-1, text=True, check=False)
    assert done.returncode == exit_codes.EXIT_UNREACHABLE
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "explain"])
def test_a_node_that_is_not_there_has_an_exit_code_of_its_own(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"{}"), isatty=lambda: False))
    codes = {"status": exit_codes.EXIT_STATUS_UNKNOWN, "explain": exit_codes.EXIT_UNREACHABLE}
    assert cli.main([command, "--control", "http://127.0.0.1:1"]) == codes[command]
    assert "can't be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["http://[::", "127.0.0.1:80:80", "", "nonsense://", "ftp://host", "http://", "http://a:b"]
)
@pytest.mark.parametrize("flag", ["--control", "--against"])
def test_an_address_that_is_none_is_reported_in_one_line(
    flag: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", flag, address]) == exit_codes.EXIT_STATUS_UNKNOWN
    reported = capsys.readouterr().err
    assert reported == f"ranvier: {address!r} is no control port, expected one like http://127.0.0.1:9180\n"


def test_a_key_may_be_any_line_of_text_and_is_never_shown(
    control: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANVIER_CONTROL_KEY", "schl\u00fcssel\n")
    assert cli.main(["status", "--control", control.url]) == exit_codes.EXIT_OK
    assert {key.encode("latin-1").decode() for _, key, _ in control.asked} == {"Bearer schl\u00fcssel"}
    monkeypatch.setenv("RANVIER_CONTROL_KEY", "two\nlines")
    assert cli.main(["status", "--control", control.url]) == exit_codes.EXIT_STATUS_UNKNOWN
    reported = capsys.readouterr().err
    assert "RANVIER_CONTROL_KEY must be one line of text" in reported
    assert "lines" not in reported


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (("flag", "variable", "file"), "flag"),
        (("", "variable", ""), "variable"),
        (("", "", "file"), "file"),
        (("", " ", "file"), "file"),
        (("", "", ""), None),
        (("", "variable", "file"), "nothing"),
    ],
)
def test_tools_take_their_key_from_where_a_node_would(
    given: tuple[str, str, str], used: str | None, control: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag, then variable. A secret and its file of the same rank are a mistake."""
    flag, variable, named = given
    for name in ("flag", "file"):
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setenv("RANVIER_CONTROL_KEY", variable)
    monkeypatch.setenv("RANVIER_CONTROL_KEY_FILE", str(tmp_path / named) if named else "")
    flags = ["--control-key-file", str(tmp_path / flag)] if flag else []
    code = cli.main(["status", "--control", control.url, *flags])
    if used == "nothing":
        assert (code, cli.main(["config", "--check"])) == (exit_codes.EXIT_STATUS_UNKNOWN, exit_codes.EXIT_CONFIG)
    else:
        assert code == exit_codes.EXIT_OK
        assert {key for _, key, _ in control.asked} == {used and f"Bearer {used}"}


def test_a_variable_of_the_reporter_keeps_no_node_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANVIER_REPORTER_KEY", "RANVIER_REPORTER_KEY_FILE"):
        monkeypatch.setenv(name, "x")
    assert cli.main(["config", "--check"]) == exit_codes.EXIT_OK


# --- serve ----------------------------------------------------------------------------------------------------------


def serve_with(run: Any, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """`ranvier serve` with this in place of the node."""
    monkeypatch.setitem(sys.modules, "ranvier_py.node.run_node", SimpleNamespace(run=run))
    monkeypatch.setattr(run_serve, "set_up_logs", lambda *_, **__: None)
    return cli.main(["serve", *flags])


def test_serve_runs_a_node_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    async def run(config: Config, _: object, *, source: Any) -> None:
        seen.append(config)

    assert serve_with(run, monkeypatch, "--policy", "random", "--backend", "http://a:1") == exit_codes.EXIT_OK
    assert (seen[0].policy, seen[0].backend[0].url) == ("random", "http://a:1")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ExceptionGroup("", [ListenError("Address already in use (127.0.0.1:1)")]), exit_codes.EXIT_ADDRESS),
        (ListenError("Address already in use (127.0.0.1:1)"), exit_codes.EXIT_ADDRESS),
        (ExceptionGroup("", [ExceptionGroup("", [ConfigError(["tokenizer: not found"])])]), exit_codes.EXIT_CONFIG),
        (KeyboardInterrupt(), exit_codes.EXIT_OK),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), exit_codes.EXIT_OK),
    ],
)
def test_what_keeps_a_node_from_starting_has_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(_: Config, __: object, *, source: Any) -> None:
        raise error

    assert serve_with(run, monkeypatch) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def run(_: Config, __: object, *, source: Any) -> None:
        raise ExceptionGroup("", [ListenError("Address already in use"), RuntimeError("a bug")])

    assert serve_with(run, monkeypatch) == exit_codes.EXIT_FAILED
    assert "RuntimeError: a bug" in caplog.text


ENDING = """
import sys, types
from ranvier_py import cli
from ranvier_py.core.errors import ConfigError

async def run(config, _, *, source):
    if config.workers > 1:
        raise ConfigError(["listen: it can not be helped"])

sys.modules["ranvier_py.node.run_node"] = types.SimpleNamespace(run=run)
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("flags", "redirected", "code"),
    [
        ("", ">/dev/full", exit_codes.EXIT_OK),  # it has nothing to write any more
        (
            "--workers 2 --listen 127.0.0.1:0",
            ">&-",
            exit_codes.EXIT_CONFIG,
        ),  # a worker ends as such, and does not go on as its parent
    ],
)
def test_an_output_that_can_not_be_written_is_no_matter_to_how_serve_ends(
    flags: str, redirected: str, code: int
) -> None:
    command = f"{shlex.join([sys.executable, '-c', ENDING])} {flags} {redirected}"
    done = subprocess.run(command, shell=True, stderr=-1, text=True, check=False, cwd=ROOT)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


# --- what all commands share ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [("statuss", "status"), ("chekc", "check"), ("backend drian a", "drain"), ("backend lst", "list")],
)
def test_a_typo_of_a_command_or_of_what_it_does_is_named(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == exit_codes.EXIT_CONFIG
    assert capsys.readouterr().err.rstrip().endswith(f"; did you mean {meant}?")


def test_the_version_is_a_flag_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ranvier {__version__}\n")


def test_the_help_of_every_flag_has_its_default_and_what_its_value_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert " X " not in text
    defaults = Config().shown()
    for name, form in {
        "listen": "HOST:PORT",
        "workers": "N",
        "probe_interval_s": "SECONDS",
        "policy": "POLICY",
    }.items():
        found = re.search(rf"{flag_of(name)} {form} (?:(?! --).)*? Default: ([^ ]+)\.", text)
        assert found is not None, name
        assert found[1] == f"{defaults[name]}"
    assert "--log-format text|json" in text
    assert "--tls-key-file FILE" in text


TOOLS = {"status": (), "clients": (), "access": (), "backend": ("list",), "explain": (), "node": ("list",)}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_finds_the_control_port_and_its_key_alike(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: PageServer
) -> None:
    port, key_file, body = control.server_address[1], tmp_path / "key", tmp_path / "body"
    key_file.write_text(KEY)
    body.write_text("{}")
    config = tmp_path / "ranvier.toml"
    config.write_text(f'control = "0.0.0.0:{port}"\ncontrol_key_file = "{key_file}"\n')
    words = [tool, *TOOLS[tool], *(["--json", str(body)] if tool == "explain" else [])]
    named: Sequence[tuple[Sequence[str], Mapping[str, str]]] = (
        (["--control", f"127.0.0.1:{port}", "--control-key-file", str(key_file)], {}),
        ([], {"RANVIER_CONTROL": f"0.0.0.0:{port}", "RANVIER_CONTROL_KEY": KEY}),
        ([], {"RANVIER_CONTROL": f"http://localhost:{port}", "RANVIER_CONTROL_KEY_FILE": str(key_file)}),
        (["--config", str(config)], {}),
        ([], {"RANVIER_CONFIG": str(config)}),
        (["--control", f"127.0.0.1:{port}"], {"RANVIER_CONFIG": str(config), "RANVIER_CONTROL": "127.0.0.1:1"}),
    )
    for flags, variables in named:
        control.asked.clear()
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            cli.main([*words, *flags])  # whatever this stub of a node answers to it
        assert control.asked, (flags, variables)
        assert {asked[1] for asked in control.asked} == {f"Bearer {KEY}"}, (flags, variables)

"""`ranvier config --check`: every file that a node would open, and everything that is wrong at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ranvier_py import cli
from ranvier_py.commands import exit_codes
from ranvier_py.config.config_model import KEYS, SECRETS
from ranvier_py.config.config_names import flag_of
from ranvier_py.config.config_values import OptionalPath
from ranvier_py.io.recorder import MARK_BYTES

KEY = "00112233445566778899aabbccddeeff" * 2
DATA = Path(__file__).parents[2] / "ranvier_py" / "data" / "tokenizer"

PATHS = [name for name, key in KEYS.items() if key.annotation == OptionalPath]
WRITTEN = ("record_file", "gossip_state_file", "limit_state_file")
FOLDER = "state_folder"


def checked(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """The exit code and what is printed, also as errors."""
    code = cli.main(["config", "--check", *flags])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", [name for name in PATHS if name not in (*WRITTEN, FOLDER)])
def test_every_file_that_a_key_names_is_opened(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none"
    code, text = checked(capsys, flag_of(name), str(missing))
    assert code == exit_codes.EXIT_CONFIG
    assert any(str(missing) in line and "can't be read" in line for line in text.splitlines())


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_could_not_be_written_is_a_problem_and_none_is_made(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(capsys, flag_of(name), str(tmp_path / "new"))[0] == exit_codes.EXIT_OK
    assert list(tmp_path.iterdir()) == []
    for place in (tmp_path, tmp_path / "none" / "new", Path(os.devnull)):
        code, text = checked(capsys, flag_of(name), str(place))
        assert (code, f"{name}: {place} " in text) == (exit_codes.EXIT_CONFIG, True)
    code, text = checked(capsys, flag_of(name), str(tmp_path / "none" / "new"), "--workers", "2")
    assert (text.count("new.0 can't be written"), text.count("new.1 can't be written")) == (1, 1)


def test_a_folder_that_could_not_be_written_to_is_a_problem_and_none_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, code in ((tmp_path, 0), (tmp_path / "new" / "folder", 0), (file, 2), (file / "folder", 2)):
        found, text = checked(capsys, flag_of(FOLDER), str(place))
        assert (found, f"{FOLDER}: {place} can't be written" in text) == (code, code == exit_codes.EXIT_CONFIG)
    assert [*tmp_path.iterdir()] == [file]


def test_a_recording_goes_on_and_another_file_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic"
    for content, code in (
        (MARK_BYTES + b"...", exit_codes.EXIT_OK),
        (b"", exit_codes.EXIT_OK),
        (b"a letter", exit_codes.EXIT_CONFIG),
    ):
        file.write_bytes(content)
        assert checked(capsys, "--record", str(file))[0] == code
        assert file.read_bytes() == content


def test_everything_that_is_wrong_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ranvier.toml"
    lines = [
        *("policy =", "workers = 0", "polcy = 1", f'record_file = "{tmp_path}/none/a"'),
        *(f'cluster_key_file = "{tmp_path}/none"', f'chat_template = "{tmp_path}/none"', "listen = 'a"),
        f'control_key_file = "{tmp_path}/none"',
    ]
    file.write_text("\n".join(lines))
    monkeypatch.setenv("RANVIER_LISTN", "1")
    monkeypatch.setenv("RANVIER_LOAD_FACTOR", "0")
    code, text = checked(capsys, "--config", str(file), "--tokenizer", str(tmp_path), "--lod-floor=1")
    assert code == exit_codes.EXIT_CONFIG
    for problem in (
        "--lod-floor: no such flag",
        "RANVIER_LISTN: no such key",
        "load_factor: must be 1 to 1000 (from RANVIER_LOAD_FACTOR)",
        f"{file}:1: not TOML",
        f"(from {file}:2)",
        f"polcy: no such key; did you mean policy? (from {file}:3)",
        f"record_file: {tmp_path}/none/a can't be written",
        f"cluster_key_file: {tmp_path}/none can't be read",
        f"chat_template: '{tmp_path}/none' can't be read",
        f"{file}:7: not TOML",
        f"control_key_file: {tmp_path}/none can't be read: No such file or directory (from {file}:8)",
        f"tokenizer: '{tmp_path}' can't be loaded",
    ):
        assert problem in text


@pytest.mark.parametrize("name", [*(f"{name}_file" for name in SECRETS), "cluster_key_file", "tls_key_file"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o602])
def test_a_key_that_every_user_can_read_or_write_is_named(
    name: str, mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(mode)
    _, text = checked(capsys, flag_of(name), str(file))
    assert (f"note: {name}: every user of this machine can" in text) is bool(mode & 0o006)
    assert KEY not in text


def test_so_is_the_key_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o644)
    _, text = checked(capsys, "--backend", f"http://127.0.0.1:1,api_key_file={file}")
    assert f"note: backend[0].api_key_file: every user of this machine can read {file}" in text
    assert KEY not in text


@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_a_configuration_that_has_a_secret_is_such_a_file(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"ranvier.{form}"
    for text, named in (('policy%s "ttft"', False), ('control_key%s "a-secret-key"', True)):
        file.write_text(text % (":" if form == "yaml" else " ="))
        for mode in (0o644, 0o600):
            file.chmod(mode)
            code, printed = checked(capsys, "--config", str(file))
            assert code == exit_codes.EXIT_OK
            assert (f"every user of this machine can read {file}" in printed) is (named and mode == 0o644)


def test_a_tokenizer_of_this_machine_is_loaded_and_one_of_a_hub_is_named_as_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    code, text = checked(capsys, "--tokenizer", str(tmp_path))
    assert (code, "its files make no tokenizer" in text) == (exit_codes.EXIT_CONFIG, True)
    code, text = checked(capsys, "--tokenizer", str(DATA))
    assert (code, "was not tried" in text) == (exit_codes.EXIT_OK, False)
    for flags in ((), ("--workers", "0")):
        assert (
            "note: tokenizer: acme/none is the id of a hub and was not tried"
            in checked(capsys, "--tokenizer", "acme/none", *flags)[1]
        )

"""`ranvier keys`, as an operator uses it: a key that is made opens, and its file is listed and checked."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from hashlib import sha256
from pathlib import Path

import pytest

from ranvier_py import cli
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_OK
from ranvier_py.config.key_files import read_key_file

KEY_BITS_LEAST = 128
LISTED = """\
ann  ann  valid  until 2099-12-31T00:00:00Z  lab-*  other
bob  bob  disabled
"""
OPERATORS = "ops  operate  valid\n"


def made(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """The lines that a new key has in a file, and the key."""
    assert cli.main(["keys", "make", *words]) == EXIT_OK
    printed = capsys.readouterr()
    return printed.out, printed.err.strip()


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = EXIT_OK) -> str:
    assert cli.main(["keys", *words]) == status
    return "".join(capsys.readouterr())


def test_a_key_that_is_made_can_not_be_guessed_and_its_lines_have_only_its_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    (lines, key), (_, other) = made(capsys, "ann", "--models", "lab-*", "other"), made(capsys, "ann")
    for each in (key, other):
        assert 8 * len(urlsafe_b64decode(each.removeprefix("rk-") + "=")) >= KEY_BITS_LEAST
    assert key != other
    assert key not in lines
    path.write_text(lines)
    found = read_key_file(path, "keys_file").find(sha256(key.encode()).digest())
    assert found is not None
    assert (found.key_id, found.may_use("lab-1"), found.may_use("x")) == ("ann", True, False)


def test_the_lines_of_a_key_are_good_whatever_its_models_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["\N{SLIGHTLY SMILING FACE}*", "mod\u00e8le", 'a"b', "a\\b", "a'b", "x[1]", "#"]
    path = tmp_path / "keys.toml"
    path.write_text(made(capsys, "ann", "--models", *models)[0], encoding="utf-8")
    (found,) = read_key_file(path, "keys_file").identities(0, 9)
    assert found.key is not None
    assert found.key.models == models


def test_a_file_of_keys_is_listed_and_checked_and_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, operators = tmp_path / "keys.toml", tmp_path / "control.toml"
    lines = made(capsys, "ann", "--models", "lab-*", "other", "--expires", "2099-12-31")[0] + made(capsys, "bob")[0]
    path.write_text(f"{lines}disabled = true\n")
    operators.write_text(made(capsys, "ops", "--role", "operate")[0])
    assert printed(capsys, "list", str(path)) == LISTED
    assert printed(capsys, "check", str(path)) == "good: 2 keys, 0 tenants\n"
    assert printed(capsys, "list", str(operators), "--control") == OPERATORS
    path.write_text(f"{lines}priority = 'high'\n")
    line = path.read_text().count("\n")
    for action in ("list", "check"):
        words = printed(capsys, action, str(path), status=EXIT_CONFIG)
        assert f"{path}:{line}: key[1].priority: must be a whole number" in words
    assert "expires" in printed(capsys, "make", "eve", "--expires", "soon", status=EXIT_CONFIG)

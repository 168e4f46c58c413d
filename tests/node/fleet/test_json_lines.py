"""With `log_format = json` every line that a process writes is JSON, also why it could not start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier_py.cli import main

Capture = pytest.CaptureFixture[str]
BAD = "probe_interval_s = -1\n"


def wrote(folder: Path, text: str, name: str, *flags: str, **variables: str) -> tuple[int, list[str]]:
    file = folder / name
    file.write_text(text)
    command = [sys.executable, "-m", "ranvier_py", "serve", "--config", str(file), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=variables)
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        (f'log_format = "json"\n{BAD}', "node.toml", ()),
        (f"log_format: json\n{BAD.replace('=', ':')}", "node.yaml", ()),
        ('log_format = "json"\nbackend = [', "node.toml", ()),
        (BAD, "node.toml", ("--log-format", "json")),
        (f'log_format = "text"\n{BAD}', "node.toml", ("--log-format=json", "--lisen", "0.0.0.0:1")),
    ],
)
def test_a_configuration_that_can_not_be_used_is_named_in_json(
    text: str, name: str, flags: tuple[str, ...], tmp_path: Path, capfd: Capture
) -> None:
    file = tmp_path / name
    file.write_text(text)
    code = main(["serve", "--config", str(file), *flags])
    event = json.loads("".join(capfd.readouterr()))
    assert (code, event["level"], event["event"]) == (2, "error", "node.ended")
    assert event["why"].startswith("ranvier: the configuration has problems:\n  ")


def test_a_process_writes_nothing_else(tmp_path: Path) -> None:
    code, (line,) = wrote(tmp_path, BAD, "node.toml", "--log-format", "json")
    assert (code, json.loads(line)["event"]) == (2, "node.ended")


@pytest.mark.slow
def test_a_variable_counts_before_the_file_and_text_stays_text(tmp_path: Path) -> None:
    code, (line,) = wrote(tmp_path, f'log_format = "text"\n{BAD}', "node.toml", RANVIER_LOG_FORMAT="json")
    assert (code, json.loads(line)["level"]) == (2, "error")
    code, lines = wrote(tmp_path, f'log_format = "json"\n{BAD}', "node.toml", RANVIER_LOG_FORMAT="text")
    assert (code, lines[0]) == (2, "ranvier: the configuration has problems:")

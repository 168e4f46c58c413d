"""The examples of docs/fleet.md about sources are files that a node takes."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

from ranvier_py.config.backend_files import read_backend_file
from ranvier_py.config.config_loader import load

PAGE = Path(__file__).parents[3] / "docs" / "fleet.md"


def example(beginning: str) -> str:
    """The block of the section that begins so."""
    section = PAGE.read_text().partition("## Discovery")[2]
    blocks = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    (found,) = [dedent(block) for block in blocks if block.strip().startswith(beginning)]
    return str(found)


def test_its_files_are_read(tmp_path: Path) -> None:
    for beginning, name, weight in (("[[backend]]", "backends.toml", 2.0), ('{"version"', "workers.json", 1.0)):
        path = tmp_path / name
        path.write_text(example(beginning))
        (found,) = read_backend_file(path).found
        assert (found.url, found.spec.weight) == ("http://10.0.0.1:8000", weight)


def test_its_names_of_dns_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "ranvier.toml"
    path.write_text(example("backend_dns"))
    assert len(load(file=path).config.discovery.backend_dns) == 2

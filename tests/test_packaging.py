"""What an installation contains, from the wheel itself. Built in this process's environment: no network."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trove_classifiers

from ranvier_py import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


@pytest.fixture(scope="module")
def metadata(built: Path, wheel: list[str]) -> Message:
    (path,) = built.glob("*.whl")
    (name,) = (name for name in wheel if name.endswith("dist-info/METADATA"))
    return message_from_bytes(zipfile.ZipFile(path).read(name))


def test_an_index_can_file_the_wheel_and_show_what_it_is(metadata: Message) -> None:
    classifiers = set(metadata.get_all("Classifier", []))
    assert classifiers <= trove_classifiers.classifiers  # an index refuses others
    first_parts = {each.partition(" :: ")[0] for each in classifiers}
    assert {"Development Status", "Framework", "Intended Audience", "Operating System", "Topic"} <= first_parts
    assert "Typing :: Typed" in classifiers
    assert {"llm", "router", "vllm", "sglang", "kv-cache"} <= set(metadata["Keywords"].split(","))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()


def is_public(url: str) -> bool:
    """Whether the host is a name with a public suffix, as far as a name shows it."""
    host = urlsplit(url).hostname or ""
    return "." in host and not host.endswith((".local", ".lan", ".internal", ".corp", ".home")) and host[-1].isalpha()


def test_the_metadata_of_the_wheel_names_no_private_host(metadata: Message) -> None:
    """A checkout's remote, a mirror or an address of a lab is of no use to who installs the wheel."""
    urls = [word for _, value in metadata.items() for word in value.split() if "://" in word]
    assert all(url.startswith("https://") and is_public(url) for url in urls), urls


def project() -> dict[str, str]:
    metadata: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return metadata


def test_the_wheel_holds_the_package_and_nothing_else(wheel: list[str]) -> None:
    """A top-level `cluster` would collide with other people's package of that name."""
    assert {name.partition("/")[0] for name in wheel} == {"ranvier_py", f"ranvier_py-{__version__}.dist-info"}


def test_the_wheel_holds_every_file_of_the_package(wheel: list[str]) -> None:
    """The embedded tokenizer is data: `ranvier serve` without it does not start."""
    files = [path for path in (ROOT / "ranvier_py").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert any(name.startswith("ranvier_py/data/") for name in expected)
    assert "ranvier_py/py.typed" in expected
    assert expected <= set(wheel)


def test_the_wheel_brings_the_command_and_the_licence(built: Path, wheel: list[str]) -> None:
    (path,) = built.glob("*.whl")
    (entry_points,) = (name for name in wheel if name.endswith("entry_points.txt"))
    assert "ranvier = ranvier_py.cli:main" in zipfile.ZipFile(path).read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_source_distribution_leaves_the_lab_out(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert "ranvier_py" in tops
    assert tops.isdisjoint({"cluster", "tests", "benchmarks", ".venv"})


@pytest.mark.slow
def test_the_wheel_works_where_the_checkout_is_not(built: Path, tmp_path: Path) -> None:
    """Run from the wheel, isolated: nothing may come from the checkout, and the lab is not importable."""
    (path,) = built.glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ranvier_py, importlib.util as u; "
        "from ranvier_py.cli import main; print(ranvier_py.__file__, u.find_spec('cluster')); main(['version'])"
    )
    done = subprocess.run(
        [sys.executable, "-Ic", program], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert done == [f"{tmp_path / 'ranvier_py' / '__init__.py'} None", __version__]


def test_the_version_is_stated_in_one_place() -> None:
    assert "version" not in project()
    assert "version" in project()["dynamic"]
    text = "\n".join(path.read_text() for path in (ROOT / "ranvier_py").rglob("*.py"))
    assert text.count(f'"{__version__}"') == 1


def test_the_lock_pins_every_package_with_hashes_and_names_no_host() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert len(pins) > 50
    assert all("==" in line and line.endswith("\\") for line in pins)
    assert sum("--hash=sha256:" in line for line in lines) > len(pins)
    assert not any("://" in line or "--index" in line or line.startswith("/") for line in lines)
    pinned = {line.partition("==")[0] for line in pins}
    named = [requirement.split(">")[0].split("=")[0] for requirement in project()["dependencies"]]
    assert set(named) <= pinned

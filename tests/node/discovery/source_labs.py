"""Each kind of source, as whoever fills it sees it: it gives engines, breaks, and gives engines again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.node.discovery import file_source

SOON_S = 0.05  # between two looks of a source, of which tests await some


class SourceLab:
    """One source. `settings`: of the node that follows it. `name`: as the node calls it."""

    name = ""
    settings: dict[str, Any]

    async def give(self, engines: Sequence[str]) -> None:
        """Have it name these engines from now on, by their URLs."""
        raise NotImplementedError

    async def fail(self) -> None:
        """Have it fail from now on."""
        raise NotImplementedError


class FileLab(SourceLab):
    """A file that is renamed into place."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.settings = {"backends_file": path}

    async def give(self, engines: Sequence[str]) -> None:
        self._write("".join(f'[[backend]]\nurl = "{engine}"\n' for engine in engines) or "backend = []")

    async def fail(self) -> None:
        self._write("[[backend]]\nurl = 3\n")

    def _write(self, text: str) -> None:
        new = self._path.with_name("new")
        new.write_text(text)
        new.rename(self._path)


class ManifestLab(FileLab):
    """A manifest of SMG."""

    async def give(self, engines: Sequence[str]) -> None:
        workers = [{"id": f"w{number}", "url": engine} for number, engine in enumerate(engines)]
        self._write(json.dumps({"version": 1, "workers": workers}))


@asynccontextmanager
async def file_lab(folder: Path) -> AsyncIterator[SourceLab]:
    yield FileLab(folder / "backends.toml")


@asynccontextmanager
async def manifest_lab(folder: Path) -> AsyncIterator[SourceLab]:
    yield ManifestLab(folder / "workers.json")


SOURCES: dict[str, Callable[[Path], AbstractAsyncContextManager[SourceLab]]] = {
    "file": file_lab,
    "manifest": manifest_lab,
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sources looked at often."""
    monkeypatch.setattr(file_source, "LOOK_S", SOON_S)

"""One backend as a source of backends found it, and how sources are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from ranvier_py.core.routing.processes.ranks import without_rank

KINDS = ("api", "static", "file", "kubernetes", "dns")
"""Kinds of sources: operators' commands, the configuration, and what is followed. Where several sources want one
backend, it has the options that the first of these gives it."""

OF_OPERATORS = frozenset(("static", "api"))
"""They never fail, and what they give up goes at once: somebody has decided it."""


class SourceName(NamedTuple):
    """`target`: what a source of this kind follows, if there may be several."""

    kind: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" if self.target else self.kind

    @property
    def rank(self) -> tuple[int, str]:
        return KINDS.index(self.kind), self.target


STATIC, API = SourceName("static"), SourceName("api")


def authorization_of(key: str) -> bytes:
    """Return what an engine is sent to see this key; b"" for none."""
    return b"Bearer " + key.encode() if key else b""


class EngineKey(NamedTuple):
    """What one engine wants to see of those that ask it, and the file that holds it."""

    file: str
    content: str

    def __repr__(self) -> str:
        return f"EngineKey({self.file!r})"

    @property
    def authorization(self) -> bytes:
        return authorization_of(self.content)


def own_key(keys: Mapping[str, EngineKey], url: str) -> EngineKey | None:
    """Return the key of the engine's own at this URL, of those by URL; a rank has that of its engine."""
    return keys.get(url) or keys.get(without_rank(url))


class Spec(Protocol):
    """Address and options of a backend, which only their reader understands (`config_values.BackendSpec`)."""

    @property
    def url(self) -> str: ...
    @property
    def weight(self) -> float: ...
    def is_but_for_weight(self, other: Self) -> bool: ...


SpecT = TypeVar("SpecT", bound=Spec)


@dataclass(frozen=True, slots=True)
class FoundBackend(Generic[SpecT]):
    """`draining`: its source says that it ends. `process`: what tells it from the next one at its address, "" if the
    source can't say. `about`: what else the source says of it, for people. `key`: its engine's own, where an operator's
    file names one; another one leaves the backend as it is."""

    spec: SpecT
    draining: bool = False
    process: str = ""
    about: tuple[tuple[str, str], ...] = ()
    key: EngineKey | None = None

    @property
    def url(self) -> str:
        return self.spec.url

    def needs_another(self, other: FoundBackend[Any]) -> bool:
        """Whether a backend that was added as this can't become `other`: another process, or options for new ones."""
        if self is other:  # of a large fleet most are
            return False
        is_other_process = bool(self.process and other.process) and self.process != other.process
        return is_other_process or not self.spec.is_but_for_weight(other.spec)

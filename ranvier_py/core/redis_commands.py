"""What parts of a node send to Redis and receive from it; io/redis_pool.py implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Literal, NamedTuple, Protocol

Command = tuple[str | bytes | int, ...]

FailureKind = Literal["connection", "timeout", "other"]  # as Continuum counts them

BEARABLE = frozenset(("OOM", "WRONGTYPE"))
"""Refusals that don't mean that Redis is away: it is full, or another program uses a key of ours."""

PREFIX_CHARACTERS_MAX = 60


class RedisFailure(NamedTuple):
    """It is not known what became of the commands. `why` is for people and holds no secret."""

    kind: FailureKind
    why: str


class RedisRefusal(Exception):  # a reply, which is never raised
    """Redis answered one command with an error; `code` is Redis's name for it: OOM, READONLY or WRONGTYPE."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class RedisCommands(Protocol):
    """Sends commands. `place` is the address without secrets; `active` and `idle` count its connections."""

    place: str

    @property
    def active(self) -> int: ...
    @property
    def idle(self) -> int: ...

    def send(self, commands: Sequence[Command], *, connects: bool = False) -> Awaitable[list[object] | RedisFailure]:
        """Send them as one pipeline and return the replies, RedisRefusals among them. Raises nothing.

        `connects`: the deadline leaves room for a new connection.
        """

    def close_idle(self) -> None: ...


def prefix_problems(field: str, prefix: str) -> list[str]:
    """Return what is wrong with a prefix of key names."""
    if not 1 <= len(prefix) <= PREFIX_CHARACTERS_MAX or not all("!" <= each <= "~" for each in prefix):
        return [f"{field}: must be 1 to {PREFIX_CHARACTERS_MAX} visible ASCII characters"]
    if any(each in "*?[]\\^" for each in prefix):
        return [f"{field}: must not hold any of * ? [ ] ^ or a backslash, which are patterns to Redis"]
    return []

"""Answers that wait to be written to another store, oldest first. Meanwhile they are found here.

Bounds: ANSWERS_MAX and BYTES_MAX; answers beyond them are not written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import NamedTuple

from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.redis_entries import Generation
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

ANSWERS_MAX = 256
BYTES_MAX = 32 << 20


class QueuedAnswer(NamedTuple):
    """An answer, and the generation that it belongs to; None: the one that is current when it is written."""

    answer: StoredAnswer
    generation: Generation | None


class WaitingAnswers:
    def __init__(self) -> None:
        self._waiting: dict[bytes, QueuedAnswer] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: bytes, answer: StoredAnswer, generation: Generation | None) -> bool:
        """Add an answer, in place of the one with this key. False: there is no room, and that one stays."""
        known = self._waiting.get(key)
        others, size = (len(self._waiting), 0) if known is None else (len(self._waiting) - 1, known.answer.size)
        if others >= ANSWERS_MAX or self._bytes - size + answer.size > BYTES_MAX:
            return False
        self.remove(key)
        self._waiting[key] = QueuedAnswer(answer, generation)
        self._bytes += answer.size
        return True

    def find(self, key: bytes) -> StoredAnswer | None:
        waiting = self._waiting.get(key)
        return waiting.answer if waiting is not None else None

    def oldest(self, count: int) -> list[tuple[bytes, QueuedAnswer]]:
        return list(islice(self._waiting.items(), count))

    def remove(self, key: bytes, expected: QueuedAnswer | None = None) -> None:
        """Remove the answer with this key, if it is still the expected one."""
        waiting = self._waiting.get(key)
        if waiting is not None and expected in (None, waiting):
            del self._waiting[key]
            self._bytes -= waiting.answer.size

    def void(self, scope: VoidScope, before: float = inf) -> None:
        """Remove the answers of this scope that were stored at `before` or earlier."""
        for key, (answer, _) in list(self._waiting.items()):
            if scope.covers(answer.model, answer.tenant) and answer.stored_at <= before:
                self.remove(key)

    def drain(self) -> Iterator[tuple[bytes, StoredAnswer]]:
        """Yield all answers, each removed as it is taken."""
        for key, waiting in list(self._waiting.items()):
            self.remove(key)
            yield key, waiting.answer

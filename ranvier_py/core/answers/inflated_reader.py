"""Reads compressed answers beside the relay: they are judged by what is in them, and reach the client as they came.

Rule: gzip and deflate are inflated, piece by piece; an answer in another coding, or of which a piece holds more than
INFLATED_BYTES_MAX, counts as one that has begun; what is called gzip and is none is no answer. What is inflated is not
learned, and no counts are removed from it.
Invariant: what is found in an answer is what is found in it without its coding (test_errors_inside.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ranvier_py.core.answers.answer_events import NO_ANSWER
from ranvier_py.core.answers.answer_reader import AnswerReader
from ranvier_py.core.answers.chunked import ChunkedReader
from ranvier_py.core.prompts.reserved_members import CODINGS, EITHER_CODING

INFLATED_BYTES_MAX = 64 * 1024
"""Of one piece: engines' errors have some hundred bytes, and no stream sends so much at once."""


class Inflater:
    """Inflates one body."""

    __slots__ = ("_state", "is_garbled", "is_gzip", "is_lost")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        codings = [value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"]
        self.is_lost = len(codings) != 1 or codings[0] not in CODINGS  # what follows can't be read any more
        self.is_gzip = not self.is_lost and codings[0] != CODINGS[-1]  # some send what is called deflate without a head
        self.is_garbled = False  # it is not in its coding
        self._state = zlib.decompressobj(EITHER_CODING)

    def inflated(self, data: bytes) -> bytes:
        """Return what is in the next piece; nothing once that can't be told."""
        try:
            found = b"" if self.is_lost else self._state.decompress(data, INFLATED_BYTES_MAX)
        except zlib.error:
            found, self.is_lost, self.is_garbled = b"", True, self.is_gzip
        self.is_lost = self.is_lost or bool(self._state.unconsumed_tail or self._state.unused_data)
        return b"" if self.is_lost else found


class InflatedReader(AnswerReader):
    """Has `inner`, which reads an answer without chunks, read what is in a compressed one."""

    __slots__ = ("_inflater", "_inner")

    def __init__(
        self, inner: AnswerReader, headers: Iterable[tuple[bytes, bytes]], chunks: ChunkedReader | None
    ) -> None:
        super().__init__(inner.api, chunks, streams=inner.streams, names=False, captures=False)
        self._inner, self._inflater = inner, Inflater(headers)
        self.naming = inner.naming

    def feed(self, data: bytes, complete: bool) -> bytes:
        inner, inflater = self._inner, self._inflater
        self.size += len(data)
        if not inflater.is_lost:
            inner.begun = self.begun  # its head may be out
            found = inflater.inflated(self._payload(data))
            if not inflater.is_lost:
                inner.feed(found, complete)
                self.name, self.naming = inner.name or self.name, inner.naming
                inner.name = ""
                self.begun, self.has_output, self.failure = inner.begun, inner.has_output, inner.failure
                return data
        if inflater.is_garbled and not self.begun:
            self.failure = NO_ANSWER
        self.begun, self.naming = self.failure is not NO_ANSWER, None
        return data

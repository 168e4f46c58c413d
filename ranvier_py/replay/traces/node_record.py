"""Loads recordings of one's own traffic by `ranvier serve --record FILE` (format: core/routing/request_record.py).

Where two prompts part between two prefix keys is unknown. So a block is named after the next deeper key that any record
has on its path, and a hit may be too short by less than the gap. Blocks beyond the deepest key are the request's own.

Rules: attempts that no engine served are left out; another line has the outcome of their request. Files of one node, or
of several with one secret, may be concatenated in any order. A prompt of unknown length is assumed to have four bytes a
token. An incomplete last line is left out: the node was still writing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.routing.request_record import MARK, BadRecord, Header, RequestRecord, read_header, read_record
from ranvier_py.replay.traces.lines import TraceLine, json_line, name_of, raw_lines
from ranvier_py.replay.traces.trace import Depth, Trace, TraceError, TraceOptions, TraceRequest
from ranvier_py.replay.traces.trace_chains import linked, own_names

BYTES_PER_TOKEN = 4  # for English and code in JSON
TOKENS_MAX = 1 << 22  # tokens of one prompt or answer: each block gets a name


def load(path: Path, options: TraceOptions) -> Trace:
    """Return the requests of a file, in order of time. Raises TraceError."""
    header: Header | None = None
    served: list[tuple[float, RequestRecord]] = []  # when each came, seconds since 1970
    for line in finished_lines(path):
        try:
            if MARK in line.fields:
                header = agreed(header, read_header(line.fields), line)
                continue
            if header is None:
                raise line.wrong("a record", f"the header before it, an object with {MARK}")
            record = read_record(line.fields)
        except BadRecord as error:
            raise TraceError(f"{line.file}:{line.number}: {error}") from error
        if any(tokens % header.block_tokens for tokens, _ in record.chain):
            raise line.wrong(
                "a prefix key inside a block", f"multiples of {header.block_tokens} tokens, as the header says"
            )
        if record.served:
            served.append((header.started + record.at, record))
    if header is None or not served:
        raise TraceError(f"{path}: found no request that was served, expected at least one")
    served.sort(key=lambda each: each[0])
    first, size = served[0][0], header.block_tokens
    beginnings = Beginnings()
    for _, record in served:
        if not beginnings.add(record.chain):
            raise TraceError(f"{path}: found a prefix that begins in two ways, expected one for each fingerprint")
    requests = [
        request_of(number, at - first, record, beginnings, size, options)
        for number, (at, record) in enumerate(served[: options.limit or None])
    ]
    return Trace(name_of(path), requests, size, timed=True)


def finished_lines(path: Path) -> Iterator[TraceLine]:
    """Yield the objects of a recording, without an incomplete last line. Raises TraceError."""
    for number, data in raw_lines(path):
        try:
            line = json_line(path, number, data)
        except TraceError:
            if data.endswith(b"\n"):
                raise
            return
        yield line


def agreed(before: Header | None, header: Header, line: TraceLine) -> Header:
    """Return the header for the next lines. Raises TraceError if its fingerprints differ from the previous header's."""
    if before is not None and (before.scheme, before.block_tokens) != (header.scheme, header.block_tokens):
        raise line.wrong("a recording under another secret or tokenizer", "the same as before: fingerprints differ")
    return header


class Beginnings:
    """Knows, from all records together, with which shorter prefixes each prefix begins."""

    def __init__(self) -> None:
        self._above: dict[int, tuple[int, int]] = {}  # by fingerprint: the next shorter key, (0, 0) at the start
        self._tokens: dict[int, int] = {}

    def add(self, chain: Sequence[tuple[int, int]]) -> bool:
        """Add the ascending keys of one prompt. False if they contradict others: a fingerprint names one prefix."""
        return all(
            self._tokens.setdefault(key[1], key[0]) == key[0] and self._begins(above, key)
            for above, key in pairwise([(0, 0), *chain])
        )

    def _begins(self, shorter: tuple[int, int], key: tuple[int, int]) -> bool:
        """Note that the prefix `key` begins with `shorter`. False if that contradicts what is known."""
        while (known := self._above.setdefault(key[1], shorter)) != shorter:
            if known[0] == shorter[0]:
                return False
            if known[0] > shorter[0]:
                key = known
            else:  # `shorter` lies between them
                self._above[key[1]] = shorter
                key, shorter = shorter, known
        return True

    def names(self, key: tuple[int, int], size: int) -> list[int]:
        """Return the names of the blocks up to this key, of `size` tokens each."""
        found: list[int] = []
        while key[0]:
            above = self._above[key[1]]
            found += [linked(key[1], index) for index in range(key[0] // size - 1, above[0] // size - 1, -1)]
            key = above
        return found[::-1]


def request_of(
    number: int, at: float, record: RequestRecord, beginnings: Beginnings, size: int, options: TraceOptions
) -> TraceRequest:
    prompt_tokens = min(max(1, record.prompt_tokens or record.request_bytes // BYTES_PER_TOKEN), TOKENS_MAX)
    answer_tokens = min(record.answer_tokens or options.answer_tokens, TOKENS_MAX)
    total = prompt_tokens + answer_tokens
    chain = [Depth(tokens, Fingerprint(name)) for tokens, name in record.chain if tokens <= total]
    names = beginnings.names(chain[-1], size) if chain else []
    names += own_names(number, total // size - len(names))
    return TraceRequest(
        at=at,
        session=record.session,
        model=record.model,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        chain=chain,
        ends=[end for end in record.ends if end < len(chain)],
        blocks=tuple(names),
    )

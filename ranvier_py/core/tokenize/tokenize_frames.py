"""Encodes jobs and results as bytes, for the sockets between a node and its tokenizer process.

    frame     4 length of the rest | msgpack
    jobs      [lengths of prefix hashes to note, [job, …]]
    results   [seconds of processor time, [keyed prefix, …], [[status, whether whole, msgpack of the rest], …]]

States and segments are columns of 64-bit numbers in one byte string each. The node does not trust what it receives,
although the process is its own: a broken process leads to BadResults, and to a new process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from struct import Struct, error, pack, unpack
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import orjson

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import MediaState, Segment, TokenState
from ranvier_py.core.tokenize.tokenize_job import Status, TokenizeJob, TokenizeResult, TokenizerFacts
from ranvier_py.core.tokenize.tokenizer_probe import ProbeTokens

FRAME_HEAD = Struct("<I")
FRAME_BYTES_MAX = 64 << 20  # a batch of jobs, or of results, is far below it

KEY_BYTES = 32  # SHA-256
KEYED = Struct("<QQQ32s")


class BadResults(ValueError):
    """The tokenizer process sent something that does not answer the request."""


class PackedResult(NamedTuple):
    """A result that is still packed for the most part, since unpacking takes a while."""

    status: Status
    is_whole: bool
    data: bytes

    def read(self) -> TokenizeResult:
        """Unpack the result. Raises BadResults."""
        try:
            segments, answer = msgpack.unpackb(self.data)
            read = [read_segment(each) for each in segments]
            return TokenizeResult(self.status, self.is_whole, read, read_fields(answer))
        except (ValueError, TypeError, error, msgpack.UnpackException) as failure:
            raise BadResults("no result") from failure


class Reply(NamedTuple):
    """The answer to a batch of jobs."""

    results: Sequence[PackedResult]
    keyed: Sequence[KeyedPrefix]
    busy_s: float  # processor time


def framed(payload: bytes) -> bytes:
    return FRAME_HEAD.pack(len(payload)) + payload


def frame_length(head: bytes | bytearray) -> int:
    """Return how many bytes follow. Raises BadResults beyond FRAME_BYTES_MAX."""
    length: int = FRAME_HEAD.unpack(head)[0]
    if length > FRAME_BYTES_MAX:
        raise BadResults(f"a frame of {length} bytes")
    return length


class Setup(NamedTuple):
    """Parameters of a tokenizer process. `key`, `block_tokens` and `short` are those of its TokenHasher."""

    source: str
    chat_template: str
    key: bytes
    block_tokens: int
    short: int


def encode_setup(setup: Setup) -> bytes:
    return framed(msgpack.packb(setup))


def decode_setup(payload: bytes) -> Setup:
    return Setup(*msgpack.unpackb(payload))


def encode_start(facts: TokenizerFacts | None, warnings: Sequence[str], problems: Sequence[str] = ()) -> bytes:
    """Encode the tokenizer's facts, or `problems` because of which there is none."""
    return framed(msgpack.packb([[*problems], [*warnings], [*astuple(facts)] if facts is not None else []]))


def decode_start(payload: bytes) -> tuple[Sequence[str], Sequence[str], TokenizerFacts | None]:
    """Return (problems, warnings, facts); there are facts if there are no problems. Raises BadResults."""
    try:
        problems, warnings, fields = msgpack.unpackb(payload)
        facts = None
        if not problems:
            *plain, results, (text, chat) = fields
            pairs = tuple((begin, end) for begin, end in results)
            facts = replace(TokenizerFacts(*plain), results=pairs, probe=ProbeTokens(tuple(text), tuple(chat)))
    except (ValueError, TypeError, msgpack.UnpackException) as failure:
        raise BadResults("no facts") from failure
    return problems, warnings, facts


def encode_jobs(jobs: Sequence[TokenizeJob], lengths: Sequence[int] = ()) -> bytes:
    """Encode a batch. `lengths`: lengths of prefix hashes that the process must note."""
    packed = [(job[0], job[1], job[2], state_bytes(job.state), *job[4:]) for job in jobs]
    return framed(msgpack.packb((tuple(lengths), packed)))


def decode_jobs(payload: bytes) -> tuple[list[TokenizeJob], tuple[int, ...]]:
    lengths, packed = msgpack.unpackb(payload)
    return [TokenizeJob._make((*job[:3], read_state(job[3]), *job[4:])) for job in packed], tuple(lengths)


def state_bytes(state: TokenState) -> bytes:
    fields = (type(state) is MediaState, state.tokens, state.total, state.veil, *state.rest)
    return pack(f"<{len(fields)}Q", *fields)


def read_state(data: bytes) -> TokenState:
    has_media, tokens, total, veil, *rest = numbers(data)
    return (MediaState if has_media else TokenState)(tokens, total, tuple(rest), veil)


def numbers(data: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(data) // 8}Q", data)


def encode_results(results: Sequence[TokenizeResult], keyed: Sequence[KeyedPrefix], busy_s: float) -> bytes:
    packed = [(int(result.status), result.is_whole, packed_result(result)) for result in results]
    prefixes = [KEYED.pack(each.root, each.fingerprint, each.tokens, each.key.to_bytes(KEY_BYTES)) for each in keyed]
    return framed(msgpack.packb((busy_s, prefixes, packed)))


def packed_result(result: TokenizeResult) -> bytes:
    answer = None if result.answer is NOTHING else answer_fields(result.answer)
    packed: bytes = msgpack.packb(([segment and segment_bytes(segment) for segment in result.segments], answer))
    return packed


def decode_results(payload: bytes, count: int) -> Reply:
    """Return the results of `count` jobs, still packed. Raises BadResults."""
    try:
        busy_s, prefixes, packed = msgpack.unpackb(payload)
        results = [PackedResult(Status(status), bool(is_whole), data) for status, is_whole, data in packed]
        keyed = [read_keyed(each) for each in prefixes]
        if len(results) != count:
            raise BadResults(f"{len(results)} results of {count} jobs")
        return Reply(results, keyed, float(busy_s))
    except (ValueError, TypeError, error, msgpack.UnpackException) as failure:
        raise BadResults("no results") from failure


def segment_bytes(segment: Segment) -> bytes:
    state = segment.state
    fields = [type(state) is MediaState, state.tokens, state.total, state.veil, len(state.rest), *state.rest]
    fields += segment.end
    for anchor in segment.anchors:
        fields += anchor
    return pack(f"<{len(fields)}Q", *fields)


def read_segment(data: bytes | None) -> Segment | None:
    if data is None:
        return None
    has_media, tokens, total, veil, count, *more = numbers(data)
    state = (MediaState if has_media else TokenState)(tokens, total, tuple(more[:count]), veil)
    depths, fingerprints = more[count::2], more[count + 1 :: 2]
    end, *anchors = zip(depths, map(Fingerprint, fingerprints), strict=True)
    return Segment(tuple(anchors), end, state)


def read_keyed(data: bytes) -> KeyedPrefix:
    root, fingerprint, tokens, key = KEYED.unpack(data)
    return KeyedPrefix(root, int.from_bytes(key), Fingerprint(fingerprint), tokens)


def answer_fields(answer: Answer) -> tuple[Any, ...]:
    message = None if answer.message is None else orjson.dumps(answer.message)
    return message, answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens


def read_fields(fields: Sequence[Any] | None) -> Answer:
    if fields is None:
        return NOTHING
    message, *counts = fields
    read = None if message is None else orjson.loads(message)
    if not isinstance(read, dict | None) or not all(isinstance(count, int | None) for count in counts):
        raise BadResults("no answer")
    return Answer(read, "", *counts)

"""Loads traces of token ids: JSON lines with the tokens of prompt and answer.

    {"prompt_token_ids": [5971, 2927, …], "output_token_ids": [791, …], "timestamp": 12.5, "session": "a", "model": "m"}
    {"input_tok_ids": […], "output_tok_ids": […], "arrival_time_ns": 46926808, "input_toks": 2358, "output_toks": 531}

The second line has LLMServingSim's names. Answer, time stamp, session and model may be missing; without time stamps
requests are `turn_s` apart. Message ends are inferred (`trace_chains.partings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.replay.traces.lines import TraceLine, from_start, json_lines, name_of, nothing_in, shown
from ranvier_py.replay.traces.trace import Trace, TraceError, TraceOptions, TraceRequest
from ranvier_py.replay.traces.trace_chains import KEY, chain_of, continued, own_names, partings

PROMPT_NAMES = ("prompt_token_ids", "input_tok_ids")
ANSWER_NAMES = ("output_token_ids", "output_tok_ids")
TOKEN_ID_MAX = 2**32 - 1
NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


class TokenRecord(NamedTuple):
    """One line: a request with its tokens."""

    stamp: float | None  # seconds
    session: str
    model: str
    prompt: TokenIds
    answer: TokenIds

    @property
    def tokens(self) -> TokenIds:
        return np.concatenate((self.prompt, self.answer))


def load(path: Path, options: TraceOptions) -> Trace:
    """Return the requests of a file. Raises TraceError."""
    records = [read_record(line) for line in json_lines(path)]
    if not records:
        raise nothing_in(path)
    times, timed = times_of(path, records, options)
    order = sorted(range(len(records)), key=times.__getitem__)[: options.limit or None]
    size = options.engine_block_tokens
    blocks = {number: continued((), records[number].tokens, size, records[number].model.encode()) for number in order}
    ends = partings(blocks.values())
    ends.update(blocks[number][whole - 1] for number in order if (whole := len(records[number].prompt) // size))
    builder = Builder(size, ends, options.answer_tokens)
    requests = [builder.request(number, times[number], records[number], blocks[number]) for number in order]
    return Trace(name_of(path), requests, size, timed=timed)


def times_of(path: Path, records: Sequence[TokenRecord], options: TraceOptions) -> tuple[list[float], bool]:
    """Return the times in the order of the file, and whether they are the file's own. Raises TraceError."""
    stamps = [record.stamp for record in records if record.stamp is not None]
    if not stamps:
        return [number * options.turn_s for number in range(len(records))], False
    if len(stamps) < len(records):
        raise TraceError(f"{path}: found {len(stamps)} time stamps on {len(records)} lines, expected all or none")
    return from_start(stamps), True


def read_record(line: TraceLine) -> TokenRecord:
    """Read one line. Raises TraceError."""
    prompt, answer = tokens_of(line, PROMPT_NAMES), tokens_of(line, ANSWER_NAMES)
    if not len(prompt):
        raise line.wrong("no token of a prompt", f"a list of token ids under {' or '.join(PROMPT_NAMES)}")
    for name, ids in (("input_toks", prompt), ("output_toks", answer)):
        if name in line.fields and line.fields[name] != len(ids):
            raise line.wrong(f"{name} {shown(line.fields[name])}", f"{len(ids)}, as there are token ids")
    stamp = None
    if "arrival_time_ns" in line.fields:
        stamp = line.stamp_s("arrival_time_ns", 1e-9)
    elif "timestamp" in line.fields:
        stamp = line.stamp_s("timestamp")
    return TokenRecord(stamp, line.text("session", "session_id"), line.text("model"), prompt, answer)


def tokens_of(line: TraceLine, names: Sequence[str]) -> TokenIds:
    """Return the token ids under the first of `names` that is there; none if none is. Raises TraceError."""
    name = next((name for name in names if line.fields.get(name) is not None), None)
    if name is None:
        return NO_TOKENS
    value = line.fields[name]
    expected = f"a list of whole numbers from 0 to {TOKEN_ID_MAX}"
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise line.wrong(f"{name} {shown(value)}", expected)
    if value and not 0 <= min(value) <= max(value) <= TOKEN_ID_MAX:
        raise line.wrong(f"{min(value)} … {max(value)} in {name}", expected)
    return np.array(value, dtype=np.uint32)


class Builder:
    """Makes requests of records whose blocks and message ends are known."""

    def __init__(self, block_tokens: int, ends: set[int], answer_tokens: int) -> None:
        self._size = block_tokens
        self._ends, self._answer_tokens = ends, answer_tokens
        self._hasher = TokenHasher(KEY, block_tokens)
        self._texts = TextHasher(KEY)

    def request(self, number: int, at: float, record: TokenRecord, blocks: tuple[int, ...]) -> TraceRequest:
        prompt_tokens, size = len(record.prompt), self._size
        depths = [
            (index + 1) * size for index, name in enumerate(blocks[: prompt_tokens // size]) if name in self._ends
        ]
        cuts = [*(depth for depth in depths if depth < prompt_tokens), prompt_tokens]
        if len(record.answer):
            cuts.append(prompt_tokens + len(record.answer))
        start = self._hasher.start(self._texts.namespace({"model": record.model}))
        chain, ends = chain_of(self._hasher.extend(start, record.tokens, cuts))
        answer_tokens = len(record.answer) or self._answer_tokens
        blocks += tuple(own_names(number, (prompt_tokens + answer_tokens) // size - len(blocks)))
        return TraceRequest(
            at=at,
            session=record.session,
            model=record.model,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            chain=chain,
            ends=ends,
            blocks=blocks,
        )

"""Loads traces in Mooncake's format: JSON lines with prompts as lists of block hashes.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2366]}

Rule: one hash id for each `block_tokens` of the prompt (512; Qwen's Bailian traces have 16, and stamps in seconds, for
which a speed of 0.001 makes up); the last block may be partial. Every whole block is a prefix key; message ends are
inferred (`trace_chains.partings`). An answer's content shows only in the ids of the next turn, so its blocks get names
that no other request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint
from ranvier_py.replay.traces.lines import (
    INTEGER_MAX,
    TraceLine,
    from_start,
    json_lines,
    name_of,
    nothing_in,
    repeated,
    shown,
    spread,
)
from ranvier_py.replay.traces.trace import Depth, Trace, TraceOptions, TraceRequest
from ranvier_py.replay.traces.trace_chains import linked, own_names, partings

STAMP_UNIT_S = 0.001
STAMP_STEP_S = 3.0  # Mooncake's published traces have stamps rounded to this step
TOKENS_MAX = 1 << 23  # tokens of one prompt or answer


class MooncakeRecord(NamedTuple):
    """A line. `path`: the chained name of each block of the prompt, including a partial one."""

    stamp: float  # seconds
    session: str
    prompt_tokens: int
    answer_tokens: int
    path: Sequence[int]


def load(path: Path, options: TraceOptions) -> Trace:
    """Return the requests of a file. Raises TraceError."""
    records = [read_record(line, options) for line in json_lines(path)]
    if not records:
        raise nothing_in(path)
    times = from_start([record.stamp for record in records])
    if repeated(times):
        times = spread(times, STAMP_STEP_S, options.seed)
    requests = requests_of(records, times, options.block_tokens, options.limit)
    return Trace(name_of(path), requests, options.block_tokens, timed=True)


def requests_of(
    records: Sequence[MooncakeRecord], times: Sequence[float], size: int, limit: int = 0
) -> list[TraceRequest]:
    """Make requests of the first `limit` records in order of time; 0: of all."""
    order = sorted(range(len(records)), key=times.__getitem__)[: limit or None]
    ends = partings(records[number].path for number in order)
    ends.update(records[number].path[whole - 1] for number in order if (whole := records[number].prompt_tokens // size))
    depths: dict[int, Depth] = {}  # by name: requests share the keys, since a name has one depth
    return [request_of(number, times[number], records[number], size, ends, depths) for number in order]


def read_record(line: TraceLine, options: TraceOptions) -> MooncakeRecord:
    """Read one line. Raises TraceError."""
    size = options.block_tokens
    prompt_tokens = line.integer("input_length", 1, TOKENS_MAX)
    answer_tokens = max(1, line.integer("output_length", 0, TOKENS_MAX))
    ids = line.fields.get("hash_ids")
    if not isinstance(ids, list):
        raise line.wrong(f"hash_ids {shown(ids)}", "a list of whole numbers")
    expected = -(-prompt_tokens // size)
    if len(ids) != expected:
        raise line.wrong(
            f"{len(ids)} hash_ids for input_length {prompt_tokens}", f"{expected} of them ({size} tokens to a block)"
        )
    above, path = 0, []
    for number in ids:
        if type(number) is not int or not 0 <= number <= INTEGER_MAX:
            raise line.wrong(f"{shown(number)} among hash_ids", f"whole numbers from 0 to {INTEGER_MAX}")
        above = linked(above, number)
        path.append(above)
    stamp = line.stamp_s("timestamp", STAMP_UNIT_S)
    return MooncakeRecord(stamp, line.text("session_id", "chat_id"), prompt_tokens, answer_tokens, path)


def request_of(
    number: int, at: float, record: MooncakeRecord, size: int, ends: set[int], depths: dict[int, Depth]
) -> TraceRequest:
    prompt = record.prompt_tokens // size
    blocks = (record.prompt_tokens + record.answer_tokens) // size
    names = (*record.path[:prompt], *own_names(number, blocks - prompt))
    chain = [Depth((index + 1) * size, Fingerprint(name)) for index, name in enumerate(names)]
    chain[:prompt] = [depths.setdefault(name, key) for name, key in zip(names, chain[:prompt], strict=False)]
    at_ends = [index for index, name in enumerate(names[:prompt]) if name in ends]
    if blocks > prompt:
        at_ends.append(blocks - 1)
    return TraceRequest(
        at=at,
        session=record.session,
        model="",
        prompt_tokens=record.prompt_tokens,
        answer_tokens=record.answer_tokens,
        chain=chain,
        ends=at_ends,
        blocks=names,
    )

"""The record of one attempt, as a line of a recording that a replay reads back. Pure.

Rule: a line holds numbers, names that operators chose (the model's is the one that the client asked for, cut), a known
client's name, and keyed fingerprints of token prefixes and of the session's name. Invariant: it holds no text, no token
id, no header and no key (test_request_record.py). Each attempt has its line: a request that was tried elsewhere has
several, of which replays take those that were served. Lines of different `scheme` share no fingerprint. Bound: 25 bytes
for each 256 tokens, and 400 more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any

import orjson

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome

VERSION = 1
MARK = "ranvier_recording"  # names the header
NAME_CHARACTERS_MAX = 200  # of a model's name, longer than any real one
TIME_DIGITS = 6  # microseconds
NUMBER_MAX = 1 << 53  # up to this every reader of JSON keeps whole numbers exact
CHAIN_KEYS_MAX = 1 << 20

OUTCOMES = frozenset(outcome.value for outcome in Outcome)
KINDS = frozenset(("chat", "completion", "opaque"))
COUNTS = ("prompt_tokens", "answer_tokens", "matched_tokens", "holders", "status", "request_bytes", "sent_bytes")
NAMES = ("model", "backend", "policy", "reason", "source")
LATER_NAMES = {"client": re.compile("[a-z0-9-]{0,64}"), "session": re.compile("([0-9a-f]{16})?")}
"""Names that lines of older nodes lack, and what their values match."""


class BadRecord(ValueError):
    """A line is not one of a recording. The message says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a recording.

    `started` is the wall clock at 0 s of the records; `scheme` differs between secrets, tokenizers and block sizes.
    """

    started: float  # seconds since 1970
    block_tokens: int
    scheme: str

    def line(self) -> bytes:
        return orjson.dumps({MARK: VERSION, **asdict(self)}) + b"\n"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One attempt. Token counts are the engine's where it gave any, else this node's; 0 answer tokens: not known."""

    at: float  # seconds since the header's `started`, when it was sent
    model: str
    kind: str  # chat, completion or opaque
    chain: tuple[tuple[int, int], ...]  # (tokens, fingerprint), ascending
    ends: tuple[int, ...]  # indices of the keys at which a message ends
    prompt_tokens: int
    answer_tokens: int
    backend: str
    policy: str
    reason: str
    source: str  # which chain found it: text, tokens, none
    matched_tokens: int
    holders: int
    outcome: str
    status: int  # as the backend answered; 0: it did not
    first_token_s: float | None  # since it was sent; None: none came
    total_s: float
    cached_tokens: int | None  # by the engine's count
    request_bytes: int
    sent_bytes: int
    client: str = ""  # as `known_clients` has it; older recordings have none
    session: str = ""  # the digest of its name, empty where it has none; equal on all nodes of a cluster

    def line(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["chain"] = [(tokens, f"{fingerprint:016x}") for tokens, fingerprint in self.chain]
        return orjson.dumps(fields) + b"\n"

    @property
    def served(self) -> bool:
        """Whether an engine worked on it: it gave a first token, or answered with success below status 300."""
        return self.first_token_s is not None or (self.outcome == Outcome.SUCCESS.value and self.status < 300)


def scheme_mark(identity: str, key: bytes) -> str:
    """Return a name for a scheme of fingerprints that does not show its key."""
    return blake2b(identity.encode(), digest_size=8, key=key, person=b"recording").hexdigest()


def record_of(
    attempt: Attempt,
    outcome: Outcome,
    finished_at: float,
    started_at: float,
    end: Boundary | None = None,
    answer: Answer = NOTHING,
) -> RequestRecord:
    """Return the record of an attempt. `end`: the end of its answer, where that was learned. Times are monotonic."""
    prompt, decision = attempt.prompt, attempt.decision
    end = end or prompt.end
    chain, ends = chain_of(end)
    counted = (answer.prompt_tokens, answer.completion_tokens)
    return RequestRecord(
        at=round(attempt.sent_at - started_at, TIME_DIGITS),
        model=printable(prompt.model),
        kind=prompt.kind,
        chain=chain,
        ends=ends,
        prompt_tokens=attempt.prompt_tokens if counted[0] is None else counted[0],
        answer_tokens=max(0, end.length - prompt.end.length) if counted[1] is None else counted[1],
        backend=decision.backend_name,
        policy=decision.policy,
        reason=decision.reason,
        source=decision.source,
        matched_tokens=decision.matched_tokens,
        holders=len(decision.holders),
        outcome=outcome.value,
        status=attempt.reply.status,
        first_token_s=None if attempt.first_at is None else round(attempt.first_at - attempt.sent_at, TIME_DIGITS),
        total_s=round(finished_at - attempt.sent_at, TIME_DIGITS),
        cached_tokens=answer.cached_tokens,
        request_bytes=len(prompt.body),
        sent_bytes=attempt.reply.sent_bytes,
        client=prompt.client,
        session=f"{prompt.session:016x}" if prompt.session else "",
    )


def chain_of(end: Boundary) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return (chain, ends), both ascending, of the tokenized part of a prompt."""
    chain: list[tuple[int, int]] = []
    ends: list[int] = []
    for tokens, token, text in reversed(list(end.chain())):
        if not token:
            continue
        if not chain or tokens > chain[-1][0]:
            chain.append((tokens, token))
        if text and ends[-1:] != [len(chain) - 1]:
            ends.append(len(chain) - 1)
    return tuple(chain), tuple(ends)


def printable(model: str) -> str:
    """Return a client's name for a model, cut, in characters that JSON can carry."""
    return model[:NAME_CHARACTERS_MAX].encode("utf-8", "replace").decode()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_header(fields: Mapping[str, Any]) -> Header:
    """Raises BadRecord."""
    if fields.get(MARK) != VERSION:
        raise BadRecord(f"found version {fields.get(MARK)!r} of a recording, expected {VERSION}")
    scheme = fields.get("scheme")
    if not isinstance(scheme, str):
        raise BadRecord("found no scheme in the header of a recording, expected a text")
    return Header(seconds(fields, "started"), whole(fields, "block_tokens", 1), scheme)


def read_record(fields: Mapping[str, Any]) -> RequestRecord:
    """Raises BadRecord."""
    chain = tuple(read_chain(fields.get("chain")))
    ends = fields.get("ends")
    if not isinstance(ends, list) or not all(type(end) is int and 0 <= end < len(chain) for end in ends):
        raise BadRecord("found ends that are no places in the chain, expected a list of them")
    if ends != sorted(set(ends)):
        raise BadRecord("found ends out of order, expected them to ascend")
    outcome, kind = str(fields.get("outcome")), str(fields.get("kind"))
    if outcome not in OUTCOMES or kind not in KINDS:
        raise BadRecord(f"found outcome {outcome!r:.40} and kind {kind!r:.40}, expected those of a recording")
    for name in NAMES:
        if not isinstance(fields.get(name), str):
            raise BadRecord(f"found {name} {fields.get(name)!r:.40}, expected a text")
    values: dict[str, Any] = {name: fields[name] for name in NAMES}
    for name, pattern in LATER_NAMES.items():
        values[name] = fields.get(name, "")
        if not isinstance(values[name], str) or pattern.fullmatch(values[name]) is None:
            raise BadRecord(f"found {name} {values[name]!r:.40}, expected what {pattern.pattern!r} matches")
    values.update((name, whole(fields, name)) for name in COUNTS)
    values["cached_tokens"] = None if fields.get("cached_tokens") is None else whole(fields, "cached_tokens")
    values["first_token_s"] = None if fields.get("first_token_s") is None else seconds(fields, "first_token_s")
    at, total_s = seconds(fields, "at"), seconds(fields, "total_s")
    return RequestRecord(at=at, total_s=total_s, kind=kind, outcome=outcome, chain=chain, ends=tuple(ends), **values)


def read_chain(found: object) -> Iterator[tuple[int, int]]:
    """Raises BadRecord."""
    expected = "expected [tokens, 16 hexadecimal digits] with ascending tokens"
    if not isinstance(found, list) or len(found) > CHAIN_KEYS_MAX:
        raise BadRecord(f"found no chain, {expected}")
    above = 0
    for key in found:
        try:
            tokens, digits = key
            fingerprint = int.from_bytes(bytes.fromhex(digits), "big")
        except (TypeError, ValueError) as error:
            raise BadRecord(f"found the prefix key {key!r:.60}, {expected}") from error
        if type(tokens) is not int or not above < tokens <= NUMBER_MAX or len(digits) != 16 or not fingerprint:
            raise BadRecord(f"found the prefix key {key!r:.60}, {expected}")
        above = tokens
        yield tokens, fingerprint


def whole(fields: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Raises BadRecord."""
    value: Any = fields.get(name)
    if type(value) is not int or not least <= value <= NUMBER_MAX:
        raise BadRecord(f"found {name} {value!r:.40}, expected a whole number from {least} on")
    return value


def seconds(fields: Mapping[str, Any], name: str) -> float:
    """Raises BadRecord."""
    value: Any = fields.get(name)
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= NUMBER_MAX:
        raise BadRecord(f"found {name} {value!r:.40}, expected seconds")
    return float(value)

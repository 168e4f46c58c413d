"""Tokenize jobs and their results: all that passes between a node and its tokenizer process.

A node keeps prompts as chains of boundaries, which the process does not know. So a job carries the state of token
hashing before its messages, and those messages; a result has the segments of the messages, and what the answer says. A
job has the whole body only if the messages alone are not enough: at first contact, for templates that are not
incremental, and after the process has answered NEEDS_BODY.

Bounds: TOKENS_MAX and BODY_BYTES_MAX; of a longer prompt only the answer is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import orjson

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.prompts.fingerprint import Segment, TokenState
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.tokenize.tokenizer_probe import NO_TOKENS, ProbeTokens

TOKENS_MAX = 1 << 19
"""Tokens, as estimated, of one prompt and of one batch: the tokenizer takes about 200 bytes for each while it works. A
longer prompt is placed by its text alone."""

BODY_BYTES_MAX = 8 * TOKENS_MAX  # JSON with many escapes, or with tools as long as the chat


class Status(IntEnum):
    """The outcome of a job."""

    DONE = 0
    FAILED = 1  # the template refuses the prompt, or the job had nothing to tokenize
    NEEDS_BODY = 2  # the new messages can't be rendered without the rest of the chat


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a node must know about a tokenizer with its template.

    Attributes:
        identity: digest of the tokenizer, the template and their settings: fingerprints of different ones never match.
        keeps_turns: earlier turns stay a prefix of later ones in the rendered text (not in Mistral's templates).
        incremental: tokens of new messages alone are exact.
        hoists_system: system messages are rendered before all others, wherever they stand (DeepSeek's templates).
        reasoning_moves, results: which reasoning later turns leave out, see `templates.TemplateProfile`.
        chars_per_token: characters of English and code per token.
        probe_report: one line for the log: what was found and why.
        probe: the tokens of what engines are asked to tokenize as well.
    """

    identity: str
    keeps_turns: bool
    incremental: bool
    chars_per_token: float
    probe_report: str = ""
    hoists_system: bool = False
    reasoning_moves: bool = False
    results: Sequence[tuple[str, str]] = ()
    probe: ProbeTokens = NO_TOKENS


class TokenizeJob(NamedTuple):
    """One prompt to be tokenized, with its answer if there is one.

    `state` is the state of token hashing behind the first `known` messages, `root` the running sum of the empty prefix.
    `content` is JSON of the messages after those, or the text of a completion; None if only the answer is to be read.
    `body` is the whole body, or empty. `length`: tokens of the whole prompt, as estimated.
    """

    kind: str  # "completion" or "generate", or how a chat came (`prompts.request_apis`)
    length: int
    known: int
    state: TokenState
    root: int
    content: bytes | None
    body: bytes = b""
    answer: bytes | None = None  # as it was relayed
    streamed: bool = False
    chunked: bool = False
    bare: bool = False  # tokenize the text without special tokens
    by_sglang: bool = False  # the engines of its model are SGLang's, which prints tools and texts in its own way


class TokenizeResult(NamedTuple):
    """The result of a job. `segments`: one for each message after the known ones, or for all if `is_whole`, and one for
    the answer if it could be tokenized; None where the end is no clean cut, so that the next segment covers it."""

    status: Status
    is_whole: bool = False
    segments: Sequence[Segment | None] = ()
    answer: Answer = NOTHING


def job_of(
    prompt: Prompt,
    answer: bytes | None = None,
    *,
    chunked: bool = False,
    with_body: bool = False,
    by_sglang: bool = False,
) -> tuple[Boundary, TokenizeJob]:
    """Return the boundary that the segments continue from, and the job for a prompt that is not opaque."""
    end = prompt.end
    ancestor = end.tokenized_ancestor()
    content, body = contents(prompt, ancestor, with_body=with_body)
    state, root = ancestor.state, end.root().state if body else ancestor.state
    assert state is not None
    assert root is not None
    return ancestor, TokenizeJob(
        kind=prompt.api,
        length=end.length,
        known=ancestor.messages,
        state=state,
        root=root.total,
        content=content,
        body=body,
        answer=answer,
        streamed=prompt.stream,
        chunked=chunked,
        bare=prompt.bare,
        by_sglang=by_sglang,
    )


def contents(prompt: Prompt, ancestor: Boundary, *, with_body: bool) -> tuple[bytes | None, bytes]:
    """Return (content, body) of a job: as little as is enough."""
    end = prompt.end
    if prompt.kind == "completion":
        too_long = end.length > TOKENS_MAX and end.state is None
        return (None if too_long else prompt.text.encode() if end.state is None else b""), b""
    missing = end.messages - ancestor.messages
    if missing == 0 and not with_body:
        return b"[]", b""
    if ancestor.messages and missing <= len(prompt.tail) and not with_body:
        if end.length - ancestor.length > TOKENS_MAX:
            return None, b""
        try:
            return orjson.dumps(prompt.tail[len(prompt.tail) - missing :]), b""
        except TypeError:  # values that only other JSON libraries accept
            pass
    if end.length > TOKENS_MAX or len(prompt.body) > BODY_BYTES_MAX:
        return None, b""
    return b"", prompt.body

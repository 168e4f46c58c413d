"""What an answer shows of the backend that gave it, by its status, its Retry-After and the words of its error.

A backend that has no room is well: 429 (too much of one credential), 529, and a 503 that has a Retry-After or speaks of
a full queue. Such an answer asks for a pause. Any other 503 is a fault, like all `health.ILL_STATUSES`.
What else refuses is about the request, unless another backend serves it (`refusals`), and so is a 500 that speaks of
the context length. A redirect computes nothing: for inference it is a refusal, mostly of a proxy before one backend.

Pure: the body is at most ERROR_BYTES_MAX, without its transfer coding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.answers.answer_events import PAGE
from ranvier_py.core.routing.blame.wordings import wording_of
from ranvier_py.core.routing.health import ILL_STATUSES, Outcome, outcome_of

ERROR_BYTES_MAX = 64 * 1024
"""Of an error's body. Engines answer with a few hundred bytes, or with the body that they could not read."""

PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
"""The pause of a backend that asks for none, or none that lasts, and the longest. A second lets some requests of a full
queue end; after half a minute an open circuit, too, would be tried again."""

IN_SECONDS, IN_MILLISECONDS = b"retry-after", b"retry-after-ms"
SECONDS = re.compile(rb"(\d{1,9})(?:\.\d{0,9})?")
BETWEEN_WORDS = re.compile(r"[\W_]+")
WITHIN_NAMES = re.compile(r"(?<=[a-z])(?=[A-Z])")  # as in QueueFullError
SENTENCE_CHARS_MAX = 2_000  # of an error's words that are looked at; what it quotes of a prompt stands behind them

FULL = re.compile(
    r"\boverload|\breason overflow\b|\bback ?pressure\b|\bbusy\b|\brate limit|\btoo many\b|\bqueue timeout\b"
    r"|\b(at|no|insufficient|out of)( \w+){0,2} capacity\b|\bcapacity( is)? (full|reached|exceeded|exhausted)\b"
    r"|\bno( \w+)? slots?\b|\bslow down\b|\bhigh demand\b|\b(try again|retry) later\b"
    r"|\b(queue|concurren\w+|pending|waiting)\b.{0,40}\b(full|limit|maximum|capacity|reached|exceed\w*)\b"
    r"|\b(full|limit|max|maximum)\b.{0,40}\b(queue|concurren\w+|pending|waiting)\b"
)
"""How engines (SGLang, vLLM, TGI, Dynamo, Triton, Ollama, llama.cpp, Ray Serve), proxies and hosted providers say that
they are at a limit of what they take at once, in lower case and with blanks alone between words. What is taken for that
by mistake is asked last for a second; the reverse costs half a minute of an engine that is well."""

NO_MODEL = re.compile(
    r"\b(model|adapters?)( \S+){0,12} (does not exist|(not|never|cannot|isn t)( be| been| a)? "
    r"(found|exist|loaded|available|supported|valid|served|deployed))\b"
    r"|\b(model|adapters?)( \S+){0,3} is (invalid|unknown|unavailable|unsupported)\b"
    r"|\b(unknown|invalid|unavailable|unsupported|no such|not a valid) (model|adapter)\b"
    r"|\b(model|adapter) not (found|exist)\b"
    r"|\b(no|not find)( \w+){0,2} (handler|endpoints?|deployments?)( \w+)? for\b"
)
"""Most engines answer 404 for a model that they lack; some, and proxies before them, 400. An error of the parameter
`model` says so in any words."""

NO_API = re.compile(
    r"\bdoes not support( \w+){0,2} "
    r"(chat|messages|generat\w*|completions?|responses|embed\w*|scor\w+|rerank\w*|classif\w*|pooling)\b"
    r"|\bnot( \w+){0,6} (generati\w+|embedding|chat|pooling) model\b"
)
"""How engines that were started for embeddings answer chats, and the reverse: vLLM, SGLang, llama.cpp, Ollama."""

OWN_STATUSES = frozenset((401, 402, 403, 407, 408, 409, 410, 421, 425, 426, 460, 499, 501, 511))
"""By which a backend, or a proxy before it, refuses our key, its account, our protocol, or a path or host that it
lacks, or says that it waited in vain (408, 460 and 499) or that the request may be sent again (409, 425)."""

TOO_LONG = re.compile(
    r"\bcontext (length|window|size)\b|\bmaximum (model|sequence|input|prompt|allowed) length\b"
    r"|\bmax (model|seq|input) len|\b(prompt|input|inputs|conversation|request) (is )?too long\b"
    r"|\b(prompt|input) length\b.{0,80}\bexceeds?\b|\b(prompt|input) length should be\b"
    r"|\binputs must have less than \d+ tokens\b|\binputs tokens max new tokens must be\b"
)
"""Of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, TensorRT-LLM and TGI; some count the answer as well."""

OF_PROMPT = re.compile(r"\b(prompts?|inputs?|sequence|messages|conversation|request|session)\b")
MEASURE, EXCEEDS = r"\b(tokens?|length|len)\b", r"\b(exceed\w*|too (many|long|large)|longer than|up to|limit)\b"
TOO_MANY = re.compile(rf"{MEASURE}.{{0,60}}{EXCEEDS}|{EXCEEDS}.{{0,60}}{MEASURE}")
"""Of any other: a measure in tokens of what was sent, and that it is too much. What is taken for that by mistake is
tried where prompts may be longer, if there is such a backend."""

NO_RANK = re.compile(r"\bdata parallel rank\b")
"""vLLM: "data_parallel_rank 3 is out of range [0, 2)."; what takes only fields that it knows names the header."""

ERROR_MEMBERS = ("type", "error_type", "code", "message", "msg", "reason", "error", "detail", "errors")
"""That have words of an error, or an error; others may quote the request. TGI has the second, FastAPI `detail`."""

LEVELS_MAX, ERRORS_MAX = 4, 4  # of errors in errors, and of errors in a list


class Judgement(NamedTuple):
    """What an answer shows. `pause_s`: for so long the backend wants no more requests, of this credential if it is
    `personal`, else of anybody; None: it says nothing of that. `is_own`: a refusal that may be the backend's own fault,
    for its keys or models, so that another one is asked before the client gets it. `is_too_long`: it refuses the length
    of the prompt, which is nobody's fault. `names_rank`: its words are of a data-parallel rank. `lacks_model`: of a
    model that it lacks. `wording`: that of a refusal (`wordings`)."""

    outcome: Outcome
    pause_s: float | None = None
    personal: bool = False
    is_own: bool = False
    is_too_long: bool = False
    names_rank: bool = False
    lacks_model: bool = False
    wording: int = 0


SERVED = Judgement(Outcome.SUCCESS)
BLANK_ANSWER = Judgement(Outcome.REFUSED)
"""Of an answer without a word, as long as nobody believes it (`refusals.blank`)."""


def wants_body(status: int) -> bool:
    """Whether the judgement on this status depends on the body, or the answer may have to wait for another one."""
    return status >= 400 and (status not in ILL_STATUSES or status in (500, 503))


def judgement_of(status: int, body: bytes = b"", retry_after: bytes | None = None, *, wall_s: float) -> Judgement:
    """Judge an answer to a request for inference. `retry_after`: the value of that field; `wall_s`: seconds since 1970,
    for one that is a date."""
    outcome = outcome_of(status)
    if 300 <= status < 400:
        return Judgement(Outcome.REFUSED, is_own=True, wording=wording_of(status, ""))
    if status == 503 and (retry_after is not None or FULL.search(error_words(body)) is not None):
        outcome = Outcome.OVERLOADED
    if status == 500 and TOO_LONG.search(error_words(body)) is not None:  # other words may be those of a bug
        return Judgement(Outcome.REFUSED, is_too_long=True)
    if outcome is Outcome.REFUSED:
        words = error_words(body) if status in (400, 404, 413, 422) else ""
        lacks_model, lacks_api = NO_MODEL.search(words) is not None, NO_API.search(words) is not None
        is_own = lacks_model or lacks_api or status in OWN_STATUSES or (status == 404 and bool(body.strip()))
        is_own = is_own or PAGE.match(body) is not None
        wording = wording_of(status, words)
        if status == 404:
            return Judgement(outcome, is_own=is_own, lacks_model=lacks_model, wording=wording)
        names_rank = NO_RANK.search(words) is not None
        return Judgement(
            outcome=outcome,
            pause_s=None,
            personal=False,
            is_own=is_own,
            is_too_long=is_too_long(words),
            names_rank=names_rank,
            lacks_model=lacks_model,
            wording=wording,
        )
    if outcome is not Outcome.OVERLOADED:
        return Judgement(outcome)
    pause_s = seconds_of(retry_after, wall_s) if retry_after is not None else None
    return Judgement(outcome, min(pause_s or PAUSE_S, PAUSE_MAX_S), personal=status == 429)


def is_too_long(words: str) -> bool:
    """Whether an error speaks of a prompt that is too long."""
    return TOO_LONG.search(words) is not None or (
        OF_PROMPT.search(words) is not None and TOO_MANY.search(words) is not None
    )


def retry_after_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the value of Retry-After; None without one. As in OpenAI's SDKs `retry-after-ms` goes first."""
    found = {key: value.strip() for name, value in headers if (key := name.lower()) in (IN_SECONDS, IN_MILLISECONDS)}
    if SECONDS.fullmatch(found.get(IN_MILLISECONDS, b"")) is not None:
        return b"%.3f" % (float(found[IN_MILLISECONDS]) / 1000)
    return found.get(IN_SECONDS, found.get(IN_MILLISECONDS))


def seconds_of(retry_after: bytes, wall_s: float) -> float | None:
    """Return the seconds that a Retry-After (RFC 9110 10.2.3) wants, 0 or more; None if it can't be read."""
    value = retry_after.strip()
    if SECONDS.fullmatch(value) is not None:
        return float(value)
    try:
        at = parsedate_to_datetime(value.decode("latin-1"))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    seconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - datetime.fromtimestamp(wall_s, UTC)
    return max(0.0, seconds.total_seconds())


def error_words(body: bytes) -> str:
    """Return the type, code and message of an error in lower case, with single blanks between words; or what else it
    is, such as a page."""
    found: Any
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = body[:SENTENCE_CHARS_MAX].decode("utf-8", "replace")
    words = " ".join(texts_of(found, LEVELS_MAX))[:SENTENCE_CHARS_MAX]
    return BETWEEN_WORDS.sub(" ", WITHIN_NAMES.sub(" ", words)).strip().lower()


def texts_of(found: Any, levels: int) -> Iterator[str]:
    """Yield the texts of an error, from its outermost object inwards."""
    if isinstance(found, str):
        yield found[:SENTENCE_CHARS_MAX]
    elif isinstance(found, list) and levels:
        for each in found[:ERRORS_MAX]:
            yield from texts_of(each, levels - 1)
    elif isinstance(found, dict) and levels:
        if found.get("param") == "model":
            yield "invalid model"
        for name in ERROR_MEMBERS:
            yield from texts_of(found.get(name), levels - 1)

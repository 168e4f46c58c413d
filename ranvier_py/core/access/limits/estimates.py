"""What a request will take, before it is answered; and what its answer shows that it took.

Rule: the prompt counts exactly where its tokens are known, else by its bytes without media, of which each counts what
those of its model took lately; a body that is not read counts what nine in ten of its tenant's took. The answer counts
what nine in ten of the tenant's have, and no more than it may have. Bounds: TENANTS_MAX, MODELS_MAX.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.meters import Amounts, cost_of
from ranvier_py.core.answers.answer_ends import ENDS_BYTES, AnswerEnds
from ranvier_py.core.answers.answer_stream import last_number
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.prompts.outer_values import scalar_of
from ranvier_py.core.prompts.prompt import Prompt

TENANTS_MAX, MODELS_MAX = 2048, 1024
NO_TOKENS = Amounts()
ANSWER_TOKENS, PROMPT_TOKENS, MEDIUM_TOKENS = 1024.0, 2048.0, 1024.0  # until some were seen
BYTES_PER_TOKEN = 4.0
CHOICES_MAX = 128  # of one prompt, as in OpenAI's API
STEPS = 4  # of lengths in each doubling: a p90 is at most a quarter above the true one
LENGTHS = 96  # classes of lengths: up to 2^24
FADES = 256.0  # answers that count

MOST = re.compile(rb'"max_(?:completion_|output_|new_)?tokens"\s*:\s*(\d{1,9})')
MEDIUM = re.compile(rb'"(?:data:[^",]{0,128},)?[A-Za-z0-9+/=_-]{512,}+"')
MEDIA_MARKS = re.compile(rb'base64|_url"|"input_audio"|"image"')
COUNTS = {
    "messages": (b'"input_tokens"', b'"cache_read_input_tokens"', b'"output_tokens"'),
    "responses": (b'"input_tokens"', b'"cached_tokens"', b'"output_tokens"'),
}
USUAL_COUNTS = (b'"prompt_tokens"', b'"cached_tokens"', b'"completion_tokens"')
WRITTEN, REASONING, TOTAL = b'"cache_creation_input_tokens"', b'"reasoning_tokens"', b'"total_tokens"'


class Percentile:
    """The length that nine in ten of the last ones do not exceed."""

    __slots__ = ("_above", "_at", "_classes", "_sum", "p90")

    def __init__(self, assumed: float) -> None:
        self._classes = [0.0] * LENGTHS
        self._at, self._above = 0, 0.0  # the class that has it, and how many lengths are above
        self._sum, self.p90 = 0.0, assumed

    def add(self, length: float) -> None:
        classes, at = self._classes, self._at
        if self._sum >= FADES:
            classes[:] = [each / 2 for each in classes]
            self._sum, self._above = self._sum / 2, sum(classes[at + 1 :])
        new = class_of(length)
        classes[new] += 1
        self._sum += 1
        above, most = self._above + (new > at), self._sum // 10
        while above > most:
            at += 1
            above -= classes[at]
        while at > 0 and above + classes[at] <= most:
            above += classes[at]
            at -= 1
        self._at, self._above = at, above
        doublings, within = divmod(at, STEPS)
        self.p90 = (STEPS + within + 1 << doublings) / STEPS


def class_of(length: float) -> int:
    """Return the class of a length: the doublings that it takes, in STEPS each."""
    number = max(1, int(length))
    doublings = number.bit_length() - 1
    return min(LENGTHS - 1, STEPS * doublings + (number * STEPS >> doublings) - STEPS)


class TenantLengths:
    """How long the answers, and the prompts that are not read, of one tenant are."""

    __slots__ = ("answers", "unread")

    def __init__(self) -> None:
        self.answers, self.unread = Percentile(ANSWER_TOKENS), Percentile(PROMPT_TOKENS)


class Estimate(NamedTuple):
    """What is reserved, what of it is sure, and from what it was estimated."""

    need: Amounts
    least: Amounts
    prompt: float  # tokens of all prompts
    media: int
    is_read: bool


class Took(NamedTuple):
    """The tokens that an answer shows to be taken; None: it does not say."""

    prompt: int | None
    cached: int
    written: int
    output: int | None
    reasoning: int


class Estimates:
    """Estimates requests by what was learned of others (see the module)."""

    def __init__(self) -> None:
        self._tenants = BoundedDict[str, TenantLengths](TENANTS_MAX)
        self._media = BoundedDict[str, float](MODELS_MAX)

    def tenant(self, name: str) -> TenantLengths:
        found = self._tenants.get(name)
        if found is None:
            self._tenants[name] = found = TenantLengths()
        return found

    def of(
        self, prompt: Prompt, body: bytes, tenant: str, cached: float, cost: ModelCost | None, *, answers: bool
    ) -> Estimate:
        """Estimate a request, of whose prompt so many tokens are expected to be cached. `answers`: it generates."""
        known, media, is_read = self.tenant(tenant), 0, prompt.kind != "opaque"
        prompts = several_prompts(body) if prompt.kind == "completion" or (answers and not is_read) else 1
        exact = is_read and prompts == 1 and prompt.end.state is not None
        if exact:
            tokens = float(prompt.end.length)
        elif MEDIA_MARKS.search(body) and (found := media_in(body)):
            media, bytes_left = found
            tokens = bytes_left / BYTES_PER_TOKEN + media * self._media.get(prompt.model, MEDIUM_TOKENS)
        elif prompts > 1:
            tokens = len(body) / BYTES_PER_TOKEN
        else:
            tokens = float(prompt.end.length) if is_read else min(known.unread.p90, float(len(body)))
        output = prompts * choices(body) * min(most_of(body), known.answers.p90) if answers else 0.0
        uncached = max(0.0, tokens - cached)
        price = cost_of(cost, tokens, min(cached, tokens), output) if cost is not None else 0.0
        need = Amounts(tokens + output, uncached + output, price)
        return Estimate(need, Amounts(tokens) if exact else NO_TOKENS, tokens, media, is_read)

    def took(self, estimate: Estimate, found: Took, tenant: str, model: str, cost: ModelCost | None) -> Amounts:
        """Return what a request took, and learn from it."""
        known = self.tenant(tenant)
        prompt = estimate.prompt if found.prompt is None else float(found.prompt)
        output = float(found.output or 0)
        if found.output:
            known.answers.add(output)
        if found.prompt is not None and not estimate.is_read:
            known.unread.add(prompt)
        if found.prompt is not None and estimate.media:
            before = self._media.get(model, MEDIUM_TOKENS)
            text = estimate.prompt - estimate.media * before
            self._media[model] = before + (max(0.0, prompt - text) / estimate.media - before) / 8
        written, reasoning = found.written, found.reasoning
        price = cost_of(cost, prompt, found.cached, output, written=written, reasoning=reasoning) if cost else 0.0
        return Amounts(prompt + output, max(0.0, prompt - found.cached) + output, price)


def most_of(body: bytes) -> float:
    """Return how many tokens an answer may have, as its request says, near the ends of a long one alone."""
    found = MOST.findall(body if len(body) < 2 * ENDS_BYTES else body[:ENDS_BYTES] + body[-ENDS_BYTES:])
    return float(max(map(int, found))) if found else float("inf")


def choices(body: bytes) -> int:
    """Return how many answers to each prompt a request asks for."""
    if b'"n"' not in body:
        return 1
    found = scalar_of(body, "n")
    number = found.value if found is not None else 1
    return min(number, CHOICES_MAX) if type(number) is int and number > 0 else 1


def several_prompts(body: bytes) -> int:
    """Return how many prompts a completion has."""
    at = body.find(b'"prompt"')
    if at < 0 or b"[" not in body[at : at + 16] or excess(body):
        return 1
    try:
        prompts = orjson.loads(body)["prompt"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return 1
    is_several = type(prompts) is list and len(prompts) > 1 and type(prompts[0]) in (str, list)
    return len(prompts) if is_several else 1


def media_in(body: bytes) -> tuple[int, int] | None:
    """Return how many media a body has or names, and its bytes without those; None without any."""
    inside = [found.end() - found.start() for found in MEDIUM.finditer(body)]
    named = body.count(b'_url"') // 2 if not inside else 0  # `"type":"image_url","image_url":{…}`
    number = max(len(inside), named)
    return (number, len(body) - sum(inside)) if number else None


def took_of(ends: AnswerEnds, api: str) -> Took:
    """Return what an answer shows. Where the engine has not counted, or the answer was cut off, its events count, one
    token each, or the bytes of an answer that is no stream."""
    prompt_name, cached_name, output_name = COUNTS.get(api, USUAL_COUNTS)
    end, is_messages = ends.end, api == "messages"
    begin = ends.begin if is_messages else end
    prompt, cached = last_number(begin, prompt_name), last_number(begin, cached_name) or 0
    written = last_number(begin, WRITTEN) or 0 if is_messages else 0
    if is_messages and prompt is not None:  # whose `input_tokens` do not include them
        prompt += cached + written
    output = last_number(end, output_name)
    if output is None and prompt is not None and api not in COUNTS and TOTAL in end:
        output = 0  # of embeddings
    if output is None or (is_messages and ends.events and b"message_delta" not in end):
        output = ends.events or int(ends.size / BYTES_PER_TOKEN)
    reasoning = last_number(end, REASONING) or 0
    return Took(prompt, min(cached, prompt or cached), written, output, min(reasoning, output))

"""What a request will take, before it is answered; and what its answer shows that it took.

Rule: the prompt counts exactly where its tokens are known, else by its bytes without media, of which each counts what
those of its model took lately; a body that is compressed, or a form, counts what nine in ten of its tenant's took. The
answer counts what the tenant's have on average, and no more than it may have; how much they vary is told beside it,
since sums of many vary less than each. Bounds: TENANTS_MAX, MODELS_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from operator import mul
from typing import NamedTuple

from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.asked_answers import AskedAnswers
from ranvier_py.core.access.limits.meter_groups import NO_EXCESS, Excess
from ranvier_py.core.access.limits.meters import Amounts, amounts_of, cost_of
from ranvier_py.core.answers.answer_counts import (
    CACHE_READ,
    COUNT,
    COUNTS,
    INPUT,
    OUTPUT,
    USUAL_COUNTS,
    WRITTEN,
    counts_in,
)
from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.prompts.prompt import Prompt

TENANTS_MAX, MODELS_MAX = 2048, 1024
NO_TOKENS = Amounts()
ANSWER_TOKENS, PROMPT_TOKENS, MEDIUM_TOKENS = 1024.0, 2048.0, 1024.0  # until some were seen
BYTES_PER_TOKEN = 4.0
STEPS = 4  # of lengths in each doubling: a p90 is at most a quarter above the true one
LENGTHS = 96  # classes of lengths: up to 2^24
FADES = 256.0  # answers that count
AT_ONCE = 16  # one in so many of them is learned at once

MEDIUM = re.compile(rb'"(?:data:[^",]{0,128},)?[A-Za-z0-9+/=_-]{512,}+"')
REASONING, TOTAL = b"reasoning", b"total"


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


class MeanLength:
    """The mean of the last lengths, and their variance. Some at once are learned, one at first."""

    __slots__ = ("_recent", "_seen", "excess", "mean")

    def __init__(self, assumed: float) -> None:
        self._recent, self._seen = list[float](), 1.0
        self.mean, self.excess = assumed, Excess(assumed * assumed, inf)

    def add(self, length: float) -> None:
        self._recent.append(length)
        if len(self._recent) * AT_ONCE >= self._seen:
            self._learn()

    def _learn(self) -> None:
        recent, number = self._recent, len(self._recent)
        mean = sum(recent) / number
        variance = max(0.0, sum(map(mul, recent, recent)) / number - mean * mean)
        self._seen = min(FADES, self._seen + number)
        part, change = number / self._seen, mean - self.mean
        before = self.excess.variance + part * change * change
        self.excess = Excess((1 - part) * before + part * variance, inf)
        self.mean += part * change
        recent.clear()


class TenantLengths:
    """How long the answers, and the prompts that are not read, of one tenant are."""

    __slots__ = ("answers", "unread")

    def __init__(self) -> None:
        self.answers, self.unread = MeanLength(ANSWER_TOKENS), Percentile(PROMPT_TOKENS)


class Estimate(NamedTuple):
    """What is reserved, how many of its tokens are sure, how many more it may take, and from what it was estimated."""

    need: Amounts
    sure: float
    excess: Excess
    prompt: float  # tokens of all prompts
    media: int
    is_read: bool
    lengths: TenantLengths
    cost: ModelCost | None


EstimateFields = tuple[Amounts, float, Excess, float, int, bool, TenantLengths, ModelCost | None]
estimate_of: Callable[[EstimateFields], Estimate] = partial(tuple.__new__, Estimate)
"""As `placement.match_of`."""


class Took(NamedTuple):
    """The tokens that an answer shows to be taken; None: it does not say."""

    prompt: int | None
    cached: int
    written: int
    output: int
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

    def of(  # each is another fact of the request
        self,
        prompt: Prompt,
        body: bytes,
        lengths: TenantLengths,
        cached: float,
        cost: ModelCost | None,
        asked: AskedAnswers | None,
        *,
        is_text: bool = True,
    ) -> Estimate:
        """Estimate a request, of whose prompt so many tokens are expected to be cached. `asked`: the answers that it
        asks for, None if it generates nothing. `is_text`: whether its bytes show how long it is."""
        answers, media, sure, is_read = lengths.answers, 0, 0.0, is_text or prompt.kind != "opaque"
        tokens: float = prompt.end.length
        prompts, output, excess = expected(answers, asked)
        if is_read and prompts == 1 and prompt.end.state is not None:
            sure = tokens
        elif (found := media_in(body)) is not None:
            media, bytes_left = found
            tokens = bytes_left / BYTES_PER_TOKEN + media * self._media.get(prompt.model, MEDIUM_TOKENS)
        elif not is_read:
            tokens = min(lengths.unread.p90, float(len(body)))
        elif prompts > 1 or prompt.kind == "opaque":
            tokens = len(body) / BYTES_PER_TOKEN
        price = 0.0 if cost is None else cost_of(cost, tokens, min(cached, tokens), output)
        all_tokens = tokens + output
        uncached = all_tokens - cached if cached < tokens else output
        need = amounts_of((all_tokens, uncached, price, 1.0, 1.0))
        return estimate_of((need, sure, excess, tokens, media, is_read, lengths, cost))

    def took(self, estimate: Estimate, found: Took, model: str) -> Amounts:
        """Return what a request took by what its answer shows, and learn from it."""
        prompt, cached, written, output, reasoning = found
        amounts, cost = self.counted(estimate, prompt, cached, output, model), estimate.cost
        if cost is None:
            return amounts
        price = cost_of(cost, amounts.tokens - output, cached, output, written=written, reasoning=reasoning)
        return amounts._replace(cost=price)

    def counted(self, estimate: Estimate, prompt: int | None, cached: int, output: int, model: str) -> Amounts:
        """Return what a request took whose tokens are counted, the cost apart, and learn from it."""
        if output:
            estimate.lengths.answers.add(output)
        tokens: float = estimate.prompt if prompt is None else prompt
        if (estimate.media or not estimate.is_read) and prompt is not None:
            self._learn(estimate, prompt, model)
        all_tokens = tokens + output
        return amounts_of((all_tokens, all_tokens - cached if cached < tokens else output, 0.0, 1.0, 1.0))

    def _learn(self, estimate: Estimate, prompt: int, model: str) -> None:
        """Learn from the tokens of a prompt that was not read, or that has media."""
        if not estimate.is_read:
            estimate.lengths.unread.add(prompt)
        if estimate.media:
            before = self._media.get(model, MEDIUM_TOKENS)
            text = estimate.prompt - estimate.media * before
            self._media[model] = before + (max(0.0, prompt - text) / estimate.media - before) / 8


def usual_need(prompt: Prompt, body: bytes, lengths: TenantLengths) -> Amounts | None:
    """Return what a request for one answer needs, as `Estimates.of` would if nothing was cached; None if its prompt is
    not read, or may have media."""
    end = prompt.end
    if prompt.kind == "opaque" or (end.state is None and has_media(body)):
        return None
    tokens = end.length + lengths.answers.mean
    return amounts_of((tokens, tokens, 0.0, 1.0, 1.0))


def expected(lengths: MeanLength, asked: AskedAnswers | None) -> tuple[int, float, Excess]:
    """Return the prompts of a request, how many tokens their answers are expected to have, and how many more they
    may."""
    if asked is None:
        return 1, 0.0, NO_EXCESS
    prompts, choices, most = asked
    number, mean = prompts * choices, min(lengths.mean, most)
    if most == inf and number == 1:
        return 1, mean, lengths.excess
    return prompts, number * mean, Excess(number * lengths.excess.variance * (most > mean), number * (most - mean))


def has_media(body: bytes) -> bool:
    """Whether a body may have media, or name any."""
    # four searches take a third of the time of one for any of the four
    return b"base64" in body or b'_url"' in body or b'"input_audio"' in body or b'"image"' in body


def media_in(body: bytes) -> tuple[int, int] | None:
    """Return how many media a body has or names, and its bytes without those; None without any."""
    if not has_media(body):
        return None
    inside = [found.end() - found.start() for found in MEDIUM.finditer(body)]
    named = body.count(b'_url"') // 2 if not inside else 0  # `"type":"image_url","image_url":{…}`
    number = max(len(inside), named)
    return (number, len(body) - sum(inside)) if number else None


def took_of(ends: AnswerEnds, api: str) -> Took | None:
    """Return what an answer shows; None if nothing of it came. Where the engine has not counted, or the answer was cut
    off, its events count, one token each, or the bytes of an answer that is no stream."""
    if not (end := ends.end):
        return None
    counts, (prompt_name, cached_name, output_name) = counts_in(end), COUNTS.get(api, USUAL_COUNTS)
    if api == "messages":
        return took_of_message(ends, counts)
    try:
        prompt, output = int(counts[prompt_name]), int(counts[output_name])
    except KeyError:
        return took_of_others(ends, counts, prompt_name, embeds=TOTAL in counts and api not in COUNTS)
    return Took(prompt, int(counts.get(cached_name, 0)), 0, output, int(counts.get(REASONING, 0)))


def price_of_stored(cost: ModelCost, ends: AnswerEnds, api: str, body: bytes, lengths: TenantLengths) -> float:
    """Return what an answer costs that was computed for an equal request: the share of what it cost there, or of what
    it may have cost as long as nothing of it is known."""
    found = took_of(ends, api) or Took(None, 0, 0, round(lengths.answers.mean), 0)
    prompt, cached, written, output, reasoning = found
    tokens = len(body) / BYTES_PER_TOKEN if prompt is None else prompt
    return cost.cached_answers * cost_of(cost, tokens, cached, output, written=written, reasoning=reasoning)


def took_of_others(ends: AnswerEnds, counts: Mapping[bytes, bytes], prompt_name: bytes, *, embeds: bool) -> Took:
    """Return what an answer shows of which the engine has not counted all."""
    events = ends.events or int(ends.size / BYTES_PER_TOKEN)
    if prompt_name not in counts:
        return Took(None, 0, 0, events, 0)
    return Took(int(counts[prompt_name]), 0, 0, 0 if embeds else events, 0)


def took_of_message(ends: AnswerEnds, counts: Mapping[bytes, bytes]) -> Took:
    """Return what a message of Anthropic's API shows, whose `input_tokens` are those that were not cached."""
    of_prompt, is_whole = dict(COUNT.findall(ends.begin)), not ends.events or b"message_delta" in ends.end
    cached, written = int(of_prompt.get(CACHE_READ, 0)), int(of_prompt.get(WRITTEN, 0))
    prompt = int(of_prompt[INPUT]) + cached + written if INPUT in of_prompt else None
    is_counted = is_whole and OUTPUT in counts
    output = int(counts[OUTPUT]) if is_counted else ends.events or int(ends.size / BYTES_PER_TOKEN)
    return Took(prompt, cached, written, output, min(int(counts.get(REASONING, 0)), output))

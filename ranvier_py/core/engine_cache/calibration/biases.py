"""Why predictions of one engine's cache are wrong: each cause with the evidence that gives it away.

| bias | evidence, among the latest answers of one engine |
|---|---|
| template | its count of prompt tokens is not ours plus one of a few constants (generation prompts) in a fifth |
| salt | of prompts used there moments ago some were found, and a tenth or more had nothing at all: caches are kept |
|      | apart by something that we do not see (a tenant, an adapter, a salt in a header) |
| no_reuse | of prompts used there moments ago nearly none was found: no prefix caching, another tokenizer, or a count |
|      | that is always 0 |
| hybrid | everything found is a multiple of a step of 256 tokens or more, and less than predicted by a part of it: |
|      | recurrent layers keep few states |
| block_size | the same with a larger block than ours |
| small_cache | the learned capacity limits what is believed, and is below what the engine reports |
| events | half of its answers are far from what it holds by its events: they are another engine's, or not all |
| profile | of what a hybrid model's checkpoints were credited with less than half was there: it is not the cache |
|      | profile that it was taken for, or gives states up sooner |
| no_counts | nine answers of ten do not say how much was cached (vLLM: --enable-prompt-tokens-details) |

Rules: a bias appears when its share passes a threshold on enough answers, and goes when it falls below half of that:
so it is named once. All shares fade: an answer counts half after HALF_LIFE further ones.
Bound: DIFFERENCES_MAX numbers for each engine.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from math import gcd


class Bias(Enum):
    TEMPLATE = "template"
    SALT = "salt"
    NO_REUSE = "no_reuse"
    HYBRID = "hybrid"
    BLOCK_SIZE = "block_size"
    SMALL_CACHE = "small_cache"
    EVENTS = "events"
    NO_COUNTS = "no_counts"
    PROFILE = "profile"


HALF_LIFE = 100.0
"""Answers: a wrong template shows within minutes of any load, and is forgotten as soon after it was put right."""

HIDDEN = 2 ** (-1 / HALF_LIFE)

ANSWERS_MIN = 20.0
"""Weight of answers below which nothing is said. Faded weights never exceed HALF_LIFE / ln 2, 144."""

TEMPLATE_SHARE, SALT_SHARE, NO_REUSE_SHARE, NO_COUNTS_SHARE = 0.2, 0.1, 0.9, 0.9
EVENTS_SHARE = 0.5
"""Of answers of an engine that is understood some hundredths are far from its events: what came in between."""

FAR = 0.5
"""An answer is far from them if this share or less of the greater number of tokens is in both."""

STAYS = 0.5
"""Share of a threshold at which a bias that was named is still there."""

DIFFERENCES_MAX = 64
"""Different distances between two counts that are kept; beyond, the rarest makes room."""

OFFSET_MAX = 64
"""Tokens that a generation prompt may have. A constant difference above that is another template, too."""

OFFSETS_USUAL = 3
"""Generation prompts of one template: with and without thinking, with tools. A wrong template differs chat by chat."""

STEPS_SEEN = 16
"""Counts of cached tokens that agree on one step before it is believed: the chance that 16 multiples of 16 are all
multiples of 32 is 1 in 65,536."""

CUT_MIN = 4
"""Of these, those that were less than predicted by a part of the step: prompts of one shape have steps, too."""

HYBRID_TOKENS = 256
"""A step from here on is not a block: vLLM's and SGLang's have 1 to 128 tokens."""


class Share:
    """How often something is so: a share that forgets. 0 while there were few answers."""

    def __init__(self) -> None:
        self.answers = 0.0
        self._so = 0.0

    def add(self, is_so: bool) -> None:
        self.answers = self.answers * HIDDEN + 1.0
        self._so = self._so * HIDDEN + is_so

    @property
    def value(self) -> float:
        return self._so / self.answers if self.answers >= ANSWERS_MIN else 0.0


class Evidence:
    """What the answers of one engine say of the ways in which we may misunderstand it."""

    def __init__(self) -> None:
        self.differences: dict[int, float] = {}  # between two counts of prompt tokens, with their weight
        self._weight = 1.0  # of the next difference
        self._silent, self._cold, self._warm, self._far = Share(), Share(), Share(), Share()
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS_SEEN)
        self._step: int | None = 0  # None: to be found again

    def counted(self, cached_tokens: int | None) -> None:
        """An answer said how much was cached, or did not."""
        self._silent.add(cached_tokens is None)

    def found(self, cached_tokens: int, predicted_tokens: int) -> None:
        """So much was cached, above 0, where that much was predicted in blocks of ours."""
        self._steps.append((cached_tokens, predicted_tokens - cached_tokens))
        self._step = None

    def measured(self, difference: int) -> None:
        """The engine counted so many prompt tokens more than we did, who are sure of our count."""
        if difference not in self.differences and len(self.differences) >= DIFFERENCES_MAX:
            del self.differences[min(self.differences, key=self.differences.__getitem__)]
        self.differences[difference] = self.differences.get(difference, 0.0) + self._weight
        self._weight /= HIDDEN
        if self._weight > 1e9:
            self.differences = {key: weight / self._weight for key, weight in self.differences.items()}
            self._weight = 1.0

    def used_again(self, cached_tokens: int, usable_tokens: int) -> None:
        """Of a prompt that was there moments ago, so much of what was usable was found."""
        self._cold.add(cached_tokens == 0)
        self._warm.add(2 * cached_tokens >= usable_tokens)

    def reported_by_events(self, cached_tokens: int, held_tokens: int) -> None:
        """So much of a prompt was cached where its events said that it holds that much."""
        low, high = sorted((cached_tokens, held_tokens))
        self._far.add(low <= FAR * high)

    @property
    def far_share(self) -> float:
        """Of its answers, those far from what its events say; 0 while there are few."""
        return self._far.value

    @property
    def step_tokens(self) -> int:
        """What everything found is a multiple of and is cut to; 0 while there is no such step."""
        if self._step is None:
            self._step = self._find_step() if len(self._steps) == STEPS_SEEN else 0
        return self._step

    def _find_step(self) -> int:
        step = gcd(*[cached for cached, _ in self._steps])
        return step if sum(0 < missing < step for _, missing in self._steps) >= CUT_MIN else 0

    @property
    def offset_tokens(self) -> int:
        """The commonest difference between the engine's count and ours."""
        return max(self.differences, key=self.differences.__getitem__) if self.differences else 0

    def strengths(self, block_tokens: int) -> dict[Bias, float]:
        """How strong each bias is, 1 being what names it. 0 where too little is known."""
        found = dict.fromkeys(Bias, 0.0)
        found[Bias.NO_COUNTS] = self._silent.value / NO_COUNTS_SHARE
        found[Bias.TEMPLATE] = self._template()
        found[Bias.EVENTS] = self.far_share / EVENTS_SHARE
        step, warm = self.step_tokens, self._warm.value
        if step >= HYBRID_TOKENS:
            pass  # short prompts have nothing then
        elif warm >= SALT_SHARE:
            found[Bias.SALT] = self._cold.value / SALT_SHARE
        elif self._warm.answers >= ANSWERS_MIN:
            found[Bias.NO_REUSE] = (1 - warm) / NO_REUSE_SHARE
        found[Bias.HYBRID] = float(step >= HYBRID_TOKENS)
        found[Bias.BLOCK_SIZE] = float(block_tokens < step < HYBRID_TOKENS)
        return found

    def _template(self) -> float:
        total = sum(self.differences.values())
        if total / self._weight < ANSWERS_MIN:
            return 0.0
        plausible = [weight for offset, weight in self.differences.items() if 0 <= offset <= OFFSET_MAX]
        usual = sum(sorted(plausible)[-OFFSETS_USUAL:])
        return (1 - usual / total) / TEMPLATE_SHARE


def present(before: bool, strength: float) -> bool:
    """Whether a bias is there, given whether it was."""
    return strength >= (STAYS if before else 1.0)

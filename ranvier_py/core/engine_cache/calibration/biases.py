"""Names why predictions for one engine are wrong: each bias with the evidence that identifies it.

Rule: a bias appears when its share of the latest answers of one engine passes a threshold on enough of them, and goes
when the share falls below half of the threshold, so a bias near its threshold is logged once. All shares fade: an
answer counts half after HALF_LIFE more.
Bound: DIFFERENCES_MAX numbers for each engine.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from ranvier_py.core.routing.checkpoints.cache_profile import STEPS_SEEN, step_of


class Bias(Enum):
    TEMPLATE = "template"  # its prompt token count is often not ours plus one of a few constants (generation prompts)
    SALT = "salt"  # of prompts used moments ago some had nothing cached: a tenant, an adapter or a header parts them
    NO_REUSE = "no_reuse"  # almost none had: no prefix caching, another tokenizer, or a count that is always 0
    HYBRID = "hybrid"  # hits are multiples of HYBRID_TOKENS or more, some cut to them: recurrent layers keep few states
    BLOCK_SIZE = "block_size"  # the same, with a step that is larger than our block and below HYBRID_TOKENS
    SMALL_CACHE = "small_cache"  # the learned capacity limits what is believed, and is below what the engine reports
    EVENTS = "events"  # answers are far from what its events report: they are another engine's, or incomplete
    NO_COUNTS = "no_counts"  # most answers do not report cached tokens (vLLM: --enable-prompt-tokens-details)
    PROFILE = "profile"  # credited checkpoints are not there: another cache profile, or states dropped sooner


HALF_LIFE = 100.0
"""In answers: a wrong template shows within minutes of any load, and is forgotten as soon after it was corrected."""

HIDDEN = 2 ** (-1 / HALF_LIFE)

ANSWERS_MIN = 20.0
"""Weight of answers below which no bias is named. Faded weights never exceed HALF_LIFE / ln 2, 144."""

TEMPLATE_SHARE, SALT_SHARE, NO_REUSE_SHARE, NO_COUNTS_SHARE = 0.2, 0.1, 0.9, 0.9
EVENTS_SHARE = 0.5
"""Even an engine that is well understood has a few hundredths of far answers: other requests came in between."""

FAR = 0.5
"""An answer is far from the events if the smaller of the two counts is at most this share of the greater."""

STAYS = 0.5
"""Share of its threshold down to which a bias that has appeared stays."""

DIFFERENCES_MAX = 64
"""Distinct differences of prompt token counts that are kept; a new one replaces the one of least weight."""

OFFSET_MAX = 64
"""Tokens that a generation prompt may have. A larger constant difference means another template, too."""

OFFSETS_USUAL = 3
"""Generation prompts of one template: with or without thinking, with tools. A wrong one differs from chat to chat."""

STEP_SOUGHT_EVERY = 4
"""Hits after which the step is sought again, unless one contradicts it: every answer asks for it."""

CUT_MIN = 4
"""So many of these counts must fall short of the prediction by less than the step: prompts of one shape share one."""

HYBRID_TOKENS = 256
"""A step of this size or more is no block: blocks of vLLM and SGLang have 1 to 128 tokens."""


class Share:
    """The share of answers for which something holds. Old answers fade; it is 0 while there are too few."""

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
    """What the answers of one engine show about each bias."""

    def __init__(self) -> None:
        self.differences: dict[int, float] = {}  # engine's prompt tokens minus ours -> weight
        self._weight = 1.0  # of the next difference; it grows, so that older ones count less
        self._silent, self._cold, self._warm, self._far = Share(), Share(), Share(), Share()
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS_SEEN)
        self._step: int | None = 0  # None: to be found again
        self._hits = 0

    def counted(self, cached_tokens: int | None) -> None:
        """Note whether an answer reported cached tokens; None: it did not."""
        self._silent.add(cached_tokens is None)

    def found(self, cached_tokens: int, predicted_tokens: int) -> None:
        """Note a hit: so many tokens were cached (above 0), and so many were predicted, in whole blocks of ours."""
        self._steps.append((cached_tokens, predicted_tokens - cached_tokens))
        self._hits += 1
        if self._hits % STEP_SOUGHT_EVERY == 0 or (self._step and cached_tokens % self._step):
            self._step = None

    def measured(self, difference: int) -> None:
        """Note by how many prompt tokens the engine's count exceeds ours, in a case where our count is certain."""
        if difference not in self.differences and len(self.differences) >= DIFFERENCES_MAX:
            del self.differences[min(self.differences, key=self.differences.__getitem__)]
        self.differences[difference] = self.differences.get(difference, 0.0) + self._weight
        self._weight /= HIDDEN
        if self._weight > 1e9:
            self.differences = {key: weight / self._weight for key, weight in self.differences.items()}
            self._weight = 1.0

    def used_again(self, cached_tokens: int, usable_tokens: int) -> None:
        """Note how many of the usable tokens were cached of a prompt that the engine had used moments ago."""
        self._cold.add(cached_tokens == 0)
        self._warm.add(2 * cached_tokens >= usable_tokens)

    def reported_by_events(self, cached_tokens: int, held_tokens: int) -> None:
        """Note how many tokens were cached of a prompt of which the engine's events report `held_tokens`."""
        low, high = sorted((cached_tokens, held_tokens))
        self._far.add(low <= FAR * high)

    @property
    def far_share(self) -> float:
        """Share of its answers that are far from its events; 0 while there are too few."""
        return self._far.value

    @property
    def step_tokens(self) -> int:
        """The step of which all recent hits are multiples, and to which some were cut; 0 while there is none."""
        if self._step is None:
            self._step = self._find_step()
        return self._step

    def forget_steps(self) -> None:
        """Look for a step anew: later counts have disproved it."""
        self._steps.clear()
        self._step = 0

    def _find_step(self) -> int:
        step = step_of([cached for cached, _ in self._steps])
        return step if sum(0 < missing < step for _, missing in self._steps) >= CUT_MIN else 0

    @property
    def offset_tokens(self) -> int:
        """The most frequent difference between the engine's prompt token count and ours."""
        return max(self.differences, key=self.differences.__getitem__) if self.differences else 0

    def strengths(self, block_tokens: int) -> dict[Bias, float]:
        """The strength of each bias: it appears at 1. 0 where too little is known."""
        found = dict.fromkeys(Bias, 0.0)
        found[Bias.NO_COUNTS] = self._silent.value / NO_COUNTS_SHARE
        found[Bias.TEMPLATE] = self._template()
        found[Bias.EVENTS] = self.far_share / EVENTS_SHARE
        step, warm = self.step_tokens, self._warm.value
        if step >= HYBRID_TOKENS:
            pass  # prompts shorter than a step have no hits, which proves neither
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
    """Whether a bias is present now, given whether it was present before."""
    return strength >= (STAYS if before else 1.0)

"""Decode rates: predicts how long answers take, and how long they are, learned from those that came. Pure.

Rule: a token takes a + c x the tokens of context that decode there; prompts computed meanwhile take their own time on
top. Both parts are fitted by least squares to what the whole fleet showed, older answers fading, and to a few assumed
ones. Of each backend one number is learned: how many times as long it takes as the fleet's line says.
Bounds: the backends; LENGTHS_MAX applications.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from typing import NamedTuple

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.rates.moments import Moments

NOMINAL_S_PER_TOKEN = 1e-4  # as for service rates
STEP_TOKENS = 200.0
CONTEXT_TOKENS = 0.001
"""Until answers have shown it, a step is assumed to take as long as computing so many prompt tokens, and reading a
token of context as so many. An 8B model on one accelerator has 100 to 280, and 0.0009 to 0.0023
(`replay/engine/presets.py`)."""

ANSWER_TOKENS = 200.0
"""Length of an answer, until one is known: between the medians of Azure's (129) and Mooncake's (350) conversations."""

WINDOW = 200.0  # answers that count, as for service rates
ASSUMED = 4.0  # how many answers the assumptions count for
UNKNOWN_FACTOR = 0.5
LOOK_EVERY = 8
"""After each so many answers, a backend that has shown nothing counts as twice as fast as the others: that is worth a
look, and its first answer settles it. Else a single user stays for ever at the first one, however slow. What it showed
is forgotten while others answer WINDOW times each: it may be faster by now, or have been slow by chance."""
UNEVEN = 1.5  # times as long as at the fastest: a few short answers of equal engines differ by less
LENGTHS_MAX = 4096  # applications whose lengths are kept; the one asked for longest ago is forgotten
LENGTH_WINDOW = 50.0  # answers of one application that count


class Decoded(NamedTuple):
    """How long one answer took. `contexts`: the tokens of context that decoded there meanwhile, on average; `computed`:
    prompt tokens that were computed there meanwhile, for a whole answer its own too."""

    backend: BackendId
    tokens: int
    seconds: float
    contexts: float
    computed: int


class DecodeRates:
    """The decode rates of all backends. An answer that comes as a whole shows the sum of its prefill, what it waited
    for, and its decoding: where none is a stream, a prompt token's time is fitted with the other two
    (`per_token_s`)."""

    def __init__(self) -> None:
        self._sums = Moments()  # over answers: contexts, computed tokens by token, seconds by token
        self._seen = 0
        self._shown: dict[BackendId, tuple[float, float, int, int]] = {}
        """Fading seconds that answers took and were predicted to take, `_seen` at the last one, and how many came."""
        self._wrong_tokens = self._counts = 0.0
        self.answer_error_s = 0.0  # the mean error of the predicted times of answers
        self._answer_s = 0.0  # the mean time that answers are predicted to take
        self.uneven = False
        """Whether a backend takes UNEVEN times as long as another, as of the last look."""
        self.assume(NOMINAL_S_PER_TOKEN)

    def __copy__(self) -> DecodeRates:
        twin = object.__new__(DecodeRates)
        vars(twin).update(vars(self))
        twin._shown, twin._sums = copy(self._shown), copy(self._sums)
        return twin

    @property
    def count(self) -> float:
        """How many answers still count."""
        return self._sums.count

    def assume(self, per_token_s: float) -> None:
        """Take what a prompt token costs, from which the rest follows as long as no answer has shown it."""
        self.per_token_s = per_token_s
        self.per_answer_token_s = STEP_TOKENS * per_token_s
        self.per_context_s = self._assumed_s = CONTEXT_TOKENS * per_token_s

    @property
    def looks(self) -> bool:
        """Whether backends that have shown nothing are worth a look now."""
        return self._seen % LOOK_EVERY == 0

    @property
    def prefill_error_s(self) -> float:
        """The mean error of a predicted prefill, by the counts of engines."""
        return self._wrong_tokens * self.per_token_s

    def counted(self, wrong_tokens: int) -> None:
        """Learn by how many tokens a prediction of what an engine had to compute was wrong."""
        self._counts = min(self._counts + 1.0, WINDOW)
        self._wrong_tokens += (wrong_tokens - self._wrong_tokens) / self._counts

    def token_s(self, contexts: float, computed: float = 0.0) -> float:
        """Return the seconds that a token takes beside so many tokens of context, and prompt tokens computed for it."""
        return self.per_answer_token_s + self.per_context_s * contexts + self.per_token_s * computed

    def factor(self, backend: BackendId) -> float:
        """Return how many times as long this backend takes as the fleet's line says."""
        if not self._sums.count:
            return 1.0
        took_s, predicted_s, seen, _ = self._shown.get(backend, (0.0, 0.0, 0, 0))
        left = 1.0 - (self._seen - seen) / (WINDOW * len(self._shown))
        if left <= 0.0 or predicted_s <= 0.0:
            return UNKNOWN_FACTOR if self.looks else 1.0
        assumed_s = ASSUMED * self._answer_s
        return (left * took_s + assumed_s) / (left * predicted_s + assumed_s)

    def observe(self, decoded: Decoded, per_token_s: float | None) -> None:
        """Learn from an answer. `per_token_s`: what a prompt token takes there; None: no first token has shown it."""
        tokens = max(1, decoded.tokens)
        known_s = 0.0 if per_token_s is None else per_token_s * decoded.computed
        seconds = max(0.0, decoded.seconds - known_s) / tokens
        computed = decoded.computed / tokens if per_token_s is None else 0.0
        x = decoded.contexts
        error_s = tokens * abs(seconds - self.token_s(x, computed)) - self.answer_error_s
        self.answer_error_s += error_s / min(self._seen + 1, WINDOW)
        self._sums.fade(1.0 - 1.0 / WINDOW)
        self._sums.add(x, computed, seconds)
        self._fit()
        predicted_s = self.token_s(x, computed)
        took_s, predicted_before_s, _, came = self._shown.get(decoded.backend, (0.0, 0.0, 0, 0))
        keep = 1.0 - 1.0 / LENGTH_WINDOW
        self._seen += 1
        self._answer_s += (tokens * predicted_s - self._answer_s) / min(self._seen, WINDOW)
        self._shown[decoded.backend] = (
            took_s * keep + tokens * seconds,
            predicted_before_s * keep + tokens * predicted_s,
            self._seen,
            came + 1,
        )
        if self.looks:
            factors = [self.factor(known) for known, (_, _, _, came) in self._shown.items() if came >= LOOK_EVERY]
            self.uneven = bool(factors) and max(factors) > UNEVEN * min(factors)

    def forget(self, backend: BackendId) -> None:
        self._shown.pop(backend, None)

    def _fit(self) -> None:
        """Fit the three parts by least squares, none of them negative, drawn to the nominal ones by ASSUMED answers."""
        sums, count = self._sums, self._sums.count
        mean_x, mean_p, mean_y = sums.sum_t / count, sums.sum_d / count, sums.sum_y / count
        xx = sums.tt / count - mean_x * mean_x
        pp = sums.dd / count - mean_p * mean_p
        xp = sums.td / count - mean_x * mean_p
        xy = sums.ty / count - mean_x * mean_y
        py = sums.dy / count - mean_p * mean_y
        # ridge: ASSUMED answers that differ from the mean by the mean, and show the nominal slopes
        ridge = ASSUMED / count
        x_ridge, p_ridge = ridge * mean_x * mean_x, ridge * mean_p * mean_p
        xx, xy = xx + x_ridge, xy + x_ridge * self._assumed_s
        pp, py = pp + p_ridge, py + p_ridge * NOMINAL_S_PER_TOKEN
        per_context, per_token = solved(xx, xp, pp, xy, py)
        rest = mean_y - per_context * mean_x - per_token * mean_p
        if rest < 0.0:  # the slopes explain more than all of it
            share = mean_y / (mean_y - rest)
            per_context, per_token, rest = share * per_context, share * per_token, 0.0
        self.per_answer_token_s, self.per_context_s = rest, per_context
        if mean_p > 0.0 and per_token > 0.0:  # 0: these answers do not show it, so what was known stays
            self.per_token_s = per_token


def solved(xx: float, xp: float, pp: float, xy: float, py: float) -> tuple[float, float]:
    """Return the two slopes of a least-squares fit, none of them negative."""
    determinant = xx * pp - xp * xp
    if determinant > 1e-9 * xx * pp > 0.0:
        x, p = (xy * pp - py * xp) / determinant, (py * xx - xy * xp) / determinant
        if x >= 0.0 and p >= 0.0:
            return x, p
        if x < 0.0:
            return 0.0, max(0.0, py / pp)
        return max(0.0, xy / xx), 0.0
    return (max(0.0, xy / xx) if xx > 0.0 else 0.0), 0.0


class AnswerLengths:
    """How long answers are, by the first message, which the chats of one application share."""

    def __init__(self) -> None:
        self._known: OrderedDict[Fingerprint, tuple[float, float]] = OrderedDict()  # fading sum, count
        self._mean = ANSWER_TOKENS
        self._seen = 0

    @property
    def applications(self) -> int:
        """How many are kept."""
        return len(self._known)

    def expected(self, application: Fingerprint) -> float:
        """Return how many tokens an answer is expected to have."""
        total, count = self._known.get(application, (0.0, 0.0))
        return (total + self._mean) / (count + 1.0)

    def observe(self, application: Fingerprint, tokens: int) -> None:
        self._seen += 1
        self._mean += (tokens - self._mean) / min(self._seen + 1.0, WINDOW)
        total, count = self._known.pop(application, (0.0, 0.0))
        keep = 1.0 - 1.0 / LENGTH_WINDOW
        self._known[application] = (total * keep + tokens, count * keep + 1.0)
        if len(self._known) > LENGTHS_MAX:
            self._known.popitem(last=False)

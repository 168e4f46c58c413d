"""Words of the calibration: what is seen of one engine's predictions, and what changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter

ERROR_BUCKETS_TOKENS = (
    *(-65_536, -16_384, -4096, -1024, -256, -64, -1),
    *(0, 64, 256, 1024, 4096, 16_384, 65_536),
)
"""Found minus predicted: below 0 the prediction was too good, above 0 the engine knew more. The bucket up to 0 is right
to the token."""


class BiasChange(NamedTuple):
    """A bias appeared or went; for the log."""

    backend: BackendId
    bias: Bias
    appeared: bool
    detail: str


class Told(NamedTuple):
    """What an engine says of its own cache; None where it says nothing."""

    capacity_tokens: int | None
    block_tokens: int | None


@dataclass(frozen=True, slots=True)
class CalibrationView:
    """How well one engine is predicted, since the start unless said otherwise. Shares are None while nothing is known.

    `predicted_tokens` is what was predicted and usable: whole blocks, without the one of the last prompt token.
    """

    backend: BackendId
    answers: int  # that said how much was cached
    answers_silent: int
    predicted_tokens: int
    cached_tokens: int
    right_tokens: int  # predicted and cached
    precision: float | None  # of the predicted tokens, cached
    recall: float | None  # of the cached tokens, predicted
    error: Histogram
    block_tokens: int  # of the engine, as told or learned
    capacity_told_tokens: int | None
    capacity_learned_tokens: int | None  # None: no limit was met
    lifetime_s: float | None  # age beyond which claims are not believed just now
    refuted: int  # prefixes withdrawn because an answer was cold
    biases: tuple[Bias, ...]


@dataclass(slots=True)
class CalibrationCounts:
    """Counters since start."""

    sampled: int = counter("Attempts whose routes were looked up for the learned capacity.")
    skipped: int = counter("Attempts whose routes were not, to bound the cost.")
    refuted: int = counter("Prefixes withdrawn because an answer was cold.")
    appeared: int = counter("Biases that appeared.")
    changes_dropped: int = counter("Changes of biases that nobody took.")

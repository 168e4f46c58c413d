"""What other routers said of the prefixes that requests name: questions to Redis, and answers for a moment.

Rules: one question for each prefix in ASK_INTERVAL_S. An answer counts for ANSWER_LIFE_S while newer word is under way,
but never against what this router heard itself since (`contradict`, `unsaid`). `version` changes with every answer that
says something new, so that whoever keeps what follows from answers knows when it is stale.
Bounds: QUESTIONS_MAX questions wait, more are not asked, and counted; PREFIXES_MAX answers, those asked for longest ago
go. Cost: 0.3 us where nothing is to be asked, 1 us where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from ranvier_py.core.engine_cache.prefix_index.prefix_index import Entry
from ranvier_py.core.ids import BackendId

ASK_INTERVAL_S = 0.1  # as Continuum's `prepare` (CR19)
ANSWER_LIFE_S = 1.0
"""A second of requests to a backend that has just evicted, against none of what others know of any prefix that comes
less than ten times a second."""

QUESTIONS_MAX = 1024
PREFIXES_MAX = 4096


class Told(NamedTuple):
    """What some router has said of a prefix at a backend; times are this process's."""

    entry: Entry
    heard_at: float


NOTHING: Mapping[BackendId, Told] = MappingProxyType({})


@dataclass(slots=True)
class Answer:
    """What is known of one prefix."""

    asked_at: float = -inf
    answered_at: float = -inf
    told: Mapping[BackendId, Told] = field(default_factory=dict)


class SharedAnswers:
    """State: answers by prefix, that asked for last at the end, and the questions that wait.

    Args:
        poke: called when the first question waits.
    """

    def __init__(self, poke: Callable[[], object]) -> None:
        self.version = 0
        self.unasked = 0  # questions beyond QUESTIONS_MAX
        self._poke = poke
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._questions: dict[str, None] = {}

    @property
    def waiting(self) -> int:
        """Questions."""
        return len(self._questions)

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, Told]:
        """What counts now. Asks anew where that is due."""
        known = self._answers.get(prefix)
        if known is None or now - known.asked_at >= ASK_INTERVAL_S:
            known = self._ask(prefix, known, now)
        return known.told if now < known.answered_at + ANSWER_LIFE_S else NOTHING

    def awaited(self, prefix: str) -> bool:
        """Whether an answer is under way."""
        known = self._answers.get(prefix)
        return known is not None and known.answered_at < known.asked_at

    def take(self, number: int) -> list[str]:
        """The oldest questions, to be asked now."""
        prefixes = [prefix for prefix, _ in zip(self._questions, range(number), strict=False)]
        for prefix in prefixes:
            del self._questions[prefix]
        return prefixes

    def answered(self, prefix: str, told: Mapping[BackendId, Told], now: float) -> None:
        known = self._answers.get(prefix)
        if known is None:
            return
        known.answered_at = now
        if told != known.told:
            known.told = told
            self.version += 1

    def contradict(self, prefix: str, backend: BackendId) -> None:
        """This router heard something newer of this."""
        known = self._answers.get(prefix)
        if known is not None and backend in known.told:
            known.told = {each: told for each, told in known.told.items() if each != backend}
            self.version += 1

    def contradict_all(self, backend: BackendId) -> None:
        """What was said of this backend counts no more. O(answers)."""
        for prefix in self._answers:
            self.contradict(prefix, backend)

    def clear(self) -> None:
        self._answers.clear()
        self._questions.clear()
        self.version += 1

    def _ask(self, prefix: str, known: Answer | None, now: float) -> Answer:
        if known is None:
            if len(self._answers) >= PREFIXES_MAX:
                self._answers.popitem(last=False)
            known = self._answers[prefix] = Answer()
        self._answers.move_to_end(prefix)
        if len(self._questions) >= QUESTIONS_MAX:
            self.unasked += 1
            return known
        known.asked_at = now
        if not self._questions:
            self._poke()
        self._questions[prefix] = None
        return known

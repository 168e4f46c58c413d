"""The DNS name by which simulated nodes find each other, with all its wrong answers.

Each asker may get another answer (see `scenario.Dns`), as with a resolver per machine. An answer is a list of
addresses; a failure is an empty one. Rules: most answers include the asker's own address, as real ones do; «subset» is
a third of the running nodes, drawn anew for each question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from cluster.faulted_value import FaultedValue
from cluster.network.virtual_time import VirtualTime
from ranvier_py.core.mesh.mesh_values import Address

DELAY_S = 0.002
SLOW_S = 5.0
"""One attempt of getaddrinfo that times out before the second one is answered."""

FLAPPING = ("all", "subset", "empty", "self", "failing", "slow")


class SimDns:
    """One name. `word` is what it answers without faults, see `scenario.Dns`; `answers` has the faults by asker."""

    def __init__(self, time: VirtualTime, rng: Random, addresses: Sequence[Address], word: str) -> None:
        self.time = time
        self.rng = rng
        self.addresses = addresses
        self.answers = [FaultedValue(word) for _ in addresses]
        self.running: Callable[[], list[int]] = list
        self.foreign: Callable[[], list[int]] = list  # numbers of nodes of another cluster
        self.beginning: tuple[int, ...] = ()
        self.questions = 0

    def resolve(self, asker: int, answer: Callable[[Sequence[Address]], None]) -> None:
        """Answer after a delay."""
        self.questions += 1
        word = self.answers[asker].value
        if word == "flapping":
            word = self.rng.choice(FLAPPING)
        delay = SLOW_S if word == "slow" else DELAY_S
        found = self._numbers(asker, word)
        self.time.after(delay, answer, [self.addresses[number] for number in found])

    def _numbers(self, asker: int, word: str) -> list[int]:
        running = self.running()
        if word in ("empty", "failing"):
            return []
        if word == "self":
            return [asker]
        if word == "stale":
            return list(self.beginning)
        if word == "foreign":
            return self.foreign()
        if word == "subset":
            count = max(1, len(running) // 3)
            return self.rng.sample(running, min(count, len(running)))
        return self.rng.sample(running, len(running))

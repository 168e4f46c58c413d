"""Chats from outside: each begins at any node, and each next turn goes to any node, as behind a round-robin name.

A client takes the first node that answers, as with a resolver's list: a node whose process has ended or is stopped
costs it a second try, not the request. The node must then serve the request at some engine; if it knows of none, no
engine may be running (S6). After each served turn, `served` gets the end of its prompt, so that checkers can follow it
through the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from cluster.faulted_value import FaultedValue
from cluster.network.virtual_time import VirtualTime
from cluster.scenario import Load
from cluster.simulation.sim_engine import ChatTokens, SimEngine
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_router import Trip
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.retries import RetryLimits

TURN_TOKENS = 320
SYSTEM_TOKENS = 640
BLOCK_TOKENS = 16
FIRST_PAUSE_S = 0.1
"""Least time between a turn and the next, for the answer."""

STOPPED_S = 0.05
"""How often it is checked whether a stopped node continues with its answer."""

TRIES_MAX = 1 + RetryLimits().total_retries_max
"""Engines that a node tries for one request before the client gets its error."""


@dataclass(slots=True)
class Chat:
    """One conversation: the end of its messages so far."""

    end: Boundary
    turns_left: int


@dataclass(slots=True)
class ClientCounters:
    turns: int = 0
    served: int = 0
    failed: int = 0  # the client got an error although an engine ran
    hopeless: int = 0  # no engine ran, or no node
    torn: int = 0  # the node was killed during the answer
    second_tries: int = 0  # at another node


class SimClients:
    """The clients of a run, see the module."""

    def __init__(
        self,
        time: VirtualTime,
        rng: Random,
        hosts: Sequence[SimHost],
        engines: Sequence[SimEngine],
        load: Load,
        tokens: ChatTokens | None = None,
    ) -> None:
        self.time = time
        self.rng = rng
        self.hosts = hosts
        self.engines = engines
        self.load = load
        self.tokens = tokens  # if prompts have tokens
        self.chats_per_s = FaultedValue(load.chats_per_s)
        self.until = float("inf")
        self.counters = ClientCounters()
        self.served: Callable[[SimHost, Boundary, int], object] = lambda *_: None
        self.failed: Callable[[SimHost, Sequence[int]], object] = lambda *_: None
        root = Boundary(None, Fingerprint(0), 0)
        self._prefixes = [self._next(root, SYSTEM_TOKENS, exact=number % 4 != 3) for number in range(load.prefixes)]

    def _next(self, parent: Boundary, tokens: int, *, exact: bool = False) -> Boundary:
        """Return the end of one more message of any tokens. 63 random bits serve as its fingerprint.

        With `exact` it has a token fingerprint, as after tokenizing; so has each message after one that has it.
        """
        if self.tokens is not None:
            return self.tokens.next(parent, tokens)
        text = Fingerprint(self.rng.getrandbits(63) | 1)
        end = Boundary(parent, text, parent.length + tokens, BLOCK_TOKENS)
        if exact or parent.token:
            end.token = Fingerprint(self.rng.getrandbits(63) | 1)
            end.own_chain = ((end.tokens, end.token, text),)
        return end

    def prefix(self) -> Boundary:
        """Return one of the system prompts that chats begin with."""
        return self.rng.choice(self._prefixes)

    def start(self) -> None:
        self.time.after(self.rng.expovariate(max(self.chats_per_s.value, 1e-9)), self._arrive)

    def _arrive(self) -> None:
        if self.time.now < self.until:
            if self.chats_per_s.value > 0:
                self.turn(Chat(self.prefix(), self.load.turns))
            self.time.after(self.rng.expovariate(max(self.chats_per_s.value, 0.1)), self._arrive)

    def turn(self, chat: Chat, host: SimHost | None = None) -> None:
        """Send the next turn of a chat, at this node or at any that answers."""
        if self.time.now >= self.until:
            return
        self.counters.turns += 1
        chat.end = self._next(chat.end, TURN_TOKENS)
        host = host or self._pick()
        if host is None:
            self.counters.hopeless += 1
            self._next_turn(chat)
            return
        tried: list[int] = []
        trip = self._start_attempt(host, chat.end, tried)
        if trip is None:
            self._unanswered(host, tried)
            self._next_turn(chat)
        else:
            self.time.after(
                self.engines[trip.engine].seconds(), self._finish_attempt, host, host.generation, chat, trip
            )

    def _start_attempt(self, host: SimHost, end: Boundary, tried: list[int]) -> Trip | None:
        """Let the node try engines until one serves the request. None: none did."""
        found: list[Trip | None] = []
        while len(tried) < TRIES_MAX:
            host.run(lambda node, now: found.append(node.start_attempt(end, tried, now)))
            trip = found.pop() if found else None
            if trip is None or self.engines[trip.engine].serve_end(end, self.time.now, self.rng):
                return trip
            tried.append(trip.engine)
            self._back(host, trip, served=False)
        return None

    def _back(self, host: SimHost, trip: Trip, *, served: bool) -> None:
        host.run(lambda node, now: node.finish_attempt(trip, served, now))

    def _finish_attempt(self, host: SimHost, generation: int, chat: Chat, trip: Trip) -> None:
        """Take in the first token. If the node was killed meanwhile, the turn is lost; if it is stopped, wait."""
        if host.generation != generation:
            self.counters.torn += 1
        elif host.paused:
            self.time.after(STOPPED_S, self._finish_attempt, host, generation, chat, trip)
            return
        else:
            self._back(host, trip, served=True)
            self.counters.served += 1
            self.served(host, chat.end, trip.engine)
        self._next_turn(chat)

    def _unanswered(self, host: SimHost, tried: Sequence[int]) -> None:
        if any(engine.running for engine in self.engines):
            self.counters.failed += 1
            self.failed(host, tried)
        else:
            self.counters.hopeless += 1

    def _next_turn(self, chat: Chat) -> None:
        chat.turns_left -= 1
        if chat.turns_left > 0:
            chat.end = self._next(chat.end, TURN_TOKENS // 2)  # the answer
            wait = FIRST_PAUSE_S + self.rng.expovariate(1 / max(self.load.think_s, 1e-3))
            self.time.after(wait, self.turn, chat)

    def _pick(self) -> SimHost | None:
        """Return the first node of a shuffled list that answers."""
        for number in self.rng.sample(range(len(self.hosts)), len(self.hosts)):
            host = self.hosts[number]
            if host.running and not host.paused and not host.leaving:
                return host
            self.counters.second_tries += 1
        return None

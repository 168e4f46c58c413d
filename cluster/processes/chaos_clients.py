"""Clients of a chaos run: open-loop chats whose turns go to any node, with the retries of an ordinary client.

Each turn asks DNS anew and tries the addresses in the given order. If a node refuses, or breaks off before the first
byte, the client tries the next address; after the last one the whole list again, as httpx and the openai library do.
An answer that breaks after its first byte is a failure, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import pairwise
from math import inf
from random import Random

import trio

from cluster.dns.resolvers import LookupFailed, look_up
from cluster.engine.engine_faults import POISON
from cluster.load import chats
from cluster.load.answer import Answer, Failure
from cluster.load.http_client import Connection
from cluster.load.load_report import LoadLog
from cluster.load.runner import Runner, Target
from cluster.load.workload import Conversation, Turn, with_think, with_unstreamed
from cluster.processes.request_log import Entry, RequestLog
from cluster.scenario import Load, Step

ROUNDS_MAX = 3
"""How often the whole list of addresses is tried; openai's client makes three tries too."""

ROUND_PAUSE_S = 0.5
"""Pause before the list is tried again, as in openai's client."""

ATTEMPT_S = 120.0
"""Longest wait for one whole answer: longer than a pause of 60 s."""

Rates = Sequence[tuple[float, float]]
"""(from when, chats per second), in order of time."""


class Clients(Runner):
    """Runs conversations and logs each request."""

    def __init__(self, target: Target, requests: RequestLog, server: tuple[str, int], began_s: float) -> None:
        super().__init__(replace(target, timeout_s=ATTEMPT_S), LoadLog())
        self.requests = requests
        self.server = server
        self.began_s = began_s

    def now_s(self) -> float:
        return trio.current_time() - self.began_s

    async def ask(self, connection: Connection, request: bytes, answer: Answer) -> Failure | None:
        """Send one request to one address after the other until a first byte comes."""
        entry = self.requests.begin(self.now_s())
        entry.poisonous = POISON in request
        try:
            failure = await self.try_addresses(connection, request, answer, entry)
        except trio.Cancelled:
            entry.ended_s, entry.cancelled = self.now_s(), True
            raise
        finally:
            connection.close()  # the next turn goes to any node
        entry.ended_s = self.now_s()
        entry.engine = answer.fingerprint
        if failure is not None:
            entry.reason, entry.detail = failure.reason, failure.detail
            streamed = answer.size > 0 and not failure.reason.startswith("HTTP ")
            entry.first_byte = streamed or in_mid_answer(failure)
        else:
            sample = self.log.samples[-1]  # this request's: nothing was awaited since it was logged
            entry.engine = sample.engine
            entry.prompt_tokens, entry.cached_tokens = sample.prompt_tokens, sample.cached_tokens
        return failure

    async def try_addresses(
        self, connection: Connection, request: bytes, answer: Answer, entry: Entry
    ) -> Failure | None:
        failure: Failure | None = Failure("no address")
        for round_number in range(ROUNDS_MAX):
            if round_number:
                await trio.sleep(ROUND_PAUSE_S)
            try:
                addresses = await look_up(self.server, self.target.host)
            except LookupFailed as error:
                failure = Failure("name not found", str(error))
                continue
            for address in addresses:
                connection.host = entry.node = address
                failure = await super().ask(connection, request, answer)
                if failure is None or not before_first_byte(failure):
                    return failure
                entry.retries.append(failure.reason)
        return failure


def before_first_byte(failure: Failure) -> bool:
    """Whether no part of an answer had come, so another node may be tried. See `load.http_client`."""
    return failure.reason.startswith("connect: ") or failure.reason.endswith(" before an answer")


def in_mid_answer(failure: Failure) -> bool:
    return failure.reason.endswith(" in mid-answer")


def rates_of(load: Load, steps: Sequence[Step]) -> Rates:
    """Return how many chats begin per second, over time: by the latest `load` step in force, or the scenario's load."""
    spans = [(step.at_s, step.at_s + (step.for_s or inf), step.chats_per_s) for step in steps if step.do == "load"]
    moments = sorted({0.0, *(at_s for span in spans for at_s in span[:2] if at_s < inf)})
    return [
        (at_s, next((rate for from_s, to_s, rate in reversed(spans) if from_s <= at_s < to_s), load.chats_per_s))
        for at_s in moments
    ]


def arrivals(rates: Rates, until_s: float, rng: Random) -> Iterator[float]:
    """Yield when chats begin: a Poisson process whose rate changes."""
    spans = pairwise([*rates, (until_s, 0.0)])
    for (from_s, rate), (end_s, _) in spans:
        at_s = from_s
        while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < min(end_s, until_s):
            yield at_s


def poisonous(steps: Sequence[Step], share: float, seed: int) -> Iterator[Conversation]:
    """Yield the requests of `poison` steps, which every engine answers with an error; this share of them unstreamed."""
    draws = Random(f"{seed}/poison")
    spans = [((step.at_s, step.chats_per_s), step.at_s + step.for_s) for step in steps if step.do == "poison"]
    for number, at_s in enumerate(sorted(at_s for rate, end_s in spans for at_s in arrivals([rate], end_s, draws))):
        message = {"role": "user", "content": f"{POISON.decode()} {number}"}
        yield Conversation(f"poison-{number}", (Turn((message,), stream=draws.random() >= share),), at_s)


def all_conversations(load: Load, steps: Sequence[Step], until_s: float, seed: int) -> Iterator[Conversation]:
    """Yield the chats and the poisonous requests of a run in order of their starts."""
    talks = conversations(load, rates_of(load, steps), until_s, seed)
    return merge(talks, poisonous(steps, load.unstreamed, seed), key=lambda talk: talk.start_s or 0.0)


def conversations(load: Load, rates: Rates, until_s: float, seed: int) -> Iterator[Conversation]:
    """Yield all chats, with their starts, from one seed. Raises ValueError for a load without turns."""
    rng = Random(f"{seed}/chats")
    talks = chats.conversations(rng, system_prompts=max(1, load.prefixes), turns=load.turns)
    talks = with_think(talks, load.think_s, Random(f"{seed}/think"))
    talks = with_unstreamed(talks, load.unstreamed, Random(f"{seed}/unstreamed"))
    for at_s, talk in zip(arrivals(rates, until_s, Random(f"{seed}/arrivals")), talks, strict=False):
        yield replace(talk, start_s=at_s)

"""How long does the core take to find a prompt among a million routes, and to learn it; how much memory is a route?

    python -m benchmarks.decision [--routes 1000000] [--rounds 2000] [--seed 1] [--out FILE]

The mix: chats of 20 messages and 10,000 tokens, in blocks of 16: about 20 boundaries, each with both fingerprints,
and about 40 anchors. Every chat starts with one of 200 system prompts, each held by up to 16 of 64 backends. The result
goes to stdout, to benchmarks/results/decision.json, and to FILE. Times are in microseconds, each of one call, with the
garbage collector off as in a node that froze its start-up objects.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter_ns
from typing import Any

from benchmarks.common import percentiles, to_json, write_result
from ranvier_py.core.fingerprint import anchors_between
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routes import RouteTable, Stop, Trust

BACKENDS = 64
BLOCK_TOKENS = 16
SYSTEM_PROMPTS = 200
HOLDERS_PER_SYSTEM_PROMPT = 16
MESSAGES = 20
CHAT_TOKENS = 10_000
EPOCH = 1
SWEEPS = 100
ROWS_PER_ROUND = 80
"""A new chat and two turns more bring no more rows than this."""

CHATS_PER_S = 20.0
"""How fast the filled chats are spread over time: 1 M routes are then about 15 minutes of traffic, within the TTL."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat: its stops, deepest first, and the backend that serves it."""

    stops: Sequence[Stop]
    backend: BackendId


class Chats:
    """Makes chats of one mix, by a seed. Fingerprints are random: they are that by construction."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._systems = [self._extend([], self._rng.randint(500, 1500)) for _ in range(SYSTEM_PROMPTS)]

    def new(self) -> Chat:
        """A chat of MESSAGES messages that starts with one of the system prompts."""
        rng = self._rng
        number = rng.randrange(SYSTEM_PROMPTS)
        stops = self._systems[number]
        mean = (CHAT_TOKENS - stops[0][0]) / (MESSAGES - 1)
        for _ in range(MESSAGES - 1):
            stops = self._extend(stops, int(rng.uniform(0.2, 1.8) * mean))
        return Chat(stops, BackendId((number + rng.randrange(HOLDERS_PER_SYSTEM_PROMPT)) % BACKENDS))

    def next_turn(self, chat: Chat) -> Chat:
        """The same chat with an answer and a question more, of 300 tokens each."""
        return Chat(self._extend(self._extend(chat.stops, 300), 300), chat.backend)

    def stranger(self) -> Chat:
        """A chat that shares nothing with any other."""
        stops: Sequence[Stop] = []
        for _ in range(MESSAGES):
            stops = self._extend(stops, CHAT_TOKENS // MESSAGES)
        return Chat(stops, BackendId(0))

    def _extend(self, stops: Sequence[Stop], tokens: int) -> Sequence[Stop]:
        """One message more. Depths are kept aligned: what a message is short of a block is not counted."""
        low = stops[0][0] // BLOCK_TOKENS if stops else 0
        end = low + max(1, tokens // BLOCK_TOKENS)
        anchors = [(depth * BLOCK_TOKENS, self._fingerprint(), 0) for depth in anchors_between(low, end - 1)]
        return [(end * BLOCK_TOKENS, self._fingerprint(), self._fingerprint()), *reversed(anchors), *stops]

    def _fingerprint(self) -> int:
        return self._rng.getrandbits(64) | 1


def fill(table: RouteTable, chats: Chats, routes: int, now: float = 0.0) -> float:
    """Learn chats, CHATS_PER_S of them, until the table has `routes` rows. Returns the time it is then."""
    while len(table) < routes:
        learn(table, chats.new(), now)
        now += 1 / CHATS_PER_S
    return now


def learn(table: RouteTable, chat: Chat, now: float) -> int:
    return table.learn(chat.stops, chat.backend, EPOCH, Trust.LOCAL, now)


def measure(prepare: Callable[[int], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of single calls: `prepare(i)` makes the i-th call, untimed."""
    times = []
    for number in range(rounds):
        call = prepare(number)
        start = perf_counter_ns()
        call()
        times.append((perf_counter_ns() - start) / 1000)
    return percentiles(times)


def memory_of_process() -> int:
    """Resident bytes of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def measure_table(routes: int, rounds: int, seed: int) -> dict[str, Any]:
    """Memory and times of a route table: learning while there is room, everything else while it is full."""
    chats = Chats(seed)
    table = RouteTable(capacity=routes)
    gc.collect()
    before = memory_of_process()
    now = fill(table, chats, routes - rounds * ROWS_PER_ROUND)
    gc.disable()
    times = times_with_room(table, chats, rounds, now)
    gc.enable()
    now = fill(table, chats, routes, now + 100.0)
    gc.collect()
    sizes = sizes_of(table, memory_of_process() - before)
    gc.disable()
    times |= times_when_full(table, chats, rounds, now)
    gc.enable()
    return {"table": sizes, "microseconds": times, "rows_evicted_meanwhile": table.statistics().evicted.local}


def sizes_of(table: RouteTable, memory: int) -> dict[str, float]:
    statistics = table.statistics()
    claims = statistics.claims.remote + statistics.claims.local + statistics.claims.confirmed
    return {
        "rows": len(table),
        "claims": claims,
        "fingerprints": statistics.fingerprints,
        "memory_bytes_per_row": round(memory / len(table), 1),
        "memory_bytes_per_claim": round(memory / claims, 1),
    }


def times_with_room(table: RouteTable, chats: Chats, rounds: int, now: float) -> dict[str, dict[str, float]]:
    """Microseconds of learning. A turn soon after the last one finds all older evidence to be of the same second."""
    known = [chats.new() for _ in range(rounds)]
    turns = [chats.next_turn(chat) for chat in known]
    later = [chats.next_turn(chat) for chat in turns]
    return {
        "learn_a_new_chat": measure(lambda i: partial(learn, table, known[i], now), rounds),
        "learn_the_next_turn_within_a_second": measure(lambda i: partial(learn, table, turns[i], now), rounds),
        "learn_the_next_turn_half_a_minute_later": measure(
            lambda i: partial(learn, table, later[i], now + 30.0 + i / CHATS_PER_S), rounds
        ),
    }


def times_when_full(table: RouteTable, chats: Chats, rounds: int, now: float) -> dict[str, dict[str, float]]:
    """Microseconds of each kind of call; each new row evicts one."""
    known = [chats.new() for _ in range(rounds)]
    branches = [chats.new() for _ in range(rounds)]
    strangers = [chats.stranger() for _ in range(rounds)]
    epochs = [EPOCH] * BACKENDS
    new = measure(lambda i: partial(learn, table, known[i], now), rounds)
    turns = [chats.next_turn(chat) for chat in known]
    later = now + 30.0

    def match(several: Sequence[Chat]) -> dict[str, float]:
        return measure(lambda i: partial(table.match, several[i].stops, epochs, now), rounds)

    return {
        "match_at_the_deepest_stop": match(known),
        "match_of_the_next_turn": match(turns),
        "match_of_a_shared_system_prompt": match(branches),
        "match_of_nothing": match(strangers),
        "learn_a_new_chat_when_full": new,
        "learn_the_next_turn_when_full": measure(
            lambda i: partial(learn, table, turns[i], later + i / CHATS_PER_S), rounds
        ),
        "sweep_2000_rows": measure(lambda _: partial(table.sweep, later + rounds / CHATS_PER_S, epochs), SWEEPS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--routes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result to this file too")
    arguments = parser.parse_args()
    result = {
        "benchmark": "decision",
        "seed": arguments.seed,
        "backends": BACKENDS,
        **measure_table(arguments.routes, arguments.rounds, arguments.seed),
    }
    write_result("decision", result)
    if arguments.out:
        arguments.out.write_text(to_json(result))
    print(to_json(result), end="")


if __name__ == "__main__":
    main()

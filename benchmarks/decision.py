"""How long do a decision among a million routes and a request's bookkeeping take? How much memory does a route need?

    python -m benchmarks.decision [--routes 1000000] [--rounds 2000] [--seed 1]

The traffic is chats of 20 messages and 10,000 tokens, in blocks of 16: about 20 boundaries, each with both
fingerprints, and about 40 anchors. Each chat starts with one of 200 system prompts, held by up to 16 of 64 backends.
Figures are microseconds of single calls of a Router with policy affinity and uneven loads, without garbage collection:

- `decide_…`: `find` and `place`, from the chain of a prompt to its placement. Goals: p50 50 us, p99 150 us;
- `attempt_…`: `start_attempt`, `first_token` and `finish_attempt`: all the bookkeeping of a request that succeeds;
- `read_…`: reads the body of a chat of 20 messages, on first contact, or when all but its last two messages are known;
  the latter also by the other APIs, whose clients move marks or number their items;
- `watch_…`: off the path, examines such a turn for clients that break their prefixes. Goal: p50 30 us.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter_ns
from typing import Any

import orjson

from benchmarks.harness.bench import command_line, finish, percentiles
from ranvier_py.core.clients.client_watch import ClientWatch
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import Segment, TextHasher, TokenHasher, TokenState, anchors_between
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey, PromptMemory
from ranvier_py.core.prompts.request_apis import CHAT
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.backends import BackendLimits, Outcome, Registry
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.core.routing.rates.work import Load
from ranvier_py.core.routing.request_paths import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.router import PoolMatch, Router

BACKENDS = 64
BLOCK_TOKENS = 16
SYSTEM_PROMPTS = 200
HOLDERS_PER_SYSTEM_PROMPT = 16
MESSAGES = 20
CHAT_TOKENS = 10_000
GENERATION = 1

CHATS_PER_S = 20.0
"""Chats per second while the table is filled: 1 M routes are then about 15 minutes of traffic, within the TTL."""

LOAD_MAX = 5  # uneven enough to distinguish holders, even enough that none is too busy
ATTEMPTS = 2 * BACKENDS  # attempts in flight while decisions are measured
DOCUMENT_TOKENS = 8_000  # a shared prefix that is worth following, of a prompt's 10,000 tokens
BODY_BYTES = (3_000, 60_000)
GOALS = {"decide_p50_us": 50, "decide_p99_us": 150, "watch_p50_us": 30}


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat: its prefix keys, deepest first, and the backend that serves it."""

    chain: Sequence[PrefixKey]
    backend: BackendId


class Chats:
    """Makes chats from a seed. Their fingerprints are random numbers, as good as real ones."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._systems = [self._extend([], self._rng.randint(500, 1500)) for _ in range(SYSTEM_PROMPTS)]

    def new(self) -> Chat:
        """Return a chat of MESSAGES messages that starts with one of the system prompts."""
        rng = self._rng
        number = rng.randrange(SYSTEM_PROMPTS)
        chain = self.branch(self._systems[number])
        return Chat(chain, BackendId((number + rng.randrange(HOLDERS_PER_SYSTEM_PROMPT)) % BACKENDS))

    def prefix(self, tokens: int) -> Sequence[PrefixKey]:
        """Return the chain of a first message of so many tokens."""
        return self._extend([], tokens)

    def branch(self, chain: Sequence[PrefixKey]) -> Sequence[PrefixKey]:
        """Return the chain of a chat of MESSAGES messages and about CHAT_TOKENS tokens whose first message is given."""
        mean = (CHAT_TOKENS - chain[0][0]) / (MESSAGES - 1)
        for _ in range(MESSAGES - 1):
            chain = self._extend(chain, int(self._rng.uniform(0.2, 1.8) * mean))
        return chain

    def next_turn(self, chat: Chat) -> Chat:
        """Return the chat with one more answer and question, of 300 tokens each."""
        return Chat(self._extend(self._extend(chat.chain, 300), 300), chat.backend)

    def stranger(self) -> Chat:
        """Return a chat that shares nothing with any other."""
        chain: Sequence[PrefixKey] = []
        for _ in range(MESSAGES):
            chain = self._extend(chain, CHAT_TOKENS // MESSAGES)
        return Chat(chain, BackendId(0))

    def _extend(self, chain: Sequence[PrefixKey], tokens: int) -> Sequence[PrefixKey]:
        """Return the chain with one more message, rounded down to whole blocks, but at least one."""
        low = chain[0][0] // BLOCK_TOKENS if chain else 0
        end = low + max(1, tokens // BLOCK_TOKENS)
        anchors = [(depth * BLOCK_TOKENS, self._fingerprint(), 0) for depth in anchors_between(low, end - 1)]
        return [(end * BLOCK_TOKENS, self._fingerprint(), self._fingerprint()), *reversed(anchors), *chain]

    def _fingerprint(self) -> int:
        return self._rng.getrandbits(64) | 1


def fill(table: RouteTable, chats: Chats, routes: int) -> float:
    """Learn chats, CHATS_PER_S of them per second, until the table has `routes` rows. Returns the time at the end."""
    now = 0.0
    while len(table) < routes:
        learn(table, chats.new(), now)
        now += 1 / CHATS_PER_S
    return now


def learn(table: RouteTable, chat: Chat, now: float) -> int:
    return table.learn(chat.chain, chat.backend, GENERATION, Trust.LOCAL, now)


def measure(prepare: Callable[[int], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the microseconds of single calls. `prepare(i)` returns the i-th call; its own time does not count."""
    times = []
    for number in range(rounds):
        call = prepare(number)
        start = perf_counter_ns()
        call()
        times.append((perf_counter_ns() - start) / 1000)
    return percentiles(times)


def memory_of_process() -> int:
    """Return the resident bytes of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def measure_all(routes: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure the memory of a full route table, and the times of requests that use it."""
    chats = Chats(seed)
    table = RouteTable(capacity=routes)
    gc.collect()
    before = memory_of_process()
    now = fill(table, chats, routes)
    gc.collect()
    sizes = sizes_of(table, memory_of_process() - before)
    gc.disable()
    times = times_of_requests(table, chats, rounds, now + 60.0)
    gc.enable()
    return {"table": sizes, "request_microseconds": times}


def sizes_of(table: RouteTable, memory: int) -> dict[str, float]:
    statistics = table.counters
    claims = sum(statistics.claims.values())
    return {
        "rows": len(table),
        "claims": claims,
        "fingerprints": statistics.fingerprints,
        "memory_bytes_per_row": round(memory / len(table), 1),
        "memory_bytes_per_claim": round(memory / claims, 1),
    }


# --- whole requests -------------------------------------------------------------------------------------------------


def make_router(table: RouteTable, seed: int) -> Router:
    """Make a Router over `table`, as the node makes it, with backends of uneven load."""
    registry = Registry(BackendLimits())
    rng = Random(seed)
    for number in range(BACKENDS):
        backend = registry.add(f"http://10.0.0.{number + 1}:8000")
        assert backend.generation == GENERATION
        registry.set_peer_load(backend.id, Load(rng.randrange(LOAD_MAX)), 0.0)
    key = rng.randbytes(32)
    hasher, memory = TokenHasher(key, BLOCK_TOKENS), PromptMemory()
    reader = PromptReader(TextHasher(key), hasher, memory, identity="t", bytes_per_token=4.0, digest_seed=seed)
    return Router(
        reader=reader,
        hasher=hasher,
        routes=table,
        registry=registry,
        policy=make_policy("affinity"),
        rng=rng,
    )


def prompt_of(chain: Sequence[PrefixKey], new: int = 0) -> Prompt:
    """Return the prompt of a chat. Its last `new` messages are not tokenized: only their text is known."""
    root = end = Boundary(None, Fingerprint(1), 0)
    messages = sum(text != 0 for _, _, text in chain)
    anchors: list[tuple[int, Fingerprint]] = []
    for tokens, token, text in reversed(chain):
        if not text:
            anchors.append((tokens, Fingerprint(token)))
            continue
        end = Boundary(end, Fingerprint(text), tokens, BLOCK_TOKENS)
        if end.messages <= messages - new:
            end.tokenized(Segment(tuple(anchors), (tokens, Fingerprint(token)), TokenState(tokens, 0, ())))
        anchors = []
    return Prompt("chat", "m", False, end, root, (), b"")


def decide(router: Router, prompt: Prompt, now: float) -> Decision:
    return router.place(prompt, router.find(prompt, now))


def fly(router: Router, prompt: Prompt, found: PoolMatch, decision: Decision, now: float) -> None:
    """Do all the bookkeeping of a request that succeeds."""
    attempt = router.start_attempt(prompt, decision, now, b"", found)
    router.first_token(attempt, now)
    router.finish_attempt(attempt, Outcome.SUCCESS, now)


def times_of_requests(table: RouteTable, chats: Chats, rounds: int, now: float) -> dict[str, Any]:
    """Return the microseconds that a request takes in the core, by kind of prompt."""
    router = make_router(table, rounds)
    for _ in range(ATTEMPTS):
        running = prompt_of(chats.stranger().chain)
        router.start_attempt(running, decide(router, running, now), now)
    prompts = prompts_of_requests(table, chats, rounds, now)
    times: dict[str, Any] = {
        f"decide_{kind}": measure(lambda i, several=several: partial(decide, router, several[i], now), rounds)  # type: ignore[misc]
        for kind, several in prompts.items()
    }
    for kind in ("the_next_turn", "a_new_chat_behind_a_shared_system_prompt", "a_cold_prompt"):
        several = prompts[kind]
        found = [router.find(prompt, now) for prompt in several]
        times[f"attempt_of_{kind}"] = measure(partial(prepare_attempt, router, several, found, now), rounds)
    for size in BODY_BYTES:
        known, cold = partial(prepare_read, router, size, 2), partial(prepare_read, router, size, 0)
        times[f"read_the_next_turn_of_{size // 1000}_kB"] = measure(partial(known, CHAT_PATH), rounds)
        for path in (MESSAGES_PATH, RESPONSES_PATH):
            name = path.decode().rpartition("/")[2]
            times[f"read_the_next_turn_of_{size // 1000}_kB_by_{name}"] = measure(partial(known, path), rounds)
        times[f"read_{size // 1000}_kB_on_first_contact"] = measure(partial(cold, CHAT_PATH), rounds)
        watched = partial(prepare_watch, router, ClientWatch(1), size)
        times[f"watch_the_next_turn_of_{size // 1000}_kB"] = measure(watched, rounds)
    return times


def prompts_of_requests(table: RouteTable, chats: Chats, rounds: int, now: float) -> dict[str, list[Prompt]]:
    """Return prompts by kind. Their chains are complete, as after a request was read."""
    known = [chats.new() for _ in range(rounds)]
    for chat in known:
        learn(table, chat, now)
    shared = [chats.prefix(1_000), chats.prefix(DOCUMENT_TOKENS)]
    for chain in shared:
        for number in range(BACKENDS):
            learn(table, Chat(chain, BackendId(number)), now - number)
    of_all, document = shared
    return {
        "the_next_turn": [prompt_of(chats.next_turn(chat).chain, new=2) for chat in known],
        "a_new_chat_behind_a_shared_system_prompt": [prompt_of(chats.new().chain) for _ in range(rounds)],
        "the_same_where_all_64_backends_hold_it": [prompt_of(chats.branch(of_all)) for _ in range(rounds)],
        "a_question_on_a_document_that_all_64_hold": [prompt_of(chats.branch(document)) for _ in range(rounds)],
        "a_cold_prompt": [prompt_of(chats.stranger().chain) for _ in range(rounds)],
    }


def prepare_attempt(
    router: Router, prompts: Sequence[Prompt], found: Sequence[PoolMatch], now: float, number: int
) -> Callable[[], object]:
    prompt, holders = prompts[number], found[number]
    return partial(fly, router, prompt, holders, router.place(prompt, holders), now + number / CHATS_PER_S)


def prepare_read(router: Router, size: int, new: int, path: bytes, number: int) -> Callable[[], object]:
    """Return a call that reads a body of about `size` bytes that shares nothing with others; if `new` is not 0, all but
    its last `new` messages were read before."""
    before, now = turns(size, new, path, number)
    if new:
        router.reader.remember(router.read(path, before))
    return partial(router.read, path, now)


def prepare_watch(router: Router, watch: ClientWatch, size: int, number: int) -> Callable[[], object]:
    """Return a call that watches a turn of two new messages, as `node.client_parts` does."""
    before, now = turns(size, 2, CHAT_PATH, -1 - number)
    prompt = router.read(CHAT_PATH, before)
    watch.observe("", 0, orjson.loads(before), CHAT, prompt.tokens, prompt.end.text)
    router.reader.remember(prompt)
    prompt = router.read(CHAT_PATH, now)

    def looked() -> None:
        watch.turn("", 0, prompt.tokens)
        watch.extend(prompt.base.text, prompt.end.text, prompt.tail, CHAT, prompt.base.messages)
        watch.compared("", prompt.tokens, prompt.base.tokens)

    return looked


def turns(size: int, new: int, path: bytes, number: int) -> tuple[bytes, bytes]:
    """Return two bodies of a chat of about `size` bytes: without its last `new` messages, and whole."""
    text = Random(f"{size}/{new}/{path!r}/{number}").randbytes(size // 2 // MESSAGES).hex()
    messages = [{"role": ("assistant", "user")[place % 2], "content": f"{place} {text}"} for place in range(MESSAGES)]

    def body(count: int) -> bytes:
        return orjson.dumps({"model": "m", **conversation(path, messages[:count]), "stream": True})

    return body(MESSAGES - new), body(MESSAGES)


def conversation(path: bytes, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return these messages in the form in which clients of an API send them."""
    if path == CHAT_PATH:
        return {"messages": messages}
    if path == MESSAGES_PATH:
        marked = {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
        return {"messages": [*messages[:-1], {**messages[-1], "content": [marked]}]}
    heads = [{"type": "message", "id": f"msg_{number}"} for number in range(len(messages))]
    parts = [[{"type": "input_text", "text": message["content"]}] for message in messages]
    items = zip(heads, messages, parts, strict=True)
    return {"input": [{**head, "role": message["role"], "content": content} for head, message, content in items]}


def main() -> int:
    parser = command_line(__doc__, seed="the chats")
    parser.add_argument("--routes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each kind")
    arguments = parser.parse_args()
    measured = measure_all(arguments.routes, arguments.rounds, arguments.seed)
    return finish("decision", arguments, {"backends": BACKENDS, "goals": GOALS, **measured})


if __name__ == "__main__":
    sys.exit(main())

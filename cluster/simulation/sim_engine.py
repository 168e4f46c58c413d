"""A simulated engine: which prefixes it holds, whether it runs, how long it takes. The truth that routes are about.

A turn is served when the engine runs; it then holds every stop of it, and says how many tokens it had already. A
restart empties it and changes its start time, which is all that a node's probe can see of it. Bound: so many stops,
the least recently used goes first. `ranvier_py.replay.engine.model` is the engine with blocks and batches;
here only the question matters whether a node's belief is true. With `kv` it has blocks, and tells of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from random import Random

from cluster.simulation.sim_kv import SimKv
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.backends import ProbeResult

CHAIN_KEYS_MAX = 20_000
FIRST_TOKEN_S = 0.05
PROBE_S = 0.003


class SimEngine:
    """See the module. `boots` counts its processes, `born_at` is virtual seconds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.url = f"http://10.255.{number // 250}.{number % 250 + 1}:8000"
        self.down = 0
        self.down_at = float("-inf")
        self.factor = 1.0
        self.boots = 1
        self.born_at = 1.0  # of a clock of its own: 0 would say that it tells nothing
        self.held: OrderedDict[int, None] = OrderedDict()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.served = 0
        self.refused = 0
        self.kv: SimKv | None = None  # where the scenario wants events
        self.published: Callable[[int, Sequence[tuple[int, bytes]]], object] = lambda *_: None
        self.halted: Callable[[int], object] = lambda _: None
        self.restarted: Callable[[int], object] = lambda _: None

    @property
    def running(self) -> bool:
        return self.down == 0

    def halt(self, now: float) -> None:
        """One more reason not to run."""
        self.down_at = now if self.running else self.down_at
        self.down += 1
        self.halted(self.number)

    def restart(self, now: float) -> None:
        """A new process, with nothing in its cache."""
        self.boots += 1
        self.born_at = 1.0 + now
        self.held.clear()
        if self.kv is not None:
            self.kv.restart(now)
            self.restarted(self.number)

    def holds(self, name: int) -> bool:
        """Whether a prompt that ends with this fingerprint is here."""
        return self.kv.holds(name) if self.kv is not None else name in self.held

    def serve_end(self, end: Boundary, now: float, rng: Random) -> bool:
        """Serve the prompt that ends there. False: nobody listens."""
        if self.kv is None or not self.running:
            return self.serve(end.chain())
        hits, messages = self.kv.serve(end, now, rng)
        self.prompt_tokens += end.tokens
        self.cached_tokens += hits
        self.served += 1
        self.published(self.number, messages)
        return True

    def serve(self, chain: Iterable[PrefixKey]) -> bool:
        """Serve a prompt, given deepest first. False: nobody listens."""
        if not self.running:
            self.refused += 1
            return False
        path = list(chain)
        cached = next((tokens for tokens, token, text in path if token in self.held or text in self.held), 0)
        for _, token, text in reversed(path):
            for name in (token, text):
                if name:
                    self.held[name] = None
                    self.held.move_to_end(name)
        while len(self.held) > CHAIN_KEYS_MAX:
            self.held.popitem(last=False)
        self.prompt_tokens += path[0][0] if path else 0
        self.cached_tokens += cached
        self.served += 1
        return True

    def seconds(self) -> float:
        """From a request's departure to its first token."""
        return FIRST_TOKEN_S * self.factor

    def probe(self) -> ProbeResult:
        """What a node's probe finds."""
        if not self.running:
            return ProbeResult(ok=False, refused=True, detail="refused")
        return ProbeResult(ok=True, status=200, latency_s=PROBE_S, models=("m",), started_at=self.born_at)

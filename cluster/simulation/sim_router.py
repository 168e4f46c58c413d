"""The real router of a simulated node: registry, route table, speculation and policy, as a node composes them.

Only the parts that read bytes are left out: prompts are boundaries already. Bound: TABLE_ROWS rows, a table small
enough for a thousand nodes in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from cluster.scenario import Cluster
from ranvier_py.core.errors import NoBackend, NotFound
from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.mesh_values import Address
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import Boundary, PromptMemory
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.backends import BackendLimits, Outcome, ProbeResult, Registry
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Router

TABLE_ROWS = 50_000
CLAIMS_LOOKED_AT_MAX = 12
MEMORY_ENTRIES = 64
KEY = b"k" * 32
"""The key of the hashers, which hash nothing here."""

TTL_S = 3600.0


class Birth(NamedTuple):
    """What a process is started with."""

    number: int
    name: str
    address: Address
    seed: str  # of the process's own random numbers
    now: float
    wall_ms: int  # the host's wall clock, a first guess for the epoch
    state: bytes  # the state file; empty if there is none
    keys: tuple[int, ...]
    label: str
    cluster: Cluster
    engines: tuple[str, ...]  # URLs

    def rng(self) -> Random:
        return Random(self.seed)


class Trip(NamedTuple):
    """One chat turn in flight at an engine."""

    engine: int
    attempt: Any  # the router's attempt


class SimRouter:
    """A node without gossip: what traffic, probes and checks need of it."""

    def __init__(self, birth: Birth, rng: Random) -> None:
        self.ttl_s = birth.cluster.route_ttl_s or TTL_S
        self.registry = Registry(BackendLimits())
        self.ids = [self.registry.add(url).id for url in birth.engines]
        self.routes = RouteTable(capacity=TABLE_ROWS, ttl_s=self.ttl_s)
        hasher = TokenHasher(KEY)
        memory = PromptMemory(entries_max=MEMORY_ENTRIES)
        self.router = Router(
            reader=PromptReader(TextHasher(KEY), hasher, memory, identity="sim", bytes_per_token=4.0, digest_seed=1),
            hasher=hasher,
            routes=self.routes,
            registry=self.registry,
            policy=make_policy("affinity"),
            rng=rng,
        )

    def start_attempt(self, end: Boundary, tried: Sequence[int], now: float) -> Trip | None:
        """Place one chat turn at an engine that was not tried. None: the node knows of none."""
        prompt = Prompt(kind="chat", model="m", stream=True, end=end, base=end.root(), tail=(), body=b"")
        try:
            found = self.router.find(prompt, now, [self.ids[number] for number in tried])
        except (NoBackend, NotFound):
            return None
        decision = self.router.place(prompt, found)
        attempt = self.router.start_attempt(prompt, decision, now)
        return Trip(self.ids.index(decision.backend), attempt)

    def finish_attempt(self, trip: Trip, served: bool, now: float) -> None:
        """Finish a turn. If it was served, the router learns that the engine holds the prompt; gossip spreads that."""
        if served:
            self.router.first_token(trip.attempt, now)
        self.router.finish_attempt(trip.attempt, Outcome.SUCCESS if served else Outcome.CONNECT_ERROR, now)

    def probed(self, engine: int, result: ProbeResult, now: float) -> None:
        self.registry.changes.probed(self.ids[engine], result, now)

    def generations(self) -> list[int]:
        """Return the generations of all backends, whether they may serve now or not."""
        return [-1 if backend is None else backend.generation for backend in self.registry.ids.slots]

    def holds(self, fingerprint: int, engine: int, now: float) -> bool:
        """Whether the route table would now send a prompt that ends with this fingerprint to this engine."""
        found = self.routes.match([(1, fingerprint, 0)], self.generations(), now, wanted=len(self.ids), touch=False)
        return any(holder.backend == self.ids[engine] for holder in found)

    def claims(self, fingerprint: int, now: float) -> list[tuple[int, int, int, float]]:
        """Return (fingerprint, engine, generation, age) of live claims below a fingerprint; of all claims for 0."""
        generations = self.generations()
        self.routes.sweep(now, generations, 0)  # so that ages count from now
        found: list[tuple[int, int, int, float]] = []
        for row in self.routes.subtree(fingerprint, limit=CLAIMS_LOOKED_AT_MAX):
            for claim in row.holders:
                if claim.generation == generations[claim.backend] and claim.age_s < self.ttl_s:
                    names = (row.token_fingerprint, *row.text_fingerprints)
                    number = self.ids.index(BackendId(claim.backend))
                    found += [(name, number, claim.generation, claim.age_s) for name in names if name]
        return found

"""Placement: a policy chooses the backend for each request. There is one module per policy.

A policy reads a Match (which backends hold how much of the prompt) and the candidates of a Pool (which may serve it),
and names a backend and a reason. Invariant: it names a candidate, whatever the loads and weights (test_policies.py). It
changes only its own state, awaits nothing, and draws random numbers from the `rng` that it is given. The Pool is
filtered before: model, health, drain, circuit, tries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple, Protocol, Self

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.prompts.namespaces import SYSTEM
from ranvier_py.core.routing.backend import SeenOfBackend
from ranvier_py.core.routing.rates.decode_rate import Decoded
from ranvier_py.core.routing.rates.work import Work


class Candidate(Protocol):
    """What a policy may know of a backend, which it must not change."""

    id: BackendId
    name: str
    weight: float
    load: int
    """Requests in flight: our own exact count plus what peers report."""
    work: Work
    """The requests in flight there, our own and the peers', and what it has room for."""
    seen: SeenOfBackend
    """What it has shown of itself: how many requests it did not fail."""


class Holder(NamedTuple):
    """A backend believed to hold the first `tokens` tokens of the prompt."""

    backend: BackendId
    tokens: int
    trust: int  # route_table.Trust
    tier: int = 0  # 0: in the engine's own memory, 1: below it (offloaded), where reloading costs time


class Credit(NamedTuple):
    """What a backend of a hybrid model has of a prompt: keys and values of `held` tokens, of which it need not compute
    the first `tokens`. `worth`: what policies are shown as the tokens that it holds."""

    held: int
    tokens: int
    worth: int


class Match(NamedTuple):
    """What a policy gets to know of one prompt. `holders` has each backend once, deepest first."""

    holders: Sequence[Holder]
    prompt_tokens: int  # exact or estimated
    home: Fingerprint  # of the first boundary: names the rendezvous home of a cold prefix; 0 = no prefix known
    home_tokens: int = 0  # depth of the first boundary: what all chats of one application share
    own: Fingerprint = UNKNOWN  # of the whole prompt: distinguishes it from others with the same home
    at: float = 0.0  # seconds, monotonic: when the request is placed
    deepest: Fingerprint = UNKNOWN  # of the prefix that the deepest holder holds, for policies that read all holders
    opening: bytes = b""  # hash of the conversation's opening (`chwbl`), for policies with `opening_bytes`
    prefix_tokens: int = 0  # depth of the beginning that the request names (`sticky_least_loaded`); 0: it names none
    shared: bool = False  # other chats go on from the deepest held prefix, too (`wants_shared`)
    several: Callable[[], Sequence[Holder]] | None = None  # finds holders of shorter prefixes, too, deepest first
    answer_tokens: float = 0.0  # expected
    evicted: tuple[BackendId, int] | None = None  # who computed more than anybody holds now, and how many tokens more

    def memory(self, held: int) -> float:
        """Return the tokens of cache that the request will take at its end where `held` tokens are cached, beside what
        others have there anyway."""
        return self.prompt_tokens - (held if self.shared else min(held, self.home_tokens)) + self.answer_tokens

    def own_tokens(self, held: int) -> int:
        """Return how many of `held` cached tokens are this chat's alone."""
        return 0 if self.shared else max(0, held - self.home_tokens)

    def more_holders(self) -> Sequence[Holder]:
        """Return the holders of the deepest and of shorter prefixes: SEVERAL_HOLDERS in all, if there are so many."""
        return self.several() if self.several else self.holders


HoldersOf = Callable[[], Sequence[Holder]]
MatchFields = tuple[
    Sequence[Holder],  # holders
    int,  # prompt_tokens
    Fingerprint,  # home
    int,  # home_tokens
    Fingerprint,  # own
    float,  # at
    Fingerprint,  # deepest
    bytes,  # opening
    int,  # prefix_tokens
    bool,  # shared
    HoldersOf | None,  # several
    float,  # answer_tokens
    tuple[BackendId, int] | None,  # evicted
]
match_of: Callable[[MatchFields], Match] = partial(tuple.__new__, Match)
"""Makes one in a quarter of the time that calling its class takes; for the one that every request needs."""

ALL_HOLDERS = 4096
"""For `depths_wanted`: every backend that holds any of the prompt. There can be no more backends."""


SEVERAL_HOLDERS = 8
"""For `Match.more_holders`: enough to choose among, and few enough to find for a prompt that dozens hold."""


class Choice(NamedTuple):
    """A policy's answer. `reason` is one of the policy's few words; metrics and a response header show it."""

    backend: BackendId
    reason: str
    tokens: int  # predicted depth at the chosen backend


class PolicyLearner:
    """What a policy learns from answers; this one learns nothing."""

    def work_of(self, held: int, prompt_tokens: int) -> int:
        """Return how many tokens a backend that holds `held` of a prompt has to compute. A policy that learns how depth
        slows tokens down returns how many would take as long at a prompt's beginning."""
        return max(0, prompt_tokens - held)

    def predicted_s(self, candidate: Candidate, tokens: int, now: float) -> float:  # noqa: ARG002
        """Predict the seconds until the first token of a request with so many tokens to compute, behind all that waits
        there; 0 for a policy that predicts nothing."""
        return 0.0

    def served(self, service: Service) -> None:
        """Learn from a first token. `computed_tokens` in the service is the prediction."""

    def counted(
        self, backend: BackendId, believed_tokens: int, computed_tokens: int, service: Service | None = None
    ) -> None:
        """Learn from an engine's count how many prompt tokens it computed, of one request, and not as was believed.
        `service`: what was learned of its first token, if that was seen."""

    def decoded(self, decoded: Decoded) -> None:
        """Learn from a finished answer how long it took."""

    def expected_at(self, candidate: Candidate, work_tokens: int, now: float) -> float:  # noqa: ARG002
        """Return when the first token of a request that is sent there now is to be expected, for answers that come as
        a whole. A policy that predicts nothing takes it for come at once."""
        return now

    def forget(self, backend: BackendId) -> None:
        """Forget what was learned of the backend that had this id before."""


class Policy:
    """One placement rule: how it chooses, which members of a Match it reads, and what it learns.

    `depths_wanted`: how many holders a Match must list for it; 1 = the deepest is enough, 0 = it reads none.
    `opening_bytes`: it reads `Match.opening`, made of so many bytes of the `opening_source`; 0 = it does not.
    `wants_prefix`: it reads `Match.prefix_tokens`, which costs something to find; `wants_shared`: `shared`, `evicted`.
    """

    name: str
    depths_wanted: int = 1
    opening_bytes: int = 0
    opening_source: str = SYSTEM
    wants_prefix = False
    wants_shared = False
    learner = PolicyLearner()

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """Choose one of `candidates`, of which there is at least one; every holder in `match` is among them."""
        raise NotImplementedError

    def forget(self, backend: BackendId) -> None:
        """Forget the backend that had this id before."""
        self.learner.forget(backend)

    def __copy__(self) -> Self:
        """Copy the policy for a dry run, with its own copy of all that a choice changes. Caches begin empty."""
        twin = object.__new__(type(self))
        vars(twin).update({name: copy(value) for name, value in vars(self).items()})
        return twin

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:  # noqa: ARG002
        """Return what it weighs for each candidate, by name, in their order; empty for a policy that weighs nothing.

        Units are in the names. Changes nothing.
        """
        return ()


class Service(NamedTuple):
    """How long one backend took to the first token of one request. `computed_tokens` are the prompt tokens that it had
    to compute: as predicted, or as the engine said."""

    backend: BackendId
    computed_tokens: int
    gap_s: float  # since the backend's last progress: its latest first token, or the sending of a lone request
    queued: bool  # others were waiting when this one was sent
    decoding: int  # others there that had their first token when this one was sent
    peer_tokens: int  # prompt tokens that the backend then had to compute for requests of peers
    prompt_tokens: int = 0  # of the whole prompt, of which the computed tokens are the last; 0: they are all of it
    since_end_s: float = inf  # since the last request there ended


class Decision(NamedTuple):
    """What was decided for one request, and from what: enough to explain it later.

    `loads` are the candidates' loads at that moment, in the order of `candidates`. `credit` is that of the chosen
    backend, if it serves a hybrid model and has some of the prompt.
    """

    backend: BackendId
    backend_name: str
    reason: str
    policy: str
    matched_tokens: int
    prompt_tokens: int
    source: str  # "text", "tokens", "none": which chain found it
    holders: Sequence[Holder]
    candidates: Sequence[BackendId]
    loads: Sequence[int]
    credit: Credit | None = None
    shared: bool = False  # as of the match

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the backend has to compute, as predicted."""
        return max(0, self.prompt_tokens - self.matched_tokens)


DecisionFields = tuple[
    BackendId,  # backend
    str,  # backend_name
    str,  # reason
    str,  # policy
    int,  # matched_tokens
    int,  # prompt_tokens
    str,  # source
    Sequence[Holder],  # holders
    Sequence[BackendId],  # candidates
    Sequence[int],  # loads
    Credit | None,  # credit
    bool,  # shared
]
decided: Callable[[DecisionFields], Decision] = partial(tuple.__new__, Decision)
"""As `match_of`."""

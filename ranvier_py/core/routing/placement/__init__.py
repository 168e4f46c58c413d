"""Placement: which backend gets this request. One file per policy, one Protocol, one Decision.

A policy reads a Match (who holds how much of the prompt) and a Pool (who may serve it) and names a backend with the
reason why. It changes nothing but its own state, awaits nothing, and draws chance from the `rng` it is given. Filters
(model served, healthy, not draining, circuit closed, not yet tried) have been applied to the Pool before it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from random import Random
from typing import NamedTuple, Protocol, Self

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.prompts.namespaces import SYSTEM


class Candidate(Protocol):
    """What a policy may know of a backend."""

    @property
    def id(self) -> BackendId: ...
    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def load(self) -> int:
        """Requests in flight: our own exact count plus what peers report."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that it has yet to compute for requests that were sent to it and gave no first token yet, as
        `Policy.work_of` counts them."""
        ...

    @property
    def decoding(self) -> int:
        """Requests in flight whose first token has come."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in flight whose first token has not come: our own and the peers'."""
        ...

    @property
    def progress_at(self) -> float:
        """Seconds, monotonic: when the first of the waiting ones became the first: as it was sent, or at the latest
        first token there; of peers, when they reported it."""
        ...

    @property
    def success_rate(self) -> float:
        """Share of its latest requests that it did not fail: 0 to 1, and 1 while there were none."""
        ...


class Holder(NamedTuple):
    """A backend believed to hold the first `tokens` tokens of the prompt."""

    backend: BackendId
    tokens: int
    trust: int  # route_table.Trust
    tier: int = 0  # 0: in the engine's own memory, 1: below it (offloaded), where reloading costs time


class Credit(NamedTuple):
    """What a backend of a hybrid model has of a prompt: keys and values of `held` tokens, of which it need not compute
    the first `tokens`. `worth`: what a policy gets as the tokens that it holds."""

    held: int
    tokens: int
    worth: int


class Match(NamedTuple):
    """What the route table knows of one prompt. `holders` has each backend once, deepest first."""

    holders: Sequence[Holder]
    prompt_tokens: int  # exact or estimated
    home: Fingerprint  # of the first boundary: names the rendezvous home of a cold prefix; 0 = no prefix known
    home_tokens: int = 0  # depth of the first boundary: what all chats of one application share
    own: Fingerprint = UNKNOWN  # of the whole prompt: tells it from others with the same home
    at: float = 0.0  # seconds, monotonic: when the request is placed
    deepest: Fingerprint = UNKNOWN  # of the prefix that the deepest holder holds, for policies that read all holders
    opening: bytes = b""  # what names the conversation's opening (`chwbl`), for policies that want it
    prefix_tokens: int = 0  # depth of the beginning that the request itself names (sticky_least_loaded); 0: it does not
    shared: bool = False  # others go on from the deepest prefix that is held: it is no chat's own (`wants_shared`)
    several: Callable[[], Sequence[Holder]] | None = None  # finds more of those that hold any of it, deepest first

    def more_holders(self) -> Sequence[Holder]:
        """Beyond those of the deepest prefix: SEVERAL_HOLDERS in all, if there are so many."""
        return self.several() if self.several else self.holders


ALL_HOLDERS = 4096
"""For `depths_wanted`: every backend that holds any of the prompt (as many as there can be backends)."""


SEVERAL_HOLDERS = 8
"""For `Match.more_holders`: enough to choose among, few enough to find behind a prompt that dozens hold."""


NO_MATCH = Match((), 0, Fingerprint(0))


class Choice(NamedTuple):
    """A policy's answer. `reason` is a word from the policy's own short list; reasons are metrics and a header."""

    backend: BackendId
    reason: str
    tokens: int  # predicted depth at the chosen backend


class Policy:
    """One placement rule, and what others may do with it.

    `depths_wanted` is how many holders a Match must list for it: 1 = the deepest is enough, 0 = it reads none.
    `opening_bytes`: so much of a prompt's opening, which is `opening_source`, names its key; 0: it reads none.
    `wants_prefix`, `wants_shared`: it reads these members of a Match, which cost something to find.
    """

    name: str
    depths_wanted: int = 1
    opening_bytes: int = 0
    opening_source: str = SYSTEM
    wants_prefix = False
    wants_shared = False

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """`candidates` is never empty; holders outside it have been left out of `match` already."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        """For a dry run: whatever a choice changes is the copy's own. So are caches, which begin anew."""
        twin = object.__new__(type(self))
        vars(twin).update({name: copy(value) for name, value in vars(self).items()})
        return twin

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:  # noqa: ARG002
        """What it weighs for each candidate, by name, in their order; none for who weighs nothing.

        Units are in the names. Changes nothing.
        """
        return ()

    def work_of(self, held: int, prompt_tokens: int) -> int:
        """Tokens of a prompt that a backend has to compute which holds so many of them: those that would take as long
        at a prompt's beginning, where the policy knows."""
        return max(0, prompt_tokens - held)

    def served(self, service: Service) -> None:
        """A first token came. `computed_tokens` is the prediction."""

    def corrected(self, service: Service, computed_tokens: int) -> None:
        """The engine said, of an earlier service, how many prompt tokens it had to compute."""


class Service(NamedTuple):
    """How long one backend took to the first token of one request. `computed_tokens` is what it did not have: as
    predicted, or as the engine said."""

    backend: BackendId
    computed_tokens: int
    gap_s: float  # since the backend's last progress: its latest first token, or the sending of a lone request
    queued: bool  # others were waiting when this one was sent
    decoding: int  # others that had their first token then
    peer_tokens: int  # that requests of peers had to compute before it
    prompt_tokens: int = 0  # of the whole prompt, of which the computed ones are the last; 0: they are all


class Decision(NamedTuple):
    """What was decided for one request, and from what: enough to explain it later.

    `loads` are the candidates' loads at that moment, in the order of `candidates`. `credit`: where a hybrid model's
    backend that has some of the prompt was chosen.
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

"""What backends of hybrid models can reuse of a prompt, learned from a router's own traffic.

Rule: positions are learned by the profile's rule for the backend that served (R3). A count of cached tokens proves its
position, and refutes the checkpoints believed behind it, not the routes (R5). Peers get as marks what is learned or
proved here, and what is given up (R10); of a peer's marks the later evidence counts. A backend without a profile here
is attention's. Invariant: there is no credit beyond a checkpoint on the prompt's path, and where no hybrid is,
decisions are those without this (test_checkpoints.py, test_credit.py).
Bounds: MARKED_MAX positions of one request; QUEUE_MAX marks that wait for peers: the oldest is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.bounded import BoundedQueue
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.capacity import FIRST_TOKENS, CapacityEstimate
from ranvier_py.core.routing.checkpoints.cache_profile import (
    ATTENTION,
    STEPS_SEEN,
    CacheProfile,
    CheckpointKind,
    CheckpointProfile,
    step_of,
)
from ranvier_py.core.routing.checkpoints.checkpoint_index import (
    CHECKPOINT_TTL_S,
    KV,
    MARK_BITS,
    STATE,
    Checkpoint,
    CheckpointIndex,
    KeptCheckpoint,
    mark_of,
)
from ranvier_py.core.routing.placement import Credit, Holder

HALF_LIFE = 200.0
"""After so many further answers an answer counts half (R5)."""

KEPT_SHARE = 2 ** (-1 / HALF_LIFE)

BELIEF = 10.0
"""Before any answer the profile, as recognised, counts as having been right in so many answers."""

ALARM_BELOW, ALARM_ANSWERS = 0.5, 20
"""Where less than this share of what was credited was there, in so many answers, the profile is another engine's."""

INVESTMENT = 0.3
"""The share of recomputed tokens that counts as saved if the request leaves a checkpoint behind them: R4's omega.
Of 0, 0.01, 0.03, 0.1, 0.3, 0.6 and 1 this one's mean hit rate, over the long traces of `benchmarks.hybrid` and profiles
with junctions, is within a quarter of a point of the best; with 0 shared documents lose 5 to 12 points."""

MARKED_MAX = 4096
"""Most positions that are noted of one request: a million tokens in vLLM's shortest blocks."""

UNCOUNTED_MAX = 16
"""Tokens of a generation prompt, which the engine renders behind the messages and only its answer counts."""

PROMISED_MAX = 32_768
"""Names of one backend under which requests left checkpoints, while its events say which of those are there."""

QUEUE_MAX = 16_384
RENEWED_MAX = 4096
"""Prefixes of each backend that are searched each second for checkpoints of which peers must be reminded."""

LATEST_MAX = 16_384
"""Prefixes whose checkpoints are sent to a peer that lacks them: 300 kB."""


class NewMark(NamedTuple):
    """A message for peers: under `name` there is a checkpoint at `position`, or none any more if `mark` lacks STATE."""

    backend: BackendId
    generation: int
    name: int
    position: int
    mark: int
    at: float


@dataclass(slots=True)
class CheckpointsCounters:
    dropped: int = counter("Checkpoints that nobody fetched for peers in time.")


StateMark = tuple[int, int, bool, bool]
"""(fingerprint, position of a state, whether it is there, whether it lies behind the fingerprint's prefix: AHEAD)."""


class Confidence:
    """The share of credited tokens that were there, over past answers, older ones fading."""

    __slots__ = ("_share", "_weight", "answers")

    def __init__(self) -> None:
        self.answers = 0
        self._weight = self._share = BELIEF

    def add(self, cached: int, credited: int) -> None:
        self.answers += 1
        self._weight = self._weight * KEPT_SHARE + 1
        self._share = self._share * KEPT_SHARE + min(1.0, cached / credited)

    @property
    def value(self) -> float:
        return self._share / self._weight

    @property
    def doubt(self) -> float:
        """1 or more where the profile is another engine's; 0 before ALARM_ANSWERS answers."""
        return (1 - self.value) / (1 - ALARM_BELOW) if self.answers >= ALARM_ANSWERS else 0.0


class BackendCheckpoints:
    """One hybrid backend: its profile, what is known of its checkpoints, and how far both are believed.

    `by_events`: its events bring every state that it keeps, so that nothing else counts. `promised` then has what
    requests left there, by which a state AHEAD of all prefixes known by events is credited to the right prompts.
    """

    def __init__(
        self,
        profile: CacheProfile,
        rule: CheckpointProfile,
        block_tokens: int,
        ttl_s: float,
        fleet: CapacityEstimate,
    ) -> None:
        self.profile = profile
        self.rule = rule
        self.index = CheckpointIndex(block_tokens, ttl_s=ttl_s)
        self.promised = CheckpointIndex(block_tokens, ttl_s=ttl_s, names_max=PROMISED_MAX)
        self.confidence = Confidence()
        self.kept = CapacityEstimate(fleet)  # of checkpoints: each counts as the least distance that it tells apart
        self.generation = -1
        self.by_events = False
        self.counts: deque[int] = deque(maxlen=STEPS_SEEN)  # above 0, of cached tokens

    def counted(self, cached: int) -> None:
        """Note how many tokens of an answer's prompt were cached."""
        if cached:
            self.counts.append(cached)

    @property
    def step_tokens(self) -> int:
        """The step that its latest counts show; 0 while there is none."""
        return step_of(self.counts)

    def looked_up(self, keys: Iterable[PrefixKey], held: int, limit: int, now: float) -> tuple[int, float] | None:
        """Return the deepest checkpoint of a prompt, given up or not: its position, and how many were used since."""
        found = self.index.deepest(keys, held, limit, now, given_up=True)
        return (found.position, self.index.uses.distance(found.at)) if found is not None else None

    def was_kept(self, distance: float, is_kept: bool) -> None:
        """Learn how many states are kept from one of which so many were used since."""
        self.kept.observe(distance * FIRST_TOKENS, 1.0 if is_kept else -1.0)
        self.kept.counted()
        self.index.kept_max = self.kept.learned / FIRST_TOKENS

    def begin(self, generation: int) -> bool:
        """Whether `generation` is the current one. A later one becomes current, and begins without checkpoints."""
        if generation > self.generation:
            self.generation = generation
            self.index.clear()
            self.promised.clear()
        return generation == self.generation

    def credit(
        self, keys: Sequence[PrefixKey], held: int, limit: int, generation: int, now: float, *, guessed: bool
    ) -> Credit:
        """Return what it need not compute of a prompt of which it holds `held` tokens; `guessed`: or soon will hold."""
        tokens = given_up = 0
        if generation == self.generation:
            found = self.index.deepest(
                keys,
                held,
                limit,
                now,
                by_events=self.by_events,
                promised=lambda at: self.promised.has(keys, at, now) or self.index.has(keys, at, now),
            )
            tokens = found.position if found is not None else 0
            learns = self.index.kept_max < inf and not self.by_events
            if learns and (last := self.looked_up(keys, held, limit, now)) is not None:
                given_up = last[0]
        rule = self.rule
        if guessed and rule.every:
            tokens = max(tokens, min(held, limit) // rule.grid * rule.grid)
        worth = self.confidence.value * tokens
        if rule.invests and rule.leaves_junction(min(held, limit), tokens):
            worth += INVESTMENT * (held - tokens)
        elif given_up > tokens:  # it goes where the next one finds its checkpoint, too
            worth += INVESTMENT * (given_up - tokens)
        return Credit(held, tokens, int(worth))


class Checkpoints(Observer):
    """The checkpoints of all hybrid backends, which alone are in `known`. See the module.

    Args:
        chain: returns the prefix keys of a prompt, deepest first, as the router matches them.
        observe: called with this object once there is a hybrid backend: it must observe attempts from then on.
    """

    def __init__(
        self,
        chain: Callable[[Boundary], Iterable[PrefixKey]],
        observe: Callable[[Observer], object] = lambda _: None,
        *,
        block_tokens: int = 16,
        ttl_s: float = CHECKPOINT_TTL_S,
    ) -> None:
        self.known: dict[BackendId, BackendCheckpoints] = {}
        self.counters = CheckpointsCounters()
        self.new: BoundedQueue[NewMark] = BoundedQueue(QUEUE_MAX)
        self._fleet = CapacityEstimate()
        self._prefixes: Container[int] | None = None  # of the route table; None: no peers
        self._ttl_s = ttl_s
        self._chain = chain
        self._observe = observe
        self._observes = False
        self._block_tokens = block_tokens

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @ttl_s.setter
    def ttl_s(self, ttl_s: float) -> None:
        """Set it from now on, for known checkpoints as well."""
        self._ttl_s = ttl_s
        for own in self.known.values():
            own.index.ttl_s = own.promised.ttl_s = ttl_s

    # --- which backends are hybrids -----------------------------------------------------------------------------------

    def set_profile(self, backend: BackendId, profile: CacheProfile) -> bool:
        """Set a backend's profile from now on. Returns whether it differs; then all known checkpoints are forgotten."""
        before = self.known.get(backend)
        if profile.checkpoints is None:
            return self.known.pop(backend, None) is not None
        if before is not None and before.profile == profile:
            return False
        made = (profile, profile.checkpoints, self._block_tokens, self.ttl_s, self._fleet)
        self.known[backend] = BackendCheckpoints(*made)
        if before is not None:  # its counts are the engine's, whatever its profile; they may have shown this one
            self.known[backend].counts.extend(before.counts)
        if not self._observes:
            self._observes = True
            self._observe(self)
        return True

    def profile(self, backend: BackendId) -> CacheProfile:
        own = self.known.get(backend)
        return own.profile if own is not None else ATTENTION

    def forget(self, backend: BackendId) -> None:
        """Forget a backend that was removed."""
        self.known.pop(backend, None)

    # --- by events ---------------------------------------------------------------------------------------------------

    def states_known(
        self, backend: BackendId, generation: int, states: Callable[[], Iterable[StateMark]], now: float
    ) -> None:
        """Take this backend's checkpoints from its events from now on: `states` first, then `states_changed`. Call it
        each second as long as that holds, so that peers are reminded."""
        own = self.known[backend]
        if own.by_events and own.generation == generation:
            if self._prefixes is not None:
                self._renew_events(own, backend, now)
            return
        if own.begin(generation):
            own.by_events = True
            self.states_changed(backend, generation, states(), now)

    def _renew_events(self, own: BackendCheckpoints, backend: BackendId, now: float) -> None:
        """Send peers again what events brought and have not taken: they forget what they are not reminded of."""
        assert self._prefixes is not None
        for name, (position, mark, at) in own.index.renew_events(now, RENEWED_MAX):
            if name in self._prefixes:
                self._send(
                    NewMark(backend=backend, generation=own.generation, name=name, position=position, mark=mark, at=at)
                )

    def states_unknown(self, backend: BackendId, now: float) -> None:
        """Learn checkpoints from traffic again; those that events brought count like learned ones from now on."""
        own = self.known[backend]
        if own.by_events:
            own.by_events = False
            own.index.doubt_events(now)

    def states_changed(self, backend: BackendId, generation: int, changes: Iterable[StateMark], now: float) -> None:
        """Take in states that came, and states that went."""
        own = self.known.get(backend)
        if own is None or not own.by_events or own.generation != generation:
            return  # `states_known` will bring them
        mark, mark_ahead = mark_of(CheckpointKind.EVENT), mark_of(CheckpointKind.AHEAD)
        for name, position, present, ahead in changes:
            if present:
                is_new = own.index.note(name, Checkpoint(position, mark_ahead if ahead else mark, int(now)))
            else:
                is_new = own.index.lose(name, position, now, ahead=ahead)
            if is_new and not ahead and self._prefixes is not None and name in self._prefixes:
                self._send(
                    NewMark(
                        backend=backend,
                        generation=generation,
                        name=name,
                        position=position,
                        mark=mark if present else KV,
                        at=now,
                    )
                )

    # --- among peers -------------------------------------------------------------------------------------------------

    def collect(self, prefixes: Container[int], came: Callable[[], object] = lambda: None) -> None:
        """Collect marks for peers from now on. `prefixes`: names in the route table, of which alone peers get states by
        events; `came` is called when the first mark of a batch comes."""
        self._prefixes, self.new.came = prefixes, came

    def latest(self) -> Iterator[NewMark]:
        """Yield the latest for a peer that lacks them: LATEST_MAX names, shared by the backends, of each the oldest
        first. Checkpoints may come and go meanwhile."""
        each = LATEST_MAX // max(1, len(self.known))
        for backend, own in list(self.known.items()):
            for name, checkpoint in own.index.latest(each):
                if checkpoint.kind is not CheckpointKind.AHEAD:
                    yield NewMark(backend, own.generation, name, *checkpoint)

    def take(self, backend: BackendId, generation: int, marks: Iterable[tuple[int, int, int, float]]) -> bool:
        """Take what a peer knows: (prefix, position, mark, since when). Returns whether any of it is new here."""
        own, brought = self.known.get(backend), False
        if own is None or not (generation == own.generation if own.by_events else own.begin(generation)):
            return False
        proved = mark_of(CheckpointKind.ANSWERED)
        for name, position, mark, at in marks:
            if own.by_events:
                if mark & STATE:
                    own.promised.note(name, Checkpoint(position, min(mark & MARK_BITS, proved), int(at)))
            elif mark & STATE:
                brought |= own.index.note(name, Checkpoint(position, min(mark & MARK_BITS, proved), int(at)))
            else:
                brought |= own.index.lose(name, position, at)
        return brought

    def _announce(self, own: BackendCheckpoints, backend: BackendId, found: Iterable[KeptCheckpoint]) -> None:
        for key, (position, mark, at), is_new in found if self._prefixes is not None else ():
            for name in key[1:] if is_new else ():
                if name:
                    self._send(
                        NewMark(
                            backend=backend, generation=own.generation, name=name, position=position, mark=mark, at=at
                        )
                    )

    def _send(self, mark: NewMark) -> None:
        self.counters.dropped += self.new.put(mark)

    # --- what a prompt can go on from --------------------------------------------------------------------------------

    def credited(
        self, prompt: Prompt, holders: Sequence[Holder], learned: int, generations: Sequence[int], now: float
    ) -> tuple[Sequence[Holder], dict[BackendId, Credit]]:
        """Return holders by the worth of their tokens, the best first, without those of no worth; and the credits.

        A holder's K tokens are of use up to R, the deepest checkpoint at or before K and before the prompt's last token
        (R2). Policies see R times the confidence in the profile, plus a part of K - R where the request will leave a
        checkpoint from which the next one can go on (R4); decisions, predictions and `explain` have R itself.

        Args:
            learned: tokens of the prompt that the route table has; a holder of more is a guess.
        """
        credit_of: dict[BackendId, Credit] = {}
        found: list[Holder] = []
        keys: list[PrefixKey] = []
        limit = length_of(prompt) - 1
        for holder in holders:
            own = self.known.get(holder.backend)
            if own is None:
                found.append(holder)
                continue
            keys = keys or list(self._chain(prompt.end))
            guessed, generation = holder.tokens > learned, generations[holder.backend]
            credit = own.credit(keys, holder.tokens, limit, generation, now, guessed=guessed)
            credit_of[holder.backend] = credit
            if credit.worth:
                found.append(holder._replace(tokens=credit.worth))
        if credit_of:
            found.sort(key=lambda holder: -holder.tokens)
        return found, credit_of

    # --- an observer -------------------------------------------------------------------------------------------------

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        """Note the checkpoint that the engine should have, to learn from the answer whether it was kept."""
        own, credit = self.known.get(attempt.target.id), attempt.decision.credit
        if own is not None and credit is not None and not own.by_events and own.generation == attempt.generation:
            keys, limit = self._chain(attempt.prompt.end), length_of(attempt.prompt) - 1
            attempt.checkpoint = own.looked_up(keys, credit.held, limit, now)

    def started(self, attempt: Attempt, now: float) -> None:
        """Learn the checkpoints of the prompt, which is computed now."""
        own = self.known.get(attempt.target.id)
        if own is None or attempt.prompt.kind == "opaque" or attempt.prompt.end.state is None:
            return
        prompt = length_of(attempt.prompt)
        self._learn(own, attempt, attempt.prompt.end, (prompt, prompt), None, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        own = self.known.get(attempt.target.id)
        prompt = attempt.prompt
        if own is None or prompt.kind == "opaque" or prompt.counts_differ or answer.prompt_tokens is None:
            return
        total = max(end.length, answer.prompt_tokens + (answer.completion_tokens or 0))
        cached = answer.cached_tokens or 0 if attempt.reports_hits else None  # vLLM leaves out zeros
        self._learn(own, attempt, end, (answer.prompt_tokens, total), cached, now)

    def _learn(
        self,
        own: BackendCheckpoints,
        attempt: Attempt,
        end: Boundary,
        lengths: tuple[int, int],
        cached: int | None,
        now: float,
    ) -> None:
        """Learn what a request left. `lengths`: of the prompt, and with the answer. `cached`: by the engine's count."""
        if attempt.target.removed or not own.begin(attempt.generation):
            return
        keys = list(self._chain(end))
        held, credited, _ = attempt.decision.credit or Credit(0, 0, 0)
        if cached is not None:
            self._compare(own, attempt.target.id, keys, (held, credited, cached), now)
            if attempt.checkpoint is not None:
                position, used_since = attempt.checkpoint
                own.was_kept(used_since, position - cached < self._block_tokens)
            held, credited = max(held, cached), cached
        if attempt.first_at is None:
            return
        prompt, total = lengths
        rules = own.rule.marked(prompt, total, min(held, prompt - 1), credited)
        kinds = dict(islice(((at, kind) for at, kind in rules if at <= total), MARKED_MAX))
        if prompt == total:  # no answer yet, whose count may move the prompt's end to the next step
            unknown = {CheckpointKind.DECODE_END}
            if own.rule.grid > UNCOUNTED_MAX and own.rule.end_of(prompt) != own.rule.end_of(prompt + UNCOUNTED_MAX):
                unknown.add(CheckpointKind.PROMPT_END)
            kinds = {at: kind for at, kind in kinds.items() if kind not in unknown}
        marks = [(at, mark_of(kinds[at])) for at in sorted(kinds, reverse=True)]
        known = own.promised if own.by_events else own.index
        self._announce(own, attempt.target.id, known.learn(keys, marks, now))

    def _compare(
        self,
        own: BackendCheckpoints,
        backend: BackendId,
        keys: Sequence[PrefixKey],
        counts: tuple[int, int, int],
        now: float,
    ) -> None:
        """Check the credit by the engine's count (R5). `counts`: tokens held, of these credited, and cached."""
        held, credited, cached = counts
        if credited:
            own.confidence.add(cached, credited)
        own.counted(cached)
        if own.by_events:
            if cached < credited:
                own.index.refute(keys, cached, credited)  # only one AHEAD can go: it was another prompt's
            return
        if cached < credited:
            gone = own.index.refute(keys, cached, credited)
            self._announce(own, backend, [each._replace(checkpoint=lost(each.checkpoint, now)) for each in gone])
        if cached:
            mark = mark_of(CheckpointKind.ANSWERED)
            self._announce(own, backend, own.index.learn(keys, [(cached, mark)], now))
            self._announce(own, backend, own.index.beyond(keys, held, cached, mark, now))


def lost(checkpoint: Checkpoint, now: float) -> Checkpoint:
    """Return the checkpoint as peers get it once it is gone; keys and values may still be there."""
    return Checkpoint(checkpoint.position, KV, int(now))


def length_of(prompt: Prompt) -> int:
    """Return the prompt's length in tokens, with those of its last block where they are known."""
    return max(prompt.tokens, prompt.end.length)

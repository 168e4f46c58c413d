"""Applies the rules that an operator turned on to request bodies, and makes each rule prove itself by engines' counts.

Rule: a keyed hash chooses sessions that a rule leaves alone, the same on all nodes. Where it has not raised the share
of prompt tokens that engines reuse within `sessions` sessions, or no longer does, it is off for that client and model
until an operator changes the rules. Invariant: all nodes with the same rules mend the same sessions
(test_body_mender.py, test_rule_verdicts.py). What cannot be read within bounds is forwarded unchanged. Bounds:
TRIALS_MAX, SESSIONS_FACTOR * `sessions` sessions in each, as many that do not count yet: the oldest is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, variance
from typing import Any, NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.clients.client_rules import Rule, RuleBook, version_of
from ranvier_py.core.clients.mended_body import Edit, RawBody, raw_body, with_more
from ranvier_py.core.clients.prefix_break import PrefixBreak
from ranvier_py.core.metrics import Sample, counter, samples
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.body_members import session_name
from ranvier_py.core.prompts.request_apis import Api

TRIALS_MAX = 256
MODEL_BYTES_MAX = 1024
SESSIONS_FACTOR = 4
"""A trial with too few sessions left alone to compare with waits for this many times `sessions`."""

TENANTS_MIN = 4
"""Where tenants are kept apart, each adds at most 1 / TENANTS_MIN of the sessions, so a judgement needs so many."""

GROUP_MIN = 3  # sessions that a group's variance needs
CERTAIN = 1.645
"""Standard errors by which a gain must exceed 0: chance alone does so in one of twenty trials."""

MEASURING, PROVED, OFF = STATES = ("measuring", "proved", "off")
DECIDED = STATES[1:]


@dataclass(frozen=True, slots=True)
class ProofOptions(Options):
    """How rules that are on have to prove themselves."""

    SECTION = "Clients"
    PREFIX = "client_rule_"

    sessions: int = option(
        200,
        "A rule that is on is turned off for a client and a model unless it raised what engines reuse within so many "
        "sessions, by their own counts.",
        least=20,
        most=100_000,
    )
    control_share: float = option(
        0.1, "Share of the sessions that rules leave alone, to compare with.", least=0.01, most=0.5
    )


class Engines(NamedTuple):
    """Who may serve a model. `owned_by` has what the model cards of each engine say that they are owned by."""

    hosted: bool
    owned_by: Sequence[frozenset[str]]


class RuleUse(NamedTuple):
    """A rule that would change a body. `changed`: it did; else the session is left alone. `session` is a digest,
    `tenant` the owner of the session; empty where tenants are not kept apart."""

    rule: str
    session: int
    changed: bool
    tenant: bytes = b""


class Mended(NamedTuple):
    """`body` is hashed for fingerprints, `sent` goes to engines. They differ only by rules of mode `key`."""

    body: bytes
    sent: bytes
    uses: Sequence[RuleUse]


class TrialResult(NamedTuple):
    """The outcome of a trial. `node` names the node that reached it; empty: this one."""

    rule: str
    client: str
    model: str
    state: str
    why: str
    node: str = ""


@dataclass(slots=True)
class MenderCounters:
    """What rules did to bodies."""

    rewritten: dict[str, int] = counter("Request bodies that a client rule changed.", label="rule")
    keyed: dict[str, int] = counter(
        "Request bodies whose fingerprints leave out, by a client rule, what engines leave out.", label="rule"
    )
    left_alone: dict[str, int] = counter(
        "Request bodies that a client rule left unchanged, to compare with those that it changed.", label="rule"
    )
    withheld: dict[str, int] = counter(
        "Bodies that rules did not change: a hosted provider may serve the model, or an engine that is not known to "
        "leave out what a rule of mode key is of.",
        label="reason",
    )
    unread: int = counter(
        "Request bodies that client rules apply to, but that could not be read within bounds, nor their model's name."
    )
    followed: dict[str, int] = counter(
        "Verdicts of other nodes on client rules that hold on this node, too.", label="state"
    )
    not_followed: dict[str, int] = counter(
        "Verdicts of other nodes on rules that do not hold here: other rules are on there, or trials are too many.",
        label="reason",
    )


Sessions = dict[int, list[int]]
"""Digest of a session -> [prompt tokens, cached tokens], as engines counted them."""


def shares_of(sessions: Sessions) -> list[float]:
    """Return the reused share of each session whose tokens were counted."""
    return [cached / prompt for prompt, cached in sessions.values() if prompt]


class Trial:
    """The trial of one rule for one client and model."""

    def __init__(self, options: ProofOptions) -> None:
        self.state = MEASURING
        self.why = ""
        self.node = ""  # name of the node that reached the verdict; empty: this one
        self.reused: float | None = None  # share at the last judgement
        self.reused_alone: float | None = None
        self._options = options
        self._changed: Sessions = {}
        self._alone: Sessions = {}
        self._tenants: Counter[bytes] = Counter()  # counted sessions of each tenant
        self.left_out = 0  # answers of sessions whose tenant had added its share
        self.waiting: BoundedDict[RuleUse, list[int]] = BoundedDict(SESSIONS_FACTOR * options.sessions)

    @property
    def count(self) -> tuple[int, int]:
        """Sessions since the last judgement: (changed, left alone)."""
        return len(self._changed), len(self._alone)

    def _counts_of(self, use: RuleUse) -> list[int] | None:
        """Return the counts of a session, which joins its group at the second answer, since its name can be made up,
        one for each request; None if it may not join."""
        sessions = self._changed if use.changed else self._alone
        if use.session in sessions:
            return sessions[use.session]
        waiting = self.waiting.pop(use, None)
        if waiting is None:
            self.waiting[use] = [0, 0]
            return self.waiting[use]
        # no single tenant can decide a trial
        if use.tenant and self._tenants[use.tenant] * TENANTS_MIN >= self._options.sessions:
            self.left_out += 1
            if self.state == MEASURING:
                self.why = f"no tenant adds more than 1/{TENANTS_MIN} of the sessions, so as many must send some"
            return None
        self._tenants[use.tenant] += 1
        sessions[use.session] = waiting
        return waiting

    def add(self, use: RuleUse, prompt_tokens: int | None, cached_tokens: int | None) -> bool:
        """Count an answer; None for what the engine did not count. Returns whether the state changed."""
        counts = self._counts_of(use) if self.state != OFF else None
        if counts is None:
            return False
        if prompt_tokens is not None and cached_tokens is not None:
            counts[0] += prompt_tokens
            counts[1] += cached_tokens
        count = sum(self.count)
        if count < self._options.sessions:
            return False
        changed, alone = shares_of(self._changed), shares_of(self._alone)
        if min(len(changed), len(alone)) >= GROUP_MIN:
            return self._judge(changed, alone)
        counted = len(changed) + len(alone) > 0
        if counted and self.state == PROVED:  # stays proved, however few sessions come by this node
            self._begin()
            return False
        if counted and count < SESSIONS_FACTOR * self._options.sessions:
            return False
        return self.become(OFF, "too few sessions to compare" if counted else "engines count no cached tokens")

    def _judge(self, changed: Sequence[float], alone: Sequence[float]) -> bool:
        self.reused, self.reused_alone = fmean(changed), fmean(alone)
        gain = self.reused - self.reused_alone
        error = sqrt(variance(changed) / len(changed) + variance(alone) / len(alone))
        self._begin()
        if not self.reused and not self.reused_alone:
            return False
        why = f"engines reused {self.reused:.1%}, and {self.reused_alone:.1%} where it left sessions alone"
        needed = CERTAIN * error if self.state == MEASURING else 0.0  # once proved, chance alone does not undo it
        return self.become(PROVED if gain > needed else OFF, why)

    def become(self, state: str, why: str, node: str = "") -> bool:
        """Take a state. Returns whether it was another one before."""
        before, self.state, self.why, self.node = self.state, state, why, node
        if state == OFF:
            self._begin()
            self.waiting.clear()
        return state != before

    def _begin(self) -> None:
        """Start the next judgement, with other sessions."""
        self._changed, self._alone = {}, {}
        self._tenants.clear()


class BodyMender:
    """Applies rules. `digest` is a keyed hash that all nodes of a cluster share."""

    def __init__(self, book: RuleBook, digest: Callable[[bytes], bytes], options: ProofOptions) -> None:
        self.book = book
        self.options = options
        self.counters = MenderCounters()
        self.trials: BoundedDict[tuple[str, str, str], Trial] = BoundedDict(TRIALS_MAX)
        self.fresh: BoundedDict[tuple[str, str, str], None] = BoundedDict(TRIALS_MAX)  # peers do not know their state
        definitions = [rule.definition for rule in book.changing]
        self.rules = int.from_bytes(digest(repr((definitions, book.settings, options)).encode())[:8])
        """A digest of rules and settings: nodes with the same one share verdicts."""
        self._digest = digest

    def forgetful(self) -> BodyMender:
        """Return a twin for a dry run: it does the same, and counts nothing."""
        twin = copy(self)
        twin.counters = MenderCounters()
        return twin

    def mend(
        self,
        body: bytes,
        api: Api,
        client: str,
        user_agent: bytes,
        session: bytes,
        engines: Callable[[str], Engines],
    ) -> Mended | None:
        """Return the body as changed by the rules; None if none applies. `engines` returns who may serve a model."""
        version = version_of(user_agent)
        rules = [rule for rule in self.book.changing if rule.fits(client, version, api.name) and rule.mark in body]
        raw = raw_body(body, api) if rules else None
        if raw is None or not is_name(raw.model):
            self.counters.unread += bool(rules)
            return None
        modes = [(rule, self._mode(rule, client, raw.model)) for rule in rules]
        rewriting = [rule for rule, mode in modes if mode == "rewrite"]
        keying = [rule for rule, mode in modes if mode == "key"]
        if not rewriting and not keying:
            return None
        able = engines(raw.model)
        if able.hosted:
            self.counters.withheld["hosted"] += 1
            return None
        uses: list[RuleUse] = []
        keying = [rule for rule in keying if self._is_left_out(rule, able)]
        try:
            named = session or session_name(raw.fields).encode("utf-8", "surrogatepass") or opening_of(raw, rules)
            sent = self._edits((), raw, rewriting, named, uses, self.counters.rewritten)
            read = self._edits(sent, raw, keying, named, uses, self.counters.keyed)
        except (ValueError, RecursionError):  # too long, or nested too deep: it goes on as it came
            self.counters.unread += 1
            return None
        if not uses:
            return None
        sent_body = raw.edited(sent).encode() if sent else body
        return Mended(raw.edited(read).encode() if len(read) > len(sent) else sent_body, sent_body, uses)

    def _mode(self, rule: Rule, client: str, model: str) -> str:
        trial = self.trials.get((rule.name, client, model))
        if not rule.fits_model(model) or (trial is not None and trial.state == OFF):
            return OFF
        return self.book.mode(rule, client, model)

    def _is_left_out(self, rule: Rule, able: Engines) -> bool:
        """Whether all engines leave out what this rule of mode `key` leaves out of fingerprints."""
        known = bool(able.owned_by) and all(names and names <= rule.left_out_by for names in able.owned_by)
        if not known:
            self.counters.withheld["engine"] += 1
        return known

    def _edits(
        self,
        edits: Sequence[Edit],
        raw: RawBody,
        rules: Iterable[Rule],
        session: bytes,
        uses: list[RuleUse],
        counts: dict[str, int],
    ) -> Sequence[Edit]:
        """Return these edits with those of the rules that act; append to `uses` all rules that would."""
        edits = [*edits]
        members: dict[str, Mapping[str, Any]] = {}  # values that were set
        for rule in rules:
            action, before = rule.action, edits
            if action.values is not None and (done := members.get(action.member)) is not None:
                action = replace(action, values={**done, **action.values, **done})
                before = [edit for edit in edits if edit.path != f"$.{action.member}"]
            more = with_more(before, raw.edits(action))
            if more == edits:
                continue
            use = self._use(rule, session)
            uses.append(use)
            (counts if use.changed else self.counters.left_alone)[rule.name] += 1
            if use.changed:
                edits = more
                members[action.member] = action.values or {}
        return edits

    def _use(self, rule: Rule, session: bytes) -> RuleUse:
        """Choose the session's group, by each rule anew, so that rules do not hide each other's effects. A session
        without a name is never left alone: its next turn might not be."""
        found = self._digest(b"rule\0" + rule.name.encode() + b"\0" + session)
        is_alone = bool(session) and int.from_bytes(found[:8]) < self.options.control_share * (1 << 64)
        return RuleUse(rule.name, int.from_bytes(found[8:16]), not is_alone)

    def answered(
        self,
        client: str,
        model: str,
        uses: Sequence[tuple[str, int, bool, bytes]],
        prompt_tokens: int | None,
        cached_tokens: int | None,
    ) -> Iterator[TrialResult]:
        """Count what an engine reported about a prompt. Yields the trials that this decides."""
        for use in map(RuleUse._make, uses):
            key = (use.rule, client, model)
            trial = self.trials.get(key)
            if trial is None:
                trial = self.trials[key] = Trial(self.options)
            if trial.add(use, prompt_tokens, cached_tokens):
                self.fresh[key] = None
                yield TrialResult(*key, trial.state, trial.why)

    def verdicts(self) -> Iterator[TrialResult]:
        """Yield all verdicts, those of other nodes too."""
        for key, trial in self.trials.items():
            if trial.state != MEASURING:
                yield TrialResult(*key, trial.state, trial.why, trial.node)

    def follow(self, verdict: TrialResult) -> bool:
        """Apply another node's verdict here, if it is later in STATES. Returns whether it changed anything."""
        key = verdict[:3]
        trial = self.trials.get(key)
        if trial is not None and STATES.index(trial.state) >= STATES.index(verdict.state):
            return False
        if trial is None:
            if len(self.trials) >= TRIALS_MAX:
                self.counters.not_followed["full"] += 1
                return False
            trial = self.trials[key] = Trial(self.options)
        self.counters.followed[verdict.state] += 1
        self.fresh[key] = None
        return trial.become(verdict.state, verdict.why, verdict.node)

    def metrics(self) -> Iterator[Sample]:
        yield from samples("client_rules", self.counters)
        for state in (MEASURING, PROVED, OFF):
            count = sum(trial.state == state for trial in self.trials.values())
            words = "Client rules at work, by how far they are proved. off: they were turned off."
            yield Sample("client_rules_trials", "gauge", words, count, {"state": state})
        words = "Trials of client rules forgotten for want of room, the oldest first: they begin anew."
        yield Sample("client_rules_trials_dropped", "counter", words, self.trials.dropped)
        count = sum(trial.left_out + trial.waiting.dropped for trial in self.trials.values())
        words = "Sessions that trials of rules forgot before a second answer, and answers of tenants over their share."
        yield Sample("client_rules_sessions_dropped", "counter", words, count)

    def rows(self) -> list[Mapping[str, Any]]:
        """The state of each trial, for display."""
        return [
            {
                "rule": rule,
                "client": client,
                "model": model,
                "state": trial.state,
                "why": trial.why,
                "node": trial.node,
                "sessions": trial.count[0],
                "sessions_left_alone": trial.count[1],
                "reused_share": trial.reused,
                "reused_share_left_alone": trial.reused_alone,
            }
            for (rule, client, model), trial in self.trials.items()
        ]


def opening_of(raw: RawBody, rules: Sequence[Rule]) -> bytes:
    """Return what names a conversation whose client does not: its opening, without what rules take out, since that
    changes with each turn. Empty if an engine keeps the history. Raises ValueError."""
    if raw.fields.get("previous_response_id"):
        return b""
    edits: Sequence[Edit] = ()
    for rule in rules:
        if rule.action.where != "system":
            edits = with_more(edits, raw.edits(rule.action))
    return raw.opening(edits).encode()


def is_name(model: str) -> bool:
    """Whether a model's name, which clients choose, is fit for logs, pages and messages."""
    return model.isprintable() and len(model.encode()) <= MODEL_BYTES_MAX


def rule_for(book: RuleBook, found: PrefixBreak, body: bytes, api: Api, client: str) -> str:
    """Return the name of the rule that would change, in this body, what made this break; empty if none does."""
    raw = raw_body(body, api)
    if raw is None:
        return ""
    with suppress(ValueError):  # no rule mends a body that is too long for it
        for rule in book.may_mend(found.cause, client, api.name, raw.model):
            if any(is_within(found.path, edit.path) for edit in raw.edits(rule.action)):
                return rule.name
    return ""


def is_within(path: str, outer: str) -> bool:
    """Whether a JSON path is, or leads into, the other one."""
    return path.startswith(outer) and path[len(outer) : len(outer) + 1] in ("", ".", "[")

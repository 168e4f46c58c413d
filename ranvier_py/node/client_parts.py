"""Watches what clients do to their own prefixes (`core/clients`), besides the requests and in spare time.

Each chat is counted. A chat that was read from its beginning, because nothing of it was known, is parsed once more and
compared with the conversation that it should have continued. Prompts are compared one by one, with pauses PAUSE_SHARE
times as long as the work. A prompt that finds the queue full, or is too large, is counted and left out.
Bounds: QUEUE_MAX prompts, QUEUE_BYTES_MAX of their bodies, BODY_BYTES_MAX each.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.rule_files import rule_book
from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.clients.body_mender import OFF, BodyMender, TrialResult, rule_for
from ranvier_py.core.clients.client_rules import Rule, RuleBook
from ranvier_py.core.clients.client_watch import ClientCounts, ClientWatch, client_rows
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.history.joined_panes import of_clients
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Family, Sample, counter, samples
from ranvier_py.core.prompts.body_json import load_object
from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.prompts.prompt import Boundary, Prompt
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.rates.service_rate import ServiceRates
from ranvier_py.node.asked import Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.fingerprints import FingerprintScheme
from ranvier_py.node.part import Handler, Part

log = logging.getLogger(__name__)

QUEUE_MAX, QUEUE_BYTES_MAX = 256, 16 << 20
BODY_BYTES_MAX = 256 * 1024  # a larger one would block the event loop too long
PAUSE_SHARE = 20.0  # even under full load this takes at most a twentieth of the event loop, as learning does
WORK_S_MAX = 0.0002  # of work before a pause, since requests wait meanwhile
GATHER_S = 0.02  # to compare several prompts for one turn of the event loop: to wake for each costs more than comparing

BREAK_TOKENS_MIN, BREAK_SHARE = 100_000, 0.05
"""A client that sent less, or that computes less of it again, is not worth an operator's time."""


@dataclass(slots=True)
class ClientReaderCounters:
    """How many prompts were compared, and how many were not."""

    compared: int = counter("Prompts compared with the earlier prompt of their conversation.")
    left_out: int = counter("Prompts not compared with their conversation: too large, or too many at once.")


class ClientReader(Part, Observer):
    """Reads clients' prompts beside the requests. `key` seeds digests: 64 bits.

    `book` has the rules that could help against breaks, `mender` applies those that are turned on.
    """

    name = "clients"
    joins = MappingProxyType({"clients": of_clients})
    keys = ("client_rules", "client_rules_file", "proof")

    def __init__(self, config: Config, scheme: FingerprintScheme, key: int, clustering: ClusterParts | None) -> None:
        self._scheme, self._clustering = scheme, clustering
        self.book, self.mender = self._rules_of(config)
        self.watch = ClientWatch(key)
        self.counters = ClientReaderCounters()
        self.rates = ServiceRates()
        self._queue: deque[tuple[Prompt, BackendId]] = deque()
        self._bytes = 0
        self._due = trio.Event()

    def _rules_of(self, config: Config) -> tuple[RuleBook, BodyMender | None]:
        """Return the rules, and what changes bodies if the operator turned one on. All nodes share verdicts."""
        book = rule_book(config.client_rules_file, config.client_rules)
        mender = BodyMender(book, TextHasher(self._scheme.key).digest, config.proof) if book.changing else None
        if self._clustering is not None:
            verdicts = self._clustering.peer.features.verdicts
            verdicts.mender, verdicts.followed = mender, log_result
        return book, mender

    def check(self, before: Config, after: Config) -> bool:
        return rule_book(after.client_rules_file).rules != self.book.rules

    def reload(self, before: Config, after: Config) -> None:
        """Rules have to prove themselves anew; peers send their verdicts about equal rules again."""
        self.book, self.mender = self._rules_of(after)

    async def loop(self) -> None:
        worked_s = 0.0
        while True:
            while not self._queue:
                self._due = trio.Event()
                await self._due.wait()
                await trio.sleep(GATHER_S)
            began = time.monotonic()
            prompt, backend = self._queue.popleft()
            self._bytes -= len(prompt.body)
            self._read(prompt, backend)
            worked_s += time.monotonic() - began
            if worked_s >= WORK_S_MAX:
                await trio.sleep(PAUSE_SHARE * worked_s)
                worked_s = 0.0

    def started(self, attempt: Attempt, now: float) -> None:
        prompt = attempt.prompt
        if prompt.kind != "chat":
            return
        self.watch.turn(prompt.client, prompt.session, prompt.tokens)
        size = len(prompt.body)
        if size > BODY_BYTES_MAX or len(self._queue) >= QUEUE_MAX or self._bytes + size > QUEUE_BYTES_MAX:
            self.counters.left_out += 1
            return
        self._queue.append((prompt, attempt.target.id))
        self._bytes += size
        self._due.set()

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        prompt, service = attempt.prompt, attempt.service
        if prompt.rules and self.mender is not None and not prompt.counts_differ:
            counts_of = (answer.prompt_tokens, answer.cached_tokens)
            for result in self.mender.answered(prompt.client, prompt.model, prompt.rules, *counts_of):
                log_result(result)
        if prompt.kind != "chat" or answer.prompt_tokens is None or answer.cached_tokens is None:
            return
        if service is not None and (computed_tokens := attempt.computed_by(answer)) is not None:
            self.rates.served(service._replace(computed_tokens=computed_tokens))
        counts = self.watch.counts(prompt.client)
        counts.counted_tokens += answer.prompt_tokens
        counts.reused_tokens += answer.cached_tokens

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/clients": Route(lambda _: self.view(), "Clients that break their own prefixes")}

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        view, known = self.view(), self.watch.clients
        for row in view["clients"]:  # what its shares are shares of, so that they can be joined
            counts = known[row["client"]]
            row |= {"counted_tokens": counts.counted_tokens, "compared_tokens": counts.compared_tokens}
        return {"clients": {name: view[name] for name in ("clients", "rules", "trials")}}

    def view(self) -> Mapping[str, Any]:
        return {
            "clients": client_rows(self.watch),
            "compared": self.counters.compared,
            "left_out": self.counters.left_out,
            "conversations_dropped": self.watch.dropped,
            "rules": [self._rule_row(rule) for rule in self.book.rules.values()],
            "trials": self.mender.rows() if self.mender is not None else [],
        }

    def _rule_row(self, rule: Rule) -> Mapping[str, Any]:
        return {
            "rule": rule.name,
            "client": rule.client,
            "apis": list(rule.apis),
            "causes": list(rule.causes),
            "key_for": sorted(rule.left_out_by),
            "source": rule.source,
            "settings": [setting._asdict() for setting in self.book.settings if setting.rule == rule.name],
        }

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield the break of each client's prefixes that costs most, if it costs much."""
        for client, counts in self.watch.clients.items():
            if counts.prompt_tokens < BREAK_TOKENS_MIN or not counts.breaks:
                continue
            kind, each = max(counts.breaks.items(), key=lambda pair: pair[1].tokens)
            if each.tokens < BREAK_SHARE * counts.prompt_tokens:
                continue
            rule = max(each.mendable, key=each.mendable.__getitem__, default="")
            what = f"client {client} breaks its prefixes at {kind.path} ({kind.cause}): {each.tokens:,} tokens of "
            what += f"{counts.prompt_tokens:,} were computed again, {each.seconds:.1f} s of prefill"
            remedy = (
                f"Turn the rule {rule} on: it mends this." if rule else "See where it does so, and mend the client."
            )
            yield Finding(
                "prefix_breaks",
                Severity.NOTICE,
                what,
                about=client,
                whom=f"requests of {client}",
                remedy=remedy,
                command="ranvier clients",
            )

    def metrics(self) -> Iterator[Sample]:
        yield from samples("clients", self.counters)
        if self.mender is not None:
            yield from self.mender.metrics()
        yield from client_samples(self.watch.clients)

    def _read(self, prompt: Prompt, backend: BackendId) -> None:
        api, end = APIS[prompt.api], prompt.end.text
        if prompt.base.parent is not None:
            self.watch.extend(prompt.base.text, end, prompt.tail, api, prompt.base.messages)
            self.watch.compared(prompt.client, prompt.tokens, prompt.base.tokens)
            return
        self.counters.compared += 1
        fields = load_object(prompt.body)
        found = self.watch.observe(prompt.client, prompt.session, fields, api, prompt.tokens, end)
        if found is not None:
            rule = rule_for(self.book, found.found, prompt.body, api, prompt.client)
            token_s = self.rates[backend].per_token_s if self.rates.fleet.count else 0.0  # 0: no rate is learned yet
            self.watch.broke(prompt.client, found, token_s, rule)


def log_result(result: TrialResult) -> None:
    level = logging.WARNING if result.state == OFF else logging.INFO
    rule, client, model, state, why, node = result
    log.log(level, event(f"client_rule.{state}", rule=rule, client=client, model=model, why=why, found_by=node))


def client_samples(clients: Mapping[str, ClientCounts]) -> Iterator[Sample]:
    """Yield what each kind of client sent, and where it broke its prefixes."""
    turns = Family("client_turns", "Chats that came from each kind of client.", ("client",))
    tokens = Family("client_prompt_tokens", "Prompt tokens that came from each kind of client.", ("client",))
    words = "Prompts that broke the prefix of their conversation, by client and cause."
    breaks = Family("prefix_breaks", words, ("client", "cause"))
    words = "Tokens that prompts repeated behind a broken prefix: engines compute them again."
    break_tokens = Family("prefix_break_tokens", words, ("client", "cause"))
    words = "Seconds of prefill for tokens behind a broken prefix, at the rate learned for each engine."
    seconds = Family("prefix_break_prefill_seconds", words, ("client", "cause"))
    for client, counts in clients.items():
        turns.add((client,), counts.turns)
        tokens.add((client,), counts.prompt_tokens)
        for cause, each in counts.causes.items():
            breaks.add((client, cause), each.count)
            break_tokens.add((client, cause), each.tokens)
            seconds.add((client, cause), each.seconds)
    for family in (turns, tokens, breaks, break_tokens, seconds):
        yield from family.samples()

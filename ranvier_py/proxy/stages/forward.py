"""Plans which backends are asked, carries out the legs of a plan, and makes other plans until a client has its answer.

A leg that fails before a byte was relayed leads to another plan without its backend, a bounded number of times, if the
request may be sent again (`failed_tries`); after the first byte it only ends. What a leg hands on serves its plan
alone. An error that is the client's to have ends the plan, whichever leg got it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ranvier_py.core.answers.answer_events import BLANK, EMPTY, Failure
from ranvier_py.core.answers.answer_reader import AnswerReader, StreamReader, WholeReader
from ranvier_py.core.answers.chunked import ChunkedReader
from ranvier_py.core.answers.inflated_reader import InflatedReader
from ranvier_py.core.answers.usage_injection import REFUSALS, Terms
from ranvier_py.core.answers.usage_removal import UsageRemoval
from ranvier_py.core.errors import ClientGone, NodeExhausted, RanvierError, ResponseLost, UpstreamEmpty, UpstreamError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.attempt import Attempt, Edit, Leg, Plan, PoolMatch
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.blame.judgements import BLANK_ANSWER, SERVED, Judgement
from ranvier_py.core.routing.health import FAULTS, Outcome
from ranvier_py.core.routing.processes.ranks import RANK_FIELD
from ranvier_py.core.routing.request_paths import ANSWERED_AS, PATHS
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.wanted.found_backend import EngineKey, own_key
from ranvier_py.core.tracing.trace_context import TRACEPARENT, TRACESTATE
from ranvier_py.proxy.call import Call, PipelineLimits, PromptTokenizer
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.edits import LegEdits
from ranvier_py.proxy.error_answers import api_of, error_response
from ranvier_py.proxy.failed_tries import FailedTries, outcome_of_error, waited_long
from ranvier_py.proxy.http_values import HttpRequest, HttpResponseHead, WaitPhase
from ranvier_py.proxy.stages.learn import serves
from ranvier_py.proxy.stages.relay import RelayStage
from ranvier_py.proxy.stages.resolve_model import ResolveStage
from ranvier_py.proxy.upstream import Exchange, Upstream


def one_leg(router: Router, call: Call, found: PoolMatch) -> Plan:
    """Place the prompt among those found: one engine prefills and decodes."""
    return (Leg(router.place(call.read.prompt, found)),)


def begin(router: Router, call: Call, leg: Leg, found: PoolMatch) -> Attempt:
    """Count a leg as in flight at its backend."""
    prompt = call.read.prompt
    if call.attempt is not None:
        call.earlier = (*call.earlier, call.attempt)
    call.attempt = attempt = router.start_attempt(prompt, leg.decision, found.at, call.id, found, quiet=True)
    attempt.judged = call.read.request.computes
    call.tries += 1
    return attempt


@dataclass(slots=True, eq=False, repr=False)  # no repr, since it would show keys
class ForwardStage:
    router: Router
    plan: Callable[[Router, Call, PoolMatch], Plan]
    upstream: Upstream
    limits: PipelineLimits
    tokenizer: PromptTokenizer
    edits: LegEdits
    relay: RelayStage
    resolve: ResolveStage
    address_of: Callable[[str], BackendAddress]  # from a backend's URL
    own_keys: Mapping[str, EngineKey]  # of backends, by URL: sent if the client sends none, before those of models
    authorization: bytes  # sent if there is no other; may be empty
    trouble: Callable[[BackendId], object]  # called with a backend that failed, to have it probed at once
    lacking: Callable[[BackendId], object]  # called with a backend that says that it lacks a model
    changed: Callable[[Sequence[Transition]], object]  # called with changes of health that requests caused

    def __call__(self, call: Call) -> Steps[None]:
        elsewhere: PoolMatch | None = call.match
        if call.named is not None:
            yield from self.resolve.at_keeper(call, call.named)
        try:
            while elsewhere is not None:
                found = elsewhere
                handed: list[Edit] = []
                for leg in self.plan(self.router, call, found):
                    elsewhere = yield from self._leg(call, leg, begin(self.router, call, leg, found), handed)
                    if elsewhere is not None or (leg.read is not None and (call.is_decided or call.falls_back)):
                        break
                if call.named is not None and elsewhere is None:
                    elsewhere = yield from self.resolve.fallen_back(call)
        except RanvierError as error:
            if isinstance(error, ClientGone) or not call.is_open:
                raise
            call.end(error)
            self.relay.fail(call, error_response(error, api_of(call.request))[2])
        finally:
            if call.awaited is not None:
                call.awaited.close()

    def _leg(self, call: Call, leg: Leg, attempt: Attempt, handed: list[Edit]) -> Steps[PoolMatch | None]:
        """Ask one backend, relay or read its answer and finish the leg. `handed` gets what it hands on. Returns whom to
        ask instead; None if the plan goes on, or ends."""
        outcome, exchange, elsewhere = Outcome.CANCELLED, None, None
        try:
            exchange, is_asked = yield from self._ask(call, attempt, (*leg.edits, *handed), asks=leg.read is None)
            if call.awaited is not None and call.awaited.is_open and leg.read is None:
                self.relay.follow(exchange)
            head, judgement, held = exchange.head, SERVED, None
            status = attempt.reply.status = head.status
            reader = self._reader(call, attempt, head, exchange.chunks, is_asked=is_asked)
            if attempt.judged and 200 <= status < 300:
                held = reader.feed(exchange.take(), exchange.complete)
                if not exchange.complete and (not reader.begun or head.framing == "length"):
                    held = yield from self.relay.begin(call, attempt, exchange, reader, held)
            if status >= 300 or (reader.failure is not None and not reader.begun):
                judgement = yield from self._judge(call, attempt, exchange, reader.failure, held)
                status = attempt.reply.status
                is_enough = judgement is BLANK_ANSWER and leg.read is not None  # nobody needs its words
                elsewhere = None if is_enough else self._failed_tries(call).after_answer(attempt, judgement)
                if elsewhere is not None or self._falls_back(call, judgement):
                    outcome = judgement.outcome
                    return elsewhere
                judgement = believed(reader, judgement)
            if status == 101:
                yield from self.relay.websocket(call, attempt, exchange)
            elif leg.read is not None and status < 300:
                handed += leg.read((yield from self.relay.whole(call, attempt, exchange, held or exchange.take())))
            else:
                yield from self.relay.answer(call, attempt, exchange, reader, held)
                if is_asked or reader.failure is not None:
                    judgement = yield from self._end(call, attempt, exchange, reader, judgement)
            outcome = judgement.outcome
        except (NodeExhausted, UpstreamError) as error:
            outcome = outcome_of_error(error)
            call.failed(error)
            elsewhere = yield from self._after_error(call, attempt, outcome, error)
            return elsewhere
        finally:
            if exchange is not None:
                exchange.release()
            self._finish(call, attempt, outcome, is_last=elsewhere is None)
        call.outcome = outcome.value
        return None

    def _judge(
        self, call: Call, attempt: Attempt, exchange: Exchange, inside: Failure | None, held: bytes | None
    ) -> Steps[Judgement]:
        """Return what an answer shows of its backend. `inside`: the failure that one of status 200 is. Raises
        UpstreamEmpty instead of one without any output, which some clients would repeat without a pause."""
        if inside is BLANK:
            attempt.reply.is_blank = True
            return BLANK_ANSWER
        if inside is not None:
            attempt.reply.status = inside.status
        if held is not None:
            if inside is EMPTY and (call.is_open or PATHS[call.read.request.path].reader):
                raise UpstreamEmpty("the engine ended its answer without any output")
            exchange.put_back(held)  # it may be the last one of several
        judgement = yield from self._failed_tries(call).judge(attempt, exchange, inside)
        if judgement.outcome is not Outcome.SUCCESS:
            call.note(f"it answered {attempt.reply.status}{'' if inside is None else ', within a 200'}")
        if judgement.lacks_model:
            self.lacking(attempt.target.id)
        return judgement

    def _end(
        self, call: Call, attempt: Attempt, exchange: Exchange, reader: AnswerReader, judgement: Judgement
    ) -> Steps[Judgement]:
        """Take in what a relayed answer showed. Returns another judgement if it failed behind its beginning."""
        if isinstance(reader, StreamReader) and reader.removal is not None:
            self.edits.asking.answered(reader.removal, attempt.target.id, attempt.generation)
        if reader.failure is not None and judgement is SERVED:
            judgement = yield from self._judge(call, attempt, exchange, reader.failure, None)
            if judgement is BLANK_ANSWER:
                self._failed_tries(call).relayed_blank(attempt)
                judgement = SERVED
        return judgement

    def _after_error(
        self, call: Call, attempt: Attempt, outcome: Outcome, error: NodeExhausted | UpstreamError
    ) -> Steps[PoolMatch | None]:
        """Return whom to ask after a try without an answer; None if the client got one after all. Raises `error`."""
        if isinstance(error, NodeExhausted):
            raise error
        self.trouble(attempt.target.id)
        if call.is_decided:
            raise error
        failed = self._failed_tries(call)
        is_late = waited_long(call.started_at, attempt, (call.limits or self.limits).first_event_s)
        elsewhere = failed.after_error(attempt, error, is_late=is_late)
        if elsewhere is not None:
            return elsewhere
        if not (is_late and outcome is Outcome.TIMEOUT) and self._falls_back(call, Judgement(outcome)):
            return None
        answer = failed.kept or (call.named.kept if call.named is not None else None)
        if answer is None:
            if attempt.prompt.response_key and outcome is Outcome.CONNECT_ERROR:
                raise ResponseLost("the engine that keeps this response is not there") from error
            raise error
        kept, exchange = answer
        yield from self.relay.answer(
            call, kept, exchange, self._reader(call, kept, exchange.head, None, is_asked=False), None
        )
        call.outcome = Outcome.OVERLOADED.value
        return None

    def _finish(self, call: Call, attempt: Attempt, outcome: Outcome, *, is_last: bool) -> None:
        failed = self._failed_tries(call) if outcome in FAULTS else call.failed_tries
        now = time.monotonic()
        served = serves(self.router.registry, call.request.path, attempt) if outcome is Outcome.SUCCESS else ()
        was_seen = is_last and call.sent_bytes > 0
        settled = failed.finish(attempt, outcome, now, is_last=is_last, was_seen=was_seen) if failed is not None else ()
        attempt.reply.sent_bytes, attempt.reply.outcome = call.sent_bytes, outcome
        transitions = self.router.finish_attempt(attempt, outcome, now)
        if transitions or settled or served:
            self.changed([*settled, *served, *transitions])

    def _falls_back(self, call: Call, judgement: Judgement) -> bool:
        """Whether another model is asked instead of the one whose last answer, or error, is judged so."""
        named = call.named
        if (
            named is None
            or judgement is BLANK_ANSWER
            or not self._failed_tries(call).may_repeat_after(judgement.outcome)
        ):
            return False
        named.following = self.resolve.following(call, named, judgement)
        return named.following > 0

    def _failed_tries(self, call: Call) -> FailedTries:
        if call.failed_tries is None:
            limits = call.limits or self.limits
            call.failed_tries = FailedTries(call.read.request, call.client, self.router, limits.retries)
        return call.failed_tries

    # --- ask --------------------------------------------------------------------------------------------------------

    def _ask(self, call: Call, attempt: Attempt, edits: Sequence[Edit], *, asks: bool) -> Steps[tuple[Exchange, bool]]:
        """Send the request, if possible with a question for counts. Returns the answer, and whether that was asked. If
        the backend refuses, perhaps because of the question, the request is sent once more without it."""
        asking = self.edits.asking
        request, is_asked = self.edits.made(call.read, attempt, edits, asks=asks)
        exchange = yield from self._send(call, attempt, request)
        if not is_asked:
            return exchange, False
        status = exchange.head.status
        if status not in REFUSALS or asking.terms(attempt.target.id, attempt.generation) is Terms.TAKES:
            if status == 200:
                asking.taken(attempt.target.id, attempt.generation)
            return exchange, True
        try:
            exchange.take()  # to release a connection that can be used again: a refusal is mostly complete here
        finally:
            exchange.release()
        request, _ = self.edits.made(call.read, attempt, edits, asks=False)
        exchange = yield from self._send(call, attempt, request)
        asking.refused(attempt.target.id, attempt.generation, exchange.head.status)
        return exchange, False

    def _send(self, call: Call, attempt: Attempt, request: HttpRequest) -> Steps[Exchange]:
        """Send the request, and wait for the head of the answer. Raises UpstreamError."""
        extra = []  # fields that a backend gets in addition to the client's own
        fields = request.fields
        if fields.request_id is None:
            extra.append((b"x-request-id", call.id))
        if not fields.authorized:
            own = own_key(self.own_keys, attempt.target.url) if self.own_keys else None
            if own is not None:
                authorization = own.authorization
            else:
                authorization = (call.named is not None and call.named.authorization) or self.authorization
            if authorization:
                extra.append((b"authorization", authorization))
        if call.trace is not None:
            extra.append((TRACEPARENT, call.trace.traceparent(call.tries)))
            if call.trace.state:
                extra.append((TRACESTATE, call.trace.state))
        elif fields.trace:
            extra += fields.trace
        if attempt.target.behind.rank is not None:
            extra.append((RANK_FIELD, b"%d" % attempt.target.behind.rank))
        call.client.arm(WaitPhase.FIRST_BYTE, (call.limits or self.limits).first_event_s)
        if call.read.upgrades:
            return self.upstream.upgrade(self.address_of(attempt.target.url), request, extra)
        return self.upstream.open(self.address_of(attempt.target.url), request, extra, partial(self._sent, attempt))

    def _sent(self, attempt: Attempt) -> None:
        """Do what no request needs to wait for: notify observers, and have the prompt tokenized."""
        if not attempt.announced:
            self.router.announce(attempt)
            self.tokenizer.submit(attempt)

    def _reader(
        self, call: Call, attempt: Attempt, head: HttpResponseHead, chunks: ChunkedReader | None, *, is_asked: bool
    ) -> AnswerReader:
        """Return what reads the answer, by what its head says that it is. `is_asked`: for counts of a stream."""
        prompt, fields, is_served = attempt.prompt, head.fields, 200 <= head.status < 300
        kind = AnswerReader
        if is_served and attempt.judged:
            kind = StreamReader if fields.streams else WholeReader
        captures = fields.readable and is_served and prompt.kind != "opaque"
        is_plain = fields.readable or kind is AnswerReader
        within = chunks if is_plain else None
        api = prompt.api if prompt.kind != "opaque" else ANSWERED_AS.get(call.read.request.path, "")
        streams = prompt.stream and (kind is not WholeReader or head.framing != "length")
        reader = kind(api, within, streams=streams, names=call.read.is_kept, captures=captures)
        if call.reservation is not None:
            reader.beyond = call.reservation.follow(reader.captured)
        if not is_plain:
            reader = InflatedReader(reader, head.headers, chunks)
        if is_asked:
            if isinstance(reader, StreamReader):
                reader.remove(UsageRemoval(keeps_length=head.framing == "length"))
            elif fields.streams and not fields.readable:
                self.edits.asking.unreadable(attempt.target.id, attempt.generation)
        return reader


def believed(reader: AnswerReader, judgement: Judgement) -> Judgement:
    """Return the judgement on an answer that the client gets."""
    if judgement is not BLANK_ANSWER:
        return judgement
    reader.believe()
    return SERVED

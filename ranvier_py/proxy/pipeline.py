"""The path of a request: its stages in order, and what drives them.

Each stage gets the Call, reads the slots of the stages before it and fills its own. It is one synchronous call, hence
atomic; one that has to wait returns steps (`driver`). If the client leaves, everything ends: the connection to the
backend is closed at once, and only what was proved is learned.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.clients.body_mender import BodyMender
from ranvier_py.core.errors import ClientGone, ModelNotFound, RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.wanted.found_backend import EngineKey
from ranvier_py.proxy.call import Call, CallObserver, PipelineLimits, PromptTokenizer, Tracer
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.edits import LegEdits
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.realtime import Realtime
from ranvier_py.proxy.stages.admit import AdmitStage, asked_in
from ranvier_py.proxy.stages.browsers import BrowserStage
from ranvier_py.proxy.stages.forward import ForwardStage, one_leg
from ranvier_py.proxy.stages.learn import LearnStage
from ranvier_py.proxy.stages.match import MatchStage, ModelStage
from ranvier_py.proxy.stages.mend import MendStage
from ranvier_py.proxy.stages.own_answer import answer_ourselves
from ranvier_py.proxy.stages.read import ReadStage
from ranvier_py.proxy.stages.relay import RelayStage
from ranvier_py.proxy.stages.reserve import ReserveStage
from ranvier_py.proxy.stages.resolve_model import ResolveStage
from ranvier_py.proxy.stages.response_cache import ResponseCache
from ranvier_py.proxy.stages.strip import RouterFields
from ranvier_py.proxy.upstream import Upstream

Stage = Callable[[Call], Steps[None] | None]


class Pipeline:
    """Handles every request of the public port. `responses` and `observers` may be replaced."""

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        router: Router,
        upstream: Upstream,
        tokenizer: PromptTokenizer,
        *,
        limits: PipelineLimits,
        address_of: Callable[[str], BackendAddress],
        asking: UsageAsker,
        trouble: Callable[[BackendId], object],
        look_for: Callable[[str], Awaitable[None]],
        lacking: Callable[[BackendId], object],
        changed: Callable[[Sequence[Transition]], object],
        own_keys: Mapping[str, EngineKey],
        authorization: bytes,
        tenants: Tenants | None,
        may_see: Callable[[bytes | None], bool],
        cache_control: bool,
        responses: ResponseCache | None,
        mender: BodyMender | None,
        reserve: ReserveStage | None,
        tracer: Tracer | None,
        own_probe: bytes,
    ) -> None:
        self.observers: Sequence[CallObserver] = ()
        self.tracer, self.responses = tracer, responses
        self.serving: dict[int, Call] = {}  # in flight, by descriptor, oldest first
        realtime, self.router_fields = Realtime(), RouterFields()
        self.mend = MendStage(mender, router.registry)
        self.browsers = BrowserStage(router.registry, upstream, address_of)
        self.read = ReadStage(
            *(router, limits), strip=self.router_fields, mend=self.mend, tenants=tenants, realtime=realtime
        )
        self.match = MatchStage(router, limits, tokenizer)
        models = ModelStage(router.registry, look_for)
        # without a file of keys nobody has limits, nor is anybody let in for some models alone
        reserving = () if reserve is None else (reserve,)
        again: Sequence[Stage] = (self.read, self.match, *(each.again for each in reserving))
        self.resolve = ResolveStage(router, models, limits, again)
        admitting = () if reserve is None else (AdmitStage(self.resolve),)
        learn = LearnStage(router, tokenizer, changed)
        self.relay = RelayStage(
            registry=router.registry,
            limits=limits,
            learn=learn,
            realtime=realtime,
            may_see=may_see,
            address_of=address_of,
        )
        self.forward = ForwardStage(
            *(router, one_leg, upstream, limits, tokenizer),
            edits=LegEdits(asking, router.counters, cache_control),
            relay=self.relay,
            resolve=self.resolve,
            address_of=address_of,
            own_keys=own_keys,
            authorization=authorization,
            trouble=trouble,
            lacking=lacking,
            changed=changed,
        )
        first: Sequence[Stage] = (
            *(each.begin for each in reserving),  # admits it by what its head says
        )
        # by whether it asks for inference: if not, the node itself may have the answer
        self._first: Mapping[bool, Sequence[Stage]] = {
            True: first,
            False: (partial(answer_ourselves, self.resolve, own_probe), *first),
        }
        # then a model that has a table gets its name; then comes the response cache, which may answer instead of
        self._rest: Sequence[Stage] = (
            self.read,  # strips and mends
            *admitting,
            models,
            self.match,
            *reserving,
            self.forward,  # plans, relays and learns leg by leg
        )

    @property
    def realtime(self) -> Realtime:
        return self.relay.realtime

    def set_limits(self, limits: PipelineLimits) -> None:
        self.read.limits = self.match.limits = self.relay.limits = self.forward.limits = limits
        self.resolve.set_limits(limits)

    def handle(self, request: HttpRequest, client: Client) -> Steps[None]:  # noqa: PLR0912  # no call for each check
        """Answer one request. Raises RanvierError, which the server answers if nothing was sent yet."""
        call = self.serving[client.fd] = Call(request, client, time.monotonic())
        try:
            if (seen := client.seen_head) is not None:
                seen.request.body, call.identity = request.body, seen.identity
                call.request = request = seen.request
            if request.fields.reserved:
                call.request = self.router_fields.admitted(request, self.read.limits.router_fields)
            call.id = client.request_id = call.request.fields.request_id or client.request_id
            if self.tracer is not None:
                self.tracer.begin(call)
            if request.fields.origin and (yield from self.browsers(call)):
                return
            for stage in self._first[request.computes]:
                steps = stage(call)
                if steps is not None:
                    yield from steps
            if self.resolve.table is not None and (steps := self.resolve(call)) is not None:
                yield from steps
            if not client.started:
                compute, responses = self._compute, self.responses
                yield from compute(call) if responses is None else responses.answer(call, compute)
            if client.renamed is not None and (left := client.renamed.end()):
                client.write((left,))
        except RanvierError as error:
            call.end(error)
            if not client.started and not isinstance(error, ClientGone):
                call.status = error.status
            raise
        except Exception:  # a bug of ours, which the server answers and logs
            call.outcome, call.status = RanvierError.code, call.status or RanvierError.status
            raise
        finally:
            self._ended(call)

    def _ended(self, call: Call) -> None:
        client = call.client
        self.serving.pop(client.fd, None)
        client.renamed = None
        if (held := call.reservation) is not None:
            held.by.settle(call, held)
        now = time.monotonic()
        for observe in self.observers:
            observe(call, now)
        if client.seen_head is not None:
            client.seen_head.request.body = b""  # since it is kept for the next request

    def _compute(self, call: Call) -> Steps[None]:
        try:
            for stage in self._rest:
                steps = stage(call)
                if steps is not None:
                    yield from steps
        except ModelNotFound as error:
            raise self.resolve.missing(asked_in(call), call.identity) from error

"""Finds who may serve a request, and who holds how much of its prompt.

A model that no engine has listed has the engines asked once more, and the request waits for that. Tokens come before
the match only if the texts find too little, and within a deadline.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call, PipelineLimits, PromptTokenizer
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.failed_tries import known_short, passed_over

OWNER_WAIT_S, OWNER_PAUSE_S = 0.5, 0.01
"""If no node here knows the owner of a response, the request waits so long and looks so often: a peer's report of it
may be on its way. Without peers it does not wait."""


@dataclass(slots=True, eq=False)
class ModelStage:
    registry: Registry
    look_for: Callable[[str], Awaitable[None]]  # returns once the model was found, or won't be

    def __call__(self, call: Call) -> Steps[None] | None:
        model, names = call.read.prompt.model, self.registry.pools.names
        if not model or not names.listed or model in names.listed:
            return None
        return self.sought(model) if names.lacks(self.registry, model) else None

    def sought(self, model: str) -> Steps[None]:
        yield partial(self.look_for, model)


@dataclass(slots=True, eq=False, repr=False)
class MatchStage:
    router: Router
    limits: PipelineLimits
    tokenizer: PromptTokenizer

    def __call__(self, call: Call) -> Steps[None] | None:
        router, read, prompt, now = self.router, call.read, call.read.prompt, time.monotonic()
        registry, names = router.registry, router.registry.pools.names
        avoids = now < registry.pauses.over_at or registry.refusals.avoiding
        if read.request.computes and (avoids or (names.lacking and prompt.model not in names.listed)):
            prompt.avoid = passed_over(router, read.request, prompt, now)
        key, owners = prompt.response_key, router.owners
        unowned = key and owners.collecting and owners.find(key, now) is None
        return self._once_owned(call) if unowned else self._find(call, now)

    def _find(self, call: Call, now: float) -> Steps[None] | None:
        router, prompt = self.router, call.read.prompt
        call.match = found = router.find(prompt, now)
        if router.too_little(prompt, found):
            return self._tokens_first(call)
        if prompt.end.length > router.registry.pools.shortest:
            self._pass_over_short(call)
        return None

    def _once_owned(self, call: Call) -> Steps[None]:
        yield partial(self._await_owner, call.read.prompt.response_key)
        yield from self._find(call, time.monotonic()) or ()

    async def _await_owner(self, digest: int) -> None:
        with trio.move_on_after(OWNER_WAIT_S):
            while self.router.owners.find(digest, time.monotonic()) is None:  # noqa: ASYNC110  # the core has no events
                await trio.sleep(OWNER_PAUSE_S)

    def _tokens_first(self, call: Call) -> Steps[None]:
        yield partial(self.tokenizer.tokenize_first, call.read.prompt, self.limits.tokenize_deadline_s)
        call.match = self.router.find(call.read.prompt, time.monotonic())
        self._pass_over_short(call)

    def _pass_over_short(self, call: Call) -> None:
        prompt = call.read.prompt
        if call.read.request.computes and (short := known_short(self.router.registry, prompt)):
            prompt.avoid = tuple(sorted({*prompt.avoid, *short}))
            call.match = self.router.find(prompt, time.monotonic())

"""Whether an engine tokenizes as this node does: asked before a node starts, and by a node of each engine's process.

Rule: a node asks vLLM and SGLang alone, once they have listed their models, and one at a time; who does not answer, or
does not tokenize for others, is not asked again until it restarts. Bound: what the registry has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Backend, ProbeResult
from ranvier_py.core.routing.processes.ranks import without_rank
from ranvier_py.core.tokenize.tokenizer_probe import (
    TEXT_DIFFERS,
    TOKENIZE_PATH,
    ProbeTokens,
    misfit,
    probe_bodies,
    tokens_in,
)
from ranvier_py.io.engine_asker import EngineAsker, EngineReply
from ranvier_py.node.part import Node, Part
from ranvier_py.node.parts.tls_parts import engine_context_of

TOKENIZERS = frozenset(("vllm", "sglang"))
ASK_S = 10.0  # an engine that computes tokenizes late


class TokenizerFit(Part):
    """Names the engines that tokenize otherwise; `ours`: how this node does."""

    name = "tokenizer_fit"

    def __init__(self, node: Node, ours: ProbeTokens) -> None:
        self._node, self._ours = node, ours
        self._asked: dict[BackendId, int] = {}  # the generation that was asked, or is to be
        self._due: dict[BackendId, None] = {}
        self._found: dict[BackendId, Finding] = {}
        self._wanted = trio.Event()

    def probed(self, backend: BackendId, result: ProbeResult) -> None:
        found = self._node.registry.ids.current(backend)
        if found is None or not self._ours.text or self._asked.get(backend) == found.generation:
            return
        if not TOKENIZERS.isdisjoint(found.catalog.owned_by) and found.catalog.models:
            self._asked[backend] = found.generation
            self._due[backend] = None
            self._wanted.set()

    def removed(self, backend: Backend) -> None:
        for known in (self._asked, self._due, self._found):
            known.pop(backend.id, None)

    async def loop(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._due:
                backend = self._node.registry.ids.current(next(iter(self._due)))
                self._due.pop(next(iter(self._due)))
                if backend is not None and backend.catalog.models:
                    await self._look(backend, backend.catalog.models[0])

    async def _look(self, backend: Backend, model: str) -> None:
        config, generation = self._node.config, backend.generation
        spec = self._node.sources.spec_of(backend.url)
        asker = EngineAsker(self._node.key_for(backend.url), engine_context_of(config), ASK_S)
        place, name = (spec.place, spec.tls_name) if spec is not None else (without_rank(backend.url), "")
        ask = partial(asker.ask, place, tls_name=name)
        differs = misfit(self._ours, await tokens_of(ask, model))
        if backend.removed or backend.generation != generation:
            return
        self._found.pop(backend.id, None)
        if differs:
            card: Mapping[str, Any] = next((each for each in backend.catalog.cards if each.get("id") == model), {})
            self._found[backend.id] = misfit_finding(backend.name, differs, card, config.tokenizer)

    def findings(self, now: float) -> Iterable[Finding]:
        return self._found.values()


async def tokens_of(ask: Callable[[str, bytes], Awaitable[EngineReply]], model: str) -> ProbeTokens:
    """Return how an engine tokenizes what is compared; empty where it does not say."""
    found: list[Sequence[int]] = []
    for body in probe_bodies(model):
        reply = await ask(TOKENIZE_PATH, body)
        found.append(tokens_in(reply.page.body) if reply.page.status == 200 else ())
    return ProbeTokens(*found)


def misfit_finding(about: str, differs: str, card: Mapping[str, Any], tokenizer: str) -> Finding:
    """Return what is to be said of an engine that tokenizes otherwise. `differs`: as `misfit` names it; "": the
    embedded tokenizer is used, and the engine does not say."""
    root = card.get("root") or card.get("id")
    if not differs:
        what = "does not say how it tokenizes, and the embedded tokenizer of this node is for trials"
    elif differs == TEXT_DIFFERS:
        what = f"tokenizes otherwise than {tokenizer!r}, so matches by tokens and what they predict are wrong"
    else:
        what = "renders chats otherwise than this node, so that no tokens match behind the first difference"
    if differs in ("", TEXT_DIFFERS):
        remedy = f"Set tokenizer to that of its model: tokenizer = {str(root)!r}."
    else:
        remedy = "Set chat_template to the file that it was started with (--chat-template), or its model's."
    return Finding(
        "engine_tokenizer", Severity.DEGRADED, f"engine {about} {what}", about=about, whom="hits", remedy=remedy
    )

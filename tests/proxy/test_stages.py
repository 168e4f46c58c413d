"""In which order the stages of a request follow each other, at a node that has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier_py.proxy import pipeline
from ranvier_py.proxy.edits import LegEdits
from ranvier_py.proxy.stages.admit import AdmitStage
from ranvier_py.proxy.stages.browsers import BrowserStage
from ranvier_py.proxy.stages.forward import ForwardStage
from ranvier_py.proxy.stages.identify import Gate
from ranvier_py.proxy.stages.learn import AnswerProof
from ranvier_py.proxy.stages.match import MatchStage, ModelStage
from ranvier_py.proxy.stages.mend import MendStage
from ranvier_py.proxy.stages.read import ReadStage
from ranvier_py.proxy.stages.relay import RelayStage
from ranvier_py.proxy.stages.reserve import ReserveStage
from ranvier_py.proxy.stages.resolve_model import ResolveStage
from ranvier_py.proxy.stages.response_cache import ResponseCache
from ranvier_py.proxy.stages.strip import RouterFields
from tests.node.access.key_lab import RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import MODEL, lab
from tests.proxy.wire import GOOD, Scripted

STAGES: dict[str, tuple[Any, str]] = {
    "identify": (Gate, "check"),
    "strip the head": (RouterFields, "admitted"),
    "browsers": (BrowserStage, "__call__"),
    "reserve by the head": (ReserveStage, "begin"),
    "resolve the model": (ResolveStage, "__call__"),
    "response cache": (ResponseCache, "answer"),
    "read": (ReadStage, "__call__"),
    "mend": (MendStage, "__call__"),
    "strip the body": (RouterFields, "found"),
    "admit": (AdmitStage, "__call__"),
    "find the model": (ModelStage, "__call__"),
    "match": (MatchStage, "__call__"),
    "reserve": (ReserveStage, "__call__"),
    "forward": (ForwardStage, "__call__"),
    "plan": (pipeline, "one_leg"),
    "edit": (LegEdits, "made"),
    "relay": (RelayStage, "answer"),
    "learn": (AnswerProof, "passed"),
}
"""In this order; what is called again later, as learning is, counts by its first call. What the node may answer itself
it answers before anything is reserved, but it looks for that only where no inference is asked for."""


async def test_the_stages_of_a_request_follow_each_other_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, None] = {}

    def note(stage: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            seen.setdefault(stage)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)

    for stage, place in STAGES.items():
        note(stage, *place)
    engine = Scripted(GOOD)
    async with lab(
        engine,
        keys_file=keys_file(tmp_path, key_lines(RED, tokens_per_minute=100_000)),
        model=[{"name": "alias", "to": MODEL}],
        response_cache=True,
        client_rules=["claude-code-billing=rewrite"],
        cors_origins="https://page.example",
    ) as node:
        seen.clear()
        fields = {**bearer(RED), "origin": "https://page.example", "x-prefiller-host-port": "10.0.0.1:9"}
        answered = await asked(node, fields, model="alias", temperature=0, kv_transfer_params={"remote_host": "h"})
    assert (answered.status_code, len(engine.bodies)) == (200, 1)
    assert list(seen) == list(STAGES)

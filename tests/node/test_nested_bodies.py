"""Bodies that are nested about as deep as an interpreter goes: they reach the engine as they came, with any rule on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranvier_py.config.rule_files import rule_book
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.routing.request_paths import PATHS
from tests.core.clients.test_client_rules import CLAUDE, VLLM, mender
from tests.node.node_lab import lab
from tests.proxy.wire import GOOD, Scripted

RULES = list(rule_book().rules)
BILLING = b'{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.330.abc; cc_entrypoint=cli;"}'


TOOL = b'{"type":"function","function":{"name":"%b","parameters":%b}}'
TURN = b'{"role":"user","content":[{"type":"tool_result","content":%b}]}'
CHAT = b'{"model":"m","messages":[{"role":"system","content":%b}],"x":%b}'
MESSAGES = b'{"model":"m","system":[%b],"messages":[%b],"tools":[{"name":"b","input_schema":%b}]}'
RESPONSE = b'{"model":"m","store":false,"instructions":"x","input":[{"role":"user","content":%b}]}'


def bodies(depth: int) -> Iterator[tuple[str, bytes]]:
    """A path, and a body for it that is so deep in one of its members, and that rules concern."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * depth + b"1" + closing * depth
        tools = b",".join(TOOL % (name, deep) for name in (b"b", b"a"))
        yield "/v1/chat/completions", b'{"model":"m","tools":[%b],"messages":[{"role":"user","content":"x"}]}' % tools
        yield "/v1/chat/completions", CHAT % (deep, deep)
        yield "/v1/messages", MESSAGES % (BILLING, TURN % deep, deep)
        yield "/v1/responses", RESPONSE % deep
        yield "/v1/completions", b'{"model":"m","prompt":%b}' % deep


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_fails_at_a_body_of_any_depth(rule: str) -> None:
    at_work = mender(f"{rule}=rewrite")
    for depth in (10, *range(700, 1030, 3)):
        for path, body in bodies(depth):
            api = APIS.get(PATHS[path.encode()].reader)
            for client in ("claude-code", "codex", "other") if api is not None else ():
                assert api is not None
                at_work.mend(body, api, client, CLAUDE, b"", lambda _: VLLM)


async def test_a_body_of_any_depth_is_served_or_refused_and_never_a_fault() -> None:
    engine = Scripted(GOOD)
    settings = {"client_rules": [f"{name}=rewrite" for name in RULES], "client_rule_control_share": 0.01}
    async with lab(engine, cluster_secret="the same groups of sessions", **settings) as node:
        for depth in (300, 900, *range(904, 1030, 7), 2000):
            for path, body in bodies(depth):
                answer = await node.http.post(f"{node.url}{path}", content=body)
                assert answer.status_code in (200, 400), (path, depth, answer.text)
                report = await node.http.post(f"{node.control}/explain", content=body)
                assert report.status_code in (200, 400), (path, depth, report.text)
        assert await node.faults() == {}

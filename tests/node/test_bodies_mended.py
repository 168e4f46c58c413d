"""A node changes bodies only by rules that its operator turned on, and never what a hosted provider gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.config.config_loader import config_of
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.backend import is_hosted_url
from tests.node.node_lab import MODEL, Node, cluster_lab, printed
from tests.node.node_lab import lab as node_lab
from tests.proxy.wire import GOOD, RESET, Scripted

BILLING = '{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.330.%03x; cc_entrypoint=cli;"},  '
HELP = "The shelves of this library hold many books about rivers. " * 30
REWRITE = {"client_rules": ["claude-code-billing=rewrite"], "client_rule_control_share": 0.01}
SECRET = {"cluster_secret": "the same groups of sessions each time"}


def body(nonce: int, question: str = "Which?") -> bytes:
    """A request as Claude Code spells it, in bytes that no JSON library would choose."""
    system = f'{BILLING % nonce}{{"type":"text", "text":"{HELP}"}}'
    turns = f'[ {{"role":"user","content":"{question}"}}]'
    return f'{{"model" : "{MODEL}","max_tokens":4, "system":[{system}],"messages":{turns}}}'.encode()


def without(nonce: int, sent: bytes) -> bytes:
    assert (BILLING % nonce).encode() in sent
    return sent.replace((BILLING % nonce).encode(), b"")


async def ask(node: Node, sent: bytes, session: str = "s") -> httpx.Response:
    headers = {"user-agent": "claude-cli/2.1.330 (external, cli)", "x-claude-code-session-id": session}
    answer = await node.http.post(f"{node.url}/v1/messages?beta=true", content=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def metrics(node: Node) -> str:
    return (await node.http.get(f"{node.control}/metrics")).text


@pytest.mark.parametrize("rules", [(), ("claude-code-billing=observe",), ("tools-by-name=rewrite",)])
async def test_a_body_reaches_the_engine_as_it_came_unless_a_rule_of_it_is_on(rules: tuple[str, ...]) -> None:
    engine = Scripted(GOOD)
    async with node_lab(engine, client_rules=rules, **SECRET) as node:
        await ask(node, body(0xABC))
        page = await metrics(node)
    assert ("ranvier_client_rules_trials" in page) == ("tools-by-name=rewrite" in rules), "else nothing looks at bodies"
    assert engine.bodies == [body(0xABC)]


async def test_a_rule_that_is_on_changes_what_it_is_of_and_no_other_byte() -> None:
    engine = Scripted(GOOD)
    async with node_lab(engine, **REWRITE, **SECRET) as node:
        await ask(node, body(0xABC))
        await node.http.post(f"{node.url}/v1/messages", content=body(0xABC))  # of no client that is known
        page = await metrics(node)
    assert engine.bodies == [without(0xABC, body(0xABC)), body(0xABC)]
    assert 'ranvier_client_rules_rewritten_total{rule="claude-code-billing"} 1.0' in page


@pytest.mark.parametrize("count", [1, 2])
async def test_no_provider_gets_a_changed_body_nor_does_anybody_while_one_may_serve_the_model(count: int) -> None:
    engines = [Scripted(GOOD) for _ in range(count)]
    async with node_lab(**REWRITE, **SECRET) as node:
        for number, engine in enumerate(engines):
            backend = {"url": await node.lab.listen(engine.serve), "hosted": number == 0}
            answer = await node.http.post(f"{node.control}/admin/backends", json=backend)
            assert answer.status_code == 200, answer.text
            assert answer.json()["hosted"] == (number == 0)
        for number in range(4):
            await ask(node, body(number), f"session {number}")
        page = await metrics(node)
    assert sorted(sent for engine in engines for sent in engine.bodies) == [body(number) for number in range(4)]
    assert 'ranvier_client_rules_withheld_total{reason="hosted"} 4.0' in page


async def test_a_provider_that_comes_while_a_request_is_tried_again_gets_the_body_as_it_came() -> None:
    gate = trio.Event()
    broken, provider = Scripted(gate, RESET), Scripted(GOOD)
    async with node_lab(broken, **REWRITE, **SECRET) as node, trio.open_nursery() as nursery:
        nursery.start_soon(ask, node, body(0xABC))
        await broken.asked.wait()
        backend = {"url": await node.lab.listen(provider.serve), "hosted": True}
        await node.http.post(f"{node.control}/admin/backends", json=backend)
        gate.set()
    assert broken.bodies == [without(0xABC, body(0xABC))]
    assert provider.bodies == [body(0xABC)]


async def test_mode_key_finds_the_prefix_that_engines_share_and_sends_the_body_as_it_came() -> None:
    found = {}
    for mode in ("observe", "key"):
        rules = {"client_rules": [f"claude-code-billing={mode}"], "client_rule_control_share": 0.01}
        async with node_lab(engines=1, **rules, **SECRET) as node:
            await node.until_backend(lambda backend: backend["models"])
            await ask(node, body(1), "one")
            await node.until("/admin/clients", lambda view: view["clients"][0]["reused_share"] is not None)
            answer = await ask(node, body(2), "two")
            found[mode] = int(answer.headers["x-ranvier-matched-tokens"])
    assert found["observe"] < 50 < found["key"]


async def test_an_operator_explains_a_body_as_rules_have_it_and_nothing_is_counted() -> None:
    async with node_lab(engines=1, **REWRITE, **SECRET) as node:
        await node.until_backend(lambda backend: backend["models"])
        await ask(node, body(1), "one")
        await node.until("/admin/clients", lambda view: view["clients"][0]["reused_share"] is not None)
        before = [line for line in (await metrics(node)).splitlines() if line.startswith("ranvier_client_rules_")]
        found = []
        for agent in ("claude-cli/2.1.330", "curl/8"):
            headers = (
                {"user-agent": agent, "x-claude-code-session-id": "two"} if "cli" in agent else {"user-agent": agent}
            )
            answer = await node.http.post(f"{node.control}/explain", content=body(2), headers=headers)
            found.append(answer.json()["candidates"][0]["matched_tokens"])
        assert found[0] > 50 > found[1], "of another client no rule is on"
        after = [line for line in (await metrics(node)).splitlines() if line.startswith("ranvier_client_rules_")]
        assert after == before


async def reused_by_an_agent(mode: str, *, nonce: bool) -> float:
    """Share of its prompts that two engines reused, by their own counts, over three sessions of six turns."""
    rules = {"client_rules": [f"claude-code-billing={mode}"], "client_rule_control_share": 0.01, **SECRET}
    async with node_lab(engines=2, **rules) as node:
        await node.until("/admin/backends", lambda view: all(each["models"] for each in view["backends"]))
        for number in range(18):
            session, last = divmod(number, 6)
            roles = ("user", "assistant")
            contents = [
                f"Task {session}, part {place}: " + "look at the shelf again. " * 12 for place in range(2 * last + 1)
            ]
            turns = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
            system = [{"type": "text", "text": "x-anthropic-billing-header: cch=%05x;" % (7919 * number)}] * nonce
            system.append({"type": "text", "text": HELP})
            sent = {"model": MODEL, "max_tokens": 4, "stream": True, "system": system, "messages": turns}
            await ask(node, json.dumps(sent).encode(), f"session {session}")
            await node.until_routes(lambda view, number=number: view["tokenizer_worker"]["learned"] > number)
        view = await node.until("/admin/clients", lambda view: view["clients"][0]["turns"] == 18)
        return float(view["clients"][0]["reused_share"])


@pytest.mark.slow
async def test_an_agent_whose_nonce_is_dropped_reuses_what_it_would_without_one() -> None:
    clean = await reused_by_an_agent("observe", nonce=False)
    broken = await reused_by_an_agent("observe", nonce=True)
    mended = await reused_by_an_agent("rewrite", nonce=True)
    assert clean > 0.7
    assert mended == pytest.approx(clean, abs=0.03), "but for which engine a session happens to begin on"
    assert broken < 0.1


async def sessions(node: Node, count: int, first: int = 0) -> None:
    """Of two requests each."""
    for number in range(first, first + count):
        for nonce in (number, 0x1000 + number):
            await ask(node, body(nonce, f"Question {number}?"), f"session {number}")


def trial_of(view: dict[str, Any]) -> dict[str, Any]:
    return dict(view["trials"][0]) if view["trials"] else {}


async def test_a_rule_proves_itself_by_what_the_engine_counted_of_other_sessions() -> None:
    rules = {**REWRITE, "client_rule_control_share": 0.4, "client_rule_sessions": 20}
    async with node_lab(engines=1, **rules, **SECRET) as node:
        await sessions(node, 30)
        view = await node.until("/admin/clients", lambda view: trial_of(view).get("state") == "proved")
        trial = trial_of(view)
        assert trial["reused_share"] > trial["reused_share_left_alone"] + 0.3
        assert 'ranvier_client_rules_trials{state="proved"} 1.0' in await metrics(node)
        (row,) = view["clients"]
        broken = [each for each in row["breaks"] if each["path"] == "$.system[0]"]
        assert broken, "of sessions left alone"
        assert all(each["rules"] == {"claude-code-billing": each["tokens"]} for each in broken)
        page = await printed("clients", "--control", node.control)
        assert "client_rules claude-code-billing=rewrite would save" in page
        assert f"rule claude-code-billing, claude-code, model {MODEL}: proved" in page


USELESS = """
format = 1
[[rule]]
name = "politeness"
client = "claude-code"
apis = ["messages"]
causes = []
action = "replace"
where = "history"
pattern = "Which"
replacement = "Pray, which"
source = "nobody"
"""


def useless_rule(folder: Path) -> dict[str, Any]:
    """Options that turn it on, and leave enough sessions alone to judge it soon."""
    file = folder / "rules.toml"
    file.write_text(USELESS)
    return {"client_rules": ["politeness=rewrite"], "client_rules_file": file, "client_rule_control_share": 0.4}


async def test_a_rule_that_helps_nothing_is_turned_off_with_a_warning_and_bodies_are_let_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with node_lab(engines=1, client_rule_sessions=20, **useless_rule(tmp_path), **SECRET) as node:
        for number in range(60):
            await ask(node, body(7), f"session {number // 2}")
        view = await node.until("/admin/clients", lambda view: trial_of(view).get("state") == "off")
        assert "where it left sessions alone" in trial_of(view)["why"]
        before = await metrics(node)
        await ask(node, body(7), "one more")
        counted = [line for line in before.splitlines() if line.startswith("ranvier_client_rules_rewritten_total{")]
        assert counted
        after = await metrics(node)
        assert all(line in after for line in counted), "it changes nothing any more"
        assert 'ranvier_client_rules_trials{state="off"} 1.0' in before
    warnings = [record.message for record in caplog.records if record.message.startswith("client_rule.off politeness")]
    assert len(warnings) == 1
    assert HELP[:20] not in warnings[0]


async def test_a_rule_that_one_node_turned_off_is_off_on_its_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        nodes = await place.cluster(2, client_rule_sessions=20, **useless_rule(tmp_path))
        for number in range(60):
            await ask(nodes[0], body(7), f"session {number // 2}")
        view = await nodes[1].until("/admin/clients", lambda view: trial_of(view).get("state") == "off")
        name = (await nodes[0].ask("/admin/cluster"))["name"]
        assert trial_of(view)["node"] == name
        assert 'ranvier_client_rules_followed_total{state="off"} 1.0' in await metrics(nodes[1])
        page = await printed("clients", "--control", nodes[1].control)
        assert f"(found by {name})" in page
        for number in range(5):
            await ask(nodes[1], body(7), f"session {number}")
        assert "ranvier_client_rules_rewritten_total{" not in await metrics(nodes[1]), "it never changed a body there"
    found = [record.message for record in caplog.records if record.message.startswith("client_rule.off politeness")]
    assert sorted(f"(found by {name})" in each for each in found) == [False, True]


def test_what_is_wrong_with_rules_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    for text, settings, why in (
        (USELESS.replace('"replace"', '"destroy"'), (), "rule 1 (politeness): action must be one of"),
        (USELESS, ("politeness=key",), "politeness can't have mode key"),
        (USELESS, ("impoliteness=rewrite",), "there is no rule 'impoliteness'"),
        (USELESS, ("politeness=on",), "must be RULE=MODE"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as raised:
            config_of(client_rules_file=file, client_rules=settings)
        assert why in "; ".join(raised.value.problems)
        assert "client_rules" in raised.value.problems[0]
    with pytest.raises(ConfigError, match="can't be read"):
        config_of(client_rules_file=tmp_path / "none")
    file.write_text(USELESS)
    assert config_of(client_rules_file=file, client_rules=["politeness=rewrite,model=qwen*"]).client_rules


def test_providers_are_known_by_their_names_and_machines_at_a_cloud_are_none() -> None:
    for host in ("api.anthropic.com", "API.OpenAI.com.", "x.openai.azure.com", "openrouter.ai"):
        assert is_hosted_url(f"https://{host}")
    assert is_hosted_url("https://bedrock-runtime.eu-west-1.amazonaws.com")
    for host in ("10.0.0.1:8000", "ec2-1-2-3-4.compute-1.amazonaws.com", "notopenai.com", "openai.com.example.org"):
        assert not is_hosted_url(f"http://{host}")


async def test_who_may_be_hosted_is_shown_and_a_card_of_a_provider_counts() -> None:
    gateway = Scripted(GOOD)
    gateway.page = json.dumps({"data": [{"id": MODEL, "object": "model", "owned_by": "openai"}]}).encode()
    async with node_lab(gateway, **REWRITE, **SECRET) as node:
        await node.until_backend(lambda backend: backend["models"])
        assert [backend["hosted"] for backend in await node.backends()] == [True]
        await ask(node, body(0xABC))
    assert gateway.bodies == [body(0xABC)]

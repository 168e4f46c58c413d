"""What an operator of Continuum Router finds of its tier 1."""

from __future__ import annotations

import pytest

from tests.node.node_lab import MODEL, lab, turn
from tests.proxy.wire import GOOD, Scripted


@pytest.mark.parametrize("policy", ["chwbl", "kv_score"])
async def test_the_ring_shows_what_it_decided_and_how_many_openings_came(policy: str) -> None:
    options = ["load_factor_epsilon=0.2", "virtual_nodes=100", "max_prefix_length=64"]
    async with lab(Scripted(GOOD), Scripted(GOOD), policy=policy, policy_option=options) as node:
        for word in ("one", "two", "three", "one"):
            own = [{"role": "system", "content": f"{word} {'x' * 60}"}, {"role": "user", "content": "hello"}]
            assert (await node.chat(own)).status_code == 200
        await node.http.post(f"{node.control}/explain", content=b'{"messages":[{"role":"user","content":"dry"}]}')
        found = await node.ask("/admin/prefix-routing/stats")
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert found["config"] == {
        "max_prefix_length": 64,
        "prefix_source": "system",
        "load_factor_epsilon": 0.2,
        "virtual_nodes": 100,
        "anthropic_cache_control_injection": False,
    }
    assert found["unique_prefixes"] == 3
    decisions = found["routing_decisions"]
    assert decisions["total"] == sum(decisions[name] for name in ("prefix_hash", "overflow", "fallback"))
    assert 3 <= decisions["total"] <= 4
    assert decisions["overflow_rate"] == "0.0000"
    assert [each["in_flight_requests"] for each in found["backend_distribution"]] == [0, 0]
    assert "ranvier_prefix_routing_prefix_cardinality 3.0" in page
    assert f'ranvier_prefix_routing_requests_total{{strategy="prefix_hash"}} {decisions["prefix_hash"]:.1f}' in page


async def test_openings_that_differ_behind_the_length_are_one() -> None:
    async with lab(Scripted(GOOD), Scripted(GOOD), policy="chwbl", policy_option=["max_prefix_length=4"]) as node:
        for word in ("this one", "this other", "that"):
            await node.chat([{"role": "system", "content": word}, {"role": "user", "content": "hello"}])
        assert (await node.ask("/admin/prefix-routing/stats"))["unique_prefixes"] == 2


async def test_cr2_the_system_prompt_of_anthropics_bodies_is_their_opening_and_so_chosen_the_first_message() -> None:
    """Beside the messages, as a text or as blocks: the same opening as in OpenAI's form."""
    system = "You are a librarian. " * 8
    asked = [{"role": "user", "content": "Where are the atlases?"}]
    blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    for options, openings in (([], 1), (["prefix_source=first_message"], 2)):
        async with lab(Scripted(GOOD), Scripted(GOOD), policy="chwbl", policy_option=options) as node:
            await node.chat([{"role": "system", "content": system}, *asked])
            for given in (system, blocks):
                body = {"model": MODEL, "max_tokens": 8, "system": given, "messages": asked}
                assert (await node.http.post(f"{node.url}/v1/messages", json=body)).status_code == 200
            await node.chat([{"role": "system", "content": system}, {"role": "user", "content": "And the globes?"}])
            assert (await node.ask("/admin/prefix-routing/stats"))["unique_prefixes"] == openings


async def test_under_other_policies_there_is_no_ring() -> None:
    async with lab(Scripted(GOOD)) as node:
        await node.chat(turn("hello"))
        assert await node.ask("/admin/prefix-routing/stats") == {"enabled": False}

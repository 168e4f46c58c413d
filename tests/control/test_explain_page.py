"""An explanation as a terminal shows it: each engine in a line, with what the policy weighs and why not this one."""

from __future__ import annotations

from typing import Any

import pytest

from ranvier_py.control.explain_page import duration, explain_page
from ranvier_py.core.routing.placement.policies import POLICIES
from tests.node.node_lab import MODEL, Lab, Node, opened, start_engine, turn

OPENING = "Where are the atlases? " * 40
DEADLINE_S = 30.0


async def explained(node: Node) -> dict[str, Any]:
    body = {"model": MODEL, "messages": turn(OPENING, "There.", "And the maps?")}
    answer = await node.http.post(f"{node.control}/explain", json=body)
    assert answer.is_success, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_engine_has_its_line_by_each_policy_and_who_is_left_out_why(policy: str) -> None:
    async with opened(Lab, 3, DEADLINE_S) as place:
        dead, scope = await start_engine(place.nursery, 9)
        place.engines.append(dead)
        node = await place.start(policy=policy, probe_interval_s=0.1)
        served = (await node.chat(turn(OPENING))).headers["x-ranvier-backend"]
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > 0)
        scope.cancel()
        await node.until("/admin/backends", lambda answer: answer["backends"][3]["health"] == "unhealthy")
        report = await explained(node)
        lines = explain_page(report)
    assert max(map(len, lines)) <= 80
    text, name = "\n".join(lines), report["chosen"]
    assert lines[0].startswith(f"{name} would get it: ")
    assert lines[4].startswith(name)
    assert lines[4].endswith("<- chosen")
    assert all(f"\n{each['backend']}"[:17] in text for each in report["candidates"])
    left = text.partition("LEFT OUT")[2]
    assert dead.removeprefix("http://") in left or served == dead.removeprefix("http://")
    assert "does not answer: its port refuses connections" in " ".join(left.split())


async def test_affinity_shows_the_seconds_of_every_engine_and_how_much_later_it_would_be() -> None:
    async with opened(Lab, 2, DEADLINE_S) as place:
        node = await place.start()
        served = (await node.chat(turn(OPENING))).headers["x-ranvier-backend"]
        await node.until_routes(lambda s: s["tokenizer_worker"]["learned"] > 0)
        report = await explained(node)
        _, _, _, head, chosen, other = explain_page(report)
    assert head.split()[-3:] == ["SUM", "WHY", "NOT"]
    assert chosen.startswith(served)
    assert " local" in chosen
    assert report["candidates"][0]["terms"]["sum_s"] >= 0
    assert other.split()[-1].startswith("+") or "holds less" in other


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.0, "0ms"), (0.00123, "1.23ms"), (0.25, "250ms"), (1.25, "1.2s"), (340.0, "340s")],
)
def test_times_fit_into_their_column(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_nothing_in_an_explanation_plays_with_the_terminal() -> None:
    bad = "\x1b[2J\n"
    row = {"backend": bad, "load": 1, "weight": 1.0, "reuses_prefixes": True, "matched_tokens": 0, "trust": bad}
    report = {"chosen": bad, "reason": bad, "policy": bad, "source": bad, "prompt_tokens": None, "unread": bad}
    report |= {"prompt_tokens_exact": False, "matched_tokens": 0, "candidates": [row]}
    text = "".join(explain_page({**report, "left_out": [{"backend": bad, "why": bad}]}))
    assert not {"\x1b", "\n"} & {*text}


async def test_a_body_that_is_not_read_is_explained_without_numbers_of_tokens() -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        node = await place.start()
        answer = await node.http.post(f"{node.control}/explain", json={"model": MODEL, "messages": 5})
    assert explain_page(answer.json())[1] == "prompt not read (schema): no engine is known to hold any of it"

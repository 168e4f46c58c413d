"""The nodes benchmark: prompts of blocks, the network in virtual time, and real routers as peers on it."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.hit_rate_replay import Outcome, Replay
from benchmarks.hit_rate_router import RouterPlacement
from benchmarks.hit_rate_traces import Prepared, data_folder
from benchmarks.nodes import MOONCAKE_FILE, Run, compare, delayed
from benchmarks.nodes_blocks import (
    BLOCK_TOKENS,
    Block,
    BlockTokenizer,
    cut,
    load_mooncake,
    message_ends,
    prepared,
    read_blocks,
    spelled,
    token_ids,
)
from benchmarks.nodes_fleet import Kind, make_places, router_commands
from benchmarks.nodes_net import NodesPlacement, make_net
from benchmarks.nodes_processes import compare as compare_processes
from benchmarks.nodes_processes import conversations, kinds
from ranvier_py.config.config_loader import load
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.replay.engine.model import EngineLimits

ENGINES = 4
LIMITS = EngineLimits(cache_tokens=200_000, block_size=BLOCK_TOKENS)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_are_read_back_as_they_were_spelled_and_take_half_a_character_a_token() -> None:
    blocks = [Block(7), Block(182_789), Block(5, 100), Block(1 << 22, 3)]
    assert list(read_blocks(spelled(blocks))) == blocks
    assert len(spelled(blocks[:2])) == BLOCK_TOKENS - 1
    assert token_ids(blocks[:1]).tolist() == list(range(7 * 512, 8 * 512))
    assert len(set(token_ids(blocks).tolist())) == 512 + 512 + 100 + 3


def test_the_tokenizer_says_where_messages_end() -> None:
    chat = Chat([{"content": spelled([Block(1), Block(2)])}, {"content": spelled([Block(3, 10)])}])
    found = BlockTokenizer().tokenize(chat)
    assert list(found.ends) == [1024, 1034]
    assert len(found.ids) == 1034


def test_the_engine_names_whole_blocks_and_answers_are_new_to_it() -> None:
    one, two = (prepared(0.0, "s", [[Block(1)], [Block(2, 100)]], number, 1000) for number in (1, 2))
    assert one.job.prompt_tokens == 612
    assert len(one.job.keys) == (612 + 1000) // BLOCK_TOKENS
    assert one.job.keys[0] == two.job.keys[0]
    assert set(one.job.keys[1:]).isdisjoint(two.job.keys[1:])


def test_messages_end_where_requests_part() -> None:
    ends = message_ends([[0, 1, 2, 3], [0, 1, 2, 4], [0, 9]])
    assert ends == {0, 2}
    blocks = [Block(number) for number in (0, 1, 2, 3)]
    assert [[block.number for block in message] for message in cut(blocks, ends)] == [[0], [1, 2], [3]]
    assert cut(blocks[:1], ends) == [blocks[:1]]


def test_mooncake_is_read_as_far_as_wanted_and_its_stamps_are_spread(tmp_path: Path) -> None:
    records = [
        {"timestamp": 3000 * number, "input_length": 700, "output_length": 5, "hash_ids": [0, number + 1]}
        for number in range(40)
    ]
    path = tmp_path / "m.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    items = load_mooncake(path, seed=1, minutes=1)
    assert len(items) == 20
    times = [item.request.at for item in items]
    assert times == sorted(times)
    assert all(0 < at - 3 * number < 3 for number, at in enumerate(times))
    assert [len(item.request.messages) for item in items] == [2] * 20
    assert {item.job.prompt_tokens for item in items} == {700}


def test_the_real_trace_gives_the_published_ideal_share_to_one_endless_cache() -> None:
    path = data_folder() / "traces" / MOONCAKE_FILE
    if not path.is_file():
        pytest.skip(f"{MOONCAKE_FILE} is not there")
    items = load_mooncake(path, seed=1, minutes=60)
    assert len(items) == 12_031
    seen: set[int] = set()
    hits = 0
    for item in items:
        keys = item.job.keys[: item.job.prompt_tokens // BLOCK_TOKENS]
        hits += next((depth for depth, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    assert hits * BLOCK_TOKENS / sum(item.job.prompt_tokens for item in items) == pytest.approx(0.374, abs=0.002)


# --- replay -----------------------------------------------------------------------------------------------------------


class Ticking:
    """A Background that has something to do at set times."""

    def __init__(self, ticks: Sequence[float]) -> None:
        self.ticks = list(ticks)
        self.ticked = 0

    def next_at(self) -> float:
        return self.ticks[self.ticked]

    def advance(self, now: float) -> None:
        self.ticked += 1


def test_what_happens_beside_the_requests_does_not_keep_a_replay_going() -> None:
    beside = Ticking([0.5 * number for number in range(1, 1000)])
    nodes = [RouterPlacement("affinity", BlockTokenizer(), 1, 1)]
    items = [prepared(2.0, "s", [[Block(1)]], 0, 5)]
    outcome = Replay(items, NodesPlacement(nodes, lambda _: 0), 1, LIMITS, beside).run()
    assert outcome.requests == 1
    assert 0 < beside.ticked < 30  # those before the request, and while it was served


# --- real nodes -----------------------------------------------------------------------------------------------------


def dialogues(sessions: int, turns: int) -> list[Prepared]:
    """Chats that grow by two blocks a turn; all begin with the same one."""
    found: list[Prepared] = []
    for session in range(sessions):
        messages = [[Block(0)]]
        for turn in range(turns):
            first = 1 + 2 * (session * turns + turn)
            messages = [*messages, [Block(first), Block(first + 1)]]
            found.append(prepared(5.0 + 2 * turn + 0.1 * session, f"s{session}", messages, len(found), 20))
    return sorted(found, key=lambda item: item.request.at)


def outcome_of(nodes: int, gossip: bool) -> Outcome:
    routers = [
        RouterPlacement("affinity", BlockTokenizer(), ENGINES, number, block_size_tokens=BLOCK_TOKENS)
        for number in range(nodes)
    ]
    net = make_net(routers, 1, 0.0) if gossip else None
    draw = Random(1)
    placement = NodesPlacement(routers, lambda _: draw.randrange(nodes), net)
    return Replay(dialogues(6, 6), placement, ENGINES, LIMITS, net).run()


def test_nodes_that_gossip_find_as_much_as_one_and_nodes_that_do_not_find_less() -> None:
    alone, together, apart = outcome_of(1, False), outcome_of(4, True), outcome_of(4, False)
    assert alone.hit_rate > 0.5
    assert together.hit_rate == pytest.approx(alone.hit_rate, abs=0.02)
    assert apart.hit_rate < alone.hit_rate - 0.1


def test_a_run_with_gossip_is_the_same_twice() -> None:
    one, two = outcome_of(3, True), outcome_of(3, True)
    assert one.first_token_s == two.first_token_s
    assert one.requests_by_engine == two.requests_by_engine


def run_of(nodes: int, gossip: bool, cached: int, first: float) -> Run:
    outcome = Outcome(4, 100, cached, [first] * 4, [2, 2], [1, 1], 10.0)
    return Run(nodes, gossip, 1, outcome, {}, {}, 0.1)


def test_nodes_are_compared_with_one_in_points_and_times() -> None:
    runs = [run_of(1, False, 80, 1.0), run_of(2, True, 80, 1.04), run_of(2, False, 60, 1.0), run_of(4, True, 80, 1.06)]
    one, good, bad, slow = compare(runs)
    assert (one["hit_points"], one["ttft_p99_times"], one["reached"]) == (0.0, 1.0, True)
    assert good["reached"]
    assert bad["hit_points"] == pytest.approx(-20.0)
    assert not bad["reached"]
    assert not slow["reached"]
    assert compare(runs[1:]) == []


def test_a_delay_moves_every_request_by_the_same() -> None:
    items = dialogues(2, 2)
    moved = delayed(items, 10.0)
    assert [each.request.at - item.request.at for each, item in zip(moved, items, strict=True)] == pytest.approx(
        [10.0] * 4
    )
    assert moved[0].job is items[0].job


# --- processes ------------------------------------------------------------------------------------------------------


def test_our_nodes_are_started_with_flags_that_the_configuration_knows(tmp_path: Path) -> None:
    """A flag that was renamed would make the benchmark leave us out."""
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 16 + "cd" * 16 + "\n")
    key_file.chmod(0o600)
    places = make_places(2, 3, Random(1))
    for shared in (True, False):
        for command in router_commands(Kind("ranvier", 2, shared), places, key_file, None):
            words = command.argv[command.argv.index("serve") + 1 :]
            flags: dict[str, Any] = {}
            for flag, value in zip(words[::2], words[1::2], strict=True):
                name = flag.removeprefix("--").replace("-", "_")
                if name in ("backend", "join"):
                    flags.setdefault(name, []).append(value)
                else:
                    flags[name] = value
            config, _ = load(flags)
            assert (config.gossip_endpoints is not None) is shared
            assert len(config.backend) == 3


def test_only_the_first_gateway_of_a_mesh_has_no_peer(tmp_path: Path) -> None:
    places = make_places(3, 1, Random(1))
    commands = router_commands(Kind("smg", 3, True), places, tmp_path, Path("/x/smg"))
    assert ["--mesh-peer-urls" in command.argv for command in commands] == [False, True, True]
    assert not any(
        "--enable-mesh" in each.argv for each in router_commands(Kind("smg", 2, False), places, tmp_path, tmp_path)
    )


def test_every_configuration_hears_the_same_chats() -> None:
    arguments = argparse.Namespace(seed=1, rate=2.0, seconds=5.0)
    first = conversations(arguments, 1.0)
    assert first == conversations(arguments, 1.0)
    assert first[-1].start_s is not None
    assert first[-1].start_s > arguments.seconds


def test_processes_are_compared_with_ours_that_gossip() -> None:
    def found(router: str, shared: bool, hits: float, ttft: float, failed: int) -> dict[str, Any]:
        kind = Kind(router, 2, shared)
        requests = {"ok": 10, "failed": failed}
        times = {"p50": ttft, "p99": 2 * ttft}
        return {
            "name": kind.name,
            "router": router,
            "nodes": 2,
            "shared": shared,
            "think_s": 1.0,
            "requests": requests,
            "hit_rate": hits,
            "ttft_s": times,
        }

    runs = [found("ranvier", True, 0.9, 0.1, 0), found("smg", True, 0.7, 0.2, 3)]
    [compared] = compare_processes([*runs, {**runs[1], "think_s": 2.0}])
    assert compared["name"] == "2 smg mesh"
    assert compared["hit_points"] == pytest.approx(-20.0)
    assert compared["ttft_p99_times"] == pytest.approx(2.0)
    assert compared["failed_more"] == 3


def test_one_router_is_run_without_sharing_and_several_with_and_without() -> None:
    names = [kind.name for kind in kinds(argparse.Namespace(nodes=[1, 2], only=["smg"]))]
    assert names == ["1 smg no mesh", "2 smg mesh", "2 smg no mesh"]

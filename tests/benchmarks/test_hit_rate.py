"""The hit_rate benchmark's loaders, references and clock, on traces small enough to reckon by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hit_rate_replay import Replay
from benchmarks.hit_rate_router import RememberingTokenizer, RouterPlacement
from benchmarks.hit_rate_traces import (
    QUESTION_SYSTEM,
    TRACES,
    ChatRequest,
    Prepared,
    data_folder,
    load_qmsum,
    load_taubench,
    prepare,
    reference,
)
from cluster.engine.engine_text import ModelTokenizer
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineLimits

EMBEDDED = Path(__file__).parents[2] / "ranvier_py" / "data" / "tokenizer"


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    return path


def say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
DIALOGUE = [
    say("system", "policy"),
    say("user", "hello"),
    say("assistant", None, tool_calls=[CALL]),
    say("tool", "seen", tool_call_id="c1", name="look"),
    say("assistant", "done"),
    say("user", "thanks"),
]


def item(at: float, prompt: list[int], answer: int = 1) -> Prepared:
    request = ChatRequest(at, "s", [say("user", "x")], say("assistant", "y"))
    return Prepared(request, b"{}", Job.of(prompt, list(range(answer))))


def test_request_k_of_a_dialogue_is_what_stands_before_its_kth_assistant_message(tmp_path: Path) -> None:
    records = [{"session_id": f"s{i}", "messages": DIALOGUE} for i in range(3)]
    requests = load_taubench(write(tmp_path / "t.gz", records), seed=1)
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    mine = [request for request in requests if request.session == "s1"]
    assert [list(request.messages) for request in mine] == [DIALOGUE[:2], DIALOGUE[:4]]
    assert [request.answer for request in mine] == [DIALOGUE[2], DIALOGUE[4]]
    assert mine[1].at - mine[0].at == pytest.approx(5.0)
    assert len({request.at for request in requests}) == 6
    assert all(0 <= request.at <= 605 for request in requests)


def test_an_assistant_message_that_opens_a_dialogue_is_no_answer(tmp_path: Path) -> None:
    records = [{"session_id": "s", "messages": [say("assistant", "hi"), say("user", "x"), say("assistant", "y")]}]
    requests = load_taubench(write(tmp_path / "t.gz", records), seed=1)
    assert [request.answer["content"] for request in requests] == ["y"]


def test_questions_are_shuffled_by_the_seed_and_come_evenly(tmp_path: Path) -> None:
    queries = [{"q": f"q{i}", "a": f"a{i}"} for i in range(20)]
    path = write(tmp_path / "q.gz", [{"doc_id": "val/1", "transcript": "A: hello", "queries": queries}])
    requests = load_qmsum(path, seed=1)
    answers = [request.answer["content"] for request in requests]
    assert answers == [request.answer["content"] for request in load_qmsum(path, seed=1)]
    assert answers != [query["a"] for query in queries]
    assert sorted(answers) == sorted(query["a"] for query in queries)
    assert [request.at for request in requests[:3]] == [0.0, 0.5, 1.0]
    first = requests[0]
    question = f"q{first.answer['content'][1:]}"
    assert [message["content"] for message in first.messages] == [QUESTION_SYSTEM, f"A: hello\n\nQuestion: {question}"]


def test_a_prepared_turn_begins_with_the_one_before_and_its_answer() -> None:
    tokenizer = ModelTokenizer(str(EMBEDDED))
    requests = [ChatRequest(0.0, "s", DIALOGUE[:2], DIALOGUE[2]), ChatRequest(5.0, "s", DIALOGUE[:4], DIALOGUE[4])]
    first, second = prepare(requests, tokenizer, "m")
    known = first.job.ids.tolist()
    assert second.job.ids[: len(known)].tolist() == known
    assert second.job.prompt_tokens > len(known)
    assert json.loads(second.body)["messages"] == DIALOGUE[:4]


def test_the_reference_figures_are_those_one_can_reckon() -> None:
    a, b = list(range(32)), list(range(100, 132))
    jobs = [Job.of(prompt, [1]) for prompt in (a, b, a, a)]
    known = reference(jobs, engines=2, seed=1)
    assert known.ideal == 0.5
    assert known.greedy == 0.5
    assert 0.0 <= known.random <= 0.5
    assert reference(jobs, engines=1, seed=1).random == 0.5


def test_greedy_leaves_an_engine_that_has_had_its_share() -> None:
    jobs = [Job.of(list(range(32)), [1]) for _ in range(40)]
    known = reference(jobs, engines=4, seed=1)
    assert known.ideal == 39 / 40
    assert known.greedy == (40 - 3) / 40  # three of the four computed it once, the cap never reaches the last one


class Alternating:
    """Placement by turns that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []
        self.routed = 0

    def route(self, item: Prepared, now: float) -> tuple[int, int]:
        assert now == item.request.at
        self.routed += 1
        return (self.routed - 1) % 2, self.routed - 1

    def first_token(self, attempt: int, now: float) -> None:
        self.told.append(("first", attempt, now))

    def finished(self, attempt: int, item: Prepared, cached_tokens: int, now: float) -> None:
        self.told.append(("finished", attempt, now))


def test_a_replay_in_virtual_time_gives_the_arithmetic_of_the_engines() -> None:
    limits = EngineLimits(cache_tokens=1600, prefill_tokens_per_s=100.0, decode_s=0.5)
    prompt = list(range(50))
    placement = Alternating()
    items = [item(0.0, prompt, answer=2), item(0.25, prompt), item(9.0, prompt)]
    outcome = Replay(items, placement, 2, limits).run()
    assert outcome.requests == 3
    assert outcome.prompt_tokens == 150
    assert outcome.cached_tokens == 48  # the third comes to the first engine again
    assert outcome.hit_rate == 48 / 150
    assert outcome.first_token_s == pytest.approx([0.5, 0.5, 0.02])
    assert outcome.requests_by_engine == [2, 1]
    assert outcome.computed_by_engine == [52, 50]
    assert [(what, attempt) for what, attempt, _ in placement.told] == [
        ("first", 0), ("first", 1), ("finished", 1), ("finished", 0), ("first", 2), ("finished", 2),
    ]  # fmt: skip
    assert outcome.ended_at_s == pytest.approx(9.02)


def grown(session: int, turns: int) -> list[ChatRequest]:
    """A dialogue in which every prompt is the one before, its answer, and a new question."""
    messages, found = [say("system", f"You are helper {session}. " * 20)], []
    for turn in range(turns):
        messages = [*messages, say("user", f"question {turn} of {session} " * 10)]
        answer = say("assistant", f"answer {turn} of {session} " * 10)
        found.append(ChatRequest(10.0 * turn + session, f"s{session}", messages, answer))
        messages = [*messages, answer]
    return found


def test_the_real_router_brings_every_turn_back_to_its_engine_and_knows_how_much_is_there() -> None:
    requests = sorted((each for session in range(4) for each in grown(session, 5)), key=lambda request: request.at)
    items = prepare(requests, ModelTokenizer(str(EMBEDDED)), "m")
    known = reference([each.job for each in items], engines=4, seed=1)
    tokenizer = RememberingTokenizer(ChatTokenizer.load("embedded"))
    rates = {}
    for policy in ("affinity", "random"):
        placement = RouterPlacement(policy, tokenizer, engines=4, seed=1)
        outcome = Replay(items, placement, 4, EngineLimits()).run()
        rates[policy] = outcome.hit_rate
        if policy == "affinity":
            predicted = placement.router.counters.predicted_tokens
            assert abs(predicted - outcome.cached_tokens) <= 16 * len(items)  # a block each
    assert rates["affinity"] >= known.ideal  # answers count here, and not in the reference
    assert rates["random"] < 0.8 * rates["affinity"]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_the_real_traces_have_as_many_requests_as_published(trace: Any) -> None:
    path = data_folder() / "traces" / trace.file
    if not path.is_file():
        pytest.skip(f"{trace.file} is not there")
    requests = trace.load(path, 1)
    assert len(requests) == {"taubench": 2454, "qmsum": 553}[trace.name]
    assert len({request.session for request in requests}) == {"taubench": 200, "qmsum": 70}[trace.name]

"""Engines that refuse at once what others serve, and look idle: a whole node, and scripted engines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import trio

from tests.node.node_lab import Node, chat, lab
from tests.proxy.test_overload import QUESTIONS, answered
from tests.proxy.test_pipeline import asked, at_rest
from tests.proxy.test_poison import question
from tests.proxy.wire import CLOSE, GOOD, STREAM_HEAD, Scripted, Step, Wire, answer, event

NO = b'{"error":{"message":"no"}}'
NO_MODEL = b'{"error":{"message":"The model `m` does not exist.","code":404}}'
REFUSALS = {
    "301": answer(b"<html><center>nginx</center></html>", b"location: https://10.0.0.1/", status=301),
    "307": answer(b"", b"location: http://10.0.0.1:8000/login", status=307),
    "400": answer(NO, status=400),
    "400, no such model": answer(NO_MODEL, status=400),
    "401": answer(b'{"error":{"code":401}}', status=401),
    "402": answer(b'{"error":{"message":"Insufficient Balance"}}', status=402),
    "403": answer(b"", status=403),
    "404": answer(NO_MODEL, status=404),
    "404, no path": answer(b'{"detail":"Not Found"}', status=404),
    "404, empty": answer(b"", status=404),
    "405": answer(b"", status=405),
    "410": answer(b"", status=410),
    "415": answer(NO, status=415),
    "422": answer(NO, status=422),
    "501": answer(b"", status=501),
}
OF_KEYS_AND_MODELS = ("301", "307", "401", "402", "403", "404", "404, no path", "400, no such model", "410")
BUSY_S = 0.02


class Busy(Scripted):
    """Serves after a while, as engines do that have something to do."""

    async def play(self, wire: Wire) -> bool:
        await trio.sleep(BUSY_S)  # the time in which one that refuses at once would take all
        return await super().play(wire)

    def script(self) -> Sequence[Step]:
        return self.good


async def load(node: Node, each: int, clients: int = 6) -> list[int]:
    """The statuses that so many clients get at once, streamed or not, by all APIs."""
    statuses: list[int] = []

    async def client(first: int) -> None:
        for number in range(first, first + each):
            path = list(QUESTIONS)[number % len(QUESTIONS)]
            request = question(path, number, poison=False, stream=number % 2 == 0)
            statuses.append((await answered(node, request))[0])

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number * each)
    return statuses


@pytest.mark.parametrize("policy", ["affinity", "least_loaded"])
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_one_that_refuses_what_others_serve_gets_hardly_any_request(
    refusal: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Scripted(REFUSALS[refusal]), Busy(), Busy(), Busy()]
    async with lab(*engines, policy=policy) as node:
        statuses = await load(node, 24)
        refusing = [backend["refusing_status"] for backend in await node.backends()]
        page = (await node.http.get(f"{node.control}/metrics")).text
        names = [backend["name"] for backend in await node.backends()]
    code = int(refusal[:3])
    assert len([status for status in statuses if status != 200]) <= (refusal not in OF_KEYS_AND_MODELS)
    assert refusing == [code, None, None, None]
    assert [text.split(" (")[0] for text in caplog.messages if text.startswith("backend.answers ")] == [
        f"backend.answers {names[0]} serves -> refuses with {code}"
    ]
    assert f'ranvier_backend_refusing_status{{backend="{names[0]}"}} {code}.0' in page
    asked_twice = 2 if code in (400, 422) else 1  # the question for counts is taken back first
    assert len(engines[0].bodies) <= 10 * asked_twice  # a few, and those of other clients meanwhile


class AsChats(Scripted):
    """Answers each request as if it were a chat."""

    def script(self) -> Sequence[Step]:
        choice = {"index": 0, "finish_reason": None}
        if json.loads(self.bodies[-1]).get("stream"):
            deltas = [{"role": "assistant", "content": ""}, {"content": "of a chat"}]
            return [STREAM_HEAD, *[event({"choices": [{**choice, "delta": delta}]}) for delta in deltas], b"0\r\n\r\n"]
        message = {"role": "assistant", "content": "of a chat"}
        return [answer(json.dumps({"choices": [{**choice, "message": message}]}).encode())]


async def test_no_client_sees_an_answer_of_another_api_and_who_gives_them_gets_hardly_any_request() -> None:
    engines = [AsChats(), Busy(), Busy()]
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for number in range(120):
            path = list(QUESTIONS)[number % len(QUESTIONS)]
            body = (await answered(node, question(path, number, poison=False, stream=number % 4 < 2)))[2]
            assert b"of a chat" not in body or path == b"/v1/chat/completions"
        assert await refusing(node) == [404, None, None]
    assert len(engines[0].heads) <= 4 * len(QUESTIONS)


async def test_one_of_two_that_refuses_gets_few_percent_in_the_long_run() -> None:
    engines = [Scripted(REFUSALS["401"]), Busy()]
    async with lab(*engines) as node:
        await load(node, 5)
        before = len(engines[0].bodies)
        assert set(await load(node, 60)) == {200}
    assert len(engines[0].bodies) - before <= 0.04 * 360


async def test_several_that_refuse_are_passed_over_for_the_one_that_serves() -> None:
    engines = [Scripted(REFUSALS[refusal]) for refusal in ("401", "403", "404")]
    async with lab(*engines, Busy()) as node:
        await load(node, 8)
        assert set(await load(node, 8)) == {200}
        assert len([each for each in await node.backends() if each["refusing_status"]]) == 3


async def test_what_two_refuse_in_different_words_is_tried_at_a_third() -> None:
    turns = iter([[REFUSALS["401"]], [REFUSALS["404"]], [GOOD]])
    async with lab(*[Scripted(turns=turns) for _ in range(3)]) as node:
        assert (await answered(node, question(b"/v1/completions", 1, poison=False)))[0] == 200


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_what_all_refuse_is_the_fault_of_the_request(refusal: str, engines: int) -> None:
    backends = [Scripted(REFUSALS[refusal]) for _ in range(engines)]
    async with lab(*backends) as node:
        for number in range(6):
            before = asked(backends)
            status, _, body = await answered(node, question(b"/v1/messages", number, poison=False))
            assert (status, body) == (int(refusal[:3]), REFUSALS[refusal].partition(b"\r\n\r\n")[2])
            assert asked(backends) - before <= min(engines, 2)
            if refusal in OF_KEYS_AND_MODELS:
                assert asked(backends) - before == min(engines, 2)
        states = [(each["circuit"], each["refusing_status"]) for each in await node.backends()]
    assert states == [("closed", None)] * engines


ONCE = [(each, b"/generate", 1) for each in ("400", "422", "405")]
ELSEWHERE_TOO = [(each, b"/v1/completions", 2) for each in OF_KEYS_AND_MODELS]


@pytest.mark.parametrize(("refusal", "path", "tries"), ONCE + ELSEWHERE_TOO)
async def test_of_refusals_of_one_that_has_served_those_of_keys_and_models_alone_are_tried_once_elsewhere(
    refusal: str, path: bytes, tries: int
) -> None:
    engines = [Scripted(GOOD) for _ in range(4)]
    async with lab(*engines, policy="round_robin") as node:
        assert set(await load(node, 8)) == {200}
        before = asked(engines)
        for engine in engines:
            engine.turns = iter([[REFUSALS[refusal]]] * 9)
        assert (await answered(node, question(path, 1, poison=False)))[0] == int(refusal[:3])
        assert asked(engines) == before + tries
        assert await refusing(node) == [None] * 4


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_no_client_sees_a_refusal_of_one_that_never_served_while_others_did(refusal: str) -> None:
    engines = [Scripted(GOOD), Scripted(GOOD), Scripted(REFUSALS[refusal])]
    async with lab(*engines, policy="round_robin") as node:
        assert set(await load(node, 8, clients=1)) == {200}
        assert len(engines[2].bodies) >= 1


async def refusing(node: Node) -> list[int | None]:
    return [backend["refusing_status"] for backend in await node.backends()]


async def test_an_operator_is_shown_where_requests_go_that_avoid_it() -> None:
    engines = [Scripted(REFUSALS["403"]), Scripted(GOOD)]
    async with lab(*engines, policy="round_robin") as node:
        await load(node, 6)
        names = [backend["name"] for backend in await node.backends()]
        for _ in range(40):
            shown = (await node.http.post(f"{node.control}/explain", content=chat())).json()
            assert (shown["chosen"], len(shown["candidates"])) == (names[1], 1)
    assert len(engines[0].bodies) < 10


async def test_it_recovers_as_soon_as_it_serves() -> None:
    ill, well = Scripted(REFUSALS["401"]), Scripted(GOOD)
    async with lab(ill, well, policy="round_robin") as node:
        await load(node, 6)
        assert await refusing(node) == [401, None]
        ill.turns = iter([[GOOD]] * 1000)
        well.turns = iter([[answer(b"", status=529)]] * 1000)
        assert (await answered(node, question(b"/v1/completions", 1, poison=False)))[0] == 200  # nobody else has room
        assert await refusing(node) == [None, None]


async def test_a_refusal_of_a_stored_response_is_tried_elsewhere_as_well() -> None:
    turns = iter([[REFUSALS["401"]], [GOOD], [REFUSALS["404"]], [GOOD]])
    engines = [Scripted(turns=turns), Scripted(turns=turns)]
    async with lab(*engines) as node:
        for _ in range(2):
            assert (await node.http.post(f"{node.url}/v1/responses", json={"input": "hi"})).status_code == 200


@pytest.mark.parametrize("status", [302, 304])
async def test_a_redirect_of_what_is_no_inference_is_an_answer_like_others(status: int) -> None:
    engine = Scripted(answer(b"", status=status))
    async with lab(engine, Scripted(GOOD), policy="round_robin") as node:
        for _ in range(4):
            assert (await node.http.get(f"{node.url}/v1/files/f1")).status_code in (status, 200)
        assert (await at_rest(node))["outcomes"] == {"success": 4}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_what_is_no_inference_is_refused_by_one_and_blames_nobody(method: str) -> None:
    engines = [Scripted(REFUSALS["404"]), Scripted(REFUSALS["404"])]
    async with lab(*engines) as node:
        for _ in range(5):
            assert (await node.http.request(method, f"{node.url}/v1/files/f1")).status_code == 404
        assert await refusing(node) == [None, None]
    assert asked(engines) == 5


async def test_if_the_second_breaks_off_its_failure_is_what_the_client_sees() -> None:
    turns = iter([[REFUSALS["401"]], [CLOSE]])
    async with lab(Scripted(turns=turns), Scripted(turns=turns)) as node:
        assert (await answered(node, question(b"/v1/completions", 1, poison=False)))[0] == 502
        assert (await at_rest(node))["outcomes"] == {"refused": 1, "broken": 1}

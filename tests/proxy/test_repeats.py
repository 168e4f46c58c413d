"""How often an engine gets a request, and what its answers do to its circuit: a whole node, and scripted engines."""

from functools import partial
from itertools import chain, repeat

import pytest
import trio

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.conversation import JOINED_BYTES_MAX
from tests.node.node_lab import Node, chat, lab
from tests.proxy.test_pipeline import asked, at_rest
from tests.proxy.wire import CLOSE, GOOD, HANG, RESET, Scripted, Step, answer, no_more_descriptors, post, tls_contexts

ONCE = {
    "a file": post(b"data", target=b"/v1/files"),
    "a batch": post(b"{}", target=b"/v1/batches"),
    "a stored response": post(b'{"input":"hi"}', target=b"/v1/responses"),
    "a response in the background": post(b'{"store":false,"background":true}', target=b"/v1/responses"),
    "a removal": post(b"", target=b"/v1/files/f1", method=b"DELETE"),
    "a look": b"GET /v1/files/f1 HTTP/1.1\r\nhost: h\r\n\r\n",
    "what nobody knows": post(b"{}", target=b"/v1/unknown"),
}
AGAIN = {
    "a chat": post(chat()),
    "a completion": post(b'{"prompt":"x"}', target=b"/v1/completions?a=b"),
    "an embedding": post(b"{}", target=b"/v1/embeddings"),
    "a response that nobody keeps": post(b'{"store":false}', target=b"/v1/responses"),
}
FAILURES: dict[str, tuple[Step, int]] = {
    "closed": (CLOSE, 502),
    "reset": (RESET, 502),
    "garbled": (b"nonsense\r\n\r\n", 502),
    "late": (HANG, 504),
    "busy": (answer(b"", status=503), 503),
    "ill": (answer(b"", status=500), 500),
}


async def status_of(node: Node, request: bytes) -> int:
    async with await node.wire() as client:
        await client.send(request)
        return (await client.response())[0]


async def status_with(node: Node, backends: list[Scripted], request: bytes, failure: str) -> int:
    """What the client gets if the first backend that is asked fails so, and the next one answers well."""
    turns = chain([[FAILURES[failure][0], CLOSE]], repeat([GOOD]))
    for backend in backends:
        backend.turns = turns
        backend.bodies.clear()
    return await status_of(node, request)


async def test_what_must_run_once_is_sent_once_however_that_ends() -> None:
    backends = [Scripted(), Scripted()]
    async with lab(*backends, first_byte_timeout_s=0.1, circuit_failures=1000) as node:
        for what, request in ONCE.items():
            for failure, (_, status) in FAILURES.items():
                answered = await status_with(node, backends, request, failure)
                assert (asked(backends), answered) == (1, status), f"{what}, {failure}"


async def test_inference_that_leaves_nothing_behind_is_asked_for_once_more() -> None:
    backends = [Scripted(), Scripted()]
    async with lab(*backends, first_byte_timeout_s=0.1, circuit_failures=1000) as node:
        for what, request in AGAIN.items():
            for failure in FAILURES:
                answered = await status_with(node, backends, request, failure)
                assert (asked(backends), answered) == (2, 200), f"{what}, {failure}"


async def test_so_is_inference_of_a_body_that_is_too_large_to_be_joined() -> None:
    request = post(chat(body="x" * JOINED_BYTES_MAX))
    backends = [Scripted(), Scripted()]
    async with lab(*backends) as node:
        for failure in ("closed", "ill"):
            assert await status_with(node, backends, request, failure) == 200
            assert asked(backends) == 2


async def test_where_nobody_listens_nothing_was_sent_and_somebody_else_is_asked() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, policy="round_robin", circuit_failures=1000) as node:
        await node.http.post(f"{node.control}/admin/backends", json={"url": "http://127.0.0.1:9"})
        requests = [*ONCE.values(), *AGAIN.values()] * 2
        for request in requests:
            assert await status_of(node, request) == 200
        routes = await at_rest(node)
    assert len(engine.bodies) == len(requests)
    assert routes["outcomes"]["connect_error"] > 1


# --- what is said of the engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 501, 503, 505])
async def test_questions_that_an_engine_does_not_take_do_not_open_its_circuit(status: int) -> None:
    engine = Scripted(answer(b"", status=status))
    async with lab(engine) as node:
        for method in (b"OPTIONS", b"PUT", b"DELETE") * 3:
            await status_of(node, post(b"", target=b"/v1/embeddings", method=method))
        assert (await node.backends())[0]["circuit"] == "closed"
    assert len(engine.bodies) == 9


@pytest.mark.parametrize(("status", "circuit"), [(500, "open"), (501, "closed"), (404, "closed"), (503, "open")])
async def test_five_chats_answered_by_a_status_of_illness_open_it_and_by_others_not(status: int, circuit: str) -> None:
    async with lab(Scripted(answer(b"", status=status))) as node:
        for number in range(5):
            assert (await node.chat(seed=number)).status_code == status
        assert (await node.backends())[0]["circuit"] == circuit


async def test_an_engine_that_refuses_is_logged_with_its_status_and_as_no_success(
    logged: list[RequestSummary],
) -> None:
    async with lab(Scripted(answer(b"", status=404))) as node:
        assert (await node.chat()).status_code == 404
        assert (await at_rest(node))["outcomes"] == {"refused": 1}
    assert [(line.status, line.outcome) for line in logged] == [(404, "refused")]


async def test_the_log_has_why_an_engine_could_not_be_asked_also_where_another_answered(
    logged: list[RequestSummary],
) -> None:
    async with lab(Scripted(GOOD), policy="round_robin") as node:
        dead = {"url": "http://127.0.0.1:9", "name": "dead"}
        await node.http.post(f"{node.control}/admin/backends", json=dead)
        for _ in range(2):
            assert (await node.chat()).status_code == 200
    assert [line.outcome for line in logged] == ["success"] * 2
    nothing, words = sorted(line.error for line in logged)
    assert nothing == ""
    assert words.startswith("dead: cannot connect to the backend: ")
    assert words.endswith("Connection refused")


async def test_an_engine_whose_certificate_is_not_trusted_is_logged_as_just_that(logged: list[RequestSummary]) -> None:
    context, _ = tls_contexts()
    serve = partial(trio.serve_ssl_over_tcp, Scripted(GOOD).serve, 0, context, host="127.0.0.1")  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        port = (await nursery.start(serve))[0].transport_listener.socket.getsockname()[1]
        async with lab(backend=[f"https://127.0.0.1:{port}"]) as node:
            refused = await node.chat()
        nursery.cancel_scope.cancel()
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "connect_failed")
    assert "127.0.0.1" not in refused.text
    (line,) = logged
    assert line.error.startswith(f"127.0.0.1:{port}: cannot connect to the backend: ")
    assert "certificate verify failed" in line.error


# --- what this node lacks ---------------------------------------------------------------------------------------------


async def test_a_node_out_of_descriptors_has_its_clients_come_back_and_blames_nobody() -> None:
    async with lab(Scripted(GOOD), Scripted(GOOD), circuit_failures=1) as node, await node.wire() as client:
        await client.send(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")  # to be accepted
        assert (await client.response())[0] == 200
        with no_more_descriptors():
            for _ in range(3):
                await client.send(post(chat()))
                status, headers, _ = await client.response()
                assert (status, headers["retry-after"]) == (503, "1")
        await client.send(post(chat()))
        assert (await client.response())[0] == 200
        assert [backend["circuit"] for backend in await node.backends()] == ["closed"] * 2
        assert (await at_rest(node))["outcomes"] == {"not_sent": 3, "success": 1}
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert "ranvier_upstream_exhausted_total 3.0" in page

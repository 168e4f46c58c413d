"""What only routers may set reaches no engine from a client, whatever the API, the place and the spelling."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from ranvier_py.core.prompts.reserved_members import RANK_MEMBERS, TRANSFER_MEMBERS
from tests.node.node_lab import MODEL, Node, lab
from tests.proxy.wire import GOOD, Scripted, post

ADDRESS = "___prefill_addr_10.0.0.1:9___decode_addr_10.0.0.2:9_x"
TEXT = "Where are the atlases? " * 20
MESSAGES = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": TEXT},
    "/v1/messages": {"max_tokens": 8, "messages": MESSAGES[1:], "system": TEXT},
    "/v1/responses": {"input": TEXT, "store": False},
    "/generate": {"text": TEXT},
    "/v1/embeddings": {"input": TEXT},
    "/tokenize": {"prompt": TEXT},
    "/v1/audio/transcriptions": {"file": "x"},
    "/v1/something": {"input": TEXT},
}
BOMB = gzip.compress(bytes(1 << 20)) * 80  # 80 MiB in 80 kB
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1, 2]}
NAMES = "x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port", "X-Data-Parallel-Host-Port"


async def send(node: Node, path: str, body: bytes, *fields: bytes) -> int:
    async with await node.wire() as wire:
        await wire.send(post(body, *fields, target=path.encode()))
        return (await wire.response())[0]


async def counted(node: Node, name: str) -> dict[str, int]:
    page = (await node.http.get(f"{node.control}/metrics")).text
    found = re.findall(rf'ranvier_router_fields_{name}_total\{{field="([^"]+)"\}} (\S+)', page)
    return {field: int(float(count)) for field, count in found}


def raw(*members: str) -> bytes:
    """A body as some client writes it, with blanks and numbers of its own."""
    return ("{" + f' "model" :"{MODEL}", "temperature":1.00,\n' + ", ".join(members) + " }").encode()


@pytest.mark.parametrize("path", APIS)
async def test_members_of_routers_are_taken_out_of_a_body_of_any_api_and_its_other_bytes_stay(path: str) -> None:
    rest = json.dumps(APIS[path])[1:-1]
    names = TRANSFER_MEMBERS
    inner = ", ".join(f'"{name}":{json.dumps(PARAMS)}' for name in names)
    engine, expected = Scripted(GOOD), []
    async with lab(engine) as node:
        for name in names:
            assert await send(node, path, raw(f'"{name}" : {json.dumps(PARAMS)}', rest)) == 200
            assert await send(node, path, raw(rest, f'"{name}":1')) == 200
            assert await send(node, path, raw(rest, f'"{name[:3]}\\u{ord(name[3]):04x}{name[4:]}":1')) == 200
            expected += [raw(rest)] * 3
        for container in ('"extra_body":{%s}', '"sampling_params":{"n":1, "extra_args":{%s}}', '"vllm_xargs":{%s}'):
            assert await send(node, path, raw(rest, container % inner)) == 200
            expected.append(raw(rest, container % ""))
        assert await send(node, path, raw(f'"request_id":"{ADDRESS}"', rest, f'"rid":["a","{ADDRESS}"]')) == 200
        assert await send(node, path, raw('"request_id":"mine"', rest)) == 200
        expected += [raw(rest), raw('"request_id":"mine"', rest)]
        removed = await counted(node, "removed")
    assert engine.bodies == expected
    assert removed == {**dict.fromkeys(names, 6), "request_id": 1, "rid": 1}


QUOTED = json.dumps(dict.fromkeys((*TRANSFER_MEMBERS, *RANK_MEMBERS), PARAMS))


async def test_the_same_names_in_messages_tools_and_schemas_stay() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": json.loads(QUOTED)}}}]
    chat = {
        "model": MODEL,
        "messages": [*MESSAGES, {"role": "user", "content": QUOTED, "kv_transfer_params": PARAMS}],
        "tools": tools,
        "response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(QUOTED)}},
        "metadata": {"bootstrap_host": "x"},
    }
    bodies = [json.dumps(chat).encode(), json.dumps({"model": MODEL, "prompt": QUOTED}).encode()]
    engine = Scripted(GOOD)
    async with lab(engine) as node:
        assert await send(node, "/v1/chat/completions", bodies[0]) == 200
        assert await send(node, "/v1/completions", bodies[1]) == 200
        assert (await counted(node, "removed"), await counted(node, "refused")) == ({}, {})
    assert engine.bodies == bodies


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("transfer_fields", ["remove", "pass"])
async def test_a_known_history_hides_no_member_on_a_later_turn(early: bool, transfer_fields: str) -> None:
    """Its raw bytes are not parsed again: what stands before it would not be seen, were it remembered."""
    engine, sent, expected = Scripted(GOOD), [], []
    async with lab(engine, transfer_fields=transfer_fields) as node:
        turns = list(MESSAGES)
        for turn in range(4):
            member, rest = f'"kv_transfer_params":{json.dumps(PARAMS)}', f'"messages":{json.dumps(turns)}'
            sent.append(raw(member, rest) if early else raw(rest, member))
            expected.append(raw(rest))
            for body in (sent[-1], raw(rest)):
                assert await send(node, "/v1/chat/completions", body) == 200
            await node.until_routes(lambda view, turn=turn: view["tokenizer_worker"]["learned"] > turn)
            turns += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": f"{turn} {TEXT}"}]
    assert engine.bodies[::2] == (expected if transfer_fields == "remove" else sent)
    assert engine.bodies[1::2] == expected


XARGS = f'"vllm_xargs":{{"kv_transfer_params":{json.dumps(PARAMS)}}}'
OPENING = json.dumps(MESSAGES)[1:-1]
HEADS = {
    "before the history": raw(XARGS, f'"messages":[{OPENING}'),
    "an id": raw(f'"request_id":"{ADDRESS}"', f'"messages":[{OPENING}'),
    "escaped": raw(XARGS.replace("vllm_", "vllm\\u005f"), f'"messages":[{OPENING}'),
    "between two histories": raw('"messages":[]', XARGS, f'"messages":[{OPENING}'),
}
"""Each up to the end of a message: what comes behind it decides what counts."""
REPLACED = b'],"vllm_xargs":{},"request_id":"mine"}'
MORE = b',{"role":"user","content":"%d"}]}'


@pytest.mark.parametrize("kind", HEADS)
async def test_a_known_history_hides_no_member_that_another_one_replaced_before(kind: str) -> None:
    engine, opening = Scripted(GOOD), HEADS[kind][:-2]
    async with lab(engine) as node:
        for number, end in enumerate((REPLACED, b"]}", MORE % 1, MORE % 2)):
            assert await send(node, "/v1/chat/completions", opening + end) == 200
            await node.until_routes(lambda view, number=number: view["tokenizer_worker"]["learned"] > number)
    for body in engine.bodies:
        fields = json.loads(body)
        assert "kv_transfer_params" not in fields.get("vllm_xargs", {})
        assert ADDRESS not in fields.get("request_id", "")
        assert fields["messages"][:2] == MESSAGES


LARGE = f'"text":"{"x" * (4 << 20)}"'
MANY = f'"text":{json.dumps([[]] * 201_000)}'
MEMBER = '"kv_transfer_params":{}'
PART = '--x\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n--x--\r\n'
UNREAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "too large": ("/v1/chat/completions", lambda: raw(LARGE, MEMBER, LARGE)),
    "too large, escaped": ("/v1/chat/completions", lambda: raw(LARGE, MEMBER.replace("kv_", "kv\\u005f"), LARGE)),
    "too large, of another API": ("/v1/embeddings", lambda: raw(LARGE, MEMBER, LARGE)),
    "too large, an id": ("/v1/completions", lambda: raw(f'"request_id":"{ADDRESS}"', LARGE)),
    "too many marks": ("/v1/messages", lambda: raw(MANY, MEMBER, MANY)),
    "too many marks, SGLang's": ("/generate", lambda: raw(MANY, '"bootstrap_room" : 1', MANY)),
    "what one library refuses": ("/v1/responses", lambda: raw('"x":NaN', f'"y":"{"y" * 200_000}"', MEMBER, '"z":1')),
    "a long number": ("/v1/responses", lambda: raw(f'"seed":{"7" * 5000}', MEMBER)),
    "UTF-16": ("/v1/chat/completions", lambda: raw(MEMBER).decode().encode("utf-16")),
    "UTF-16, large": (
        "/v1/chat/completions",
        lambda: raw(MEMBER, f'"x":"{"x" * 200_000}"').decode().encode("utf-16-le"),
    ),
    "lines": ("/v1/something", lambda: raw(MEMBER) + b"\n" + raw()),
    "a field of a form": ("/v1/audio/transcriptions", lambda: PART.format("kv_transfer_params", "{}").encode()),
    "JSON in a form": ("/v1/audio/transcriptions", lambda: PART.format("vllm_xargs", "{" + MEMBER + "}").encode()),
    "a form where JSON belongs": ("/v1/something", lambda: PART.format("bootstrap_host", "x").encode()),
}


@pytest.mark.parametrize("kind", UNREAD)
async def test_a_body_that_is_not_read_is_refused_if_it_may_have_one(kind: str) -> None:
    path, made = UNREAD[kind]
    body = made()
    engine = Scripted(GOOD)
    form = (b"content-type: multipart/form-data; boundary=x",) if body.startswith(b"--") else ()
    async with lab(engine) as node, await node.wire() as wire:
        await wire.send(post(body, *form, target=path.encode()))
        status, _, text = await wire.response()
        assert status == 400
        found = json.loads(text)
        assert found["type"] == "error" if path == "/v1/messages" else found["error"]["type"] == "invalid_request_error"
        assert sum((await counted(node, "refused")).values()) == 1
        harmless = body.replace(b"kv_transfer", b"xx_transfer").replace(b"bootstrap_", b"xxotstrap_")
        harmless = (
            harmless.replace(b"kv\\u005f", b"xx\\u005f").replace(b"k\0v\0", b"x\0x\0").replace(b"prefill", b"xrefill")
        )
        await wire.send(post(harmless.replace(b"decode_addr", b"xecode_addr"), *form, target=path.encode()))
        assert (await wire.response())[0] == 200
    assert not any(b"kv_transfer" in sent or b"bootstrap_" in sent for sent in engine.bodies)


async def test_a_body_that_claims_to_be_compressed_is_searched_as_it_came() -> None:
    """Engines parse it all the same, whatever it says of itself."""
    engine = Scripted(GOOD)
    packed = gzip.compress(raw('"messages":[]'))
    async with lab(engine) as node:
        for coding in (b"gzip", b"identity"):
            body = raw(MEMBER, '"messages":[]')
            assert await send(node, "/v1/chat/completions", body, b"content-encoding: " + coding) == 200
        assert await send(node, "/v1/chat/completions", packed, b"content-encoding: gzip") == 200
    assert engine.bodies == [raw('"messages":[]'), raw('"messages":[]'), packed]


def raw_deflate(body: bytes) -> bytes:
    coding = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coding.compress(body) + coding.flush()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-Gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity, gzip": gzip.compress,
    "gzip ": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),
    "Deflate": raw_deflate,
}
UNKNOWN_CODINGS = "br", "zstd", "gzip, gzip", "compress"


@pytest.mark.parametrize("coding", PACKED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/responses"])
async def test_a_compressed_body_that_has_one_is_refused_and_any_other_passes(coding: str, path: str) -> None:
    engine, pack, field = Scripted(GOOD), PACKED[coding], b"content-encoding: " + coding.encode()
    clean = pack(raw('"messages":[]', f'"x":"{"y" * 3_000_000}"'))
    behind = raw(f'"x":"{"y" * 3_000_000}"', '"\\u006bv_transfer_params":1')
    async with lab(engine) as node:
        for body in (raw(MEMBER), behind, raw('"request_id":"' + ADDRESS + '"')):
            assert await send(node, path, pack(body), field) == 400
        assert await send(node, path, clean, field) == 200
        assert len(await counted(node, "refused")) == 2
    assert engine.bodies == [clean]


@pytest.mark.parametrize("coding", UNKNOWN_CODINGS)
async def test_a_body_in_a_coding_that_is_not_known_is_refused(coding: str) -> None:
    async with lab(Scripted(GOOD)) as node:
        field = b"content-encoding: " + coding.encode()
        assert await send(node, "/v1/chat/completions", b"\x28\xb5\x2f\xfd", field) == 400


async def test_a_small_body_that_would_fill_the_memory_is_refused() -> None:
    async with lab(Scripted(GOOD)) as node:
        assert await send(node, "/v1/chat/completions", BOMB, b"content-encoding: gzip") == 400


async def test_fields_of_the_head_that_routers_write_are_taken_out_and_an_id_with_an_address_is_ours() -> None:
    engine, ids = Scripted(GOOD), (b"mine", ADDRESS.encode())
    async with lab(engine) as node:
        for given in ids:
            fields = [b"%b: 10.0.0.1:9" % name.encode() for name in NAMES]
            assert (
                await send(node, "/v1/chat/completions", raw('"messages":[]'), *fields, b"X-Request-ID: " + given)
                == 200
            )
        removed = await counted(node, "removed")
    found = [dict(re.findall(rb"\r\n(x-[^:]+): ([^\r]*)", head.lower())) for head in engine.heads]
    assert [set(fields) for fields in found] == [{b"x-request-id"}] * 2
    assert found[0][b"x-request-id"] == b"mine"
    assert b"addr" not in found[1][b"x-request-id"]
    assert removed == {**dict.fromkeys([name.lower() for name in NAMES], 2), "x-request-id": 1}


async def test_a_trusted_router_in_front_may_set_them() -> None:
    engine, body = Scripted(GOOD), raw(MEMBER, '"messages":[]')
    async with lab(engine, transfer_fields="pass") as node:
        fields = [b"%b: 10.0.0.1:9" % name.encode() for name in NAMES]
        assert await send(node, "/v1/chat/completions", body, *fields, b"x-request-id: " + ADDRESS.encode()) == 200
        assert await send(node, "/v1/embeddings", raw(LARGE, MEMBER, LARGE)) == 200
        assert await counted(node, "removed") == {}
    assert engine.bodies[0] == body
    assert all(name.lower().encode() in engine.heads[0].lower() for name in NAMES)
    assert engine.heads[0].count(b"x-request-id") == engine.heads[0].count(ADDRESS.encode()) == 1


@pytest.mark.parametrize(("client_ranks", "stays"), [("auto", True), ("pass", True), ("remove", False)])
async def test_a_client_chooses_a_rank_only_where_it_may(client_ranks: str, stays: bool) -> None:
    engine, body = Scripted(GOOD), raw('"messages":[]', '"data_parallel_rank":1')
    async with lab(engine, client_ranks=client_ranks) as node:
        assert await send(node, "/v1/chat/completions", body, b"X-Data-Parallel-Rank: 1") == 200
        removed = await counted(node, "removed")
    assert (b"x-data-parallel-rank: 1" in engine.heads[0].lower(), engine.bodies[0] == body) == (stays, stays)
    assert removed == ({} if stays else {"x-data-parallel-rank": 1, "data_parallel_rank": 1})

"""Writes the captures of vLLM and SGLang anew: see README.md."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import trio
import zmq

from cluster.engine.kv_events import KvEncoder, Scope
from cluster.engine.kv_publisher import END, KvEndpoints, KvPublisher
from ranvier_py.replay.engine.block_cache import BlockCache, Job, KeysCleared

HERE = Path(__file__).parent
BLOCK, BLOCKS = 16, 24
AT = 1_795_296_242.0
REPLAY_FROM = 5


def steps() -> list[tuple[Scope, list[Any]]]:
    """What happens to a small cache: prompts that share a beginning, repetitions, evictions, scopes."""
    cache = BlockCache(BLOCKS, BLOCK, events_max=10_000)
    found = []
    prompts = [[*range(100, 148), *range(1000 * n, 1000 * n + 30 + 20 * n)] for n in range(1, 5)]
    prompts += [list(range(100, 164))] * 2
    prompts += [list(range(5000 + 200 * n, 5000 + 200 * n + 100)) for n in range(4)]
    scopes = [Scope()] * len(prompts) + [Scope("", "pepper"), Scope("french", ""), Scope("french", "pepper")]
    prompts += [list(range(100, 140))] * 3
    for prompt, scope in zip(prompts, scopes, strict=True):
        job = Job.of(np.array(prompt), np.array([1, 2, 3]), BLOCK, "/".join(scope).encode() if any(scope) else b"")
        lease = cache.lease(job)
        assert lease is not None
        cache.grow(lease, job.tokens_computed)
        cache.release(lease)
        found.append((scope, list(cache.drain_events())))
    return found


def payloads(encoding: str) -> list[bytes]:
    encoder, made = KvEncoder(encoding, BLOCK), []
    for number, (scope, events) in enumerate(steps()):
        for event in events:
            if getattr(event, "parent", 1) == 0:
                encoder.note(event.keys[0], scope)
        made.append(encoder.batch(events, AT + number))
    return made


def packed(number: int, *events: Any) -> bytes:
    return bytes(msgpack.packb([AT + number, events, 0]))


def stored(hashes: list[Any], parent: Any, ids: list[int], **more: Any) -> dict[str, Any]:
    fields = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return fields | more


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | more


def vllm_array() -> list[bytes]:
    made = payloads("array")
    cpu = ["BlockStored", [7001], None, list(range(16)), BLOCK, None, "CPU", None]
    return [*made, packed(90, cpu, ["BlockRemoved", [7001], "CPU"]), packed(91, ["AllBlocksCleared"])]


def vllm_map() -> list[bytes]:
    ids = list(range(32))
    media = [["3f2a", 4], ["3f2a", -12]]
    more = {"locality": "LOCAL", "session_id": "s1", "priority": 3}
    return [
        *payloads("map"),
        packed(90, stored([7001, 7002], None, ids, extra_keys=[[each] for each in media])),
        packed(91, stored([7003], None, [], block_size=0, medium="CPU", extra_keys=None)),
        packed(
            92,
            stored([7004], None, ids[:16], group_idx=1, kv_cache_spec_kind="sliding_window"),
            removed(7003, medium="CPU"),
        ),
        packed(94, stored([7005], None, ids[16:], **more), {"type": "BlockInactive", "block_hashes": [7005]}),
    ]


def vllm_bytes() -> list[bytes]:
    names = [bytes([n]) * 32 for n in range(6)]
    return [
        packed(0, stored(names[:3], None, list(range(48)))),
        packed(1, stored(names[3:5], names[2], list(range(48, 80)))),
        packed(2, stored(names[3:4], names[2], list(range(48, 64)))),
        packed(3, removed(names[4]), removed(names[3])),
        packed(4, stored([names[5]], names[3], list(range(80, 96)))),
        packed(5, removed(names[0])),
    ]


def sglang() -> list[bytes]:
    host = {"type": "BlockStored", "block_hashes": [-7], "parent_block_hash": None, "token_ids": list(range(16))}
    host |= {"block_size": BLOCK, "lora_id": None, "medium": "CPU_PINNED", "session_id": "s1"}
    cleared = KvEncoder("sglang", BLOCK).batch([KeysCleared()], AT)
    gone = {"type": "BlockRemoved", "block_hashes": [-7], "medium": "CPU_PINNED"}
    return [cleared, *payloads("sglang"), packed(90, host), packed(91, gone)]


async def record(name: str, messages: list[bytes], load: bytes = b"", **endpoints: Any) -> None:
    """Publish, listen, ask again, and write down what came."""
    lines = []
    at = KvEndpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", **endpoints)
    with KvPublisher(at) as source, zmq.Context() as context, trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.run)
            with context.socket(zmq.SUB) as receives, context.socket(zmq.DEALER) as asks:
                receives.setsockopt(zmq.SUBSCRIBE, b"")
                receives.connect(source.events)
                asks.connect(source.replay)
                await trio.sleep(0.3)
                for message in messages:
                    source.publish(message)
                if load:
                    source.send(b"load", bytes(8), load)
                asks.send_multipart([b"", REPLAY_FROM.to_bytes(8, "big")])
                lines += await reported(receives, "events")
                lines += await reported(asks, "replay")
            nursery.cancel_scope.cancel()
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


async def reported(socket: zmq.Socket[bytes], name: str) -> list[dict[str, Any]]:
    """All that comes until nothing more does."""
    lines: list[dict[str, Any]] = []
    await trio.sleep(0.5)
    while socket.poll(0):
        frames = socket.recv_multipart()
        texts = [base64.b64encode(each).decode() for each in frames]
        lines.append({"from": "load" if frames[0] == b"load" else name, "frames": texts})
        if name == "replay" and frames[-2] == END:
            break
    return lines


async def main() -> None:
    load = bytes(msgpack.packb(["LoadStat", 3, 1, 5120, 65536, 0, 2]))
    await record("vllm-0.20-array", vllm_array(), topic="kv-events", replays_topic=False)
    await record("vllm-0.32-map", vllm_map(), topic="kv@127.0.0.1@tiny")
    await record("vllm-bytes-map", vllm_bytes())
    await record("sglang-0.5.23", sglang(), load, replays_topic=False)


if __name__ == "__main__":
    trio.run(main)

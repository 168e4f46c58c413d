"""Encodes changes of the fake engine's block cache as KV events, in msgpack messages like those of real engines.

Three encodings: `map` is vLLM's from 0.24 on (as 0.32 sends it), `array` is vLLM's before that (0.20), `sglang` is that
of SGLang 0.5.23, with signed hashes and one event for all blocks that a step removes. A fourth one, `strange`, is a map
whose events have unknown names, like those of some future version. A real engine keeps salt and adapter with each
block; here they are remembered by the first block of a prompt.

A hybrid engine of vLLM's has `state_groups` groups of block tables for states, and then one for attention. A checkpoint
is one block in each group of states. It has the name of attention's block that ends there, and all tokens since the
last checkpoint. SGLang reports nothing about its states.
Bounds: SCOPES_MAX prompts are remembered. The oldest is forgotten, and its blocks then look like blocks without a salt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import orjson

from cluster.engine.kv_publisher import HWM, KvEndpoints, KvPublisher
from ranvier_py.replay.engine.block_cache import (
    CacheEvent,
    KeyRemoved,
    KeysCleared,
    KeysStored,
    StateRemoved,
    StateStored,
)

ENCODINGS = ("map", "array", "sglang")
STRANGE = "strange"
SCOPES_MAX = 65_536
SIGN = 1 << 63


class Scope(NamedTuple):
    """What a prompt's blocks are hashed with beside their tokens; empty texts for nothing."""

    adapter: str = ""
    salt: str = ""


PLAIN = Scope()


class KvEncoder:
    """Encodes the events of one engine."""

    def __init__(self, encoding: str, block_size: int, rank: int = 0, state_groups: int = 0) -> None:
        """`state_groups`: those of a hybrid model. Raises ValueError for an unknown encoding."""
        if encoding not in (*ENCODINGS, STRANGE):
            raise ValueError(f"KV events can be encoded as {', '.join((*ENCODINGS, STRANGE))}")
        self.encoding = encoding
        self._block_size = block_size
        self._rank = rank
        self._state_groups = state_groups
        self._scopes: dict[int, Scope] = {}

    def note(self, first: int, scope: Scope) -> None:
        """Remember adapter and salt of prompts that begin with the block `first`."""
        if scope != PLAIN:
            self._scopes[first] = scope
            if len(self._scopes) > SCOPES_MAX:
                del self._scopes[next(iter(self._scopes))]

    def batch(self, events: Sequence[CacheEvent], at: float) -> bytes:
        """Encode one message. `at` is in Unix seconds."""
        written: list[Any] = []
        for event in events:
            if isinstance(event, KeysStored):
                written.append(self._stored(event, event.keys, self._state_groups))
            elif isinstance(event, KeyRemoved):
                self._remove(event, written)
            elif isinstance(event, KeysCleared):
                written.append(self._event("AllBlocksCleared", {}))
            elif self.encoding != "sglang":
                written += self._states(event)
        return bytes(msgpack.packb([at, written, self._rank]))

    def _states(self, event: StateStored | StateRemoved) -> list[Any]:
        groups = range(self._state_groups)
        if isinstance(event, StateStored):
            return [self._stored(event, event.keys[-1:], group) for group in groups]
        return [self._removed(event.key, group) for group in groups]

    def _stored(self, event: KeysStored | StateStored, keys: Sequence[int], group: int) -> Any:
        """Encode a stored event. `keys`: the blocks that it names."""
        scope = self._scopes.get(event.keys[0], PLAIN) if not event.parent else PLAIN
        fields: dict[str, Any] = {
            "block_hashes": [self._hash(key) for key in keys],
            "parent_block_hash": self._hash(event.parent) if event.parent else None,
            "token_ids": event.ids.tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": scope.adapter or None,
        }
        if self.encoding == "sglang":
            if scope.salt:
                fields["cache_salt"] = scope.salt
        else:
            own = [scope.adapter] if scope.adapter else []
            extra: list[list[str] | None] = [own or None for _ in keys]
            if scope.salt and keys[0] == event.keys[0]:  # the salt is on the first block, which may not be among `keys`
                extra[0] = [*own, scope.salt]
            fields["extra_keys"] = extra
            if self.encoding == "map" or self._state_groups:
                kind = "mamba" if group < self._state_groups else "full_attention"
                fields |= {"group_idx": group, "kv_cache_spec_kind": kind}
        return self._event("BlockStored", fields)

    def _remove(self, event: KeyRemoved, written: list[Any]) -> None:
        """Encode a removal. SGLang has one event for all removals in a row."""
        last = written[-1] if written and self.encoding == "sglang" else {}
        if last.get("type") == "BlockRemoved":
            last["block_hashes"].append(self._hash(event.key))
            return
        written.append(self._removed(event.key, self._state_groups))

    def _removed(self, key: int, group: int) -> Any:
        fields: dict[str, Any] = {"block_hashes": [self._hash(key)], "medium": "GPU"}
        if self.encoding == "map" or self._state_groups:
            fields["group_idx"] = group
        return self._event("BlockRemoved", fields)

    def _event(self, tag: str, fields: dict[str, Any]) -> Any:
        if self.encoding == STRANGE:
            tag = f"{tag}V9"
        return [tag, *fields.values()] if self.encoding == "array" else {"type": tag, **fields}

    def _hash(self, key: int) -> int:
        return key - 2 * SIGN if self.encoding == "sglang" and key >= SIGN else key


class EventSource:
    """Publishes the KV events of one engine, and makes the HTTP page that says where."""

    def __init__(self, endpoints: KvEndpoints, block_size: int, state_groups: int = 0, rank: int = 0) -> None:
        """Raises OSError, or ValueError for an unknown encoding."""
        self.encoder = KvEncoder(endpoints.encoding, block_size, rank, state_groups)
        self.publisher = KvPublisher(endpoints)
        self._block_size = block_size
        self._begin()

    @property
    def path(self) -> bytes:
        """The path of the page that says where events are published."""
        return b"/server_info" if self.encoder.encoding == "sglang" else b"/kv_event_sources"

    def publish(self, events: Sequence[CacheEvent]) -> None:
        self.publisher.publish(self.encoder.batch(events, time.time()))

    def restart(self) -> None:
        self.publisher.restart()
        self._begin()

    def _begin(self) -> None:
        """Publish what a new process does first: SGLang reports that its cache is empty."""
        if self.encoder.encoding == "sglang":
            self.publish([KeysCleared()])

    def sources(self) -> bytes:
        return self._server_info() if self.encoder.encoding == "sglang" else self._event_sources()

    def _event_sources(self) -> bytes:
        """Return vLLM 0.32's page."""
        endpoints = self.publisher.endpoints
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.publisher.events,
            "replay_endpoint": self.publisher.replay or None,
            "buffer_steps": endpoints.buffer_messages,
            "hwm": HWM,
            "max_queue_size": HWM,
            "topic": endpoints.topic,
        }
        return orjson.dumps({"0": source})

    def _server_info(self) -> bytes:
        """Return SGLang 0.5.23's page, as far as it is about KV events."""
        host, _, port = self.publisher.events.removeprefix("tcp://").rpartition(":")
        topic = self.publisher.endpoints.topic
        block = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": int(port),
            "topic": topic,
            "block_size": self._block_size,
            "dp_size": 1,
        }
        option = {"publisher": "zmq", "endpoint": self.publisher.events, "topic": topic}
        option |= {"replay_endpoint": self.publisher.replay} if self.publisher.replay else {}
        return orjson.dumps({"dp_size": 1, "kv_events_config": orjson.dumps(option).decode(), "kv_events": block})

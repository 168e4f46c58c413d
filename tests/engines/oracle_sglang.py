"""SGLang's own RadixCache under mixed requests, without engine or model: what an index of its events has to equal.

    PYTHONPATH=. .venv-sglang/bin/python tests/engines/oracle_sglang.py [--requests N] [--blocks N] [--block-size 16]
        [--seed N] [--dynamo-format] [--state-slots N [--extra-buffer]]
Writes the records of oracle_vllm.py, whose kinds of requests these are too. A tree holds each block once. torchvision
has no build for this machine; an empty one stands in for it while SGLang is imported. With `--state-slots` it is the
tree of a hybrid model, with ["request", tokens, held, reused], where it has keys and values of `held` tokens and reuses
so many, ["served", answer], and ["given up", states, payload] of events when so many states had to go.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import sys
import types
from array import array
from typing import Any

import torch
import transformers  # noqa: F401  looks for the real torchvision, so it comes first


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {})
        setattr(self, name, found)
        return found


def stand_in_for(*names: str) -> None:
    for name in names:
        module = Empty(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


TRANSFORMS = "torchvision.transforms"
stand_in_for("torchvision", "torchvision.io", TRANSFORMS, f"{TRANSFORMS}.functional", f"{TRANSFORMS}.v2")
stand_in_for(f"{TRANSFORMS}.v2.functional")

from sglang.srt.disaggregation.kv_events import KVEventBatch, namespaced_block_hash  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams, MatchResult  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.events import KvEventLoraNames  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType, mamba  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.utils import hash_str_to_int64  # noqa: E402

from tests.engines.oracle_requests import TABLE_INTERVAL, Requests, make_parser  # noqa: E402

STATE_CHUNK = 64
ANSWER_INTERVAL = 256
ADAPTERS = {"french": "f" * 32, "legal": "e" * 32}  # name -> the key under which the cache keeps it apart


class Memory:
    """Stands in for the pool: whatever is asked of it is done, and nothing comes of it."""

    device = "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_named: None


class States(HybridReqToTokenPool):
    """Stands in for the memory of a hybrid model's states."""

    def __init__(self) -> None:
        self.mamba_allocator = self.mamba_pool = Memory()


def tree_with_states(*, extra_buffer: bool) -> UnifiedRadixCache:
    """The cache of a hybrid model. Where it asks the server's arguments they are the default ones."""
    mamba.mamba_cache_chunk_size = lambda: STATE_CHUNK
    mamba.mamba_checkpoint_grid = lambda _page: STATE_CHUNK
    mamba.get_exec = lambda: types.SimpleNamespace(mamba=types.SimpleNamespace(mamba_max_states_per_path=-1))
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=States(),
            token_to_kv_pool_allocator=Memory(),
            page_size=1,
            enable_kv_cache_events=True,
            enable_mamba_extra_buffer=extra_buffer,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tree_core_backend="python",
        )
    )


class Hybrid:
    """A tree with states under mixed requests, one after the other, each computed in one step.

    Under `no_buffer` a state is kept at the end of each prompt, and at that of what was computed of its answer. Under
    `extra_buffer` at the last chunk's end after what was reused, or where the tree says that prompts part, if that is
    before it; and at the last multiple of ANSWER_INTERVAL in the answer. What lies behind is not kept at all. So says
    SGLang's managers/schedule_batch.py, which is not to be had without a GPU.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.oracle = Oracle(options)
        self.extra_buffer = options.extra_buffer
        self.cache = self.oracle.cache = tree_with_states(extra_buffer=self.extra_buffer)
        self.slots = options.state_slots
        self.kept = 0

    def run(self, requests: int) -> None:
        oracle = self.oracle
        for _ in range(requests):
            prompt, *_ = oracle.prompt()
            found = self.cache.match_prefix(MatchPrefixParams(key=oracle.key(prompt[:-1], None, None)))
            oracle.write(["request", prompt, found.full_kv_hit_length, found.device_prefix_len])
            answer = oracle.tokens(1 + oracle.rng.randrange(60))
            computed = (prompt + answer)[:-1]
            for length in self.ends(found, len(prompt), len(computed)):
                whole = computed[:length]
                state = torch.tensor([self.kept])
                self.kept += 1
                key = oracle.key(whole, None, None)
                self.cache.insert(InsertParams(key=key, value=torch.arange(len(whole)), mamba_value=state))
            oracle.write(["served", answer])
            oracle.send()
            excess = self.cache.mamba_evictable_size() - self.slots
            if excess > 0:
                self.cache.evict(EvictParams(mamba_num=excess))
                events = self.cache.take_events()
                oracle.write(
                    ["given up", excess, oracle.encoder.encode(KVEventBatch(ts=1.0, events=events, attn_dp_rank=0))]
                )
            oracle.keep(prompt + answer, None, None)

    def ends(self, found: MatchResult, prompt: int, computed: int) -> list[int]:
        """Where states are kept, of a prompt and of all that was computed, in tokens."""
        if not self.extra_buffer:
            return [prompt, computed]
        reused, parts = found.device_prefix_len, found.mamba_branching_seqlen
        end = reused + (prompt - reused) // STATE_CHUNK * STATE_CHUNK
        if end > reused and parts is not None and reused < parts < prompt:
            end = parts
        answered = computed // ANSWER_INTERVAL * ANSWER_INTERVAL
        return [each for each in (end, answered) if each > (reused if each is end else prompt)]


class Oracle(Requests):
    """The cache, and what is written of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, [None, None, *ADAPTERS])
        self.tokens_max = options.blocks * options.block_size
        names = KvEventLoraNames()
        for name, key in ADAPTERS.items():
            names.register(types.SimpleNamespace(lora_id=key, extra_key=key), name)
            names.register(lora_id=key, lora_name=name)
        self.cache = RadixCache.create_simulated(
            page_size=self.size,
            enable_kv_cache_events=True,
            mock_allocator=Memory(),
            dynamo_kv_event_format=options.dynamo_format,
            kv_event_lora_names=names,
        )

    def run(self, requests: int) -> None:
        for number in range(1, requests + 1):
            self.serve()
            if self.rng.random() < 0.002:
                self.cache.reset()
            self.send()
            if number % TABLE_INTERVAL == 0:
                self.write(["table", self.table()])

    def serve(self) -> None:
        """A prompt is looked up and kept; its chat is kept again when it is answered, with the answer."""
        prompt, salt, adapter = self.prompt()
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(prompt[:-1], salt, adapter)))
        self.write(["request", prompt, salt, adapter, found.device_prefix_len])
        locked = found.last_device_node
        self.cache.inc_lock_ref(locked)
        self.insert(prompt, salt, adapter)
        self.send()
        self.cache.dec_lock_ref(locked)
        whole = prompt + self.tokens(self.rng.randrange(60))
        self.insert(whole, salt, adapter)
        self.keep(whole, salt, adapter)

    def insert(self, tokens: list[int], salt: str | None, adapter: str | None) -> None:
        self.cache.insert(InsertParams(key=self.key(tokens, salt, adapter), value=torch.arange(len(tokens))))
        excess = self.cache.total_size() - self.tokens_max
        if excess > 0:
            self.cache.evict(EvictParams(num_tokens=excess + self.rng.randrange(500)))

    def key(self, tokens: list[int], salt: str | None, adapter: str | None) -> RadixKey:
        return RadixKey(array("q", tokens), ADAPTERS[adapter] if adapter else None, cache_salt=salt)

    def send(self) -> None:
        events = self.cache.take_events()
        if events:
            self.write(["events", self.encoder.encode(KVEventBatch(ts=1.0, events=events, attn_dp_rank=0))])

    def table(self) -> dict[int, int]:
        """Every block of the tree, by the name that its events have."""
        recorder, found = self.cache.kv_events, {}
        nodes: list[TreeNode] = list(self.cache.root_node.children.values())
        while nodes:
            node = nodes.pop()
            seed = recorder._namespace_seed(node)
            for value in recorder._node_event_hash_values(node):
                found[namespaced_block_hash(hash_str_to_int64(value), namespace_seed=seed)] = 1
            nodes.extend(node.children.values())
        return found


def main() -> None:
    parser = make_parser()
    parser.add_argument("--dynamo-format", action="store_true")
    parser.add_argument("--state-slots", type=int, default=0, help="a hybrid model, whose states are so many at most")
    parser.add_argument("--extra-buffer", action="store_true", help="whose mode is not no_buffer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.state_slots:
        hybrid = Hybrid(options)
        hybrid.run(options.requests)
        hybrid.oracle.output.flush()
        return
    oracle = Oracle(options)
    oracle.run(options.requests)
    oracle.output.flush()


if __name__ == "__main__":
    main()

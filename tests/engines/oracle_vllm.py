"""vLLM's own KVCacheManager under mixed requests, without engine or model: what an index of its events has to equal.

    PYTHONPATH=. .venv-vllm/bin/python tests/engines/oracle_vllm.py [--requests N] [--blocks N] [--block-size 16|32]
        [--bytes-as-hashes] [--full-reports SHARE] [--states align|all [--state-groups N] [--retention N]]
        [--alone] [--seed N]
Writes records to standard output, each as its length in four bytes and msgpack: ["request", tokens, salt, adapter,
hit], where the manager found `hit` tokens of the prompt; ["events", payload] as vLLM's publisher would send then;
["table", {hash: copies}] of all blocks after every 100th request; with `--alone` ["served", answer, counts] at a
request's end, for the blocks of each group that can be found. Requests share documents, branch off each other's chats,
repeat each other, carry salts and adapters, come in chunks, run at the same time, grow token by token, and are cut off;
now and then the whole cache is reset.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections import Counter
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
if "--bytes-as-hashes" in sys.argv:
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"

import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.request import Request

from tests.engines.oracle_requests import TABLE_INTERVAL, VOCABULARY, Requests, make_parser

RUNNING_MAX = 8
CHUNK_TOKENS = 512
ADAPTERS = (None, None, None, None, "french", "legal")


class Oracle(Requests):
    """The manager, the requests that run, and what is written of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, ADAPTERS, 0.45)
        size = self.size
        self.full_reports = options.full_reports
        self.states, self.alone = options.states, options.alone
        self.chunk_tokens = max(CHUNK_TOKENS, 2 * size)
        self.scheduler = types.SimpleNamespace(  # as much of one as its rule reads
            cache_config=types.SimpleNamespace(block_size=size),
            scheduler_config=types.SimpleNamespace(long_prefill_token_threshold=0),
            block_size=size,
            hash_block_size=size,
            max_num_scheduled_tokens=self.chunk_tokens,
            mamba_partial_cache_hit=False,
            use_eagle_block_drop=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            mamba_shared_prefix_checkpoint=False,
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(size, hash_function)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=options.blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in self.layers(options).items()],
                prefix_cache_retention_interval=None if options.retention < 0 else options.retention,
            ),
            max_model_len=8192,
            scheduler_block_size=size,
            hash_block_size=size,
            enable_caching=True,
            enable_kv_cache_events=True,
            log_stats=True,
        )
        self.running: list[Request] = []

    def layers(self, options: argparse.Namespace) -> dict[str, KVCacheSpec]:
        """One of each group, in the order of the groups."""
        size = self.size
        attention = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        if not options.states:
            return {"attention": attention}
        state = MambaSpec(
            block_size=size, shapes=((2 * size,),), dtypes=(torch.float32,), mamba_cache_mode=options.states
        )
        return {**{f"state {group}": state for group in range(options.state_groups)}, "attention": attention}

    def run(self, requests: int) -> None:
        for number in range(1, requests + 1):
            self.begin(number)
            if self.alone:
                self.serve(self.running[-1])
                continue
            for _ in range(self.rng.randrange(4)):
                self.decode(self.rng.choice(self.running), self.rng.randrange(1, 24))
            while len(self.running) > self.rng.randrange(1, RUNNING_MAX):
                self.finish(self.rng.choice(self.running))
            if self.rng.random() < 0.002:
                self.reset()
            self.send()
            if number % TABLE_INTERVAL == 0:
                self.write(["table", self.table()])

    # One request

    def serve(self, request: Request) -> None:
        """To its end, with nobody beside it."""
        prompt = request.num_prompt_tokens
        self.decode(request, self.rng.randrange(1, 4 * self.size))
        whole = list(request.all_token_ids)
        self.finish(request)
        self.send()
        self.write(["served", whole[prompt:], self.groups()])

    def begin(self, number: int) -> None:
        prompt, salt, adapter = self.prompt()
        full = self.full_reports and self.rng.random() < self.full_reports
        request = Request(
            f"request-{number}",
            prompt,
            SamplingParams(max_tokens=512, extra_args={"kv_cache_report_mode": "full"} if full else None),
            None,
            lora_request=LoRARequest(adapter, 1 + ADAPTERS.index(adapter), "nowhere") if adapter else None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        self.write(["request", prompt, salt, adapter, hit])
        self.prefill(request, blocks, hit)
        self.running.append(request)

    def prefill(self, request: Request, blocks: Any, hit: int) -> None:
        """In chunks, of which each is a step of the engine; others may run between two of them."""
        first, done = True, hit
        while done < request.num_tokens:
            chunk = self.chunk(request, min(self.chunk_tokens, request.num_tokens - done), hit if first else 0)
            arguments = (hit, blocks) if first else ()
            self.manager.new_step_starts()
            while self.manager.allocate_slots(request, chunk, *arguments) is None:
                self.finish(self.running[0])
            done += chunk
            request.num_computed_tokens = done
            first = False
            self.send()
            if self.running and self.rng.random() < 0.5:
                self.decode(self.rng.choice(self.running), self.rng.randrange(1, 8))

    def chunk(self, request: Request, tokens: int, hit: int) -> int:
        """How much of that the scheduler would compute in one step, by its own rule for aligned states."""
        if self.states != "align":
            return tokens
        cut: int = Scheduler._mamba_block_aligned_split(self.scheduler, request, tokens, hit)
        assert cut > 0, "a chunk is longer than a block"
        return cut

    def decode(self, request: Request, count: int) -> None:
        for _ in range(count):
            if request not in self.running:
                return
            request.append_output_token_ids(self.rng.randrange(VOCABULARY))
            self.manager.new_step_starts()
            while self.manager.allocate_slots(request, 1) is None:
                self.finish(self.running[0])
                if request not in self.running:
                    return
            request.num_computed_tokens += 1

    def finish(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        adapter = request.lora_request.lora_name if request.lora_request else None
        self.keep(list(request.all_token_ids), request.cache_salt, adapter)

    def reset(self) -> None:
        while self.running:
            self.finish(self.running[0])
        assert self.manager.reset_prefix_cache()

    # What is asked, and what is told

    def send(self) -> None:
        events = self.manager.take_events()
        if events:
            self.write(["events", self.encoder.encode(KVEventBatch(ts=1.0, events=events, data_parallel_rank=0))])

    def groups(self) -> list[int]:
        """How many blocks of each group can be found."""
        found = Counter(map(get_group_id, self.manager.block_pool.cached_block_hash_to_block._cache))
        return [found[group] for group in range(len(self.manager.kv_cache_config.kv_cache_groups))]

    def table(self) -> dict[int | bytes, int]:
        found: Counter[int | bytes] = Counter()
        for key, blocks in self.manager.block_pool.cached_block_hash_to_block._cache.items():
            found[maybe_convert_block_hash(get_block_hash(key))] += len(blocks) if isinstance(blocks, dict) else 1
        return dict(found)


def main() -> None:
    parser = make_parser()
    parser.add_argument("--full-reports", type=float, default=0.0, help="share of requests that want all blocks told")
    parser.add_argument("--states", choices=("align", "all"), help="a hybrid model, and its mamba_cache_mode")
    parser.add_argument("--state-groups", type=int, default=3)
    parser.add_argument("--retention", type=int, default=0, help="prefix_cache_retention_interval; -1: none")
    parser.add_argument("--alone", action="store_true", help="one request after the other")
    parser.add_argument("--bytes-as-hashes", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    oracle = Oracle(options)
    oracle.run(options.requests)
    oracle.output.flush()


if __name__ == "__main__":
    main()

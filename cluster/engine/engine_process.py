"""`python -m cluster engine`: one fake engine as a process. Prints where it listens, ends with code 0 on a signal."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio

import ranvier_py
from cluster.engine.engine_metrics import MAMBA_MODES
from cluster.engine.engine_ranks import Ranks
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import TextTokenizer, load_tokenizer
from cluster.engine.kv_events import ENCODINGS, STRANGE
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.core.addresses import host_port
from ranvier_py.core.errors import leaves
from ranvier_py.proxy.conversation import awaiting
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.server import DataServer
from ranvier_py.replay.engine.engine_values import CACHES, EngineLimits
from ranvier_py.replay.hybrid.hybrid_model import HYBRID_MODELS

DEFAULT_TOKENIZER = Path(ranvier_py.__file__).parent / "data" / "tokenizer"  # wherever the package is installed

SERVER_LIMITS = ServerLimits(connections_max=16_384, in_flight_max=16_384)
"""So large that the model's own queue is the limit, as in vLLM, whose server has none."""


def parser() -> argparse.ArgumentParser:
    defaults = EngineLimits()
    result = argparse.ArgumentParser(prog="python -m cluster engine", description=__doc__)
    add = result.add_argument
    add("--listen", default="127.0.0.1:9001", metavar="HOST:PORT", help="port 0 takes a free one (%(default)s)")
    add("--name", default="", help="says who served: x-engine and system_fingerprint (HOST:PORT)")
    add("--model", default="lab-model", help="name of the model it serves (%(default)s)")
    add("--lora", action="append", default=[], metavar="NAME", help="an adapter it serves beside; may be repeated")
    add("--tokenizer", default=str(DEFAULT_TOKENIZER), metavar="DIR", help="directory, hub id, or `bytes`")
    add("--cache-tokens", type=int, default=defaults.cache_tokens, help="size of the KV cache (%(default)s)")
    add("--block-size", type=int, default=0, help="tokens of one block (vLLM's for its cache and model, mostly 16)")
    add("--cache", default=defaults.cache, choices=CACHES, help="what it keeps of a prefix (%(default)s)")
    add("--hybrid-model", default=defaults.hybrid_model, choices=HYBRID_MODELS, help="whose states (%(default)s)")
    add("--prefill-tokens-per-s", type=float, default=defaults.prefill_tokens_per_s, help="0 = instant (%(default)s)")
    add("--decode-ms", type=float, default=1000 * defaults.decode_s, help="one decode step (%(default)s)")
    add("--decode-ms-per-running", type=float, default=0.0, help="added for each decoding request (%(default)s)")
    add("--max-running", type=int, default=defaults.running_max, help="requests in work at once (%(default)s)")
    add("--max-waiting", type=int, default=defaults.waiting_max, help="queue; beyond it 503 (%(default)s)")
    add("--max-step-tokens", type=int, default=defaults.step_tokens_max, help="prefill chunk (%(default)s)")
    add("--max-model-len", type=int, default=0, help="longest prompt and answer (the cache's size)")
    add("--answer-tokens", default="40:160", metavar="LOW:HIGH", help="length of answers without max_tokens")
    add("--kv-events", default="", metavar="tcp://*:PORT", help="publish KV events there; port 0 takes a free one")
    add("--kv-replay", default="", metavar="tcp://*:PORT", help="... and tell missed ones again there")
    add(
        "--kv-encoding",
        default="map",
        choices=(*ENCODINGS, STRANGE),
        help="vLLM's now, vLLM's before 0.24, SGLang's, or what nobody knows (%(default)s)",
    )
    add("--ranks", type=int, default=1, help="data-parallel ranks behind the port, events at port + rank (%(default)s)")
    add("--kv-topic", default="", help="of the KV events")
    add("--seed", type=int, default=1, help="of the answers and of fault probabilities (%(default)s)")
    return result


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    """Make the engine's configuration. Raises ValueError if a number makes no sense."""
    low, _, high = arguments.answer_tokens.partition(":")
    lengths = (int(low), int(high or low))
    if not 1 <= lengths[0] <= lengths[1]:
        raise ValueError("--answer-tokens wants LOW:HIGH with 1 <= LOW <= HIGH")
    in_pages = arguments.cache in MAMBA_MODES  # a block of these caches has the size of a state
    own_size = HYBRID_MODELS[arguments.hybrid_model].block_tokens if in_pages else EngineLimits().block_size
    limits = EngineLimits(
        cache_tokens=arguments.cache_tokens,
        block_size=arguments.block_size or own_size,
        cache=arguments.cache,
        hybrid_model=arguments.hybrid_model,
        prefill_tokens_per_s=arguments.prefill_tokens_per_s or math.inf,
        decode_s=arguments.decode_ms / 1000,
        decode_s_per_running=arguments.decode_ms_per_running / 1000,
        running_max=arguments.max_running,
        waiting_max=arguments.max_waiting,
        step_tokens_max=arguments.max_step_tokens,
    )
    if arguments.kv_replay and not arguments.kv_events:
        raise ValueError("--kv-replay needs --kv-events")
    encoding = arguments.kv_encoding
    kv = KvEndpoints(
        arguments.kv_events, arguments.kv_replay, arguments.kv_topic, encoding, replays_topic=encoding == "map"
    )
    return EngineConfig(
        name=arguments.name,
        models=(arguments.model, *arguments.lora),
        limits=limits,
        tokens_max=arguments.max_model_len or arguments.cache_tokens,
        answer_tokens=lengths,
        seed=arguments.seed,
        kv=kv if arguments.kv_events else None,
    )


def make_engine(config: EngineConfig, tokenizer: TextTokenizer, ranks: int) -> Engine | Ranks:
    """Raises OSError if an address for KV events can't be had, ValueError for ranks that can't be."""
    if ranks < 1:
        raise ValueError("--ranks wants 1 at least")
    return Engine(config, tokenizer) if ranks == 1 else Ranks(config, tokenizer, ranks)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; 1 if the address can't be had."""
    options = parser()
    arguments = options.parse_args(argv)
    try:
        host, port = host_port(arguments.listen)
    except ValueError as error:
        options.error(f"--listen {error}")
    try:
        engine = make_engine(config_of(arguments), load_tokenizer(arguments.tokenizer), arguments.ranks)
    except (ValueError, OSError) as error:
        options.error(str(error))
    refused: list[BaseException] = []
    try:
        trio.run(run, engine, host, port)
    except* OSError as group:
        refused += leaves(group)
    if refused:
        print(f"engine: can't listen on {arguments.listen}: {refused[0]}", file=sys.stderr)
    return 1 if refused else 0


async def run(engine: Engine | Ranks, host: str, port: int) -> None:
    """Serve, print the address in one line, and end at the first signal, which cuts all streams."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve, engine, host, port)
            name = engine.engines[0].name if isinstance(engine, Ranks) else engine.name
            print(f"engine {name} listening on http://{host}:{port}", flush=True)
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()


async def serve(
    engine: Engine | Ranks,
    host: str,
    port: int,
    *,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled. `started` gets the address on which the engine listens."""
    server = DataServer(awaiting(engine.handle), SERVER_LIMITS)
    engines = engine.engines if isinstance(engine, Ranks) else (engine,)
    with ExitStack() as publishers:
        for each in engines:
            if each.kv is not None:
                publishers.enter_context(each.kv.publisher)
        async with trio.open_nursery() as nursery:
            for each in engines:
                nursery.start_soon(each.live.run)
                if each.kv is not None:
                    nursery.start_soon(each.kv.publisher.run)
            addresses = await nursery.start(server.serve, host, port)
            for each in engines:
                each.name = each.name or "{}:{}".format(*addresses[0])
            task_status.started(addresses[0])

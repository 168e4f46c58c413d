"""How does LiteLLM hold the limit of tokens that `limits` measures, with the same clients, engine and machine?

    python -m benchmarks.limits_peers [--only ours litellm redis] [--dry]

One key of 100,000 tokens a minute, asked by `limits`' clients for twice that, four fifths of them at one process, for
150 s. *ours*: nodes that gossip. *litellm*: LiteLLM's proxy, each process counting alone, as it does by default.
*redis*: the same with one Redis, in which they count together. Its keys come from a hook (`custom_auth`), which gives
the key its `tpm_limit`, since its own keys need a database. SMG 1.13 is not here: its HTTP path limits no key.

LiteLLM lives in an environment of its own: `python -m venv ~/.cache/ranvier-peers/litellm` and `pip install
'litellm[proxy]'` there; `redis-server` is Debian's.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.harness.processes import PEERS_DIR, free_port, process, wait_for_answer
from benchmarks.limits.processes import KEY, served_by, with_processes
from cluster.limits.limit_run import LimitCase

CASES = {f"{processes} processes": LimitCase(processes, loss=0.0, for_s=150.0) for processes in (1, 4)}
LIMIT = LimitCase.per_minute
KINDS = ("ours", "litellm", "redis")
LITELLM = PEERS_DIR / "litellm" / "bin"

HOOK = f"""
from litellm.proxy._types import UserAPIKeyAuth


async def user_api_key_auth(request, api_key: str) -> UserAPIKeyAuth:
    return UserAPIKeyAuth(api_key=api_key, key_alias="b", tpm_limit={LIMIT})
"""
CONFIG = """
model_list:
  - {{model_name: m, litellm_params: {{model: openai/m, api_base: "{engine}/v1", api_key: x}}}}
general_settings: {{custom_auth: limits_hook.user_api_key_auth, master_key: "{master}"}}
router_settings: {{num_retries: 0}}
"""
REDIS = """
# for counts alone: no answer is kept
litellm_settings:
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {port}, supported_call_types: []}}
"""


@contextmanager
def proxies(count: int, engine: str, folder: Path, *, redis: bool) -> Iterator[Sequence[str]]:
    """Run so many proxies in front of an engine. Yields where they take chats."""
    (folder / "limits_hook.py").write_text(HOOK)
    config = CONFIG.format(engine=engine, master=f"sk-{secrets.token_hex(24)}")
    with ExitStack() as stack:
        if redis:
            port = free_port()
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
            stack.enter_context(process(["redis-server", *options]))
            config += REDIS.format(port=port)
        file = folder / "litellm.yaml"  # beside the hook, where the proxy looks for it
        file.write_text(config)
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
        for url in urls:
            command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=CRITICAL", str(LITELLM / "litellm")]
            command += ["--config", str(file), "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
            stack.enter_context(process(command))
            wait_for_answer(f"{url}/health/liveliness")
        yield [f"{url}/v1/chat/completions" for url in urls]


async def with_proxies(case: LimitCase, seed: int, *, redis: bool) -> Mapping[str, Any]:
    """Measure so many proxies."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with TemporaryDirectory() as name:
        start = partial(proxies, case.nodes, folder=Path(name), redis=redis)
        return await served_by(start, case, seed, headers)


def release() -> str:
    program = "from importlib.metadata import version; print(version('litellm'))"
    return subprocess.run(
        [LITELLM / "python", "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def measured(only: Sequence[str], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"litellm_release": release()}
    for kind in only:
        found[kind] = {}
        for name, case in CASES.items():
            run = with_processes if kind == "ours" else partial(with_proxies, redis=kind == "redis")
            found[kind][name] = trio.run(run, case, seed)
            show_row({"kind": kind, "processes": case.nodes, **found[kind][name]})
    return found


def main() -> int:
    parser: argparse.ArgumentParser = command_line(__doc__, seed="clients and answers")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS, help="all by default")
    options = parser.parse_args()
    if not (LITELLM / "litellm").is_file():
        raise SystemExit(f"LiteLLM is not in {LITELLM}: see --help")
    result = measured(options.only, options.seed)
    show("")
    return finish("limits_peers", options, result, whole=set(options.only) == set(KINDS))


if __name__ == "__main__":
    sys.exit(main())

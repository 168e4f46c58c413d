"""Makes docs/metrics.md of what the parts of a node declare: name, kind, labels and help of each family of metrics.

The node is put together with all its parts and one engine, and never runs; a family whose labels come with requests is
declared without a series.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import trio

from cluster.local_tokenizer import local_tokenizer
from cluster.processes.children import ROOT
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import ControlPort
from ranvier_py.control.exposition import PREFIX, of_process
from ranvier_py.core.metrics import Sample
from ranvier_py.node.cluster_parts import open_cluster
from ranvier_py.node.fingerprints import load_keys
from ranvier_py.node.node import make_node, parts_of
from ranvier_py.node.parts.request_parts import RequestPath

PAGE = ROOT / "docs" / "metrics.md"
KEY = "3f" * 16 + "a7" * 16
KEYS = f"""[[key]]
id = "one"
tenant = "t"
sha256 = "{KEY}"
[[tenant]]
name = "t"
requests_per_minute = 1
"""
ENGINE = "http://127.0.0.1:1,kv_index=http://127.0.0.1:1/events,kv_events=tcp://127.0.0.1:1"
EVERYTHING = {
    "listen": "127.0.0.1:0",
    "control": "127.0.0.1:0",
    "gossip": "127.0.0.1:0",
    "backend": [ENGINE],
    "policy": "kv_score",
    "shadow": ["affinity"],
    "kv_index_backend": "redis",
    "kv_redis_url": "redis://127.0.0.1:1",
    "response_cache": True,
    "response_cache_backend": "redis",
    "client_rules": ["tools-by-name=rewrite"],
    "trusted_proxies": ["127.0.0.1"],
    "tenant_isolation": "header:X-Tenant",
    "otel_endpoint": "http://127.0.0.1:1",
}
"""Settings with which a node has all of its parts."""

HEAD = """# Metrics

What `/metrics` of the control port has, made of the node's own declarations (`make pages`). A scraper that accepts
OpenMetrics gets that, with the trace of a request in each bucket where requests are traced. With `--workers N` the
page of any worker has the series of all, each with the label `worker`: scrape one. `metric_names = "continuum"` gives
the names of Continuum Router's document its prefix.

A family that comes with requests has at most 10,000 lines; what has no room is `other`, and counted in
`ranvier_series_spilled_total`. Durations are in seconds, sizes in bytes, and a counter starts at 0 with its process.
"""


def families() -> Sequence[Sample]:
    """Return one sample of each family that a node with all its parts has, in the order of its page."""
    return trio.run(_families)


async def _families() -> Sequence[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "key").write_text(KEY)
        (place / "keys").write_text(KEYS)
        files = {
            "keys_file": place / "keys",
            "gossip_state_file": place / "state",
            "state_folder": place,
            "record_file": place / "record",
        }
        config = config_of(**EVERYTHING, cluster_key_file=place / "key", **files)
        keys, key_file = await load_keys(config)
        tokenizer = local_tokenizer(config, keys.fingerprint_secret)
        node, inbox = make_node(config, tokenizer, Random(1), keys.fingerprint_secret)
        clustering = await open_cluster(config, keys, key_file, node)
        *parts, public_port = parts_of(node, tokenizer, inbox, clustering)
        node.assemble([*parts, ControlPort(node), public_port])
        found: dict[str, Sample] = {}
        for sample in node.metrics():
            found.setdefault(sample.name, sample)
        node.part(RequestPath).upstream.close()
        clustering.port.sockets.close()
        return [*found.values()]


def page() -> str:
    return HEAD + "\n".join(lines(families())) + "\n"


def lines(found: Sequence[Sample]) -> Iterator[str]:
    yield ""
    yield "| metric | kind | labels | what it is |"
    yield "|---|---|---|---|"
    for sample in found:
        name = PREFIX + sample.name + ("_total" if sample.kind == "counter" else "")
        labels = " ".join(f"`{label}`" for label in sample.labels) + " " if sample.labels else ""
        yield f"| `{name}` | {sample.kind} | {labels}| {sample.help} |"
    for metric in of_process():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield f"| `{name}` | {metric.type} | | {metric.documentation} |"


def metrics_page() -> Mapping[Path, str]:
    return {PAGE: page()}

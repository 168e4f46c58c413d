"""A scrape of one control port shows all workers of a machine."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import httpx
import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from cluster.dns.addresses import free_port
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.exposition import render
from ranvier_py.control.worker_pages import joined
from ranvier_py.core.metrics import Histogram, Sample
from ranvier_py.node.parts.siblings import siblings_of
from tests.control.test_control_keys import Certificates
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, chat, opened
from tests.node.test_reload_of_processes import served, taken_by

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DEADLINE_S = 90


def page(count: int, accept: str) -> str:
    seconds = Histogram((0.1, 1.0))
    seconds.observe_all([0.5] * count, ["4bf92f3577b34da6a3ce929d0e0e4736"] * count, 1.0)
    samples = [
        Sample("requests", "counter", "Requests.", count, {"path": 'a{b}" c', "model": "x y"}),
        Sample("workers", "gauge", "Workers.", 2),
        Sample("queue_seconds", "histogram", "Seconds # HELP me.", seconds),
        Sample("empty", "counter", "None yet.", None, {"kind": ""}),
    ]
    return render(samples, accept)[0].decode()


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_each_family_stands_once_and_each_series_names_its_worker(accept: str) -> None:
    text = (await joined({1: page(5, accept), 0: page(3, accept)})).decode()
    assert text.endswith("# EOF\n") == bool(accept)
    families = [*(parse_openmetrics if accept else parse_text)(text)]
    assert len(families) == len({each.name for each in families}) == text.count("# TYPE ") == 4
    found = {each.name: each.samples for each in families}
    requests = next(samples for name, samples in found.items() if name.startswith("ranvier_requests"))
    assert {(each.labels["worker"], each.labels["path"], each.value) for each in requests} == {
        ("0", 'a{b}" c', 3),
        ("1", 'a{b}" c', 5),
    }
    assert [(each.labels, each.value) for each in found["ranvier_workers"]] == [
        ({"worker": "0"}, 2),
        ({"worker": "1"}, 2),
    ]
    counts = [each for each in found["ranvier_queue_seconds"] if each.name.endswith("_count")]
    assert [each.value for each in counts] == [3, 5]
    exemplars = [each.exemplar for each in found["ranvier_queue_seconds"] if each.exemplar is not None]
    assert len(exemplars) == (2 if accept else 0)


def test_siblings_are_known_by_their_ports() -> None:
    config = config_of_worker(config_of(control="127.0.0.1:9180", workers=3), 1, bytes(32))
    assert siblings_of(config) == {0: "http://127.0.0.1:9180", 2: "http://127.0.0.1:9182"}
    assert siblings_of(config_of(control="127.0.0.1:9180")) == {}
    assert siblings_of(config_of(control="127.0.0.1:0", workers=2)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [False, True], ids=["open", "with a key and by TLS of certificates"])
async def test_one_scrape_shows_the_requests_of_all_workers(keyed: bool, tmp_path: Path) -> None:
    """The authority of its clients need not have issued the port's own certificate."""
    async with opened(Lab, 1, DEADLINE_S) as place:
        file, rng = tmp_path / "ranvier.toml", Random()
        key = "a-control-key-of-some-length-1234" if keyed else ""
        (tmp_path / "key").write_text(key)
        named = f'control_key_file = "{tmp_path / "key"}"\n' if keyed else ""
        server, clients = (Certificates(tmp_path / name) for name in ("server", "clients"))
        if keyed:
            settings = server.settings("control", clients=True) | {"control_client_ca_file": clients.ca}
            named += "".join(f'{name} = "{path}"\n' for name, path in settings.items())
        context = server.context(proves=False)
        context.load_cert_chain(clients.client)
        file.write_text(f'backend = ["{place.engines[0]}"]\n{named}')
        public = free_port(["127.0.0.1"], rng)
        control = free_port(["127.0.0.1"], rng, taken_by(public))
        gossip = free_port(["127.0.0.1"], rng, taken_by(public, control))
        places = ("--listen", f"127.0.0.1:{public}", "--control", f"127.0.0.1:{control}", "--workers", "2")
        async with (
            served(place, file, *places, "--gossip", f"127.0.0.1:{gossip}", workers=2) as node,
            httpx.AsyncClient(verify=context, trust_env=False, timeout=DEADLINE_S) as scraper,
        ):
            assert all(url.startswith("https") == keyed for url in node.control)
            fields = {"authorization": f"Bearer {key}"} if keyed else {}
            while len(await by_worker(scraper, node.control[0], "ranvier_worker_up", fields)) < 2:  # noqa: ASYNC110
                await trio.sleep(BETWEEN_LOOKS_S)
            for _ in range(12):  # each on a connection of its own
                async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
                    assert (await client.post(f"{node.url}/v1/chat/completions", content=chat())).is_success
            for url in node.control:
                found = await by_worker(scraper, url, "ranvier_requests_total", fields)
                assert sum(found.values()) == 12
                assert set(await by_worker(scraper, url, "process_resident_memory_bytes", fields)) == {"0", "1"}
            own = await scraper.get(f"{node.control[1]}/metrics?own", headers=fields)
            assert "worker=" not in own.text


async def by_worker(http: httpx.AsyncClient, control: str, name: str, fields: dict[str, str]) -> dict[str, float]:
    text = (await http.get(f"{control}/metrics", headers=fields)).text
    found: dict[str, float] = {}
    for worker, number in re.findall(rf'(?m)^{name}\{{worker="(\d)".*\}} (\S+)$', text):
        found[worker] = found.get(worker, 0.0) + float(number)
    return found

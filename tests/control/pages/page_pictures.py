"""Takes the pictures of the page in the documents: a small cluster under load, with an engine that died.

    python -m tests.control.pages.page_pictures [--minutes 0.6] [--to docs/pictures]

It needs a browser (`tests/builders/browsers.py`). The page changes seldom enough that nobody takes them at each change.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import trio

from tests.builders.browsers import Browser, Tab, browser
from tests.node.access.key_lab import BLUE, RED, bearer, key_lines, keys_file
from tests.node.node_lab import ClusterLab, Node, cluster_lab, start_engine, turn

ENGINES, TURNS_MAX, PROMPTS, DEADLINE_S = 8, 6, 4, 3600.0
SPEED = {"prefill_tokens_per_s": 2500.0, "decode_s": 0.02}
CLIENTS = ("claude-cli/2.0", "opencode/1.2", "python-httpx/0.27")
TENANTS = '[[tenant]]\nname = "search"\nrequests_per_minute = 150\n[[tenant]]\nname = "support"\n'
WIDE, NARROW = (1280, 1500), (390, 1300)


@asynccontextmanager
async def scene(folder: Path, minutes: float) -> AsyncIterator[Node]:
    """A node with two peers, as it is after some minutes; half a minute ago an engine has died."""
    async with cluster_lab(folder, 0, DEADLINE_S) as place:
        started = [await start_engine(place.nursery, number, **SPEED) for number in range(ENGINES)]
        backend = [{"name": f"h100-{number}", "url": url} for number, (url, _) in enumerate(started, 1)]
        keys = keys_file(folder, key_lines(RED, tenant="search"), key_lines(BLUE, tenant="support"), TENANTS)
        nodes = []
        for name in ("router-a", "router-b", "router-c"):
            settings = {"keys_file": keys, "probe_interval_s": 1, "engine_metrics_interval_s": 1}
            nodes.append(
                await place.start(
                    node_name=name, backend=backend, policy="ttft", shadow=["affinity", "least_loaded"], **settings
                )
            )
        for number in range(14):
            place.nursery.start_soon(talk, place, nodes, Random(number))
        await trio.sleep(60 * minutes)
        started[4][1].cancel()
        await trio.sleep(30)
        yield nodes[0]


async def talk(place: ClusterLab, nodes: Sequence[Node], rng: Random) -> None:
    """Have one conversation after the other, as a client of some kind."""
    while True:
        client, key, prompt = rng.choice(CLIENTS), rng.choice((RED, RED, BLUE)), rng.randrange(PROMPTS)
        words = [f"system {prompt} " * (60 + 40 * prompt)]
        for number in range(rng.randrange(2, TURNS_MAX)):
            words += [f"question {number} {rng.random()} " * rng.randrange(4, 20), "an answer"]
            fields = {**bearer(key), "user-agent": client}
            body = {"model": "", "messages": turn(*words[:-1]), "max_tokens": rng.randrange(10, 60)}
            await place.http.post(f"{rng.choice(nodes).url}/v1/chat/completions", json=body, headers=fields)
            await trio.sleep(rng.expovariate(0.4))


async def take(started: Browser, url: str, to: Path, folder: Path) -> None:
    """Take the page light, dark with an open row some time ago, and on a telephone: as it comes, and explaining."""
    tab = await started.tab(f"{url}/", *WIDE)
    await shows(tab)
    await tab.picture(to / "page-1280-light.png")
    tab = await started.tab(f"{url}/", *WIDE, dark=True)
    await shows(tab)
    await tab.click("[data-pane=engines] tr[data-row]")
    await tab.press(",", ",")
    await tab.until("document.querySelector('main').ariaBusy === 'false'")
    await trio.sleep(2)
    await tab.value("scrollTo(0, 0)")
    await tab.picture(to / "page-1280-dark.png")
    for name, dark in (("left", False), ("right", True)):
        tab = await started.tab(f"{url}/", *NARROW, dark=dark)
        await shows(tab)
        if dark:
            await tab.press("e")
            await tab.click("dialog button.main")
            await tab.sees("by policy")
        await tab.picture(folder / f"{name}.png")
        assert tab.errors == []
    (folder / "both.html").write_text(
        '<body style="margin:0;background:#888;display:flex;gap:4px"><img src="left.png"><img src="right.png">'
    )
    both = await started.tab(f"file://{folder / 'both.html'}", 2 * NARROW[0] + 4, NARROW[1])
    await both.until("document.images.length === 2 && [...document.images].every((each) => each.complete)")
    await both.picture(to / "page-390.png")


async def shows(tab: Tab) -> None:
    """Wait until all is drawn."""
    await tab.until("document.querySelectorAll('[data-pane=hits] tr[data-row]').length > 3")
    await tab.until("document.querySelector('.map canvas')?.width > 300")
    await trio.sleep(3)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.6, help="of traffic before the pictures")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        async with scene(Path(folder), options.minutes) as node, browser(Path(folder) / "profile") as started:
            await take(started, node.control, options.to, Path(folder))


if __name__ == "__main__":
    trio.run(main)

"""The incidents of tests/node/test_incidents.py, as the page shows them: each is named within ten seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from tests.builders.browsers import BROWSER, Tab, browser
from tests.node.test_incidents import INCIDENTS, before, happening

NAMED_S = 10.0
LOOK_S = 0.1
VERDICT = "document.querySelector('[data-pane=verdict]')?.innerText ?? ''"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium, or name one in CHROMIUM")
@pytest.mark.parametrize("name", INCIDENTS)
async def test_each_incident_is_named_by_the_page_within_ten_seconds(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    named = re.compile(incident.named.partition(" +")[2])  # the severity is a colour and a sign there
    async with before(incident, tmp_path) as (scene, control), browser(tmp_path / "profile") as started:
        tab = await started.tab(f"{control}/")
        await tab.until("document.querySelectorAll('[data-pane=engines] tr[data-row]').length > 0")
        assert incident.at_start or not named.search(await verdict(tab))
        async with happening(incident, scene):
            began = trio.current_time()
            while not named.search(found := await verdict(tab)):
                assert trio.current_time() < began + NAMED_S, found
                await trio.sleep(LOOK_S)
        print(f"{name}: named after {trio.current_time() - began:.1f} s")
        assert tab.errors == []


async def verdict(tab: Tab) -> str:
    return " ".join(str(await tab.value(VERDICT)).split())

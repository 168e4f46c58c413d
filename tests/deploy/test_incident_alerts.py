"""The incidents of tests/node/test_incidents.py, as the alerts see them: each has its alert within two minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from tests.deploy.live_prometheus import SCRAPE, prometheus
from tests.deploy.promtool import needs_prometheus
from tests.deploy.test_alerts import ALERTS, GROUP, RULES
from tests.node.access.key_lab import RED, key_lines, keys_file
from tests.node.node_lab import cluster_lab
from tests.node.test_incidents import INCIDENTS, Scene, engine_process

ALERT = {
    "three_engines_die": "RanvierEngineDown",
    "a_peer_with_the_old_key": "RanvierMismatch",
    "the_wrong_tokenizer": "RanvierMismatch",
    "a_flood_of_one_tenant": "RanvierLimitReached",
    "errors_inside_200": "RanvierEngineDown",
}
FROM_THE_START = "the_wrong_tokenizer"  # a node compares how its engines tokenize as they start
SCRAPED_S = 15.0
"""Between two scrapes, in deploy/prometheus/scrape.yaml."""

FIRES_S = 120.0
SEEN_S = 30.0  # on a busy machine; ten seconds on others
DEADLINE_S = 180.0
LOOK_S = 0.5


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_alert_fires_within_two_minutes_of_what_is_seen_within_half_a_minute(name: str) -> None:
    """What it takes by its own times: to be seen, to be scraped, to be looked at, to last."""
    rule = RULES[ALERT[name]]
    assert SEEN_S + SCRAPED_S + 2 * seconds(GROUP["interval"]) + seconds(rule["for"]) < FIRES_S


def hurried(folder: Path) -> Path:
    """The alerts without the time that something has to last."""
    path = folder / "alerts.yaml"
    text = re.sub(r"(?m)^ +for: .*\n", "", ALERTS.read_text())
    path.write_text(re.sub(r"interval: \w+", f"interval: {SCRAPE}", text))
    return path


@needs_prometheus
@pytest.mark.slow
@pytest.mark.parametrize("name", INCIDENTS)
async def test_the_alert_of_an_incident_is_seen_in_half_a_minute(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    async with cluster_lab(tmp_path, engines=0, deadline_s=DEADLINE_S) as place:
        engines = [await engine_process(place, *incident.flags) for _ in range(incident.engines)]
        settings: dict[str, object] = {}
        if incident.limited:
            tenant = '[[tenant]]\nname = "acme"\nrequests_per_minute = 5\n\n'
            settings["keys_file"] = keys_file(tmp_path, tenant, key_lines(RED, tenant="acme"))
        _, url, control = await place.addressed_process(**settings)
        place.places.append((await place.http.get(f"{control}/admin/cluster")).json()["address"])
        async with (
            prometheus(tmp_path, place.http, [control], [hurried(tmp_path)]) as found,
            trio.open_nursery() as nursery,
        ):
            while not await found.numbers("ranvier_build_info"):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
            assert name == FROM_THE_START or ALERT[name] not in await found.firing()
            scene = Scene(place, engines, url, tmp_path)
            if incident.starts:
                await incident.begin(scene)
            else:
                nursery.start_soon(incident.begin, scene)
            began = trio.current_time()
            while ALERT[name] not in await found.firing():
                assert trio.current_time() < began + SEEN_S, "no alert"
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()
        place.nursery.cancel_scope.cancel()

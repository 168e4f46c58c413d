"""The incidents of tests/node/test_incidents.py, as the alerts see them: each has its alert within two minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from tests.deploy.live_prometheus import SCRAPE, prometheus
from tests.deploy.promtool import needs_prometheus
from tests.deploy.test_alerts import ALERTS, group, rules
from tests.node.test_incidents import INCIDENTS, before, happening

ALERT = {
    "three_engines_die": "RanvierEngineDown",
    "a_peer_with_the_old_key": "RanvierMismatch",
    "the_wrong_tokenizer": "RanvierMismatch",
    "a_flood_of_one_tenant": "RanvierLimitReached",
    "errors_inside_200": "RanvierEngineDown",
}
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
    rule = rules()[ALERT[name]]
    assert SEEN_S + SCRAPED_S + 2 * seconds(group()["interval"]) + seconds(rule["for"]) < FIRES_S


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
    async with (
        before(incident, tmp_path, DEADLINE_S) as (scene, control),
        prometheus(tmp_path, scene.place.http, [control], [hurried(tmp_path)]) as found,
    ):
        while not await found.numbers("ranvier_build_info"):  # noqa: ASYNC110
            await trio.sleep(LOOK_S)
        assert incident.at_start or ALERT[name] not in await found.firing()
        async with happening(incident, scene):
            began = trio.current_time()
            while ALERT[name] not in await found.firing():
                assert trio.current_time() < began + SEEN_S, "no alert"
                await trio.sleep(LOOK_S)

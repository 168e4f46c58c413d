"""The page in a real browser: keys, clicks, a node that dies, a reload. Without a browser this is skipped; what
the page asks for is in `test_page_served.py`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.builders.browsers import BROWSER, Tab, browser
from tests.node.access.key_lab import BLUE, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import ClusterLab, Lab, Node, cluster_lab, lab, opened, start_engine, turn
from tests.replay.test_page import report, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium, or name one in CHROMIUM"),
]

KEY = "the-key-of-the-port"
DEADLINE_S = 120
SOON = {"probe_interval_s": 0.2, "probe_timeout_s": 0.5, "engine_metrics_interval_s": 0.5}
ROWS = "[...document.querySelectorAll('[data-pane=engines] tr[data-row]')]"
SELECTED = "document.querySelector('[data-pane=engines] tr[aria-selected=true]')?.dataset.row"
CLIPPED = """(() => {
  const right = (each) => each.getBoundingClientRect().right;
  const isClipped = (box) => [...box.querySelectorAll('td, p, li')].some((each) => right(each) > right(box) + 1);
  return [...document.querySelectorAll('section, dialog')].filter(isClipped).map((box) => box.ariaLabel);
})()"""
BEYOND = "(each) => each.getBoundingClientRect().right > innerWidth"
MARKED = """[...new Uint32Array(document.querySelector('.strip canvas').getContext('2d')
  .getImageData(0, 0, 900, 1).data.buffer)].indexOf(0xff005ed5)"""
NO_SCROLLING = "document.documentElement.scrollWidth <= innerWidth"


@asynccontextmanager
async def seen(url: str, folder: Path, **size: Any) -> AsyncIterator[Tab]:
    """The page in a tab, which logs no error."""
    async with browser(folder) as started:
        tab = await started.tab(url, **size)
        yield tab
        assert tab.errors == []


async def rows(tab: Tab, count: int) -> None:
    await tab.until(f"{ROWS}.length === {count}")


async def test_a_key_is_asked_for_kept_for_the_tab_and_sent_in_a_field_alone(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S, control_key=KEY) as node, browser(tmp_path) as started:
        tab = await started.tab(f"{node.control}/")
        await tab.until("document.activeElement?.name === 'key'")  # it asks for a key, and what is typed goes there
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.sees("refused this key (401)")
        await tab.click("input[name=key]")
        await tab.type(KEY)
        await tab.press("Enter")
        await rows(tab, 1)
        await tab.call("Page.reload")
        await rows(tab, 1)
        assert KEY not in await tab.value("location.href + document.cookie + JSON.stringify(localStorage)")
        assert not [url for url, _ in tab.asked if KEY in url]
        sent = {fields.get("authorization") for url, fields in tab.asked if url.endswith("/stream")}
        assert f"Bearer {KEY}" in sent
        assert {each.partition(": ")[0] for each in map(status_of, tab.errors)} <= {"401"}
        other = await started.tab(f"{node.control}/")
        await other.sees("needs a key")


def status_of(error: str) -> str:
    return "401" if "401" in error else error


async def test_the_keyboard_moves_opens_filters_explains_and_helps(tmp_path: Path) -> None:
    async with lab(engines=3, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await rows(tab, 3)
        await tab.value(
            "document.querySelector('[data-pane=engines] .title').click()"
        )  # by name, whatever their states
        await tab.until("document.querySelector('[data-pane=engines] th').ariaSort === 'ascending'")
        names = await tab.value(f"{ROWS}.map((row) => row.dataset.row)")
        await tab.press("j", "j")
        assert await tab.until(SELECTED) in names  # their order follows their states
        await tab.press("k", "Enter")
        await tab.sees("counted")
        assert await tab.value(SELECTED) in names
        await tab.press("?")
        await tab.sees("10 seconds back, forward")
        await tab.press("Escape")
        await tab.until("!document.querySelector('dialog')")
        await tab.press("/")
        await tab.type(names[2])
        await rows(tab, 1)
        await tab.press("Escape", "e")
        await tab.sees("where would a request go")
        await tab.click("dialog button.main")
        await tab.sees("by policy")
        await tab.press("Escape")
        link = await tab.until(f"decodeURIComponent(location.hash).includes({json.dumps(names[2])}) && location.href")
        await tab.go("about:blank")
        await tab.go(link)  # the same view, for somebody else
        await rows(tab, 1)


async def test_who_has_a_keyboard_alone_sees_the_chosen_row_and_keeps_the_focus(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await rows(tab, 1)
        await tab.value(
            "import('/page/state.js').then(({ change, state }) => { const [row] = state.live.engines;"
            "const engines = Array.from({ length: 60 }, (_, n) => ({ ...row, name: `engine ${n}` }));"
            "change({ chosenAt: state.at, past: { panes: { engines }, of: state.at } }); })"
        )
        await rows(tab, 60)
        for key, place in (("j", 59), ("k", 20)):
            await tab.press(*key * (40 if key == "k" else 61))
            await tab.until(f"{SELECTED} === 'engine {place - (key == 'k')}'")
            top, bottom, head = await tab.value(
                "(({ top, bottom }) => [top, bottom, document.querySelector('header').offsetHeight])"
                "(document.querySelector('tr[aria-selected=true]').getBoundingClientRect())"
            )
            assert head <= top < bottom <= 900
        await tab.value("document.getElementById('help').focus()")
        await tab.press("Enter")
        await tab.sees("10 seconds back, forward")
        await tab.press("Escape")
        await tab.until("!document.querySelector('dialog')")
        assert await tab.value("document.activeElement.id") == "help"


async def test_a_decision_opens_and_files_have_what_is_shown(tmp_path: Path) -> None:
    async with (
        lab(engines=2, deadline_s=DEADLINE_S, policy="ttft", shadow=["least_loaded"]) as node,
        seen(f"{node.control}/", tmp_path / "profile") as tab,
    ):
        await rows(tab, 2)
        for number in range(3):
            await node.chat(turn(f"number {number} " * 20))
        await tab.until("document.querySelectorAll('[data-pane=decisions] tr[data-row]').length === 3")
        await tab.click("[data-pane=decisions] tr[data-row]")
        await tab.sees("← chosen")
        folder = tmp_path / "files"
        folder.mkdir()
        await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        await tab.click("[data-pane=engines] .files button:first-child")
        await tab.click("[data-pane=engines] .files button:last-child")
        await tab.click("[data-pane=decisions] .files button:first-child")
        while len([*folder.glob("*.csv"), *folder.glob("*.json")]) < 3:  # noqa: ASYNC110  # a file wakes nobody
            await trio.sleep(0.05)
        shown = json.loads((folder / "engines.json").read_text())
        names = [each["name"] for each in await node.backends()]
        assert sorted(each["name"] for each in shown) == sorted(names)
        assert (folder / "engines.csv").read_text().splitlines()[0].startswith("name,url,state")
        assert len((folder / "decisions.csv").read_text().splitlines()) == 4


async def test_each_pane_can_be_saved_as_rows_and_whole(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 3, DEADLINE_S) as place:
        node = await crowded(place)
        async with seen(f"{node.control}/", tmp_path / "profile") as tab:
            await tab.until("document.querySelectorAll('[data-pane] .files button:enabled').length === 18")
            folder = tmp_path / "files"
            folder.mkdir()
            await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
            await tab.until("document.querySelectorAll('[data-pane=hits] tr[data-row]').length > 0")
            for pane in await tab.value(
                "[...document.querySelectorAll('[data-pane]')].map((each) => each.dataset.pane)"
            ):
                for number, kind in ((1, "csv"), (2, "json")):
                    while not (folder / f"{pane}.{kind}").exists():  # a pane that grows may move it from under a click
                        await tab.click(f"[data-pane={pane}] .files button:nth-child({number})")
                        await trio.sleep(0.3)
                json.loads((folder / f"{pane}.json").read_text())
            saved = json.loads((folder / "prefixes.json").read_text())["prefixes"]
            lines = (folder / "prefixes.csv").read_text().splitlines()
            assert lines[0] == "fingerprint,parent,tokens,holders,heat,idle_s"
            assert len(lines) == len(saved) + 1 > 1
            assert {each["parent"] for each in saved} <= {"", *(each["fingerprint"] for each in saved)}


PICTURE = """(() => {
  const shown = document.querySelector('.map canvas'), copy = document.createElement('canvas');
  if (!shown?.kind) return '';
  [copy.width, copy.height] = [shown.width, shown.height];
  copy.getContext('2d').drawImage(shown, 0, 0);
  return copy.toDataURL();
})()"""
CHOSEN = "document.querySelector('#prefix code')?.innerText"
ZOOMED = "new URLSearchParams(location.hash.slice(1)).get('open') === '1'"


async def test_a_prefix_fills_the_map_by_click_and_by_key_and_gives_it_back(tmp_path: Path) -> None:
    async with lab(engines=2, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        for number in range(4):
            await node.chat(turn(f"number {number} " * 120, "well", "and then?"))
        await tab.until("document.querySelector('[data-pane=prefixes] small')?.innerText.includes('of')")
        await tab.until("document.querySelector('.map canvas')?.width > 300")
        whole = await tab.value(PICTURE)
        await tab.click(".map canvas")
        name = await tab.until(CHOSEN)
        await tab.sees("engines")
        chosen = await changed(tab, whole)
        assert not await tab.value(ZOOMED)
        await tab.click(".map canvas")
        await tab.until(ZOOMED)
        assert await tab.value(CHOSEN) == name
        await tab.until(f"location.hash.includes({json.dumps(name)})")
        zoomed = await changed(tab, chosen)
        await tab.press("Enter")  # back
        await tab.until(f"!({ZOOMED})")
        assert await changed(tab, zoomed) != whole
        await tab.press("j")
        other = await tab.until(f"{CHOSEN} !== {json.dumps(name)} && {CHOSEN}")
        await tab.press("Enter")
        await tab.until(ZOOMED)
        await tab.until(f"location.hash.includes({json.dumps(other)})")
        await tab.press("Enter", "k")
        await tab.until(f"{CHOSEN} === {json.dumps(name)}")


async def changed(tab: Tab, before: str) -> str:
    """The next picture of the map."""
    while (found := await tab.value(PICTURE)) in ("", before):  # noqa: ASYNC110  # the page wakes nobody
        await trio.sleep(0.05)
    return str(found)


async def test_a_link_to_a_time_shows_that_time_to_who_follows_it(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S, **SOON) as node, browser(tmp_path) as started:
        tab = await started.tab(f"{node.control}/")
        await rows(tab, 1)
        await trio.sleep(11)  # so that there is a time to go back to
        await tab.press("j", ",")
        await tab.until(
            "document.querySelector('main').ariaBusy === 'false' && !document.getElementById('live').disabled"
        )
        link = await tab.until("location.hash.includes('at=') && location.href")
        (engine,) = await node.backends()
        await node.http.post(f"{node.control}/admin/backends/drain", json={"name": engine["name"]})
        other = await started.tab(link)
        await rows(other, 1)
        await other.sees("ago")
        assert "drained" not in await other.value("document.querySelector('[data-pane=engines]').innerText")
        assert await other.value("location.href") == link
        await other.press("l")
        await other.sees("drained")
        assert tab.errors == other.errors == []


async def test_the_theme_button_goes_through_light_and_dark_and_is_remembered(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await rows(tab, 1)
        back, found = "getComputedStyle(document.body).backgroundColor", {}
        for name in ("light", "dark"):
            await tab.click("#theme")
            await tab.until(f"document.getElementById('theme').innerText === {json.dumps(name)}")
            found[name] = await tab.value(back)
        assert found["light"] != found["dark"]
        await tab.call("Page.reload")
        await rows(tab, 1)
        assert await tab.value("document.getElementById('theme').innerText") == "dark"
        assert await tab.value(back) == found["dark"]
        await tab.press("t")  # as the system, which is light here
        await tab.until("document.getElementById('theme').innerText === 'auto'")
        assert await tab.value(back) == found["light"]


async def test_an_engine_is_drained_by_a_click_once_that_is_confirmed(tmp_path: Path) -> None:
    async with lab(engines=2, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await rows(tab, 2)
        await tab.press("j", "Enter")
        name = await tab.until(SELECTED)
        await tab.click("[data-pane=engines] .orders button")
        await tab.sees("It gets no new requests")
        assert not any(each["draining"] for each in await node.backends())
        await tab.click("#confirm")
        await tab.sees(f"drain {name}: done")
        await tab.sees("drained")
        assert [each["name"] for each in await node.backends() if each["draining"]] == [name]
        await tab.click("[data-pane=engines] .orders button:nth-child(2)")
        await tab.until("Boolean(document.querySelector('dialog input'))")
        await tab.value("document.querySelector('dialog input').value = '2.5'")
        await tab.click("#confirm")
        await tab.sees("weight 2.5")
        assert 2.5 in [each["weight"] for each in await node.backends()]


async def test_a_dead_engine_shows_and_the_time_before_is_shown_again(tmp_path: Path) -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        url, scope = await start_engine(place.nursery, 9)
        place.engines.append(url)
        node = await place.start(**SOON)
        async with seen(f"{node.control}/", tmp_path) as tab:
            await rows(tab, 2)
            await tab.until("document.querySelector('[data-pane=engines] small').innerText.includes('2 are well')")
            await trio.sleep(14)  # so that the page knows of that time
            scope.cancel()
            await tab.sees("engine_down")
            await tab.until("document.querySelector('[data-pane=engines] small').innerText.includes('1 are well')")
            await tab.press(",")  # ten seconds back
            await tab.until("document.querySelector('[data-pane=engines] small').innerText.includes('2 are well')")
            await tab.sees("ago")
            assert "engine_down" not in await tab.value("document.querySelector('[data-pane=verdict]').innerText")
            await tab.press("l")
            await tab.sees("engine_down")


async def test_a_peer_that_dies_is_a_banner_and_so_is_a_node_that_dies(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 1, DEADLINE_S) as place:
        node = await place.start(node_name="left")
        process, _, control = await place.addressed_process(node_name="right")
        await node.sees(1)
        async with browser(tmp_path / "profile") as started:
            tab = await started.tab(f"{node.control}/")
            await tab.sees("right")
            other = await started.tab(f"{control}/")  # the first one is behind it now, and asks for nothing
            await other.sees("left")
            process.kill()
            await other.sees("does not answer")
            await tab.call("Page.bringToFront")
            await tab.until("document.getElementById('partition')?.innerText.includes('right')")
            assert tab.errors == []


async def test_what_was_shown_stays_while_a_node_that_died_is_asked_for_another_time(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 1, DEADLINE_S) as place, browser(tmp_path / "profile") as started:
        process, _, control = await place.addressed_process()
        tab = await started.tab(f"{control}/")
        await rows(tab, 1)
        process.kill()
        await tab.sees("does not answer")
        asked_before = len(tab.asked)
        await tab.press(",")
        while sum("/past?" in url for url, _ in tab.asked[asked_before:]) < 2:
            await tab.value("0")
        assert await tab.value(f"{ROWS}.length") == 1
        assert await tab.value("document.querySelector('main').ariaBusy") == "true"


async def test_of_a_thousand_tenants_the_first_are_shown_and_the_filter_finds_the_others(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await rows(tab, 1)
        await tab.value(
            "import('/page/state.js').then(({ change, state }) => { const tenant_requests = {};"
            "for (let n = 0; n < 1000; n++) tenant_requests[`t${n}`.padEnd(100, 'x')] = [1, 0, 2, 1, 1];"
            "const tenants = { needs_key: true, limited: 0, limits: {} };"
            "change({ chosenAt: state.at, past: { panes: { tenants, tenant_requests }, of: state.at } }); })"
        )
        tenants = "document.querySelectorAll('[data-pane=tenants] tr[data-row]').length"
        await tab.until(f"{tenants} === 200")
        assert "and 800 more" in await tab.value("document.querySelector('[data-pane=tenants]').textContent")
        assert await tab.value(CLIPPED) == []
        await tab.press("/")
        await tab.type("t997")
        await tab.until(f"{tenants} === 1")


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_needs_scrolling_sideways(width: int, tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 3, DEADLINE_S) as place:
        node = await crowded(place)
        async with seen(f"{node.control}/", tmp_path / "profile", width=width) as tab:
            await rows(tab, 3)
            await tab.until("document.querySelectorAll('[data-pane=hits] tr[data-row]').length > 0")
            for pane in ("engines", "decisions", "peers", "clients"):
                await tab.click(f"[data-pane={pane}] tr[data-row]")
                assert await tab.value(NO_SCROLLING), pane
            await tab.press("e")
            await tab.click("dialog button.main")
            await tab.sees("by policy")
            assert await tab.value(NO_SCROLLING)
            assert await tab.value(CLIPPED) == []


async def test_a_time_is_marked_on_the_strips_and_rows_that_were_the_same_then_stay_untouched(tmp_path: Path) -> None:
    async with lab(engines=2, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await node.chat()
        await rows(tab, 2)
        await tab.value(
            "globalThis.touched = []; const element = ({ target }) => target.closest ? target : target.parentNode;"
            "const isRow = (each) => element(each)?.closest('tbody');"
            "new MutationObserver((found) => touched.push(...found.filter(isRow).map((each) => each.type)))"
            ".observe(document.querySelector('[data-pane=engines] table'),"
            "{ subtree: true, childList: true, characterData: true, attributes: true }); 0"
        )
        await tab.value(
            "import('/page/state.js').then(({ change, state }) => { const at = state.at - 10; globalThis.touched = [];"
            "change({ chosenAt: at, past: { panes: structuredClone(state.live), of: at } }); })"
        )
        await tab.until(f"Math.abs({MARKED} - 890) < 9")
        assert await tab.value("touched") == []
        await tab.press("l")
        await tab.until(f"{MARKED} < 0")


async def test_tables_fit_into_their_panes_at_all_widths(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 3, DEADLINE_S) as place:
        node = await crowded(place)
        async with seen(f"{node.control}/", tmp_path / "profile", height=6000) as tab:
            await rows(tab, 3)
            await tab.until("document.querySelectorAll('[data-pane=hits] tr[data-row]').length > 0")
            for width in (320, 600, 751, 800, 861, 1001, 1241, 1920):
                await tab.size(width, 6000)
                assert await tab.value(CLIPPED) == [], width
                assert await tab.value(NO_SCROLLING), width


async def crowded(place: ClusterLab) -> Node:
    """A node with a peer and something in each pane."""
    node, _ = await place.cluster(2, shadow=["least_loaded"], policy="ttft", **SOON)
    for number in range(6):
        await node.chat(turn(f"number {number} " * 40, "well", "and then?"))
    return node


async def test_tenants_show_their_tokens_at_each_width(tmp_path: Path) -> None:
    named = key_lines(RED, tenant="a-team-with-a-long-name") + '[[tenant]]\nname = "a-team-with-a-long-name"\n'
    async with (
        lab(engines=1, deadline_s=DEADLINE_S, keys_file=keys_file(tmp_path, named, key_lines(BLUE))) as node,
        browser(tmp_path / "profile") as started,
    ):
        for key in (RED, RED, BLUE):
            await asked(node, bearer(key), max_tokens=7)
        for width in (1280, 390):
            tab = await started.tab(f"{node.control}/", width)
            row = "document.querySelector('[data-pane=tenants] tr[data-row=\"tenant a-team-with-a-long-name\"]')"
            await tab.until(f"{row}?.querySelector('[data-title=answer]').innerText.includes('14')")
            assert await tab.value(NO_SCROLLING)
            assert await tab.value(CLIPPED) == []
            assert tab.errors == []


async def test_a_long_name_of_a_node_leaves_the_buttons_beside_it(tmp_path: Path) -> None:
    name = "router-of-the-second-rack-in-the-north-hall.frankfurt"
    async with lab(engines=1, deadline_s=DEADLINE_S, node_name=name) as node, browser(tmp_path) as started:
        for width in (1280, 390):
            tab = await started.tab(f"{node.control}/", width)
            await tab.until(f"document.querySelector('h1')?.innerText.includes({json.dumps(name)})")
            middle = (
                "(each) => { const box = each.getBoundingClientRect(); return Math.round(box.y + box.height / 2); }"
            )
            heights = await tab.value(f"[...document.querySelectorAll('h1, #filter, #theme, #help')].map({middle})")
            assert max(heights) - min(heights) <= 2, (width, heights)
            assert await tab.value(NO_SCROLLING)
            assert (await tab.value("document.querySelector('h1').title")).startswith(f"{name}, release ")


async def test_details_of_rows_are_kept_of_the_last_ones_and_of_those_that_are_open(tmp_path: Path) -> None:
    async with lab(engines=1, deadline_s=DEADLINE_S) as node, seen(f"{node.control}/", tmp_path) as tab:
        await node.chat()
        await tab.click("[data-pane=decisions] tr[data-row]")
        await tab.sees("← chosen")
        kept = "import('/page/state.js').then(({ keepDetails, state }) => { const open = state.opened.decisions;"
        opened_ = await tab.value(kept + "return open; })")
        keys = await tab.value(
            kept + "for (let n = 0; n < 500; n++) keepDetails(`r${n}`, {}); return [...state.details.keys()]; })"
        )
        assert keys == [opened_, *(f"r{number}" for number in range(437, 500))]


async def test_a_viewer_that_may_only_read_gives_no_orders(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nid = "looker"\nsha256 = "{sha256(KEY.encode()).hexdigest()}"\nrole = "read"\n')
    async with (
        lab(engines=1, deadline_s=DEADLINE_S, control_keys_file=keys) as node,
        browser(tmp_path / "profile") as started,
    ):
        tab = await started.tab(f"{node.control}/")
        await tab.until("document.activeElement?.name === 'key'")  # it asks for a key, and what is typed goes there
        await tab.type(KEY)
        await tab.press("Enter")
        await rows(tab, 1)
        await tab.press("j", "Enter")
        await tab.sees("this one has role read")
        assert await tab.value("document.querySelectorAll('[data-pane=engines] .orders button:disabled').length") == 2


async def test_the_report_of_a_replay_can_be_read_on_a_telephone(tmp_path: Path) -> None:
    runs = [
        run(policy, p90, rate=rate) for policy, p90 in (("ttft", 1.0), ("least_loaded", 2.0)) for rate in (1.0, 2.0)
    ]
    (tmp_path / "report.html").write_text(report(*runs))
    async with seen(f"file://{tmp_path / 'report.html'}", tmp_path / "profile", width=390) as tab:
        await tab.sees("ranvier replay")
        assert await tab.value(NO_SCROLLING)
        assert await tab.value(f"[...document.querySelectorAll('figure, svg, li, p')].filter({BEYOND}).length") == 0

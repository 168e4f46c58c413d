"""Pages that name what there is in tables, and what is made of other files: current, and true of this checkout."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain
from xml.etree import ElementTree as ET

from cluster.pages.control_page import PAGE, control_page, openapi
from cluster.pages.drawings import FOLDER, pictures
from cluster.pages.metrics_page import families
from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.core.routing.placement.policies import POLICIES
from tests.documents import DOCS, tables

REMEDY = "make pages"


def test_the_page_of_the_control_port_is_what_the_parts_declare() -> None:
    assert PAGE.read_text() == control_page(), REMEDY
    routes = [(method.upper(), path) for path, found in openapi()["paths"].items() for method in found]
    assert sorted(re.findall(r"(?m)^\| `([A-Z]+) (\S+)` \|", control_page())) == sorted(routes)
    assert len(routes) > 30


def test_pictures_are_current_and_each_is_shown() -> None:
    drawn = pictures()
    for path, text in drawn.items():
        assert path.read_text() == text, REMEDY
        root = ET.fromstring(text)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        assert title.text
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(box.get("x", 0)) + float(box.attrib["width"])
            assert right <= width
            assert float(box.get("y", 0)) + float(box.attrib["height"]) <= height
    shown = set(re.findall(r"!\[[^\]]+\]\(pictures/(\S+)\)", DOCS["concepts.md"]))
    assert {path.name for path in FOLDER.glob("*.svg")} == {path.name for path in drawn} == shown


@cache
def metrics() -> frozenset[str]:
    """Names of the families of a node, as they are scraped."""
    endings = {"counter": "_total"}
    return frozenset(f"ranvier_{sample.name}{endings.get(sample.kind, '')}" for sample in families())


def cells(page: str, title: str) -> list[str]:
    """The second cell of each row of the tables whose second title is this one."""
    found = [table for table in tables(DOCS[page]) if table[0].split("|")[2].strip() == title]
    return [row.split("|")[2] for row in chain.from_iterable(table[2:] for table in found)]


def test_what_one_migrates_to_is_there() -> None:
    named = [name for cell in cells("migrating.md", "ours") for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) > 60
    assert {name for name in named if name not in {*KEYS, *metrics(), *POLICIES}} == set()


NONE_HERE = ("ranvier_py", "ranvier_limits_shadowed_total", "ranvier_recording")
"""The package, a metric of a node that has limits, and a form of traces."""


def test_every_metric_that_a_page_names_in_full_is_one() -> None:
    text = "\n".join(page for name, page in DOCS.items() if name != "metrics.md")
    named = set(re.findall(r"`(ranvier_[a-z0-9_]+)(?:\{[^`]*\})?`", text)) - {*NONE_HERE}
    assert len(named) > 30
    assert {name for name in named if not {name, f"{name}_total"} & metrics()} == set()


def test_tuning_has_the_defaults() -> None:
    defaults = Config().masked()
    rows = [row.split("|") for table in tables(DOCS["tuning.md"]) if "default" in table[0] for row in table[2:]]
    assert len(rows) > 8
    for _, _, option, shown, *_ in rows:
        names = re.findall(r"`([a-z_]+)`", option)
        known = [name for name in names if name in KEYS]
        assert known, option
        for name, text in zip(known, re.split(r", (?!\d{3})", shown.strip()), strict=True):
            value = {"off": False, "one million": 1_000_000}.get(text, text.strip("`"))
            wanted = defaults[name]
            assert json.loads(json.dumps(wanted)) == (
                value if isinstance(value, bool | int) else type(wanted)(value.replace(",", ""))
            ), option

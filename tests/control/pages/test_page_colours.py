"""The colours of the page as those see them who see fewer: words can be read, lines and shades can be distinguished.

Source: G. M. Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, at its
full strength; contrast is that of WCAG 2, distances are those of CIELAB.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import dist
from typing import NamedTuple

import pytest

from ranvier_py.core.findings import Severity
from tests.control.pages.test_page_served import PAGES

Triple = tuple[float, float, float]

EYES: dict[str, Sequence[Triple]] = {
    "all colours": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
WORDS_CONTRAST_MIN, LINES_CONTRAST_MIN = 4.5, 3.0
LINES_APART_MIN = 10.0  # side by side, 2 can be seen
SHADES_APART_MIN = 13.0  # of lightness: they are read against a scale


class Theme(NamedTuple):
    """Colours by name, and the shades of a scale from one end to the other."""

    colours: dict[str, str]
    ramp: list[str]


def themes() -> list[Theme]:
    """Light, dark as the system has it, dark as it was chosen."""
    text = (PAGES / "page.css").read_text()
    found = re.findall(r"(--back: #.*?)--ramp: ([^;]+);", text, re.DOTALL)
    return [Theme(dict(re.findall(r"--([\w-]+): (#\w+)", names)), ramp.split(", ")) for names, ramp in found]


def light(colour: str) -> list[float]:
    """The three lights of a colour, each from 0 to 1."""
    digits = colour[1:] if len(colour) > 4 else "".join(2 * each for each in colour[1:])
    values = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def seen(colour: str, eyes: Sequence[Triple]) -> Triple:
    """What is seen of it, in CIELAB: lightness first."""
    lights = light(colour)
    r, g, b = (min(1.0, max(0.0, sum(a * c for a, c in zip(row, lights, strict=True)))) for row in eyes)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y, z = 0.2126 * r + 0.7152 * g + 0.0722 * b, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    dark, bright = sorted(
        sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), light(c), strict=True)) for c in (one, other)
    )
    return (bright + 0.05) / (dark + 0.05)


def test_there_is_a_light_theme_and_one_dark_theme_in_two_places() -> None:
    bright, by_system, chosen = themes()
    assert by_system == chosen != bright
    assert contrast(bright.colours["card"], "#000") > contrast(chosen.colours["card"], "#000")


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_words_and_lines_stand_out_from_what_they_are_on(number: int) -> None:
    colours = themes()[number].colours
    for name in ("text", "soft", "down", "degraded", "notice", "well", "accent"):
        assert contrast(colours[name], colours["card"]) >= WORDS_CONTRAST_MIN, name
    assert contrast(colours["down"], colours["down-back"]) >= WORDS_CONTRAST_MIN
    assert contrast(colours["accent-text"], colours["accent"]) >= WORDS_CONTRAST_MIN
    for line in range(5):
        assert contrast(colours[f"line{line}"], colours["card"]) >= LINES_CONTRAST_MIN, line


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_lines_and_shades_can_be_distinguished_by_whoever_sees_fewer_colours(number: int, eyes: str) -> None:
    colours, ramp = themes()[number]
    for one, other in combinations(range(5), 2):
        if one % 2 == other % 2:  # each second line is dashed, which is distinguished by anybody
            colour, another = (seen(colours[f"line{each}"], EYES[eyes]) for each in (one, other))
            assert dist(colour, another) >= LINES_APART_MIN, (one, other)
    steps = [after - before for before, after in pairwise(seen(shade, EYES[eyes])[0] for shade in ramp)]
    assert min(map(abs, steps)) >= SHADES_APART_MIN
    assert len({step > 0 for step in steps}) == 1, "from dark to bright, or from bright to dark"


def test_each_second_line_of_a_chart_is_dashed_and_each_severity_has_a_sign_of_its_own() -> None:
    assert "dash: place % 2 ? [6, 3] : undefined" in (PAGES / "charts.js").read_text()
    (table,) = re.findall(r"MARKS = \{ ([^}]+) \}", (PAGES / "pane_verdict.js").read_text())
    signs = dict(re.findall(r"(\w+): '([^']+)'", table))
    assert len(set(signs.values())) == len(signs) == len(Severity) + 1

"""The pictures of docs/concepts.md, drawn as SVG: boxes, lines between them, and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from cluster.processes.children import ROOT

FOLDER = ROOT / "docs" / "pictures"

INK, PAPER, SOFT = "#1b1f24", "#ffffff", "#5b6570"
NODE, ENGINE, CLIENT, WARM, COLD = "#cfe3ff", "#d9f0d3", "#eceff2", "#ffd9a8", "#f3f4f6"
"""Fills. The words in them have the same meaning, so that nobody needs the colours."""

LINE_HEIGHT, FONT = 16, "font-family='Helvetica, Arial, sans-serif'"


@dataclass
class Picture:
    """A canvas with a title, which is what a screen reader reads."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, fill: str, words: str = "") -> None:
        self.shapes.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='4' fill='{fill}' stroke='{INK}'/>"
        )
        lines = words.split("\n")
        first = y + height / 2 - (len(lines) - 1) * LINE_HEIGHT / 2 + 4
        for number, line in enumerate(lines if words else ()):
            self.words(x + width / 2, first + number * LINE_HEIGHT, line, anchor="middle")

    def words(self, x: float, y: float, text: str, *, anchor: str = "start", soft: bool = False) -> None:
        style = f"{FONT} font-size='12' text-anchor='{anchor}' fill='{SOFT if soft else INK}'"
        self.shapes.append(f"<text x='{x:g}' y='{y:g}' {style}>{escape(text)}</text>")

    def line(
        self, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False, arrow: bool = True
    ) -> None:
        style = " stroke-dasharray='5 4'" if dashed else ""
        head = " marker-end='url(#head)'" if arrow else ""
        self.shapes.append(
            f"<line x1='{start[0]:g}' y1='{start[1]:g}' x2='{end[0]:g}' y2='{end[1]:g}' stroke='{INK}'{style}{head}/>"
        )

    def svg(self) -> str:
        head = (
            "<marker id='head' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
            f"<path d='M 0 0 L 8 4 L 0 8 z' fill='{INK}'/></marker>"
        )
        size = f"viewBox='0 0 {self.width} {self.height}' width='{self.width}' height='{self.height}'"
        lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' role='img' {size}>",
            f"<title>{escape(self.title)}</title>",
            f"<defs>{head}</defs>",
            f"<rect width='{self.width}' height='{self.height}' fill='{PAPER}'/>",
            *self.shapes,
            "</svg>\n",
        ]
        return "\n".join(lines)


def cluster() -> Picture:
    """Clients, nodes, engines; every node reaches every engine, and nodes gossip."""
    picture = Picture(720, 300, "Clients reach any node by one name; every node reaches every engine; nodes gossip")
    clients = [(20, 40 + 80 * number) for number in range(3)]
    nodes = [(290, 40 + 80 * number) for number in range(3)]
    engines = [(570, 20 + 65 * number) for number in range(4)]
    for (x, y), (to_x, to_y) in zip(clients, nodes, strict=True):
        picture.line((x + 110, y + 20), (to_x, to_y + 20))
    for x, y in nodes:
        for to_x, to_y in engines:
            picture.line((x + 130, y + 20), (to_x, to_y + 20))
    for x, y in nodes[:2]:
        picture.line((x + 40, y + 40), (x + 40, y + 80), dashed=True)
        picture.line((x + 90, y + 80), (x + 90, y + 40), dashed=True)
    for number, (x, y) in enumerate(clients):
        picture.box(x, y, 110, 40, CLIENT, f"client {number + 1}")
    for number, (x, y) in enumerate(nodes):
        picture.box(x, y, 130, 40, NODE, f"node {number + 1}")
    for number, (x, y) in enumerate(engines):
        picture.box(x, y, 130, 40, ENGINE, f"engine {number + 1}")
    picture.words(20, 20, "one DNS name, any node")
    picture.words(355, 275, "dashed: gossip, UDP and TCP 7946, encrypted", anchor="middle", soft=True)
    picture.words(355, 291, "fingerprints, loads, removals; never prompts or tokens", anchor="middle", soft=True)
    return picture


TURNS: Sequence[tuple[str, Sequence[tuple[str, int, bool]]]] = (
    ("turn 1", (("system and tools", 220, False), ("question 1", 90, False))),
    (
        "turn 2",
        (("system and tools", 220, True), ("question 1", 90, True), ("answer 1", 110, True), ("question 2", 90, False)),
    ),
    ("another chat", (("system and tools", 220, True), ("its question", 110, False))),
)


def prefixes() -> Picture:
    """What of each prompt an engine holds already."""
    picture = Picture(720, 250, "What an engine computed for one prompt it need not compute again for the next")
    for row, (name, messages) in enumerate(TURNS):
        y, x = 40 + 60 * row, 120
        picture.words(20, y + 22, name)
        for words, width, is_held in messages:
            picture.box(x, y, width, 36, WARM if is_held else COLD, words)
            x += width
    picture.box(120, 214, 24, 16, WARM)
    picture.words(152, 227, "held by the engine: no prefill")
    picture.box(380, 214, 24, 16, COLD)
    picture.words(412, 227, "computed now, learned by the node")
    picture.words(120, 24, "a prompt, from its beginning; only an equal beginning is reused", soft=True)
    return picture


CANDIDATES: Sequence[tuple[str, float, float, str]] = (
    ("engine 1", 2.4, 0.2, "holds most, but much waits there"),
    ("engine 2", 0.3, 0.7, "holds the system prompt: chosen"),
    ("engine 3", 0.1, 1.9, "idle, holds nothing"),
)
SECOND = 140
"""Width of a second."""


def placement() -> Picture:
    """Seconds to the first token at each engine: what waits, and what is to be computed."""
    picture = Picture(720, 220, "A request goes where its first token is predicted soonest: waiting plus prefill")
    for row, (name, waiting, prefill, words) in enumerate(CANDIDATES):
        y = 36 + 50 * row
        picture.words(20, y + 20, name)
        picture.box(100, y, round(SECOND * waiting), 30, CLIENT, "waiting" if waiting >= 0.5 else "")
        end = 100 + round(SECOND * waiting)
        picture.box(end, y, round(SECOND * prefill), 30, COLD, "prefill" if prefill >= 0.5 else "")
        picture.words(end + round(SECOND * prefill) + 8, y + 20, words, soft=True)
    for second in range(4):
        picture.words(100 + SECOND * second, 200, f"{second} s", anchor="middle", soft=True)
        picture.line((100 + SECOND * second, 180), (100 + SECOND * second, 186), arrow=False)
    picture.line((100, 180), (100 + SECOND * 4, 180))
    picture.words(100, 22, "seconds until the first token, as predicted at each engine", soft=True)
    return picture


PATH = ("read\nthe request", "recognise\nthe chat", "choose\nan engine", "relay\nthe answer", "learn\nit")


def path() -> Picture:
    """What a node does for one request, in order."""
    picture = Picture(720, 150, "The path of a request through a node")
    for number, words in enumerate(PATH):
        x = 20 + 140 * number
        picture.box(x, 40, 112, 50, NODE, words)
        if number + 1 < len(PATH):
            picture.line((x + 112, 65), (x + 140, 65))
    picture.words(160, 115, "keys, limits, names of models before it", soft=True)
    picture.words(440, 115, "another engine if nothing was sent yet", soft=True)
    picture.words(580, 132, "and gossip it to the peers", soft=True)
    return picture


def pictures() -> Mapping[Path, str]:
    """Return each picture by its file."""
    return {FOLDER / f"{draw.__name__}.svg": draw().svg() for draw in (cluster, prefixes, placement, path)}

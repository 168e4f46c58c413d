"""Serves the page at `/`: static files, which reveal nothing and need no key, and what they ask for, which needs one.

Rules: the browser runs nothing but these files (`POLICY`), and the page sends the key that is typed into it in a field
of its requests, never in a URL. The files are read once, at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType

from ranvier_py.control.pages.feed import STEP_S, Feed
from ranvier_py.control.pages.sibling_panes import AGO, ANSWER_S, HISTORY, PATH, Ask
from ranvier_py.core.errors import BadRequest, NotFound
from ranvier_py.core.history.series import SECONDS
from ranvier_py.node.asked import JSON, Asked, ControlAnswer, Route
from ranvier_py.node.part import Handler, Node
from ranvier_py.node.parts.siblings import answers_of

LINES = "application/x-ndjson"
KINDS = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "mjs": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)
"""Content types of what is served, by the ends of names; no other file is."""

POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FIELDS = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)
SHELL, FILE, VENDORED = "/", "/page/<file>", "/page/vendor/<file>"
OPEN = (SHELL, FILE, VENDORED)
"""Routes without a key."""

INDEX = "index.html"
STREAM_S_MAX = 24 * 3600


class WebPage:
    """See the module."""

    def __init__(self, node: Node) -> None:
        self.feed = Feed(lambda: node.parts, node.faults, siblings_of(node))
        here = files(__package__)
        self._files, self._vendored = read(here), read(here / "vendor")

    def routes(self) -> Mapping[str, Handler]:
        whole = {"seconds": {"type": "integer", "minimum": 1, "maximum": STREAM_S_MAX}}
        ago = {AGO: {"type": "integer", "minimum": 0, "maximum": SECONDS}}
        kinds = tuple(dict.fromkeys(KINDS.values()))
        return {
            f"GET {SHELL}": Route(lambda _: self._file(self._files, INDEX), "The page", kinds=kinds[:1]),
            f"GET {FILE}": Route(
                lambda asked: self._file(self._files, asked.path["file"]), "A file of the page", kinds=kinds
            ),
            f"GET {VENDORED}": Route(
                lambda asked: self._file(self._vendored, asked.path["file"]), "A library of the page", kinds=kinds
            ),
            "GET /admin/page/stream": Route(
                self._stream, "All that the page shows, then what changes, for ever or some seconds", None,
                query=whole, kinds=(LINES,),
            ),
            "GET /admin/page/past": Route(self._past, "What the page showed so many seconds ago", query=ago),
            f"GET {PATH}": Route(
                self._worker, "What this worker alone has served, now or earlier, for the pages of others",
                query={**ago, HISTORY: {"type": "string"}},
            ),
        }  # fmt: skip

    def _file(self, known: Mapping[str, tuple[bytes, str]], name: str) -> ControlAnswer:
        if name not in known:
            raise NotFound(f"the page has no file {name[:64]!r}")
        content, kind = known[name]
        return ControlAnswer(content, kind=kind, fields=FIELDS)

    def _stream(self, asked: Asked) -> ControlAnswer:
        seconds = asked.number("seconds", 0, above=0) if "seconds" in asked.query else None
        if seconds is not None and seconds > STREAM_S_MAX:
            raise BadRequest(f"seconds must be at most {STREAM_S_MAX}")
        hello = {"role": asked.role, "caller": asked.caller, "step_s": STEP_S, "seconds": SECONDS}
        fields = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return ControlAnswer(self.feed.lines(hello, seconds, key=asked.bearer()), kind=LINES, fields=fields)

    async def _past(self, asked: Asked) -> ControlAnswer:
        return ControlAnswer(await self.feed.past(asked.number(AGO, 0), key=asked.bearer()), kind=JSON)

    async def _worker(self, asked: Asked) -> ControlAnswer:
        if AGO in asked.query:
            return ControlAnswer(await self.feed.own_past(asked.number(AGO, 0)), kind=JSON)
        made = self.feed.own_history() if HISTORY in asked.query else await self.feed.own()
        return ControlAnswer(made, kind=JSON)


def siblings_of(node: Node) -> Ask:
    async def ask(path: str, key: str) -> Mapping[int, bytes]:
        return await answers_of(node.config, path, key, timeout_s=ANSWER_S)

    return ask


def read(folder: Traversable) -> dict[str, tuple[bytes, str]]:
    """Return the files that may be served of a folder, with their content types, by name."""
    ends = {each.name: each.name.rpartition(".")[2] for each in folder.iterdir() if each.is_file()}
    return {name: ((folder / name).read_bytes(), KINDS[end]) for name, end in ends.items() if end in KINDS}

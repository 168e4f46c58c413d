"""The pages that people read: README.md for a first reading, docs/ for operators, and the pages that these link to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from ranvier_py.core.engine_cache.calibration.bias_findings import BIASES
from tests.house import ROOT, everything, files, imports_of, module_of, nodes_of

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
OPERATORS = "\n".join([README, *DOCS.values()])
"""All that an operator reads, as one text."""

PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in ("node_modules", "dist") for part in path.relative_to(ROOT).parts)
)
"""Every page of the repository."""

MAKERS_OF_FINDINGS = ("Finding", "of_engine")

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(text: str) -> str:
    """A page without its blocks between fences."""
    return re.sub(r"(?ms)^```.*?^```\n", "", text)


def anchors(text: str) -> set[str]:
    """What links can lead to within a page: its headings, as GitHub names them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tables(text: str) -> list[list[str]]:
    """The rows of each table."""
    return [block.splitlines() for block in re.findall(r"(?m)(?:^\|.*\n)+", prose(text))]


CITATION = re.compile(r"\b(PU|PX|CR|CX|R|M)(\d+)[a-z]?\b|_(pu|px|cr|cx)(\d+)(?=_)")
NAMED_TEST = re.compile(r"\b(test_\w+)(?:\.py)?::(\w+)")


def cited(text: str) -> set[str]:
    """The rules of docs/sources.md that a text or a name in it cites."""
    return {"".join(filter(None, found)).upper() for found in CITATION.findall(text)}


@cache
def defined_in_tests() -> dict[str, set[str]]:
    """What each file of tests defines, by the name of the file."""
    return {path.stem: set(_defined_in(nodes_of(path))) for path in files("tests") if path.name.startswith("test_")}


def _defined_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def missing_tests(text: str) -> list[str]:
    """Of the tests that a text names as file::name, those that do not exist."""
    return [
        f"{file}::{name}" for file, name in NAMED_TEST.findall(text) if name not in defined_in_tests().get(file, ())
    ]


INVARIANT = re.compile(
    r"(?s)\bInvariants?(?: \([^)]+\))?:\s(.*?)(?=\n\n|\n? *\b(?:Invariants?|Rules?|Bounds?|Cost|Source)\b|\Z)"
)


def invariants() -> Iterator[tuple[str, str]]:
    """(module, text) of each invariant that a docstring of the package states."""
    for path in files("ranvier_py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for text in INVARIANT.findall(ast.get_docstring(node) or ""):
                    yield module_of(path), text


def is_tested(module: str, invariant: str) -> bool:
    """Whether it names tests, all of which exist and get to its module by their imports."""
    named = re.findall(r"\b(test_\w+)\.py", invariant)
    return (
        bool(named) and all(module in _imported_by().get(name, ()) for name in named) and not missing_tests(invariant)
    )


@cache
def _imported_by() -> dict[str, set[str]]:
    """The modules that each file of tests imports, itself or through others."""
    found = {module_of(path): {module for _, module in imports_of(path)} for path in everything()}
    known: dict[str, set[str]] = {}
    for path in files("tests"):
        known[path.stem], waiting = set(), [module_of(path)]
        while waiting:
            for module in found.get(waiting.pop(), ()):
                if module not in known[path.stem]:
                    known[path.stem].add(module)
                    waiting.append(module)
    return known


def kinds_of_findings() -> set[str]:
    """The kinds that the parts of a node find: what `Finding` and its like are first given, and those of biases."""
    found = {kind for kind, _, _ in BIASES.values()}
    for path in (*files("ranvier_py/core"), *files("ranvier_py/node")):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS_OF_FINDINGS:
                (first, *_) = node.args
                found |= {str(first.value)} if isinstance(first, ast.Constant) else set()
    return found

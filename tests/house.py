"""The house in numbers: `make house` prints them, `test_tidy.py` holds them. One function for each rule."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from gc import freeze
from pathlib import Path
from types import CodeType

from tests.rehearsed_changes import rehearsed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ranvier_py"
TOPS = ("ranvier_py", "cluster", "benchmarks", "tests")

LINES_MAX = {"ranvier_py": 40_000, "cluster": 11_000, "benchmarks": 5_000, "tests": 46_000}
"""The goals. `make house` says by how much they are missed."""
ROOT_MODULES_MAX = 4
FOLDER_MODULES_MAX = 20
PRIVATE_LINES_MAX = 40
ROWS_SHOWN_MAX = 40
DOCSTRING_LINES_MAX = 8
BY_PLACE_MAX = 5
ATTRIBUTES_MAX = 14
METHODS_MAX = 24

LARGE_CLASSES = {
    "BlockCache": "a model of vLLM's allocator: free blocks, references and names change with each request's blocks",
    "Call": "one slot for what each stage of a request finds",
    "EngineBatch": "a model of one engine's step: who runs, waits and decodes changes at once, and is copied whole",
    "GapMachine": "a state machine: what it has of a stream, and what it waits for, change together",
    "Membership": "SWIM: probes, suspicions and what is passed on read and change one clock and one table",
    "Prompt": "a record of what one pass over a body has found",
    "Pull": "a state machine: the stages of one copy of a peer's table",
    "RedisAnswers": "one protocol with one server: its connection's state decides about each of its calls",
    "Residency": "an index: its maps name the same blocks, and each event changes all of them",
    "Rows": "a table in columns: one array for each",
    "SharedIndex": "an index: its maps name the same blocks, and each command changes all of them",
    "StateTree": "Marconi's tree: insertions, splits and evictions keep the sums over its nodes",
}
"""Classes that may have more attributes or methods, and why: at most twelve. What derives from one is measured by what
it adds."""
MADE_BY_PLACE = {
    "Opened": "of every packet; what the seal reads stands in its order",
    "Note": "of every body; made beside `new(Note, …)`, with the same fields",
}
"""Values with more fields that are made by their order, and why."""

LARGE_CLASSES_MAX = 12
LARGE_CLASSES_LEFT = 2
"""Others that have more. It only falls."""

ALLOWED = {
    "": (),
    "core": (),
    "core.prompts": ("core",),
    "core.answers": ("core", "core.prompts"),
    "core.mesh": ("core",),
    "core.tracing": ("core",),
    "core.access": ("core", "core.mesh", "core.prompts", "core.answers"),
    "core.response_cache": ("core", "core.mesh", "core.prompts", "core.answers"),
    "core.clients": ("core", "core.mesh", "core.prompts"),
    "core.routing": ("core", "core.mesh", "core.access", "core.prompts", "core.answers"),
    "core.engine_cache": ("core", "core.mesh", "core.prompts", "core.answers", "core.routing"),
    "core.shadows": ("core", "core.prompts", "core.answers", "core.routing", "core.engine_cache"),
    "core.tokenize": ("core", "core.prompts", "core.answers", "core.routing", "core.engine_cache"),
    "core.peer": (
        *("core", "core.mesh", "core.access", "core.clients", "core.response_cache"),
        *("core.routing", "core.engine_cache"),
    ),
    "supervision": ("core",),
    "proxy": ("core", "supervision"),
    "io": ("core", "supervision", "proxy.transport"),
    "config": ("core", "proxy", "io"),
    "node": ("", "core", "supervision", "config", "proxy", "io"),
    "control": ("core", "supervision", "config", "proxy", "node"),
    "replay": ("", "core", "io.tokenizer"),
    "reporter": ("core", "supervision", "io"),
    "commands": ("", "core", "config"),
    "commands.run_serve": ("commands", "core", "config", "io", "control", "node"),
    "commands.live_report": ("commands", "core", "config", "node"),
    "commands.run_check": ("commands", "commands.live_report"),
    "commands.run_config": ("commands", "commands.live_report", "core", "config"),
    "commands.run_status": ("commands", "control"),
    "commands.run_explain": ("commands", "control", "config"),
    "commands.run_clients": ("commands", "replay"),
    "commands.run_lint": ("commands", "config", "replay"),
    "commands.run_replay": ("replay",),
    "commands.run_reporter": ("commands", "reporter"),
    "cli": ("", "core", "commands"),
    "__main__": ("cli",),
}
"""What each package may import from the others, lowest first. Inside itself each may import freely, in no circle."""

OLD_WORDS = frozenset(
    """
    told tell tells telling heard hear hears hearing hearsay said say says saying news letter letters
    flight flights depart departed departs departure land landed landing lands going
    lesson lessons sheaf sheaves teacher taught teach truth truthing boot boots pace paces way ways
    spot spots parked lot stem stems donor donors faded circle company ledger ledgers holdings ear ears posted poster
    """.split()  # noqa: SIM905  # a list of words reads better than a list of strings
)
"""DESIGN's table of words, left column: what the field has a standard term for. `in_flight` is the field's own."""

FOREIGN = frozenset({"stem", "ParkingLot", "tell"})
"""Of pathlib, trio and msgpack."""

GERUNDS_THAT_ARE_NONE = frozenset({"ring", "keyring", "outgoing", "incoming", "ping", "setting", "finding"})

TIMING = re.compile(r"\d\s?(us|µs|ns|microseconds)\b|\b([Cc]osts?|[Tt]akes)\b[^.\n]{0,40}\d\s?ms\b")
"""What a docstring says of speed: that is for benchmarks to say."""


NAMED_TUPLE = frozenset({"_replace", "_asdict", "_fields", "_make"})
"""Public names of named tuples."""


@cache
def tree_of(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(), filename=str(path))
    freeze()  # it stays: no collection of garbage shall look through all trees so far for each new one
    return tree


@cache
def nodes_of(path: Path) -> Sequence[ast.AST]:
    """Every node of a file's tree: a dozen rules look at them all."""
    return tuple(ast.walk(tree_of(path)))


@cache
def files(top: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / top).rglob("*.py")))


def everything() -> tuple[Path, ...]:
    return tuple(path for top in TOPS for path in files(top))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return {module_of(path): path for path in files("ranvier_py")}


def lines_of(top: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files(top))


# --- loops ----------------------------------------------------------------------------------------------------------


def loops(*packages: str) -> Iterator[tuple[str, str]]:
    """(module, qualified name) of every coroutine that goes round: `while`, `async for`, or `for` over `count()`."""
    for module, path in modules().items():
        if any(is_in(module, f"ranvier_py.{package}") for package in packages):
            yield from ((module, name) for name, node in _coroutines(tree_of(path)) if any(_loops_in(node)))


def with_call_in_loops(module: str, name: str, called: str) -> CodeType:
    """This coroutine alone, with one more call as the first thing that each round of its loops does."""
    (found,) = [node for each, node in _coroutines(ast.parse(modules()[module].read_text())) if each == name]
    for loop in list(_loops_in(found)):
        loop.body[:0] = ast.parse(f"{called}()").body
    alone = ast.fix_missing_locations(ast.Module([found], []))
    return compile(alone, f"{module} with {called}", "exec", annotations.compiler_flag, dont_inherit=True)


def _coroutines(scope: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{node.name}".removeprefix(".")
            if isinstance(node, ast.AsyncFunctionDef):
                yield name, node
            yield from _coroutines(node, name)


def _loops_in(function: ast.AST) -> Iterator[ast.While | ast.For | ast.AsyncFor]:
    """Without those of functions inside."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        is_counting = isinstance(node, ast.For) and ast.unparse(node.iter).startswith("count(")
        if isinstance(node, ast.While | ast.AsyncFor) or is_counting:
            yield node
        yield from _loops_in(node)


# --- metrics --------------------------------------------------------------------------------------------------------

HELP_WORDS_MIN = 6
LEANING = re.compile(r"(Of|In|Such|Others|The same|The others|These|Those|They|Their|Its?|Also|Again)\b|\.\.\.|…")
"""How a text begins that only its neighbour explains."""


def help_texts() -> Iterator[tuple[Path, int, str]]:
    """What Prometheus shows beside each metric, one line alone."""
    for path in files("ranvier_py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("counter", "gauge", "histogram") and node.args:
                yield from _texts_in(path, node.args[0])
            elif isinstance(node, ast.FunctionDef) and any(_makes_samples(inner) for inner in ast.walk(node)):
                for statement in node.body[ast.get_docstring(node) is not None :]:
                    yield from (
                        (path, line, text) for path, line, text in _texts_in(path, statement) if text[-1:] == "."
                    )


def leans(text: str) -> bool:
    return LEANING.match(text) is not None


def _texts_in(path: Path, node: ast.AST) -> Iterator[tuple[Path, int, str]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield path, inner.lineno, inner.value


def _makes_samples(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "Sample"


def help_that_does_not_stand_alone() -> list[str]:
    return [
        f"{short(path)}:{line}: {text}"
        for path, line, text in help_texts()
        if len(text.split()) < HELP_WORDS_MIN or leans(text)
    ]


# --- imports --------------------------------------------------------------------------------------------------------


@cache
def imports_of(path: Path) -> Sequence[tuple[int, str]]:
    """(line, module) of everything imported, for types alone as well; `from package import module` names the module."""
    return tuple(_imports_in(path))


def _imports_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules() else base


def is_in(module: str, package: str) -> bool:
    return package in ("", module) or module.startswith(package + ".")


def package_of(module: str) -> str:
    """The longest name in ALLOWED that this module is or lies in."""
    inside = module.removeprefix("ranvier_py").removeprefix(".")
    return max((name for name in ALLOWED if is_in(inside, name)), key=len)


def import_edges() -> Counter[tuple[str, str]]:
    """How often each package imports from each other one."""
    found: Counter[tuple[str, str]] = Counter()
    for path in files("ranvier_py"):
        own = package_of(module_of(path))
        for _, module in imports_of(path):
            if module.partition(".")[0] == "ranvier_py" and package_of(module) != own:
                found[own, package_of(module)] += 1
    return found


def imports_not_allowed() -> list[str]:
    found = []
    for path in files("ranvier_py"):
        own = package_of(module_of(path))
        for line, module in imports_of(path):
            if module.partition(".")[0] == "ranvier_py" and package_of(module) != own and not may_import(own, module):
                found.append(f"{short(path)}:{line}: {own} imports {module}")
    return found


def may_import(own: str, module: str) -> bool:
    """Inside the core a name of the table means that room alone; from outside, `core` means all of it."""
    if own.startswith("core."):
        return package_of(module) in ALLOWED[own]
    inside = module.removeprefix("ranvier_py").removeprefix(".")
    return any(is_in(inside, name) if name else not inside for name in ALLOWED[own])


def circles_in_the_table() -> list[str]:
    names = list(ALLOWED)
    return [
        f"{name} may import {other}, which stands below it"
        for index, name in enumerate(names)
        for other in ALLOWED[name]
        if package_of(f"ranvier_py.{other}") not in names[:index]
    ]


def imports_between_io_modules() -> list[str]:
    """An io module stands alone: what two of them need is a third thing, in the core or passed in."""
    return [
        f"{short(path)}:{line}: imports {module}"
        for path in files("ranvier_py/io")
        for line, module in imports_of(path)
        if module.startswith("ranvier_py.io.")
    ]


# --- names ----------------------------------------------------------------------------------------------------------


def class_names_used_twice() -> list[str]:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for path in files("ranvier_py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(short(path))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1]


def module_names_used_twice() -> list[str]:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for path in files("ranvier_py"):
        if not path.name.startswith("__"):
            where[path.name].append(short(path))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1]


def modules_named_by_a_gerund() -> list[str]:
    last = {path: path.stem.rpartition("_")[2] for path in files("ranvier_py")}
    return [short(path) for path, word in last.items() if word.endswith("ing") and word not in GERUNDS_THAT_ARE_NONE]


def classes_named_by_a_gerund() -> list[str]:
    """A class is a thing: what it does is its methods' to say. Those of tests, which misbehave in one way, are free."""
    return [
        f"{short(path)}:{node.lineno}: {node.name}"
        for path in everything()
        if "tests" not in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        and (last := words_of(node.name)[-1]).endswith("ing")
        and last not in GERUNDS_THAT_ARE_NONE
    ]


def words_of(identifier: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", identifier)]


@cache
def old_words_in(identifier: str) -> list[str]:
    if identifier.startswith("__"):
        return []
    words = [] if identifier in FOREIGN else words_of(re.sub(r"(?i)in_?flight", "", identifier))
    return [word for word in words if word in OLD_WORDS]


def old_words() -> Counter[tuple[str, str]]:
    """(file, identifier) of every use of a word that the field has a better one for."""
    found: Counter[tuple[str, str]] = Counter()
    for path in everything():
        if path == Path(__file__):
            continue
        for identifier in identifiers(nodes_of(path)):
            if old_words_in(identifier):
                found[short(path), identifier] += 1
    return found


@cache
def naming_fields(kind: type[ast.AST]) -> Sequence[str]:
    return [field for field in kind._fields if field in ("id", "attr", "name", "arg", "asname", "module", "rest")]


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that these give or use."""
    for node in nodes:
        for field in naming_fields(type(node)):
            value = getattr(node, field)
            if isinstance(value, str):
                yield from value.split(".")
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs


# --- classes --------------------------------------------------------------------------------------------------------

NO_STATE = frozenset("NamedTuple TypedDict Protocol Enum IntEnum StrEnum Flag IntFlag BaseModel".split())  # noqa: SIM905
"""Bases of what holds no state of a running node."""


@cache
def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Every class of the package by its name, of which there is one."""
    found = [(path, node) for path in files("ranvier_py") for node in nodes_of(path)]
    return {node.name: (path, node) for path, node in found if isinstance(node, ast.ClassDef)}


def bases_of(node: ast.ClassDef) -> list[str]:
    named = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [ast.unparse(base).rpartition(".")[2] for base in named]


def decorated_by(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def holds_state(node: ast.ClassDef) -> bool:
    """Whether it is neither a frozen value, nor options, nor a set of counters."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    counted = [each.value for each in fields if isinstance(each.value, ast.Call)]
    made = [ast.unparse(each.func) for each in counted]
    is_counters = bool(fields) and len(made) == len(fields) and {*made} <= {"counter", "gauge", "histogram"}
    return not (is_counters or "frozen=True" in decorated_by(node) or NO_STATE.intersection(bases_of(node)))


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Fields, slots, and what any method sets on itself; with those of our own bases, but for listed ones."""
    bases = [base for base in bases_of(node) if base in classes() and base not in LARGE_CLASSES]
    found = set().union(*(attributes_of(classes()[base][1]) for base in bases))
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and "dataclass" in decorated_by(node):
            if "ClassVar" not in ast.unparse(each.annotation):
                found.add(ast.unparse(each.target))
        elif isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__":
            found |= {inner.value for inner in ast.walk(each.value) if isinstance(inner, ast.Constant)}
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.args.args:
            found |= {each.name} if "cached_property" in decorated_by(each) else _set_on(each.args.args[0].arg, each)
    return found


def _set_on(owner: str, function: ast.AST) -> set[str]:
    return {
        inner.attr
        for inner in ast.walk(function)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == owner
    }


def methods_of(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def large_classes() -> dict[str, str]:
    """Classes that hold state and have more attributes or methods than they should, by name; the largest first."""
    sizes = {
        name: (len(attributes_of(node)), len(methods_of(node)), short(path))
        for name, (path, node) in classes().items()
        if holds_state(node)
    }
    return {
        name: f"{attributes:3} attributes {methods:3} methods  {name} in {path}"
        for name, (attributes, methods, path) in sorted(sizes.items(), key=lambda size: size[1], reverse=True)
        if attributes > ATTRIBUTES_MAX or methods > METHODS_MAX
    }


def large_classes_not_listed() -> list[str]:
    return [row for name, row in large_classes().items() if name not in LARGE_CLASSES]


def made_by_place() -> list[str]:
    """Where a value of more than BY_PLACE_MAX fields is made by their order: no type warns of two that changed."""
    made = [
        (path, node, ast.unparse(node.func).rpartition(".")[2])
        for path in files("ranvier_py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and len(node.args) > 0
    ]
    return [
        f"{short(path)}:{node.lineno}: {name} of {count} fields"
        for path, node, name in made
        if (count := sum(map(_places, node.args))) > BY_PLACE_MAX
        and name in classes()
        and name not in MADE_BY_PLACE
        and any(isinstance(each, ast.AnnAssign) for each in classes()[name][1].body)
    ]


def _places(argument: ast.expr) -> int:
    inner = argument.value if isinstance(argument, ast.Starred) else None
    return len(inner.elts) if isinstance(inner, ast.Tuple) else 1


# --- sizes ----------------------------------------------------------------------------------------------------------


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def longest_functions() -> list[tuple[int, str]]:
    found = [
        (body_lines(node), f"{short(path)}:{node.lineno} {node.name}")
        for path in everything()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(found, reverse=True)


def longest_files() -> list[tuple[int, str]]:
    return sorted(((len(path.read_text().splitlines()), short(path)) for path in everything()), reverse=True)


def root_modules() -> list[str]:
    return [path.name for path in files("ranvier_py") if path.parent == PACKAGE]


def crowded_folders() -> list[str]:
    sizes = Counter(path.parent for top in ("ranvier_py", "cluster", "benchmarks") for path in files(top))
    return [f"{short(folder)}: {size} modules" for folder, size in sizes.items() if size > FOLDER_MODULES_MAX]


# --- prose and tests ------------------------------------------------------------------------------------------------


def timings_in_docstrings() -> list[str]:
    found = []
    for path in files("ranvier_py"):
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                claim = TIMING.search(node.value.value)
                if claim is not None:
                    found.append(f"{short(path)}:{node.lineno}: {claim.group()}")
    return found


def long_docstrings() -> list[str]:
    """A module states its rule and its bounds in few lines: what explains one branch stands at that branch."""
    lines = {path: len((ast.get_docstring(tree_of(path)) or "").splitlines()) for path in files("ranvier_py")}
    return [f"{short(path)}: {count} lines" for path, count in lines.items() if count > DOCSTRING_LINES_MAX]


def private_lines_in_tests() -> list[str]:
    """Lines of tests that touch a private attribute of something else than `self` or `cls`."""
    found = {
        f"{short(path)}:{node.lineno}"
        for path in files("tests")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in NAMED_TUPLE
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    return sorted(found)


def sleeps_in_tests() -> list[str]:
    return [
        f"{short(path)}:{node.lineno}"
        for path in files("tests")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "sleep"
    ]


# --- the page -------------------------------------------------------------------------------------------------------


def page() -> Iterator[str]:
    for top in TOPS:
        lines = lines_of(top)
        verdict = "" if lines <= LINES_MAX[top] else f"  {lines - LINES_MAX[top]:,} too many"
        yield f"{top:12}{lines:8,} lines of {LINES_MAX[top]:,} in {len(files(top))} files{verdict}"
    yield from section("lines by package", [f"{lines_of(folder):7,}  {folder}" for folder in packages()])
    yield from section("longest functions", [f"{lines:4}  {name}" for lines, name in longest_functions()[:8]])
    yield from section("longest files", [f"{lines:4}  {name}" for lines, name in longest_files()[:8]])
    edges = sorted(import_edges().items())
    yield from section("imports between packages", [f"{count:4}  {own} -> {other}" for (own, other), count in edges])
    yield from section("imports that the table forbids", imports_not_allowed() + circles_in_the_table())
    yield from section("imports between io modules", imports_between_io_modules())
    yield from section("modules at the root, more than four", root_modules()[ROOT_MODULES_MAX:])
    yield from section("folders of more than 20 modules", crowded_folders())
    yield from section("class names used twice", class_names_used_twice())
    yield from section("module names used twice", module_names_used_twice())
    yield from section("gerunds", modules_named_by_a_gerund() + classes_named_by_a_gerund())
    yield from section(
        f"classes of more than {ATTRIBUTES_MAX} attributes or {METHODS_MAX} methods", large_classes_not_listed()
    )
    yield from section(f"values of more than {BY_PLACE_MAX} fields that are made by their order", made_by_place())
    yield from section("such classes that may be, and why", [f"{name}: {why}" for name, why in LARGE_CLASSES.items()])
    old = [f"{count:4}  {name} in {path}" for (path, name), count in old_words().most_common()]
    yield from section("old words", old)
    yield from section("timing claims in docstrings", timings_in_docstrings())
    yield from section(f"modules' docstrings of more than {DOCSTRING_LINES_MAX} lines", long_docstrings())
    yield from section("help of metrics that does not stand alone", help_that_does_not_stand_alone())
    yield from section(f"private lines in tests, of {PRIVATE_LINES_MAX}", private_lines_in_tests())
    yield from section("sleeps in tests", sleeps_in_tests())
    yield from section("files touched by rehearsed changes, and how many may be", rehearsed())


def packages() -> list[str]:
    depth = len(ROOT.parts) + 3
    return sorted({short(path.parent) for top in TOPS for path in files(top) if len(path.parent.parts) <= depth})


def section(title: str, rows: list[str]) -> Iterator[str]:
    yield f"\n{title}: {len(rows) or 'none'}"
    yield from ("  " + row for row in rows[:ROWS_SHOWN_MAX])
    if len(rows) > ROWS_SHOWN_MAX:
        yield f"  … and {len(rows) - ROWS_SHOWN_MAX} more"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")

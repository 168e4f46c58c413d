"""The rules of the house that a linter does not know: layers, sizes, no waiting in the core, no state in modules."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import documents, house
from tests.documents import ROOT
from tests.house import (
    body_lines,
    everything,
    files,
    imports_of,
    module_of,
    modules,
    nodes_of,
    package_of,
    short,
    tree_of,
)

SHIPPED = files("ranvier_py")
CORE = files("ranvier_py/core")
OURS = [*SHIPPED, *files("cluster"), *files("benchmarks")]

FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 650
FUNCTION_LINES_MAX = 60

READERS_OF_CONFIG = {"config", "node", "commands", "commands.run_serve"}
"""Everybody else gets just the values he needs."""

LIBRARIES = {
    "quart": ("control_port",),
    "quart_trio": ("control_port",),
    "werkzeug": ("control_port",),
    "hypercorn": ("control_server",),
    "prometheus_client": ("exposition",),
    "transformers": ("tokenizer", "templates"),
    "tokenizers": ("tokenizer", "templates"),
    "huggingface_hub": ("tokenizer",),
    "httpcore": ("engine_asker", "engine_poller"),
    "httpx": (
        "control_client",
        "run_lint",
        "run_status",
        "router_link",
        "sse_source",
        "kubernetes_api",
        "otlp_sender",
    ),
    "zmq": ("zmq_sockets",),
    "redis": ("redis_pool",),
    "dns": ("dns_lookups",),
    "yaml": ("yaml_file",),
    "cryptography": ("seal", "certificates"),
    "msgpack": ("frame", "event_frames", "tokenize_frames", "answer_frames", "redis_entries"),
    "pydantic": ("config_model", "discovery_settings", "config_loader", "config_values", "model_tables"),
}
"""Files that may import a foreign library, by name."""

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


def offences(paths: Sequence[Path], rule: Callable[[Path], Iterator[tuple[int, str]]]) -> list[str]:
    return [f"{short(path)}:{line}: {what}" for path in paths for line, what in rule(path)]


def test_packages_import_only_what_the_table_allows() -> None:
    assert house.imports_not_allowed() == []
    assert house.circles_in_the_table() == []


def test_the_root_of_the_package_has_few_modules_and_no_folder_many() -> None:
    assert len(house.root_modules()) <= house.ROOT_MODULES_MAX
    assert house.crowded_folders() == []


def test_names_mean_one_thing() -> None:
    assert house.class_names_used_twice() == []
    assert house.module_names_used_twice() == []


def test_no_module_and_no_class_is_named_by_a_gerund() -> None:
    assert house.modules_named_by_a_gerund() == []
    assert house.classes_named_by_a_gerund() == []


def test_words_that_the_field_has_a_term_for_are_gone() -> None:
    assert house.old_words() == Counter()


@pytest.mark.parametrize(
    ("identifier", "found"),
    [("told_at", ["told"]), ("EngineTruth", ["truth"]), ("in_flight_max", []), ("Flight", ["flight"]), ("always", [])],
)
def test_the_search_for_old_words_finds_what_it_should(identifier: str, found: list[str]) -> None:
    assert house.old_words_in(identifier) == found


def test_docstrings_leave_speed_to_the_benchmarks() -> None:
    assert house.timings_in_docstrings() == []


def test_the_help_of_a_metric_can_be_read_alone() -> None:
    """Prometheus and Grafana show one line: no neighbour explains it."""
    assert len(list(house.help_texts())) > 500
    assert house.help_that_does_not_stand_alone() == []


def test_no_io_module_imports_another() -> None:
    assert house.imports_between_io_modules() == []


def test_tests_reach_for_public_names() -> None:
    assert len(house.private_lines_in_tests()) <= house.PRIVATE_LINES_MAX


def test_the_package_imports_nothing_of_the_lab_the_tests_or_the_benchmarks() -> None:
    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for line, module in imports_of(path):
            if module.partition(".")[0] in ("cluster", "tests", "benchmarks"):
                yield line, f"imports {module}"

    assert offences(SHIPPED, rule) == []


def test_imports_have_no_cycle() -> None:
    graph = {
        name: [module for _, module in imports_of(path) if module in modules()] for name, path in modules().items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_only_the_composition_reads_the_configuration() -> None:
    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for line, module in imports_of(path):
            if module == "ranvier_py.config.config_model" and package_of(module_of(path)) not in READERS_OF_CONFIG:
                yield line, "imports the configuration"

    assert offences(SHIPPED, rule) == []


def test_each_foreign_library_has_its_file() -> None:
    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for line, module in imports_of(path):
            library = module.partition(".")[0]
            if library in LIBRARIES and path.stem not in LIBRARIES[library]:
                yield line, f"imports {library}"

    assert offences(SHIPPED, rule) == []


def test_nothing_in_the_core_waits() -> None:
    waiting = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)

    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for node in nodes_of(path):
            if isinstance(node, waiting):
                yield node.lineno, type(node).__name__

    assert offences(CORE, rule) == []


def test_nothing_in_the_core_iterates_over_a_set() -> None:
    """Its order is another one in each process: a simulation would not replay."""

    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for node in nodes_of(path):
            iterated = getattr(node, "iter", None)
            if isinstance(iterated, ast.Set | ast.SetComp) or called(iterated) in ("set", "frozenset"):
                yield iterated.lineno, "iterates over a set"

    assert offences(CORE, rule) == []


def called(node: ast.AST | None) -> str:
    """Name of the function that this calls; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def module_tables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the mutable values bound at module level."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if not isinstance(node.value, MUTABLE) and called(node.value) not in MUTABLE_CALLS:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def is_constant(name: str) -> bool:
    return name == name.upper() or name == "__all__"


def changes(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Where one of these names is changed in place."""
    for node in ast.walk(tree):
        changed: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in names:
            yield changed.lineno, f"changes {changed.id}"


def test_modules_hold_no_state() -> None:
    """A table that nothing changes is a constant, and is named like one."""

    def rule(path: Path) -> Iterator[tuple[int, str]]:
        tree = tree_of(path)
        tables = list(module_tables(tree))
        yield from ((line, f"{name} is mutable and no constant") for line, name in tables if not is_constant(name))
        yield from changes(tree, {name for _, name in tables})
        yield from ((node.lineno, "global") for node in ast.walk(tree) if isinstance(node, ast.Global))

    assert offences(OURS, rule) == []


def test_there_is_no_lock() -> None:
    """Core calls are atomic because they do not wait: whoever needs a lock has broken that."""

    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for node in nodes_of(path):
            if called(node) in ("Lock", "RLock", "StrictFIFOLock", "Semaphore", "Condition"):
                yield node.lineno, called(node)  # type: ignore[attr-defined]

    assert offences(SHIPPED, rule) == []


def test_functions_and_files_stay_small() -> None:
    def rule(path: Path) -> Iterator[tuple[int, str]]:
        lines = len(path.read_text().splitlines())
        if lines > (TEST_FILE_LINES_MAX if "tests" in path.parts else FILE_LINES_MAX):
            yield 1, f"{lines} lines"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = body_lines(node)
                if length > FUNCTION_LINES_MAX:
                    yield node.lineno, f"{node.name} has {length} lines"

    assert offences(everything(), rule) == []


def test_a_class_that_holds_state_is_one_thing() -> None:
    """What moves together, and what ends before the rest does, is a thing of its own."""
    assert len(house.large_classes_not_listed()) <= house.LARGE_CLASSES_LEFT, house.large_classes_not_listed()
    assert len(house.LARGE_CLASSES) <= house.LARGE_CLASSES_MAX
    assert house.LARGE_CLASSES.keys() - house.large_classes().keys() == set(), "listed without need"


def test_a_value_of_many_fields_is_made_by_their_names() -> None:
    assert house.made_by_place() == []


def test_the_measure_of_classes_finds_what_it_should() -> None:
    source = """
@dataclass
class Engine(Rows):
    first: int = 0
    second: ClassVar[int] = 0
    def __init__(self, other):
        self.third, other.fourth = 1, 2
        for self.fifth in other: self.sixth += 1
    @property
    def seventh(self): return self.eighth
    @cached_property
    def ninth(self): return 1
"""
    (found,) = ast.parse(source).body
    assert isinstance(found, ast.ClassDef)
    assert house.holds_state(found)
    assert house.attributes_of(found) == {"first", "third", "fifth", "sixth", "ninth"}
    assert house.methods_of(found) == {"__init__", "seventh", "ninth"}


@pytest.mark.parametrize(
    "source",
    ["class A(NamedTuple):\n a: int", "@dataclass(frozen=True)\nclass A:\n a: int", "class A:\n a: int = counter('')"],
)
def test_values_and_counters_hold_no_state(source: str) -> None:
    (found,) = ast.parse(source).body
    assert isinstance(found, ast.ClassDef)
    assert not house.holds_state(found)


def test_every_module_has_a_docstring() -> None:
    silent = [str(short(path)) for path in OURS if not ast.get_docstring(tree_of(path))]
    assert silent == []


def test_a_module_states_its_rule_and_bounds_in_at_most_eight_lines() -> None:
    assert house.long_docstrings() == []


def test_nothing_is_left_to_do() -> None:
    marks = tuple(first + second for first, second in (("TO", "DO"), ("FIX", "ME"), ("XX", "X")))

    def rule(path: Path) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(mark in line for mark in marks):
                yield number, line.strip()

    assert offences(everything(), rule) == []


def test_names_of_test_files_are_unique() -> None:
    """So that a name on the command line means one file."""
    names = [path.name for path in files("tests") if path.name.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("cache = {}", [(1, "cache")]),
        ("TABLE: dict[str, int] = dict(a=1)", [(1, "TABLE")]),
        ("PAIR = (1, 2)", []),
        ("def f():\n    seen = []", []),
    ],
)
def test_the_search_for_state_finds_what_it_should(source: str, found: list[tuple[int, str]]) -> None:
    assert list(module_tables(ast.parse(source))) == found


KEPT_BYTES_MAX = 8 << 20
"""Of one file of tests; a body of the largest kind, and a copy of it."""


def test_no_file_of_tests_keeps_large_bodies_from_its_collection_on(request: pytest.FixtureRequest) -> None:
    """Each process of a run collects all files, and keeps what their tables and parameters are until its end."""
    kept = defaultdict[str, dict[int, int]](dict)
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        call = getattr(item, "callspec", None)  # a test without parameters has none
        kept[item.path.name] |= texts_in(call.params if call is not None else ())
    for module in {item.module for item in request.session.items if isinstance(item, pytest.Function)}:
        kept[Path(str(module.__file__)).name] |= texts_in(list(vars(module).values()))
    sizes = {name: sum(texts.values()) for name, texts in kept.items()}
    assert {name: size >> 20 for name, size in sizes.items() if size > KEPT_BYTES_MAX} == {}


def texts_in(value: object) -> dict[int, int]:
    """The length of each text in a value, by its identity."""
    if isinstance(value, bytes | str):
        return {id(value): len(value)}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {text: length for each in inner for text, length in texts_in(each).items()}


@pytest.mark.parametrize("change", ["T[1] = 2", "del T[1]", "T.update(a=1)", "def f():\n    T.pop(1)", "T[1] += 1"])
def test_the_search_for_changes_finds_what_it_should(change: str) -> None:
    assert len(list(changes(ast.parse(change), {"T"}))) == 1
    assert list(changes(ast.parse(change), {"U"})) == []


def test_every_invariant_names_its_tests() -> None:
    last = (ROOT / "ARCHITECTURE.md").read_text().partition("## Invariants")[2]
    stated = re.findall(r"(?m)^\d+\. .*\n(?:   .*\n)*", last)
    assert len(stated) == 10
    assert [each for each in stated if "`tests/" not in each] == []
    found = list(documents.invariants())
    assert len(found) == sum(path.read_text().count("Invariant") for path in house.files("ranvier_py")) > 80
    assert [(module, text) for module, text in found if not documents.is_tested(module, text)] == []


def test_an_invariant_whose_test_is_none_or_of_another_room_is_found() -> None:
    owners = "ranvier_py.core.routing.owners"
    assert documents.is_tested(owners, "nothing is lost (test_owners.py).")
    for wrong in ("", "test_owner.py", "test_owners.py::test_nothing", "test_owners.py, test_dns.py"):
        assert not documents.is_tested(owners, f"nothing is lost ({wrong}).")
    assert documents.INVARIANT.findall("A. Invariants: a == b; c.\nBound: d. Invariant (one): e") == ["a == b; c.", "e"]

"""Reads files of backends: ours in TOML or YAML, and SMG's manifest in JSON.

Rules: a file is taken whole or not at all, and each problem has its line. A file without a list of backends is one that
is being written. Of a manifest, workers of one half of a request (prefill, decode) and of gRPC are left out and named:
this node sends whole requests over HTTP. Bounds: FILE_BYTES_MAX; YAML_BYTES_MAX, since PyYAML takes far longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.config_values import BackendSpec, backend_fields
from ranvier_py.config.toml_file import FILE_BYTES_MAX, YAML_SUFFIXES, parse_toml, read_text
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.backend import NAME_CHARS_MAX
from ranvier_py.core.routing.wanted.found_backend import FoundBackend

YAML_BYTES_MAX = 1024 * 1024
PROBLEMS_MAX = 20  # with more of them the file is another one
MANIFEST_VERSION = 1
WHOLE = ("regular", "", None)
"""Types of SMG's workers that take whole requests."""

HALVES = ("prefill", "decode", "encode")
KNOWN = frozenset(("id", "url", "worker_type", "bootstrap_port", "kv_connector"))
ABOUT = ("worker_type", "bootstrap_port", "kv_connector")


class BackendFile(NamedTuple):
    """What a file names. `left_out`: what of it can't be used here, in words."""

    found: Sequence[FoundBackend[BackendSpec]]
    left_out: Sequence[str] = ()


class FileValues(NamedTuple):
    """What stands in a file: its values, and the lines of places such as `backend[0].url`."""

    values: Any
    lines: Mapping[str, int]


def read_backend_file(path: Path) -> BackendFile:
    """Read a file. Raises ConfigError with all problems, each with its line."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        written = read_json(path)
        return of_manifest(path, written)
    if suffix in YAML_SUFFIXES:
        from ranvier_py.config.yaml_file import plain, read_yaml  # noqa: PLC0415  # PyYAML, which few files need

        yaml = read_yaml(path, YAML_BYTES_MAX)
        lines = dict[str, int]()
        written, problems = (
            FileValues(plain(yaml.tree, "", lines) if yaml.tree is not None else {}, lines),
            yaml.problems,
        )
    else:
        toml = parse_toml(read_text(path, FILE_BYTES_MAX), str(path))
        written, problems = FileValues(toml.values, toml.lines), toml.problems
    if problems:
        raise ConfigError(problems)
    return of_ours(path, written)


def read_json(path: Path) -> FileValues:
    text = read_text(path, FILE_BYTES_MAX)
    try:
        values = json.loads(text, object_pairs_hook=once_each)
    except json.JSONDecodeError as error:
        raise ConfigError([f"{path}:{error.lineno}: not JSON: {error.msg}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from error
    return FileValues(values, dict(lines_of_workers(text)))


def once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is written twice in one object")
    return found


def lines_of_workers(text: str) -> Iterator[tuple[str, int]]:
    """Yield in which line each worker of a manifest begins: an object two brackets deep."""
    depth, number, line, is_text, escaped = 0, 0, 1, False, False
    for character in text:
        if character == "\n":
            line += 1
        if is_text:
            escaped, is_text = character == "\\" and not escaped, character != '"' or escaped
        elif character == '"':
            is_text = True
        elif character in "{[":
            depth += 1
            if depth == 3 and character == "{":
                yield f"workers[{number}]", line
                number += 1
        elif character in "}]":
            depth -= 1


class FileProblems:
    """Collects problems, each with its place."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self._path, self._lines = path, lines
        self.found: list[str] = []

    def add(self, at: str, why: str) -> None:
        line = self._lines.get(at) or self._lines.get(at.rpartition(".")[0]) or self._lines.get(at.partition("[")[0])
        if len(self.found) < PROBLEMS_MAX:
            self.found.append(f"{self._path}{f':{line}' if line else ''}: {at}: {why}")

    def check(self) -> None:
        if self.found:
            raise ConfigError(self.found)


def of_ours(path: Path, written: FileValues) -> BackendFile:
    """Return the backends of a file in our form. Raises ConfigError."""
    values, problems = written.values, FileProblems(path, written.lines)
    entries = values.get("backend") if isinstance(values, dict) else None
    if not isinstance(entries, list):
        raise ConfigError([f"{path}: has no list of backends: is it being written?"])
    for name in sorted(set(values) - {"backend"}):
        problems.add(name, "no such key: only backend is")
    found: list[FoundBackend[BackendSpec]] = []
    for index, entry in enumerate(entries):
        spec = spec_at(f"backend[{index}]", lambda entry=entry: typed(entry), problems)  # type: ignore[misc]
        if spec is not None and spec.kv_index:
            problems.add(f"backend[{index}].kv_index", "is read when a node starts, and can't be set here")
        elif spec is not None:
            with_key = spec_at(f"backend[{index}].api_key_file", spec.with_key_read, problems)
            found.append((with_key or spec).found)
    check_twice([(f"backend[{index}]", each.spec) for index, each in enumerate(found)], problems)
    problems.check()
    return BackendFile(found)


def typed(entry: Any) -> BackendSpec:
    """Return one backend, a table or «URL,weight=2». Raises ConfigError."""
    if isinstance(entry, dict):
        return read_backend(entry, is_operators_file=True)
    if not isinstance(entry, str):
        raise ConfigError(["must be a table or a text such as URL,weight=2"])
    try:
        return BackendSpec.model_validate(backend_fields(entry))
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def spec_at(at: str, make: Callable[[], BackendSpec], problems: FileProblems) -> BackendSpec | None:
    try:
        return make()
    except ConfigError as error:
        for problem in error.problems:
            name, colon, why = problem.partition(": ")
            is_field = colon and name.isidentifier()
            problems.add(f"{at}.{name}" if is_field else at, why if is_field else problem)
        return None


def check_twice(specs: Sequence[tuple[str, BackendSpec]], problems: FileProblems) -> None:
    for what in ("url", "label"):
        first: dict[str, str] = {}
        for at, spec in specs:
            value = getattr(spec, what)
            if first.setdefault(value, at) != at:
                problems.add(at, f"{value} is the {what if what == 'url' else 'name'} of {first[value]} as well")


def of_manifest(path: Path, written: FileValues) -> BackendFile:
    """Return the backends of SMG's manifest. Raises ConfigError."""
    values, problems = written.values, FileProblems(path, written.lines)
    if not isinstance(values, dict) or not isinstance(values.get("workers"), list):
        raise ConfigError([f"{path}: has no list of workers: is it being written?"])
    if values.get("version") != MANIFEST_VERSION:
        raise ConfigError([f"{path}: version must be {MANIFEST_VERSION}"])
    found: list[tuple[str, FoundBackend[BackendSpec]]] = []
    left_out: list[str] = []
    for index, worker in enumerate(values["workers"]):
        at = f"workers[{index}]"
        if why := worker_problem(worker):
            problems.add(at, why)
            continue
        if unknown := sorted(set(worker) - KNOWN):
            left_out.append(f"{at}: {', '.join(unknown)} not known, ignored")
        if why := worker_of_no_use(worker):
            left_out.append(f"{at} {worker['id']}: {why}")
            continue
        fields = {"url": worker["url"], "name": worker["id"] if fits_as_name(worker["id"]) else ""}
        spec = spec_at(at, lambda fields=fields: read_backend(fields), problems)  # type: ignore[misc]
        if spec is not None:
            about = tuple((name, str(worker[name])) for name in ABOUT if worker.get(name) is not None)
            found.append((at, FoundBackend(spec, about=about)))
    check_twice([(at, each.spec) for at, each in found], problems)
    problems.check()
    return BackendFile([each for _, each in found], left_out)


def worker_problem(worker: Any) -> str:
    """Return why an entry is no worker; "" if it is one."""
    if not isinstance(worker, dict):
        return "must be an object"
    for name in ("id", "url"):
        if not isinstance(worker.get(name), str) or not worker[name]:
            return f"{name} must be a text"
    kind = worker.get("worker_type")
    if kind not in (*WHOLE, *HALVES):
        return "worker_type must be regular, prefill, decode or encode"
    port = worker.get("bootstrap_port")
    if port is not None and (type(port) is not int or not 0 < port < 65536):
        return "bootstrap_port must be a port"
    return ""


def worker_of_no_use(worker: Mapping[str, Any]) -> str:
    kind = worker.get("worker_type")
    if kind not in WHOLE:
        return f"left out: it serves the {kind} half of requests, and this node sends whole ones"
    scheme = worker["url"].partition("://")[0].lower()
    return "left out: gRPC is not spoken here" if scheme in ("grpc", "grpcs") else ""


def fits_as_name(text: str) -> bool:
    return len(text) <= NAME_CHARS_MAX and all("!" <= character <= "~" for character in text)

"""docs/control-api.md: every route of the control port, made of the same declarations as its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from cluster.local_tokenizer import local_tokenizer
from cluster.processes.children import ROOT
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import OPEN_PATHS, ControlPort, role_for
from ranvier_py.control.openapi import document
from ranvier_py.node.node import make_node, parts_of
from ranvier_py.node.reload import Reloads

PAGE = ROOT / "docs" / "control-api.md"
HEAD = """\
# The control port's API

Made by `make pages` of what the parts of a node declare. A node serves the same as an OpenAPI 3.1 document, for tools,
at `GET /openapi.json`. Keys and their roles: [access](access.md#keys-of-the-control-port); what the answers mean:
[operating](operating.md#the-control-port), and the pages that are named there.

    curl -s http://127.0.0.1:9180/openapi.json

Errors have the form `{"error": {"message", "type", "param", "code"}}` with a status of 400 to 499, or 503 where
something is not possible now. A member with a star is needed.
"""


def openapi() -> Mapping[str, Any]:
    """Return the document of a node with all its parts, of which nothing runs."""
    key = bytes(32)
    config = config_of(listen="127.0.0.1:0", control="127.0.0.1:0")
    tokenizer = local_tokenizer(config, key)
    node, inbox = make_node(config, tokenizer, Random(1), key)
    node.assemble([ControlPort(node), Reloads(node, config, None, 0), *parts_of(node, tokenizer, inbox)])
    return document(node, role_for, OPEN_PATHS)


def control_page() -> str:
    """Return the page: a table for each part."""
    found = openapi()
    tables: dict[str, list[str]] = {}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            tables.setdefault(operation["tags"][0], []).append(row(method.upper(), path, operation))
    titles = ["| request | role | what it does | takes |", "|---|---|---|---|"]
    sections = [
        "\n".join([f"## {part.replace('_', ' ').capitalize()}", "", *titles, *rows])
        for part, rows in sorted(tables.items())
    ]
    return "\n\n".join([HEAD.rstrip(), *sections]) + "\n"


def row(method: str, path: str, operation: Mapping[str, Any]) -> str:
    role = operation.get("x-role", "none")
    takes = ", ".join([*members_of_body(operation), *members_of_query(operation)])
    cells = [f"`{method} {path}`", role, operation["summary"], takes]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def members_of_body(operation: Mapping[str, Any]) -> Iterator[str]:
    for kind in operation.get("requestBody", {}).get("content", {}).values():
        schema = kind.get("schema", {})
        for name, member in schema.get("properties", {}).items():
            yield named(name, member, needed=name in schema.get("required", ()))


def members_of_query(operation: Mapping[str, Any]) -> Iterator[str]:
    for each in operation.get("parameters", ()):
        if each["in"] == "query":
            yield named(f"?{each['name']}", each["schema"], needed=bool(each.get("required")))


def named(name: str, schema: Mapping[str, Any], *, needed: bool) -> str:
    kind = schema.get("type", "")
    shown = f"`{name}`{'*' if needed else ''}"
    return f"{shown} ({', '.join(kind) if isinstance(kind, list) else kind})" if kind else shown

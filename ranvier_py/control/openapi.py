"""The OpenAPI 3.1 document of a control port, made of the routes that the parts of its node declare.

Rule: each route is in it, with the role that it needs (`x-role`). Of a `Route` it has what it does, the members of its
body and its query; of a plain handler the first sentence of its docstring, if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ranvier_py.node.asked import Asked, Route
from ranvier_py.node.part import Node

PLACE = re.compile(r"<(\w+)>")
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
REFUSED = {
    "description": "refused, or not possible now",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def document(node: Node, role_for: Callable[[str, str], str], open_paths: Iterable[str]) -> dict[str, Any]:
    """Return the document. `role_for`: the role that a method and path need; `open_paths` need no key."""
    paths: dict[str, dict[str, Any]] = {}
    opened = dict.fromkeys(open_paths)
    for part in node.parts:
        for declared, handler in part.routes().items():
            method, path = declared.split(" ")
            route = handler if isinstance(handler, Route) else Route(handler)
            operation = operation_of(declared, route, part.name)
            operation["security" if path in opened else "x-role"] = [] if path in opened else role_for(method, path)
            paths.setdefault(PLACE.sub(r"{\1}", path), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Control port of a Ranvier node", "version": node.release},
        "paths": dict(sorted(paths.items())),
        "security": [{"key": []}],
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def operation_of(declared: str, route: Route, part: str) -> dict[str, Any]:
    """Return what one route does, takes and answers."""
    _, path = declared.split(" ")
    content: Mapping[str, Any] = {kind: {} for kind in route.kinds}
    made: dict[str, Any] = {
        "operationId": re.sub(r"[^a-z0-9]+", "_", declared.lower()).strip("_"),
        "summary": route.summary or first_line(route.handle) or declared,
        "tags": [part or "node"],
        "responses": {"200": {"description": "done", "content": content}, "4XX": REFUSED, "503": REFUSED},
    }
    made["responses"] |= {str(each): {"description": "not now", "content": content} for each in route.statuses}
    places: list[tuple[str, str, Any]] = [(name, "path", {"type": "string"}) for name in PLACE.findall(path)]
    places += [(name, "query", schema) for name, schema in route.query.items()]
    if places:
        made["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": schema} for name, where, schema in places
        ]
    if route.body is not None:
        schema = {
            "type": "object",
            "properties": dict(route.body),
            "required": [*route.required],
            "additionalProperties": route.others,
        }
        made["requestBody"] = {
            "required": not route.may_lack_body,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def first_line(handle: Callable[[Asked], Any]) -> str:
    """Return the first sentence of a handler's own docstring; "" without one."""
    text = getattr(handle, "__doc__", None) if hasattr(handle, "__qualname__") else None
    return (text or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".")

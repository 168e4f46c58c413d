"""No default exists twice: an option is written where it belongs, and everything else follows from it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from ranvier_py.config import config_model
from ranvier_py.config.config_loader import load
from ranvier_py.config.config_model import KEYS, Config
from tests.house import modules

NODE = {name: path for name, path in modules().items() if name.startswith("ranvier_py.node.")}


def keys_taken_over() -> set[str]:
    """Keys of Config whose default is not a number or a text of its own, but the component's (`default_of`)."""
    tree = ast.parse(inspect.getsource(config_model))
    return {
        field.target.id
        for field in ast.walk(tree)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "default_of(" in ast.unparse(field)
    }


def keys_in(expression: ast.expr) -> Iterator[str]:
    """Those of Config's own fields that this expression reads."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "node.config", "after"):
            yield node.attr


def parameter_of(call: ast.Call, argument: ast.expr, kind: Any) -> inspect.Parameter | None:
    """The parameter that this argument is for; None where the callee says nothing about it."""
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return None
    named = next((each.arg for each in call.keywords if each.value is argument), None)
    if named is not None:
        return parameters.get(named)
    position = next((at for at, each in enumerate(call.args) if each is argument), None)
    return list(parameters.values())[position] if position is not None and position < len(parameters) else None


def second_defaults(source: str, names: dict[str, Any], taken_over: set[str]) -> list[str]:
    """Where a key of the configuration is handed to a parameter that has a default of its own."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        kind = names.get(ast.unparse(call.func))
        for argument in [*call.args, *(each.value for each in call.keywords)]:
            parameter = parameter_of(call, argument, kind) if kind is not None else None
            if parameter is None or parameter.default in (parameter.empty, None, "", ()):
                continue
            found += [
                f"{ast.unparse(call.func)}({parameter.name}={parameter.default!r}) of {key}"
                for key in keys_in(argument)
                if isinstance(parameter.default, int | float | str)
                and not isinstance(parameter.default, bool)
                and not (key in taken_over and parameter.default is KEYS[key].option.default)
            ]
    return found


def test_no_component_has_a_default_of_its_own_for_what_the_configuration_hands_to_it() -> None:
    taken_over = keys_taken_over()
    assert "route_capacity" in taken_over
    for module, path in NODE.items():
        names = vars(importlib.import_module(module))
        assert second_defaults(path.read_text(), names, taken_over) == [], path.name


def test_the_search_for_second_defaults_finds_one() -> None:
    def part(size: int = 5, *, name: str) -> None: ...

    names = {"part": part}
    assert second_defaults("part(config.size, name=config.name)", names, set()) == ["part(size=5) of size"]
    assert second_defaults("part(7, name=config.name)", names, set()) == []


def test_a_key_is_written_once() -> None:
    names = [one.name for one in config_model.keys_of(Config)]
    assert sorted(names) == sorted(set(names)) == sorted(KEYS)


def test_without_any_setting_every_component_has_its_own_defaults() -> None:
    config, origins, _ = load({})
    assert (config, origins) == (Config(), {})

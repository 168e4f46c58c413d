"""The language of chat templates: jinja2, with the names, filters and limits that transformers gives to templates.

Rule: a template renders the same text here as there, and is refused the same; it may read what it is handed, and
changes nothing. Engines render with transformers, whose import takes a second and a hundred megabytes.
Invariant: both render alike whatever uses a name of this module (test_template_language.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls  # noqa: N812  # jinja2 has a class of this name
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks for training what an assistant wrote. Here it is that text."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return str(caller())


class OpenNamespace(Namespace):
    """`namespace()`, which keeps no name that Python may have given a meaning."""

    def __init__(self, /, *given: Any, **values: Any) -> None:
        held = dict(*given, **values)
        for name in held:
            refuse_private(name)
        super().__init__(held)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        super().__setitem__(name, value)


class Dictionaries:
    """`dict`, of which a template sees only that it makes dictionaries."""

    def __call__(self, /, *given: Any, **values: Any) -> dict[Any, Any]:
        return dict(*given, **values)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


def refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace keeps no name with a leading underscore: {name!r}")


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter writes for HTML pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(template: str, date_now: Callable[[str], str]) -> Template:
    """Compile a chat template. `date_now` is what it may call as `strftime_now(format)`.

    Raises jinja2.TemplateError.
    """
    environment: Environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControls]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": date_now,
        "dict": Dictionaries(),
        "namespace": OpenNamespace,
    }
    return environment.from_string(template)

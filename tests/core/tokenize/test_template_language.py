"""Chat templates mean here what they mean to transformers, with which engines render."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ranvier_py.core.tokenize.template_language import compile_template

DATA = Path(os.environ.get("SHARED_DATA", Path(__file__).parents[3].parent / "shared" / "data")) / "tokenizers"
TOOLS = [
    {"type": "function", "function": {"name": "wähle", "parameters": {"type": "object", "b": [1, None], "a": "<&>"}}}
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer <briefly> & well."},
    {"role": "user", "content": "Wo sind die Atlanten?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And the maps?"},
]
ARGUMENTS = {"messages": CHAT, "tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}

RENDERED = {
    "blanks": "  {% if tools %}\n  {{ tools }}\n  {% endif %}\n{% for m in messages %}\n  {{- m }}\n{% endfor %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(True, sort_keys=True) }}",
    "json of separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "json of text": "{{ messages[0].content | tojson }}{{ none | tojson }}{{ 1.5 | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
    "generation": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ messages[0].role }}\n{% endgeneration %}{{ a }}",
    "generation in a macro": "{% macro f(m) %}{% generation %}{{ m }}{% endgeneration %}{% endmacro %}{{ f('a') }}",
    "namespace": "{% set n = namespace({'b': 2}, a=1) %}{% set n.a = n.a + n.b %}{{ n.a }}",
    "namespace with self": "{% set n = namespace(self=1) %}{{ n.self }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict([('c', 3)]) }}{{ dict.fromkeys(['x'], 0) }}{{ dict.fromkeys('z') }}",
    "undefined": "{{ missing }}{{ missing is defined }}{{ messages[9] is defined }}",
    "string methods": "{{ messages[0].content.split('<')[-1] }}{{ 'a%s' % 'b' }}{{ '{0.__class__}'.format('') }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}",
    "copies": "{% set l = messages[:1] + [{'role': 'x'}] %}{{ l | length }}",
    "macro": "{%- macro f(a, b='x') -%}{{ a }}{{ b }}{{ caller() }}{%- endmacro -%}{% call f(1) %}y{% endcall %}",
    "escape": "{{ '<b>' }}{{ '<b>' | e }}",
}
REFUSED = {
    "raise_exception": "{{ raise_exception('only user and assistant roles') }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
    "class": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
    "dict of a class": "{{ dict.__init__.__globals__ }}",
    "private name of a namespace": "{% set n = namespace(_a=1) %}",
    "private name from a mapping": "{% set n = namespace({'__class__': 1}) %}",
    "private name set later": "{% set n = namespace() %}{% set n._a = 1 %}",
    "attribute of nothing": "{{ missing.name }}",
    "no json": "{{ namespace | tojson }}",
    "generation without its end": "{% generation %}",
    "unknown tag": "{% nothing %}",
    "break outside": "{% break %}",
}


def by_the_library(template: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415 - takes a second

    return _compile_jinja_template(template)


def by_us(template: str) -> Any:
    return compile_template(template, lambda form: datetime.now().strftime(form))  # noqa: DTZ005


@pytest.mark.parametrize("name", RENDERED)
def test_a_template_renders_as_with_the_library(name: str) -> None:
    template = RENDERED[name]
    assert by_us(template).render(**ARGUMENTS) == by_the_library(template).render(**ARGUMENTS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_is_refused_as_by_the_library(name: str) -> None:
    outcomes = []
    for compiled in (by_us, by_the_library):
        try:
            outcomes.append(compiled(REFUSED[name]).render(**json.loads(json.dumps(ARGUMENTS))))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], type), outcomes


def test_only_the_date_of_today_is_asked_for() -> None:
    template = compile_template("{{ strftime_now('%Y') }}", lambda form: f"<{form}>")
    assert template.render() == "<%Y>"


def test_a_template_that_does_not_compile_is_an_error_of_jinja() -> None:
    with pytest.raises(jinja2.TemplateError):
        compile_template("{% if %}", str)


def shared_templates() -> list[Any]:
    found = {path.stem: path.read_text() for path in sorted(DATA.glob("templates/*.jinja"))}
    for path in sorted(DATA.glob("*/tokenizer_config.json")):
        found[path.parent.name] = json.loads(path.read_text())["chat_template"]
    return [pytest.param(text, id=name) for name, text in found.items()]


@pytest.mark.skipif(not DATA.is_dir(), reason="there are no shared tokenizers on this machine")
@pytest.mark.parametrize("template", shared_templates())
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_templates_of_real_models_render_as_with_the_library(template: str, tools: Any, count: int) -> None:
    given = {**ARGUMENTS, "messages": CHAT[:count], "tools": tools}
    outcomes = []
    for compiled in (by_us, by_the_library):
        try:
            outcomes.append(compiled(template).render(**given))
        except jinja2.TemplateError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]

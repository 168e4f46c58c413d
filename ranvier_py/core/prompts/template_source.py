"""Reads the source of a chat template without rendering it.

The syntax tree shows which variables a template reads, and which texts it looks for in contents. A content in which
such a text occurs may be rendered in a special form, and is therefore never treated as plain. Every text that could be
one is taken: too many of them cost time, too few exactness.
"""

from __future__ import annotations

import jinja2.meta
from jinja2 import nodes


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


RESERVED = words("messages tools documents add_generation_prompt chat_template tokenize")
"""Arguments of a rendering that a request can't set through chat_template_kwargs."""

USUAL_VARIABLES = words("""
bos_token eos_token pad_token unk_token sep_token cls_token mask_token raise_exception strftime_now namespace
range dict lipsum cycler joiner loop
""")
"""Variables that the library sets, not requests."""

MESSAGE_KEYS = words("""
role content name tool_calls tool_call_id tool_call function arguments reasoning reasoning_content thinking type
text image image_url video audio tools id parameters properties description
""")
"""Texts that templates look up in mappings; they do not show a special treatment of contents."""

TEXT_METHODS = words("""
split rsplit startswith endswith replace find rfind index rindex count partition rpartition strip lstrip rstrip
removeprefix removesuffix
""")


def read_variables(tree: nodes.Template) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the variables that a request or the tokenizer may set, and those that only a request sets, sorted."""
    found = frozenset(jinja2.meta.find_undeclared_variables(tree)) - RESERVED
    return found, tuple(sorted(found - USUAL_VARIABLES))


def compared_texts(tree: nodes.Template) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the texts that a template may look for in a content: (anywhere, as the whole of it)."""
    anywhere: dict[str, None] = {}
    whole: dict[str, None] = {}
    for compare in tree.find_all(nodes.Compare):
        for operand in compare.ops:
            into = anywhere if operand.op in ("in", "notin") else whole
            into.update(dict.fromkeys([*texts_of(compare.expr), *texts_of(operand.expr)]))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in TEXT_METHODS:
            anywhere.update(dict.fromkeys(text for argument in call.args for text in texts_of(argument)))
    for applied in (*tree.find_all(nodes.Filter), *tree.find_all(nodes.Test)):
        into = anywhere if isinstance(applied, nodes.Filter) and applied.name == "replace" else whole
        into.update(dict.fromkeys(text for argument in applied.args for text in texts_of(argument)))
    return tuple(text for text in anywhere if text.strip() and text not in MESSAGE_KEYS), frozenset(whole) - {""}


def texts_of(node: nodes.Node) -> list[str]:
    """Return the string constants at or below a node."""
    found = [*node.find_all(nodes.Const), *([node] if isinstance(node, nodes.Const) else [])]
    return [const.value for const in found if isinstance(const.value, str)]

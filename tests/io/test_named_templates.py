"""Tokenizers with several chat templates: which one renders a chat is what transformers, and so an engine, takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer, load_tokenizer

TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
DEFAULT = {"name": "default", "template": TURNS}
TOOL_USE = {"name": "tool_use", "template": "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" + TURNS}
RAG = {"name": "rag", "template": "RAG" + TURNS}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "user", "content": "Where are the atlases?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And the maps?"},
]


def folder_with(folder: Path, *templates: dict[str, str]) -> Path:
    """The embedded tokenizer with these templates, as older releases of transformers save them."""
    for file in EMBEDDED.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": list(templates)}))
    return folder


def by_the_library(folder: Path, messages: list[Any], tools: Any) -> str:
    library = load_tokenizer(str(folder), local=True)
    return str(library.apply_chat_template(messages, tools=tools, tokenize=False))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("templates", [[DEFAULT, TOOL_USE], [RAG, TOOL_USE, DEFAULT], [DEFAULT, RAG], [DEFAULT]])
def test_a_chat_with_tools_is_rendered_by_the_template_that_is_for_them(
    tmp_path: Path, templates: list[dict[str, str]], tools: Any
) -> None:
    tokenizer = ChatTokenizer.load(str(folder_with(tmp_path, *templates)))
    text = by_the_library(tmp_path, MESSAGES, tools)
    assert tokenizer.render(Chat(MESSAGES, tools), generation=False) == text
    whole = tokenizer.tokenize(Chat(MESSAGES, tools))
    assert list(whole.ids) == list(tokenizer.tokenize_text(text, bare=True))
    start = tokenizer.tokenize(Chat(MESSAGES[:2], tools))
    tail = tokenizer.tokenize_tail(MESSAGES[2:], lambda: Chat(MESSAGES, tools), 2)
    if tail is not None:
        assert [*start.ids, *tail.ids] == list(whole.ids)


TO_THE_LAST = "{% if tools and loop.last %}TOOLS {{ tools | tojson }}\n{% endif %}{{ m['content'] }}"
SYSTEM_FIRST = "{% for m in messages if m.role == 'system' %}S{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        (TOOL_USE["template"], True),
        (TURNS.replace("{{ m['content'] }}", TO_THE_LAST), False),
        (SYSTEM_FIRST + TURNS.replace("in messages", "in messages if m.role != 'system'"), False),
        ("{{ tools | tojson }}", False),
    ],
    ids=["tools first", "tools in the last message", "system texts first", "nothing of the chat"],
)
def test_equal_texts_are_equal_tokens_only_if_both_templates_keep_turns_by_one_rule(
    tmp_path: Path, template: str, keeps: bool
) -> None:
    tokenizer = ChatTokenizer.load(str(folder_with(tmp_path, DEFAULT, {**TOOL_USE, "template": template})))
    assert tokenizer.profile.keeps_turns
    assert tokenizer.facts.keeps_turns is keeps


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_without_a_default_one_count_as_none(tmp_path: Path, tools: Any) -> None:
    tokenizer = ChatTokenizer.load(str(folder_with(tmp_path, TOOL_USE, RAG)))
    with pytest.raises(TemplateRefused):
        tokenizer.tokenize(Chat(MESSAGES, tools))


def test_a_chosen_template_renders_all_chats(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(str(folder_with(tmp_path, DEFAULT, TOOL_USE)), chat_template=RAG["template"])
    assert tokenizer.render(Chat(MESSAGES, TOOLS), generation=False).startswith("RAG<|im_start|>")


def test_the_template_for_tools_is_part_of_a_tokenizers_identity(tmp_path: Path) -> None:
    found = set[str]()
    for number, templates in enumerate(
        ([DEFAULT], [DEFAULT, TOOL_USE], [DEFAULT, {**TOOL_USE, "template": TURNS + " "}])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.add(ChatTokenizer.load(str(folder_with(folder, *templates))).facts.identity)
    assert len(found) == 3

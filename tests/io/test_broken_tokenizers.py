"""Whatever the files of a tokenizer hold, they make one that works, or an error that names what is wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.core.errors import ConfigError, TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.io.tokenizer import EMBEDDED, MEASURE, ChatTokenizer

FILES = (
    *("tekken.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "config.json"),
)
CONTENTS = {
    "empty": b"",
    "object": b"{}",
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "cut": b'{"version": "1.0", "a',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "mark": b"\xef\xbb\xbf{}",
}
CHAT = Chat([{"role": "user", "content": "Where are the atlases?"}])
NO_TOKENS = {
    "config": {"pattern": ".*", "num_vocab_tokens": 0, "default_vocab_size": 0, "default_num_special_tokens": 0},
    "vocab": [],
    "special_tokens": [],
}


def folder_of(folder: Path, **files: bytes) -> str:
    """The embedded tokenizer with other files; one that reads tekken.json has no other vocabulary."""
    for file in EMBEDDED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if "tekken.json" in files:
        (folder / "tokenizer.json").unlink()
    return str(folder)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_a_broken_file_is_named_as_a_problem_or_does_no_harm(tmp_path: Path, file: str, content: str) -> None:
    source = folder_of(tmp_path, **{file: CONTENTS[content]})
    tokenizer, problem = None, ""
    try:
        tokenizer = ChatTokenizer.load(source)
    except ConfigError as error:
        problem = str(error)
    if tokenizer is None:
        assert problem.startswith(f"tokenizer: {source!r} can't be loaded: its files make no tokenizer: ")
        return
    assert "tokenizer.json" not in file or content == "object"
    assert len(tokenizer.tokenize_text("two words")) > 1
    try:
        assert len(tokenizer.tokenize(CHAT).ids) > 1
    except TemplateRefused:
        assert file == "chat_template.jinja"


def with_model(**model: Any) -> bytes:
    whole = json.loads((EMBEDDED / "tokenizer.json").read_text())
    return json.dumps({**whole, "model": {**whole["model"], **model}, "added_tokens": []}).encode()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", with_model(vocab={}, merges=[]), "vocabulary is empty"),
        ("tekken.json", json.dumps(NO_TOKENS).encode(), "vocabulary is empty"),
        (
            "tokenizer.json",
            b'{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}',
            "UNK",
        ),
    ],
)
def test_a_vocabulary_that_can_read_nothing_is_a_problem(
    tmp_path: Path, file: str, content: bytes, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ChatTokenizer.load(folder_of(tmp_path, **{file: content}))


@pytest.mark.parametrize(
    "template", ["{}", "{{ messages | length }}", "{% for m in messages %}{{ m.role }}{% endfor %}"]
)
def test_a_template_that_shows_nothing_of_a_question_makes_no_two_chats_one(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = ChatTokenizer.load("", chat_template=template)
    assert "shows nothing of a question" in caplog.text
    with pytest.raises(TemplateRefused):
        tokenizer.tokenize(CHAT)


def test_a_word_that_a_vocabulary_lacks_refuses_that_text_alone(tmp_path: Path) -> None:
    words = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(dict.fromkeys(MEASURE.split()))},
        "unk_token": "?",
    }
    whole = {"added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    tokenizer = ChatTokenizer.load(folder_of(tmp_path, **{"tokenizer.json": json.dumps(whole).encode()}))
    assert len(tokenizer.tokenize_text("The router")) == 2
    with pytest.raises(TemplateRefused, match="can't read a text"):
        tokenizer.tokenize_text("xyzzy")

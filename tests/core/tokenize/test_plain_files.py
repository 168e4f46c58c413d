"""A tokenizer that needs no transformers is loaded without it, and is the one that transformers would make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.io.tokenizer import (
    EMBEDDED,
    ChatTokenizer,
    load_plain,
    load_tokenizer,
    read_template,
    read_tool_template,
)

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data")) / "tokenizers"
SETTINGS: dict[str, Any] = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
ADDED = json.loads((EMBEDDED / "tokenizer.json").read_text())["added_tokens"]
DECODER = {str(token["id"]): {name: token[name] for name in token if name != "id"} for token in ADDED}
TEXTS = ("", "Wo sind die Atlanten?", "<|im_start|>user\n a  b<|im_end|>\n", "né 日本 \U0001f600\t\r\n  x", "x" * 300)
NAMED = [{"name": "default", "template": "D{{ messages }}"}, {"name": "tool_use", "template": "T{{ messages }}"}]

Files = Mapping[str, Any]
PLAIN: dict[str, Files] = {
    "as it is": {},
    "without a template": {"chat_template.jinja": None},
    "its template in the settings": {
        "chat_template.jinja": None,
        "tokenizer_config.json": {**SETTINGS, "chat_template": "{{ messages[0].content }}"},
    },
    "templates in both places": {"tokenizer_config.json": {**SETTINGS, "chat_template": NAMED}},
    "named templates": {
        "chat_template.jinja": None,
        "tokenizer_config.json": {**SETTINGS, "chat_template": NAMED},
    },
    "the new name of the class": {"tokenizer_config.json": {**SETTINGS, "tokenizer_class": "TokenizersBackend"}},
    "its added tokens again": {"tokenizer_config.json": {**SETTINGS, "added_tokens_decoder": DECODER}},
    "its added tokens again, and files that count no more": {
        "tokenizer_config.json": {**SETTINGS, "added_tokens_decoder": DECODER},
        "special_tokens_map.json": {"bos_token": "<|im_start|>"},
        "added_tokens.json": {"<new>": 9999},
    },
    "flags that tokenizer.json overrides": {
        "tokenizer_config.json": {**SETTINGS, "add_bos_token": True, "bos_token": "<|im_start|>", "add_eos_token": True}
    },
    "a model of no class of its own": {"config.json": {"model_type": "llama", "vocab_size": 128256}},
}
NOT_PLAIN: dict[str, Files] = {
    "no settings": {"tokenizer_config.json": None},
    "a class of the model": {"tokenizer_config.json": {**SETTINGS, "tokenizer_class": "Qwen2Tokenizer"}},
    "no class": {"tokenizer_config.json": {k: v for k, v in SETTINGS.items() if k != "tokenizer_class"}},
    "a setting that we do not know": {"tokenizer_config.json": {**SETTINGS, "split_special_tokens": True}},
    "code of its own": {"tokenizer_config.json": {**SETTINGS, "auto_map": {"AutoTokenizer": ["a.B", None]}}},
    "a special token that is not in the vocabulary": {"tokenizer_config.json": {**SETTINGS, "bos_token": "<bos>"}},
    "a special token that is a usual one": {"tokenizer_config.json": {**SETTINGS, "bos_token": "a"}},
    "a special token with flags": {"tokenizer_config.json": {**SETTINGS, "bos_token": {"content": "<|im_start|>"}}},
    "another added token": {
        "tokenizer_config.json": {
            **SETTINGS,
            "added_tokens_decoder": {**DECODER, "9999": {**DECODER[str(ADDED[0]["id"])], "content": "<new>"}},
        }
    },
    "other flags of an added token": {
        "tokenizer_config.json": {
            **SETTINGS,
            "added_tokens_decoder": {number: {**token, "lstrip": True} for number, token in DECODER.items()},
        }
    },
    "older files": {"special_tokens_map.json": {"bos_token": "<|im_start|>"}},
    "more templates": {"additional_chat_templates/rag.jinja": "R"},
    "templates of another form": {"tokenizer_config.json": {**SETTINGS, "chat_template": [["default", "x"]]}},
    "a model whose class we do not know": {"config.json": {"model_type": "qwen2"}},
    "a model without a type": {"config.json": {"architectures": []}},
    "no vocabulary": {"tokenizer.json": None},
    "a broken vocabulary": {"tokenizer.json": {}},
    "settings that are none": {"tokenizer_config.json": []},
}


def folder_of(folder: Path, files: Files) -> Path:
    """The embedded tokenizer with other files; None: without this one."""
    for file in EMBEDDED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def assert_alike(folder: Path) -> None:
    ours, theirs = load_plain(folder), load_tokenizer(str(folder), local=True)
    assert ours is not None
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert read_template(ours, None) == read_template(theirs, None)
    assert read_tool_template(ours) == read_tool_template(theirs)
    backends = (ours.backend_tokenizer, theirs.backend_tokenizer)
    assert [each.get_vocab(with_added_tokens=True) == backends[0].get_vocab() for each in backends] == [True, True]
    assert len({repr(sorted(each.get_added_tokens_decoder().items())) for each in backends}) == 1
    for text in TEXTS:
        for added in (False, True):
            ids = [each.encode(text, add_special_tokens=added).ids for each in backends]
            assert ids[0] == ids[1], (text, added)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_folder_makes_the_tokenizer_of_the_library(name: str, tmp_path: Path) -> None:
    assert_alike(folder_of(tmp_path, PLAIN[name]))


@pytest.mark.skipif(not DATA.is_dir(), reason="there are no shared tokenizers on this machine")
@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_a_real_model_makes_the_tokenizer_of_the_library(name: str) -> None:
    assert_alike(DATA / name)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_folder_with_more_is_left_to_the_library(name: str, tmp_path: Path) -> None:
    assert load_plain(folder_of(tmp_path, NOT_PLAIN[name])) is None


PROGRAM = """
import sys
import ranvier_py.control.control_port, ranvier_py.node.run_node, ranvier_py.node.tokenizer_child
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.io.tokenizer import ChatTokenizer
tokenizer = ChatTokenizer.load(sys.argv[1])
assert len(tokenizer.tokenize(Chat([{"role": "user", "content": "Where are the maps?"}])).ids) > 5
print(tokenizer.facts.identity, *sorted({"transformers", "huggingface_hub"} & set(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["embedded", "folder"])
def test_a_node_and_its_tokenizer_need_no_library_for_a_plain_folder(source: str, tmp_path: Path) -> None:
    given = source if source == "embedded" else str(folder_of(tmp_path, {}))
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == [ChatTokenizer.load("embedded").facts.identity]

"""Messages as templates see them, and what the probe finds out. The templates here are plain functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jinja2
import pytest

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.core.prompts.template_probe import Encode, TemplateProbe
from ranvier_py.core.prompts.template_source import compared_texts, read_variables
from ranvier_py.core.prompts.templates import (
    Render,
    TemplateProfile,
    chat_pieces,
    normalise,
    piece_of_plain,
    tail_pieces,
    thinks,
    unwrapped,
)

KNOWN = TemplateProfile(markers=("<s>", "</s>"))


def chatml(chat: Chat) -> str:
    """A template with nothing special about it."""
    return "".join(f"<s>{m['role']}\n{m['content']}{m.get('tool_calls', '')}</s>" for m in chat.messages)


def joining_tools(chat: Chat) -> str:
    """Like Qwen2.5: results of one round share a block, which is closed when no further one follows."""
    text = ""
    for at, message in enumerate(chat.messages):
        role = message["role"]
        if role != "tool":
            text += f"<s>{role}\n{message['content']}{message.get('tool_calls', '')}</s>"
            continue
        text += "<s>user" if chat.messages[at - 1]["role"] != "tool" else ""
        text += f"\n[{message['content']}]"
        last = at + 1 == len(chat.messages) or chat.messages[at + 1]["role"] != "tool"
        text += "</s>" if last else ""
    return text


def moving_system(chat: Chat) -> str:
    """Like Mistral's: the system text goes into the last message."""
    messages = list(chat.messages)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    if not messages:
        raise TemplateRefused("no question")
    return "".join(f"<s>{system if at == len(messages) - 1 else ''}{m['content']}</s>" for at, m in enumerate(messages))


def tools_in_second(chat: Chat) -> str:
    """Like Llama 3: the first question carries the tools."""
    first = 1 if chat.messages[0]["role"] == "system" else 0
    if chat.tools and len(chat.messages) <= first:
        raise TemplateRefused("no question to put the tools into")
    return "".join(
        f"<s>{m['role']}\n{chat.tools if chat.tools and at == first else ''}{str(m['content']).strip()}</s>"
        for at, m in enumerate(chat.messages)
    )


def unmarked(chat: Chat) -> str:
    return "".join(f"{m['role']}: {m['content']}\n" for m in chat.messages)


def refusing(chat: Chat) -> str:
    raise TemplateRefused("never")


def by_character(texts: Sequence[str]) -> list[list[int]]:
    return [[ord(character) for character in text] for text in texts]


def by_position(texts: Sequence[str]) -> list[list[int]]:
    """A tokenizer that treats the start of a text in a special way, as some SentencePiece models do."""
    return [[0, *map(ord, text)] for text in texts]


def probed(render: Render, variables: Sequence[str] = (), **known: Any) -> TemplateProfile:
    return TemplateProbe(render, by_character, replace(KNOWN, **known), variables).profile()


def plain(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_a_plain_template_is_incremental() -> None:
    profile = probed(chatml)
    assert profile.keeps_turns
    assert profile.incremental
    assert profile.windows
    assert profile.starter == "<s>"
    assert piece_of_plain(plain("user", " a "), profile) == "<s>user\n a </s>"


def test_a_probe_renders_no_conversation_twice_nor_what_is_refused() -> None:
    rendered: Counter[str] = Counter()

    def counting(chat: Chat) -> str:
        rendered[repr(chat)] += 1
        return tools_in_second(chat)

    profile = probed(counting, ("thinking",))
    assert profile == probed(tools_in_second, ("thinking",))
    assert profile.incremental
    assert {*rendered.values()} == {1}


@pytest.mark.parametrize(
    ("render", "encode", "keeps_turns", "reason"),
    [
        pytest.param(unmarked, by_character, True, "special token", id="without special tokens"),
        pytest.param(moving_system, by_character, False, "earlier turns", id="the system text moves"),
        pytest.param(chatml, by_position, True, "tokenize", id="a tokenizer that treats the start of a text apart"),
        pytest.param(refusing, by_character, False, "never", id="it refuses all"),
    ],
)
def test_what_is_not_incremental_gives_its_reason(
    render: Render, encode: Encode, keeps_turns: bool, reason: str
) -> None:
    profile = TemplateProbe(render, encode, KNOWN).profile()
    assert (profile.keeps_turns, profile.incremental) == (keeps_turns, False)
    assert reason in profile.reason


def hoisting(chat: Chat) -> str:
    """Like DeepSeek's: all system texts come first, without an end of their own."""
    systems = "\n\n".join(str(m["content"]) for m in chat.messages if m["role"] == "system")
    others = [m for m in chat.messages if m["role"] != "system"]
    return f"<s>{systems}" + "".join(f"<s>{m['role']}\n{m['content']}{m.get('tool_calls', '')}</s>" for m in others)


def closing_system(chat: Chat) -> str:
    """The same in a block that ends: what it begins with is no prefix of what more of them makes."""
    systems = "\n\n".join(str(m["content"]) for m in chat.messages if m["role"] == "system")
    others = [m for m in chat.messages if m["role"] != "system"]
    return f"<s>{systems}</s>" + "".join(f"<s>{m['role']}\n{m['content']}</s>" for m in others)


def test_a_template_that_renders_system_messages_first_keeps_turns_in_that_order() -> None:
    profile = probed(hoisting)
    assert (profile.keeps_turns, profile.hoists_system) == (True, True)
    assert profile.incremental, profile.reason
    assert piece_of_plain(plain("user", " a "), profile) == "<s>user\n a </s>"


@pytest.mark.parametrize("render", [chatml, joining_tools, moving_system, closing_system])
def test_no_other_template_is_taken_for_one_that_does(render: Render) -> None:
    assert not probed(render).hoists_system


def test_messages_that_may_carry_the_tools_are_not_settled() -> None:
    assert probed(chatml).settled == 1
    assert probed(tools_in_second).settled == 2


def test_stripping_is_learned() -> None:
    profile = probed(tools_in_second)
    assert piece_of_plain(plain("user", " a\n"), profile) == "<s>user\na</s>"


def test_an_argument_that_changes_pieces_is_noticed() -> None:
    def named(chat: Chat) -> str:
        return "".join(f"<s>{m['role']}{chat.template.get('who', '')}{m['content']}</s>" for m in chat.messages)

    assert probed(named, variables=("who",)).arguments_matter
    assert not probed(chatml, variables=("who",)).arguments_matter


def test_the_end_of_a_round_of_results_is_the_only_cut_in_it() -> None:
    profile = probed(joining_tools)
    turn = [plain("user", "q"), plain("assistant", "", tool_calls=[CALL]), plain("tool", "1"), plain("tool", "2")]
    chat = Chat([normalise(message, parts=False) for message in turn])
    text, pieces = chat_pieces(chat, profile, joining_tools)
    assert pieces is not None
    assert [piece is None for piece in pieces] == [False, False, True, False]
    assert "".join(filter(None, pieces)) == text


def test_a_result_that_reopens_a_closed_round_is_tokenized_in_full() -> None:
    """The first part was sent closed: it is no prefix of what comes now."""
    profile = probed(joining_tools)
    turn = [plain("user", "q"), plain("assistant", "", tool_calls=[CALL]), plain("tool", "1"), plain("tool", "2")]
    assert tail_pieces(turn[3:], lambda: Chat(turn), 3, profile, joining_tools) is None
    assert tail_pieces(turn[1:], lambda: Chat(turn), 1, profile, joining_tools) is not None


def test_a_tail_that_does_not_belong_to_its_chat_is_refused() -> None:
    profile = probed(chatml)
    chat = Chat([plain("user", "q"), plain("assistant", "", tool_calls=[CALL])])
    assert tail_pieces(chat.messages[1:], lambda: chat, 5, profile, chatml) is None


def test_contents_that_a_template_looks_into_are_not_plain() -> None:
    profile = probed(chatml, quoting=("password",), exact=frozenset(["reset"]))
    assert piece_of_plain(plain("user", "my password"), profile) is None
    assert piece_of_plain(plain("user", "reset"), profile) is None
    assert piece_of_plain(plain("user", "reset it"), profile) is not None


@pytest.mark.parametrize(
    "message",
    [plain("user", None), plain("tool", "x"), plain("user", ["x"]), plain("user", "x", name="n"), {"role": "user"}],
)
def test_other_messages_are_not_plain(message: dict[str, Any]) -> None:
    assert piece_of_plain(message, probed(chatml)) is None


def test_arguments_of_calls_are_parsed_as_engines_do() -> None:
    def arguments(given: object) -> object:
        call = {"function": {"name": "f", "arguments": given}}
        return normalise(plain("assistant", None, tool_calls=[call]), parts=False)["tool_calls"][0]["function"][
            "arguments"
        ]

    assert arguments('{"a": 1}') == {"a": 1}
    assert arguments("") == {}
    assert arguments("{broken") == {}
    assert arguments(None) == {}
    assert arguments({"a": 2}) == {"a": 2}


def test_normalising_leaves_the_message_alone() -> None:
    message = plain("assistant", None, tool_calls=[CALL])
    normalise(message, parts=False)
    assert CALL["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_contents_become_strings_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "image_url", "image_url": {}}, {"type": "text", "text": None}]
    assert normalise(plain("user", parts), parts=False)["content"] == "a\nb\n<image>"
    assert [part["type"] for part in normalise(plain("user", parts), parts=True)["content"]] == [
        "text",
        "text",
        "image",
    ]
    assert normalise(plain("user", None), parts=False)["content"] == ""
    assert normalise(plain("user", None), parts=True)["content"] == []
    assert normalise(plain("tool", "x", tool_call_id="i"), parts=True) == plain("tool", "x", tool_call_id="i")
    assert unwrapped(normalise(plain("user", "x"), parts=True)) == plain("user", "x")


def test_empty_members_are_dropped() -> None:
    echoed = plain("assistant", "x", refusal=None, tool_calls=None, audio=None)
    assert normalise(echoed, parts=False) == plain("assistant", "x")
    assert normalise(plain("assistant", "x", tool_calls=[]), parts=False) == plain("assistant", "x")


@pytest.mark.parametrize("message", [{}, plain("user", 3), plain("user", [3]), plain("assistant", "", tool_calls=[{}])])
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(TemplateRefused):
        normalise(message, parts=False)


def test_reasoning_is_seen_however_it_is_sent() -> None:
    assert thinks(plain("assistant", "x", reasoning_content="why"))
    assert thinks(plain("assistant", "<think>why</think>x"))
    assert not thinks(plain("user", "what is </think>?"))
    assert not thinks(plain("assistant", "x", reasoning_content=None))


def test_texts_that_a_template_compares_with_are_read_from_its_source() -> None:
    source = """{% if 'secret' in m.content or m.content == 'reset' or 'tool_calls' in m %}{% endif %}
    {{ m.content.split('</think>')[-1].lstrip('\n') | replace('a!', 'b') }}{{ raise_exception('no') }}{{ who }}"""
    tree = jinja2.Environment(autoescape=True).parse(source)
    anywhere, whole = compared_texts(tree)
    assert set(anywhere) == {"secret", "</think>", "a!", "b"}
    assert whole == {"reset"}
    assert read_variables(tree)[1] == ("m", "who")

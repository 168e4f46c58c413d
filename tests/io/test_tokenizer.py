"""The real tokenizers: what is tokenized turn by turn must be what the engine sees as a whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ranvier_py.core.errors import ConfigError, TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat, TailJob
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.prompts.templates import normalise
from ranvier_py.core.tokenize.tokenize_job import job_of
from ranvier_py.core.tokenize.tokenize_service import TokenizeService
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer, load_tokenizer, read_template
from tests.examples import examples

DATA = Path(os.environ.get("SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "tokenizers"
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
PAIRS = [("embedded", ""), *product(("qwen2.5", "llama3"), ("", *TEMPLATES))]
INCREMENTAL = {
    ("embedded", ""),
    ("qwen2.5", ""),
    ("qwen2.5", TEMPLATES[0]),
    ("llama3", ""),
    ("llama3", TEMPLATES[1]),
    ("llama3", TEMPLATES[2]),
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # the first example may find a busy machine

THINKING_TEMPLATE = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}
    {%- set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set reasoning = m.reasoning_content or '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0] %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or reasoning) %}
        {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""Of our own, with the habits of reasoning templates: earlier thoughts go, the last answer gets an empty one, and
results of tools that a user's message brings are no question."""

ENDS_WITH_EOS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}
"""

PARTS_TEMPLATE = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.content is string %}{{ m.content }}{% else %}
        {%- for part in m.content %}{{ part.text if part.type == 'text' else '[' + part.type + ']' }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
"""

OTHER_BEHAVIOUR_FOR_SECRETS = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + ('[hidden]' if 'password' in m.content else m.content) + '<|im_end|>\n' }}
{%- endfor %}
"""

NUMBERS_MESSAGES = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + loop.index|string + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
"""

MARKS_THE_LAST = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + ('!' if loop.last else '') + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
"""

COUNTS_MESSAGES = """
{{- messages|length }} messages:
{%- for m in messages %}{{ m.content + '\n' }}{% endfor %}
"""

GREETS_BY_NAME = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + (who or '') + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
"""


@cache
def library_tokenizer(path: Path) -> Any:
    return load_tokenizer(str(path), local=True)


@cache
def loaded(name: str, template: str) -> ChatTokenizer:
    """A tokenizer with its own template (""), a template of ours (embedded), or one of the shared ones."""
    if name == "embedded":
        return ChatTokenizer.load("embedded", chat_template=template or None)
    if not (DATA / name).is_dir():
        pytest.skip("the shared tokenizers are not here (set SHARED_DATA)")
    library = library_tokenizer(DATA / name)
    chosen = str(DATA / "templates" / f"{template}.jinja") if template else None
    return ChatTokenizer(library, read_template(library, chosen), identity=f"{name} {template}")


def plain(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: int, arguments: str = '{"what": "it"}') -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "look", "arguments": arguments}}


MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"),
    *("[INST]", "<|user|>", "</think>", "<tool_call>"),
)
TEXTS = st.one_of(
    st.sampled_from(("", " ", "\n", "Yes.", "  both edges  ", "\n\nlines\n\n", "password", *MARKS)),
    st.text(alphabet="ab .\n\t1'é你😀<|>", max_size=12),
    st.tuples(st.sampled_from(MARKS), st.sampled_from(("", " ", "\n", "x"))).map("".join),
)


@st.composite
def turns(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """A conversation as the lists of messages that each request brings."""
    first = [plain("system", draw(TEXTS))] if draw(st.booleans()) else []
    found: list[list[dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages = [plain("user", draw(TEXTS))]
        if draw(st.integers(0, 3)) == 0:
            messages = [plain("user", [{"type": "text", "text": draw(TEXTS)} for _ in range(draw(st.integers(1, 2)))])]
        found.append([*first, *messages])
        thought = draw(st.sampled_from(({}, {}, {"reasoning_content": "I see."})))
        first = [plain("assistant", draw(TEXTS), **thought)]
        if draw(st.integers(0, 2)) == 0:
            count = draw(st.integers(1, 2))
            calls = [
                call(at, draw(st.sampled_from(('{"what": "it"}', "", '{"n": [1, 2.5, null]}')))) for at in range(count)
            ]
            answer = plain("assistant", draw(st.sampled_from((None, "", "Let me see."))), tool_calls=calls, **thought)
            results = [plain("tool", draw(TEXTS), tool_call_id=made["id"]) for made in calls]
            found.append([answer, *results])
    if draw(st.booleans()):
        found.append(first)  # the last answer, as it is learned
    return found


def prefixes(parts: list[list[dict[str, Any]]]) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    known: list[dict[str, Any]] = []
    for new in parts:
        if known:
            yield known, new
        known = [*known, *new]


def check_turn_by_turn(tokenizer: ChatTokenizer, parts: list[list[dict[str, Any]]], tools: Any) -> int:
    """Tokenize a conversation turn by turn and as a whole. Returns how many tails were done alone."""
    done = 0
    for known, new in prefixes(parts):
        chat = Chat([*known, *new], tools)
        try:
            before, whole = tokenizer.tokenize(Chat(known, tools)), tokenizer.tokenize(chat)
        except TemplateRefused:
            continue
        tail = tokenizer.tokenize_tail(new, lambda chat=chat: chat, len(known)) if before.ends[-1] >= 0 else None
        assert len(whole.ends) == len(chat.messages)
        if tail is None:
            continue
        done += 1
        assert before.ids.tolist() + tail.ids.tolist() == whole.ids.tolist()
        shifted = [end + len(before.ids) if end >= 0 else -1 for end in tail.ends]
        assert shifted == list(whole.ends[len(known) :])
    return done


@pytest.mark.parametrize(("name", "template"), PAIRS, ids=lambda value: value or "own")
def test_turn_by_turn_equals_the_whole(name: str, template: str) -> None:
    """If it did not, a node that has the history and one that has not would know the same prompt by different names."""
    tokenizer = loaded(name, template)
    done = 0

    @settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
    @given(turns(), st.sampled_from((None, TOOLS)))
    @example([[plain("system", "s"), plain("user", "a")], [plain("assistant", "b"), plain("user", "c")]], None)
    def check(parts: list[list[dict[str, Any]]], tools: Any) -> None:
        nonlocal done
        done += check_turn_by_turn(tokenizer, parts, tools)

    check()
    assert tokenizer.facts.incremental == ((name, template) in INCREMENTAL), tokenizer.facts.probe_report
    assert (done > 0) == tokenizer.facts.incremental


@pytest.mark.parametrize(
    "template", [THINKING_TEMPLATE, ENDS_WITH_EOS, PARTS_TEMPLATE, OTHER_BEHAVIOUR_FOR_SECRETS, GREETS_BY_NAME]
)
def test_turn_by_turn_equals_the_whole_with_templates_of_strange_habits(template: str) -> None:
    tokenizer = loaded("embedded", template)

    @settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
    @given(turns(), st.sampled_from((None, TOOLS)))
    def check(parts: list[list[dict[str, Any]]], tools: Any) -> None:
        check_turn_by_turn(tokenizer, parts, tools)

    check()
    assert tokenizer.facts.incremental, tokenizer.facts.probe_report


@pytest.mark.parametrize("template", [NUMBERS_MESSAGES, MARKS_THE_LAST])
def test_a_template_whose_pieces_depend_on_their_place_is_not_incremental(template: str) -> None:
    tokenizer = loaded("embedded", template)
    assert not tokenizer.facts.incremental
    chat = Chat([plain("user", "a"), plain("assistant", "b"), plain("user", "c")])
    assert tokenizer.tokenize_tail(chat.messages[2:], lambda: chat, 2) is None
    assert tokenizer.tokenize(chat).ends[-1] > 0


@pytest.mark.parametrize(("name", "template"), PAIRS, ids=lambda value: value or "own")
def test_tokens_are_those_of_transformers(name: str, template: str) -> None:
    """Prompts end in a user message or tool results; then nothing but the generation prompt may follow."""
    tokenizer = loaded(name, template)
    reference = library_tokenizer(EMBEDDED if name == "embedded" else DATA / name)
    text = (DATA / "templates" / f"{template}.jinja").read_text() if template else None

    @settings(max_examples=examples(30), suppress_health_check=SLOW)
    @given(turns(), st.sampled_from((None, TOOLS)))
    def check(parts: list[list[dict[str, Any]]], tools: Any) -> None:
        messages = [message for part in parts for message in part]
        try:
            found = tokenizer.tokenize(Chat(messages, tools)).ids.tolist()
        except TemplateRefused:
            return
        plain = [normalise(message, parts=False) for message in messages]
        expected = reference.apply_chat_template(plain, tools=tools, chat_template=text, return_dict=False)
        if tokenizer.profile.trailer:
            expected = expected[: -len(reference.encode(tokenizer.profile.trailer, add_special_tokens=False))]
        assert found == expected

    check()


def test_the_whole_is_not_asked_for_when_a_tail_is_plain() -> None:
    """Parsing 200 kB of history again is what incremental tokenizing saves."""
    tokenizer = loaded("embedded", "")

    def context() -> Chat:
        raise AssertionError("asked for the whole chat")

    found = tokenizer.tokenize_tail([plain("assistant", "b", refusal=None), plain("user", "c")], context, 7)
    assert found is not None
    assert found.how == "rendered"
    assert len(found.ends) == 2


def test_a_batch_equals_its_jobs_one_by_one() -> None:
    tokenizer = loaded("embedded", "")
    chat = Chat(
        [plain("user", "a"), plain("assistant", None, tool_calls=[call(0)]), plain("tool", "r", tool_call_id="0")]
    )
    jobs = [
        TailJob([plain("user", "hello")], lambda: chat, 4),
        TailJob(chat.messages[1:], lambda: chat, 1),
        TailJob([], lambda: chat, 3),
        TailJob([plain("user", "\ud800")], lambda: chat, 2),
        TailJob([plain("user", "x"), plain("assistant", "y")], lambda: chat, 2),
    ]
    together = tokenizer.tokenize_tails(jobs)
    assert [found is None for found in together] == [False, False, True, True, False]
    for job, found in zip(jobs, together, strict=True):
        alone = tokenizer.tokenize_tail(*job)
        assert (found is None) == (alone is None)
        if found is not None and alone is not None:
            assert found.ids.tolist() == alone.ids.tolist()
            assert list(found.ends) == list(alone.ends)


def test_reasoning_of_the_last_answer_is_no_cut_where_later_turns_drop_it() -> None:
    tokenizer = loaded("embedded", THINKING_TEMPLATE)
    chat = Chat([plain("user", "a"), plain("assistant", "b", reasoning_content="why"), plain("tool", "c")])
    ends = tokenizer.tokenize(chat).ends
    assert ends[0] > 0
    assert list(ends[1:]) == [-1, -1]


def test_a_tail_that_a_new_question_ends_has_none_of_the_reasoning_before_it() -> None:
    tokenizer = loaded("embedded", THINKING_TEMPLATE)
    called = plain("assistant", "", reasoning_content="I think.", tool_calls=[call(0)])
    turn = [plain("user", "a"), called, plain("tool", "r", tool_call_id="0"), plain("assistant", "done")]
    parts = [turn[:1], [*turn[1:], plain("user", "b")], [called, turn[2], plain("assistant", "ok"), plain("user", "c")]]
    assert check_turn_by_turn(tokenizer, parts, None) == 2


def test_a_result_of_a_tool_that_a_user_sends_takes_no_reasoning_away() -> None:
    tokenizer = loaded("embedded", THINKING_TEMPLATE)
    assert tokenizer.profile.results == (("<tool_response>", ""),)
    result = plain("user", "<tool_response>\nr\n</tool_response>")
    thought = plain("assistant", "b", reasoning_content="why")
    ends = tokenizer.tokenize(Chat([plain("user", "a"), thought, result])).ends
    assert list(ends[1:]) == [-1, -1]
    parts = [[plain("user", "a")], [thought, result, thought, plain("user", "c")]]
    assert check_turn_by_turn(tokenizer, parts, None) == 1


HOISTING_TEMPLATE = """
{%- set ns = namespace(text='') %}
{%- for m in messages %}{% if m.role == 'system' %}
    {%- set ns.text = ns.text + ('\n\n' if ns.text else '') + m.content %}
{%- endif %}{% endfor %}
{{- '<|im_start|>' + ns.text }}
{%- for m in messages %}{% if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
"""
"""As DeepSeek's: all system texts stand before the conversation."""


def test_a_late_system_message_is_tokenized_before_what_it_stands_behind() -> None:
    tokenizer = loaded("embedded", HOISTING_TEMPLATE)
    assert tokenizer.facts.hoists_system, tokenizer.facts.probe_report
    assert tokenizer.facts.keeps_turns
    messages = [plain("user", "a"), plain("assistant", "b"), plain("system", "late"), plain("user", "c")]
    reader = PromptReader(
        TextHasher(b"k" * 32),
        TokenHasher(b"k" * 32),
        PromptMemory(),
        identity="t",
        bytes_per_token=4.0,
        digest_seed=1,
        hoists_system=True,
    )
    prompt = reader.chat(json.dumps({"model": "m", "messages": messages}).encode())
    service = TokenizeService(tokenizer, TokenHasher(b"k" * 32), hoists_system=True)
    _, job = job_of(prompt, with_body=True)
    [result] = service.results([job])
    whole = tokenizer.tokenize(Chat(messages))
    assert [segment is not None for segment in result.segments] == [True] * 4
    assert result.segments[-1].state.tokens == len(whole.ids), "as the template renders it, wherever it stands"
    assert tokenizer.tokenize(Chat(prompt.tail)).ids.tolist() == whole.ids.tolist()


def test_a_template_that_moves_the_system_text_does_not_keep_turns() -> None:
    mistral = loaded("llama3", TEMPLATES[4])
    assert not mistral.facts.keeps_turns
    assert "prefix" in mistral.facts.probe_report
    chat = Chat([plain("system", "s"), plain("user", "a"), plain("assistant", "b"), plain("user", "c")])
    found = mistral.tokenize(chat)
    assert [end >= 0 for end in found.ends] == [True, False, True, True], "a user message that is last has the text"
    assert found.ends[-1] == len(found.ids)


def test_ends_are_found_by_markers_where_prefixes_do_not_render_alone() -> None:
    tokenizer = loaded("embedded", MARKS_THE_LAST)
    found = tokenizer.tokenize(Chat([plain("user", "a b c"), plain("assistant", "d"), plain("user", "e")]))
    marker = tokenizer.tokenize_text("<|im_start|>")[0]
    assert found.how == "markers"
    assert [found.ids[end] for end in found.ends[:-1]] == [marker, marker]


def test_ends_are_estimated_where_nothing_else_helps() -> None:
    tokenizer = loaded("embedded", COUNTS_MESSAGES)
    found = tokenizer.tokenize(
        Chat([plain("user", "word " * 50), plain("assistant", "word " * 25), plain("user", "e")])
    )
    assert found.how == "estimate"
    assert abs(found.ends[0] - len(found.ids) * 2 / 3) < 5
    assert found.ends[-1] == len(found.ids)


def test_arguments_of_the_template_count_where_the_template_reads_them() -> None:
    tokenizer = loaded("embedded", GREETS_BY_NAME)
    assert tokenizer.profile.arguments_matter
    messages = [plain("user", "a"), plain("assistant", "b"), plain("user", "c")]
    named = Chat(messages, None, {"chat_template_kwargs": {"who": " Ann", "tokenize": 1}})
    assert "user Ann" in tokenizer.render(named, generation=True)
    assert tokenizer.tokenize_tail(messages[2:], lambda: named, 2) is None
    assert tokenizer.tokenize_tail(messages[2:], lambda: Chat(messages), 2) is not None


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [plain("user", 7)],
        [{"content": "no role"}],
        [plain("user", "\ud800")],
        [plain("assistant", "", tool_calls=["no call"])],
    ],
)
def test_what_a_template_cannot_render_is_refused(messages: list[Any]) -> None:
    """The caller then routes by load alone: the engine, not we, tells the client."""
    with pytest.raises(TemplateRefused):
        loaded("embedded", "").tokenize(Chat(messages))


def test_a_template_of_the_request_is_refused() -> None:
    with pytest.raises(TemplateRefused):
        loaded("embedded", "").tokenize(Chat([plain("user", "a")], None, {"chat_template": "{{ messages }}"}))


def test_images_become_a_placeholder() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat = Chat([plain("user", [{"type": "text", "text": "What is it?"}, image])])
    assert "<image>" in loaded("embedded", "").render(chat, generation=False)
    assert "What is it?[image]" in loaded("embedded", PARTS_TEMPLATE).render(chat, generation=False)
    assert "AAAA" not in loaded("embedded", "").render(chat, generation=False)


def test_the_identity_keeps_tokenizers_and_templates_apart() -> None:
    [own] = {ChatTokenizer.load(source).facts.identity for source in ("", "embedded", str(EMBEDDED))}
    assert own != loaded("embedded", ENDS_WITH_EOS).facts.identity


def test_plain_prompts_get_the_special_tokens_that_the_tokenizer_adds() -> None:
    llama = loaded("llama3", "")
    assert llama.tokenize_text("Hello")[0] == 128_000
    assert llama.tokenize(Chat([plain("user", "Hello")])).ids.tolist().count(128_000) == 1
    assert loaded("embedded", "").tokenize_text("Hello").dtype == np.uint32


def test_a_text_that_asks_for_no_special_tokens_gets_none() -> None:
    """Clients that render chats themselves have them in the text."""
    llama, hasher = loaded("llama3", ""), TokenHasher(b"k" * 32)
    at = PromptReader(TextHasher(b"k" * 32), hasher, PromptMemory(), identity="t", bytes_per_token=4.0, digest_seed=1)
    lengths = []
    for more in ({}, {"add_special_tokens": False}):
        prompt = at.completion(json.dumps({"model": "m", "prompt": "Hello, who are you?", **more}).encode())
        [result] = TokenizeService(llama, hasher).results([job_of(prompt)[1]])
        lengths.append(result.segments[-1].state.tokens)
    assert lengths[0] == lengths[1] + 1


def test_what_cannot_be_loaded_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be loaded: there is no tokenizer\.json in it"):
        ChatTokenizer.load(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    for text in ("", "{", "{}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"its files make no tokenizer: [A-Za-z]+Error: ") as caught:
            ChatTokenizer.load(str(tmp_path))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a file, expected the directory"):
        ChatTokenizer.load(str(file))
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTokenizer.load("", chat_template="{% for %}")
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTokenizer.load("", chat_template=str(tmp_path / "absent.jinja"))


def test_english_costs_about_four_characters_a_token() -> None:
    assert 3 < loaded("embedded", "").facts.chars_per_token < 6


def test_the_embedded_tokenizer_is_small_and_its_origin_is_written_beside_it() -> None:
    assert (EMBEDDED / "tokenizer.json").stat().st_size < 600_000
    assert (
        hashlib.sha256((EMBEDDED / "tokenizer.json").read_bytes()).hexdigest() in (EMBEDDED / "README.md").read_text()
    )


def test_several_threads_can_tokenize_at_once() -> None:
    tokenizer = loaded("embedded", "")
    chats = [Chat([plain("system", "s"), plain("user", "word " * size)]) for size in range(1, 200)]
    alone = [tokenizer.tokenize(chat).ids.tolist() for chat in chats]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda chat: tokenizer.tokenize(chat).ids.tolist(), chats))
    assert together == alone

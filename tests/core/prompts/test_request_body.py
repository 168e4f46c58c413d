"""A body is read once; a known history is found, not read again; and nothing but broken JSON is refused."""

import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.body_json import MARKS_MAX
from ranvier_py.core.prompts.body_members import MESSAGE_BYTES_MIN, MESSAGES_FREE, MESSAGES_MAX
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import Boundary, PromptMemory
from ranvier_py.core.prompts.request_body import REPARSED_BYTES_MAX, Prompt, PromptReader

KEY = b"k" * 32
SYSTEM = {"role": "system", "content": "You help with routing."}


class Remembering(PromptReader):
    """Remembers each chat as soon as it is read, as the router does once it is served."""

    def chat(self, body: bytes) -> Prompt:
        prompt = super().chat(body)
        self.remember(prompt)
        return prompt


def reader(
    *, identity: str = "tokenizer", entries_max: int = 1000, key: bytes = KEY, reasoning_moves: bool = False
) -> PromptReader:
    return Remembering(
        TextHasher(key),
        TokenHasher(key),
        PromptMemory(entries_max),
        identity=identity,
        bytes_per_token=4.0,
        digest_seed=11,
        reasoning_moves=reasoning_moves,
        results=(("<tool_response>", "</tool_response>"),),
    )


def chat_body(messages: Sequence[object], style: str = "openai", **fields: object) -> bytes:
    """The spellings of real clients: member order and white space differ, never the meaning."""
    if style == "curl":
        return json.dumps({"model": "m", "messages": messages, **fields}, indent=1).encode()
    if style == "compact":
        return json.dumps({"model": "m", **fields, "messages": messages}, separators=(",", ":")).encode()
    return json.dumps({"messages": messages, "model": "m", **fields}).encode()


def turns(count: int, words: str = "word") -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": f"{words} {i}"} for i in range(count))]


def texts(prompt: Prompt) -> list[int]:
    return [text for _, _, text in prompt.end.chain() if text]


THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [{"id": "1"}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "found"}


@pytest.mark.parametrize(
    "result", [RESULT, {"role": "user", "content": "<tool_response>\nfound\n</tool_response>"}], ids=["tool", "user"]
)
def test_what_a_question_takes_the_reasoning_from_is_no_prefix_of_its_prompt(result: dict[str, Any]) -> None:
    """Qwen3's template leaves out what was thought before the last question, so the text changes there."""
    at = reader(reasoning_moves=True)
    opened = [*turns(1), THOUGHT, result]
    closed = [*opened, {"role": "assistant", "content": "done"}, {"role": "user", "content": "again"}]
    first = texts(at.chat(chat_body(opened)))
    assert len(first) == 4
    assert texts(at.chat(chat_body([*opened, THOUGHT, result])))[2:] == first, "as long as no question comes"
    later = texts(at.chat(chat_body(closed)))
    assert later[1:] == first[2:]
    longer = texts(at.chat(chat_body([*closed, THOUGHT, result])))
    assert longer[2:] == later, "turn by turn"
    assert texts(reader(reasoning_moves=True).chat(chat_body([*closed, THOUGHT, result]))) == longer, "and at once"
    assert len(texts(reader().chat(chat_body(closed)))) == 6, "other templates keep it"


def test_depths_are_corrected_along_what_is_a_prefix() -> None:
    prompt = reader(reasoning_moves=True).chat(
        chat_body([*turns(1), THOUGHT, RESULT, {"role": "user", "content": "again " * 40}])
    )
    question, first = [text for _, _, text in prompt.end.chain()][:2]
    assert prompt.end.correct(1, {question: 0, first: 640}.get)  # the two between are no prefix
    assert [tokens > 640 for tokens, _, _ in prompt.end.chain()] == [True, False, False]


@pytest.mark.parametrize("behind", ['"x":{x}', '"x":{x},"z":1', '"z":[{{}}],"z":1,"y":2,"x":{x}'])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("size", [10, REPARSED_BYTES_MAX], ids=["short", "long"])
def test_an_array_under_a_name_that_stands_twice_is_not_taken_for_the_history(
    behind: str, known: bool, size: int
) -> None:
    """Libraries take the last of two members of a name, and its place in the order of names is that of the first."""
    at, words = reader(), "x" * size

    def body(history: Sequence[object], more: Sequence[object]) -> bytes:
        last = behind.format(x=json.dumps(more))
        return f'{{"model":"m","x":1,"messages":{json.dumps(history)},{last}}}'.encode()

    if known:
        at.chat(body(turns(1), []))
    other = turns(2)
    at.chat(body(turns(3, words), other))
    for count in (3, 4):
        following = body(turns(3, words), turns(count))
        assert texts(at.chat(following)) == texts(reader().chat(following))


def test_a_chat_with_a_number_that_is_rounded_when_read_is_routed_by_load() -> None:
    for number, kind in ((2**64 - 1, "chat"), (2**64 + 1, "opaque"), (sys.float_info.max, "chat")):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": number}}}]
        assert reader().chat(chat_body(turns(1), tools=tools)).kind == kind


CONTENT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ['"role"', '},{"role":"user"', "}]", '"}]}', '\\"role\\"', "{", "}", ']},{"role":', '{"messages":[null']
    ),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}), min_size=1, max_size=3),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": CONTENT},
    optional={
        "tool_calls": st.just(
            [{"id": "1", "type": "function", "function": {"name": "role", "arguments": '{"role": 1}'}}]
        ),
        "name": st.just("role"),
    },
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"role": {"type": "string"}}}}]),
        "cache_salt": st.sampled_from(["a", "b"]),
        "stop": st.just(["}]"]),
        "user": st.just('{"role"'),
    },
)


@given(st.lists(MESSAGE, min_size=1, max_size=12), st.data(), FIELDS, st.sampled_from(["openai", "curl", "compact"]))
def test_a_chat_read_turn_by_turn_has_the_chain_of_the_chat_read_at_once(
    messages: list[dict[str, Any]], data: st.DataObject, fields: dict[str, Any], style: str
) -> None:
    growing = reader()
    ends = sorted(data.draw(st.sets(st.integers(1, len(messages)), max_size=4)) | {len(messages)})
    for end in ends:
        prompt = growing.chat(chat_body(messages[:end], style, **fields))
        fresh = reader().chat(chat_body(messages[:end], style, **fields))
        assert texts(prompt) == texts(fresh)
        assert (prompt.model, prompt.stream) == (fresh.model, fresh.stream)
        assert prompt.end.first.text == fresh.end.first.text
        assert list(prompt.tail) == messages[prompt.base.messages : end]


def test_turn_n_plus_1_reads_only_its_new_messages() -> None:
    growing = reader()
    growing.chat(chat_body(turns(9)))
    prompt = growing.chat(chat_body(turns(11)))
    assert prompt.base.messages == 10
    assert len(prompt.tail) == 2
    assert growing.memory.counters.found == 1


@pytest.mark.parametrize("style", ["openai", "curl", "compact"])
def test_a_branch_from_a_known_history_reads_only_its_last_message(style: str) -> None:
    growing = reader()
    growing.chat(chat_body(turns(9), style))
    prompt = growing.chat(chat_body([*turns(8), {"role": "user", "content": "another question"}], style))
    assert (prompt.base.messages, len(prompt.tail)) == (9, 1)


@pytest.mark.parametrize("style", ["openai", "curl", "compact"])
def test_a_chat_that_began_with_one_message_is_found_too(style: str) -> None:
    growing = reader()
    growing.chat(chat_body(turns(1)[1:], style))
    prompt = growing.chat(chat_body(turns(3)[1:], style))
    assert (prompt.base.messages, len(prompt.tail)) == (1, 2)


def test_estimates_grow_from_what_is_known_exactly() -> None:
    growing = reader()
    first = growing.chat(chat_body(turns(3)))
    hasher = TokenHasher(KEY)
    root = first.end.root()
    assert root.state is not None
    ids = np.arange(1000, dtype=np.uint32)
    first.end.tokenized(hasher.extend(root.state, ids, [1000])[0])
    after = growing.chat(chat_body([*turns(3), {"role": "assistant", "content": "x" * 400}]))
    assert 1080 <= after.end.tokens <= 1120


def test_a_chat_resumed_in_another_spelling_keeps_its_boundaries() -> None:
    growing = reader()
    one = growing.chat(chat_body(turns(5), "curl"))
    other = growing.chat(chat_body(turns(5), "compact"))
    assert texts(one) == texts(other)
    assert one.end is other.end


@given(st.lists(MESSAGE, min_size=2, max_size=6), st.lists(MESSAGE, min_size=1, max_size=3))
def test_tools_that_look_like_messages_are_never_taken_for_them(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    growing = reader()
    for taken in range(1, len(tools) + 1):
        body = chat_body(messages, "openai", tools=tools[:taken])
        assert texts(growing.chat(body)) == texts(reader().chat(body))


@pytest.mark.parametrize(
    "fields",
    [
        *({"model": "other"}, {"cache_salt": "tenant"}, {"lora_path": "adapter"}, {"documents": [{"text": "d"}]}),
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_changes_the_rendered_text_or_parts_caches_changes_every_fingerprint(fields: dict[str, Any]) -> None:
    growing = reader()
    plain = set(texts(growing.chat(chat_body(turns(3)))))
    assert plain.isdisjoint(texts(growing.chat(chat_body(turns(3), **fields))))


def test_two_tokenizers_and_two_clusters_never_share_a_fingerprint() -> None:
    mine = set(texts(reader().chat(chat_body(turns(3)))))
    assert mine.isdisjoint(texts(reader(identity="another").chat(chat_body(turns(3)))))
    assert mine.isdisjoint(texts(reader(key=b"o" * 32).chat(chat_body(turns(3)))))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1,", b"{'a':1}", b'{"a":1}}', b"\xff\xfe", b'{"a":"\x00"}'),
        b'{"messages":[{"role":"user","content":"\xff"}]}',
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        reader().chat(body)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadRequest, match="too deeply"):
        reader().chat(b"[" * 100_000)


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"null", b"{}", b'{"messages":"hello"}', b'{"messages":[]}', b'{"messages":["a"]}'),
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"temperature":NaN,"messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)
def test_json_that_some_engine_might_accept_is_passed_on_and_routed_by_load(body: bytes) -> None:
    assert reader().chat(body).kind == "opaque"


def test_strange_members_do_not_stop_a_chat_from_being_routed() -> None:
    body = chat_body([{"role": "user", "content": None, "x": [1, {"y": 2}]}, {"content": 5}, {"role": 7}])
    assert reader().chat(body).end.messages == 3


def test_a_prompt_that_its_engine_may_cut_is_routed_by_load() -> None:
    """vLLM keeps its last tokens: what we would learn is not what it holds."""
    known, long = reader(), "word " * 400
    first = {"role": "user", "content": long}
    more = [first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]

    def chat(messages: list[dict[str, str]], most: object) -> Prompt:
        prompt = known.chat(json.dumps({"messages": messages, "truncate_prompt_tokens": most}).encode())
        known.remember(prompt)
        return prompt

    for most in (100_000, -1, None, "100"):  # a cap that is never met costs no placement
        assert chat([first], most).kind == chat(more, most).kind == "chat"
    for messages in ([first], more):
        prompt = chat(messages, 100)
        assert (prompt.kind, prompt.unread) == ("opaque", "truncated")
    for messages, kind in (([first], "chat"), ([*more, first], "opaque")):  # named before what is known
        prompt = known.chat(json.dumps({"truncate_prompt_tokens": 1100, "messages": messages}).encode())
        known.remember(prompt)
        assert prompt.kind == kind
    assert known.memory.counters.found >= 1
    for body in ({"prompt": long}, {"prompt": [7] * 400}):
        assert known.completion(json.dumps({**body, "truncate_prompt_tokens": 100}).encode()).kind == "opaque"
        assert known.completion(json.dumps({**body, "truncate_prompt_tokens": 5000}).encode()).kind == "completion"


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a"], [[1, 2]]])
def test_a_body_of_several_prompts_is_known_as_such(prompt: Any) -> None:
    """Its answer has the sum of their tokens, and of cached ones the last prompt's."""
    assert not reader().completion(json.dumps({"prompt": prompt}).encode()).counts_differ
    first = prompt[0] if isinstance(prompt[0], list) else prompt if isinstance(prompt[0], int) else "a"
    assert reader().completion(json.dumps({"prompt": [first, "b"]}).encode()).counts_differ


def test_a_completion_of_token_ids_needs_no_tokenizer() -> None:
    ids = list(range(40))
    prompt = reader().completion(json.dumps({"model": "m", "prompt": ids}).encode())
    assert prompt.end.state is not None
    assert prompt.end.tokens == 32
    hasher = TokenHasher(KEY)
    root = prompt.end.parent
    assert root is not None
    assert root.state is not None
    assert hasher.extend(root.state, np.array(ids, dtype=np.uint32), [40])[0].end[1] == prompt.end.token


@pytest.mark.parametrize("prompt", [5, None, [], [-1], [2**32], [[]], [True], {"a": 1}, [1, "a"], ""])
def test_a_completion_prompt_that_is_not_understood_is_routed_by_load(prompt: object) -> None:
    assert reader().completion(json.dumps({"prompt": prompt}).encode()).kind == "opaque"


def test_memory_is_bounded_and_counts_what_it_drops() -> None:
    small = reader(entries_max=8)
    for number in range(50):
        small.chat(chat_body(turns(3, words=f"chat {number}")))
    statistics = small.memory.counters
    assert statistics.prefixes <= 8
    assert statistics.boundaries <= 8
    assert statistics.dropped > 0


def test_large_tools_are_not_kept_in_memory() -> None:
    growing = reader()
    tools = [{"type": "function", "function": {"name": "f" * 100_000}}]
    body = json.dumps({"tools": tools, "messages": turns(3), "model": "m"}).encode()
    growing.chat(body)
    assert len(pickle.dumps(growing)) < 10_000


def test_a_boundary_shows_what_it_is() -> None:
    assert repr(Boundary(None, Fingerprint(5), 0)) == "<Boundary 0 messages, 0 tokens (estimated)>"


def test_a_chat_of_countless_messages_is_routed_by_load_also_when_it_grew_to_that() -> None:
    texts = reader()
    many: list[object] = [{"role": "user", "content": "x" * MESSAGE_BYTES_MIN}] * MESSAGES_MAX
    assert texts.chat(chat_body(many)).kind == "chat"
    assert texts.chat(chat_body([*many, SYSTEM])).unread == "messages"
    texts.chat(chat_body([*many[:-1], SYSTEM]))
    assert texts.chat(chat_body([*many[:-1], SYSTEM, SYSTEM])).unread == "messages"
    assert texts.memory.counters.found == 1, "the branch alone"


def test_many_messages_are_read_if_they_are_not_all_tiny() -> None:
    many: list[object] = [{"role": "user", "content": "yes"}] * (2 * MESSAGES_FREE)
    assert reader().chat(chat_body(many)).unread == "messages"
    assert reader().chat(chat_body([*many, {"role": "user", "content": "x" * 70_000}])).kind == "chat"


@pytest.mark.parametrize("name", ["model", "cache_salt", "chat_template", "lora_path", "stream"])
@pytest.mark.parametrize("style", ["openai", "compact"])
def test_what_is_kept_of_a_request_does_not_grow_with_it(name: str, style: str) -> None:
    texts = reader()
    for number in range(20):
        value = f"{number}" + "x" * 1_000_000
        prompt = texts.chat(chat_body(turns(2), style, **{name: value}))
        assert prompt.kind == ("opaque" if name == "model" else "chat")
    assert len(pickle.dumps(texts)) < 100_000


@pytest.mark.parametrize("name", ["cache_salt", "chat_template"])
def test_long_salts_and_templates_still_keep_chats_apart_and_are_found_again(name: str) -> None:
    texts = reader()
    found = [
        texts.chat(chat_body(turns(2), "compact", **{name: value * 1000})).end.text for value in ("a", "b", "a", "b")
    ]
    assert found[0] == found[2] != found[1] == found[3]
    assert texts.chat(chat_body(turns(3), "compact", **{name: "a" * 1000})).base.text == found[0]
    assert texts.memory.counters.found == 3


def test_a_chat_that_was_read_and_not_served_is_not_remembered() -> None:
    growing = reader()
    PromptReader.chat(growing, chat_body(turns(3)))
    assert growing.memory.counters.prefixes == 0


def test_more_token_ids_than_any_engine_takes_are_routed_by_load() -> None:
    body = b'{"prompt":[' + b"1," * MARKS_MAX + b"1]}"
    prompt = reader().completion(body)
    assert (prompt.kind, prompt.unread) == ("opaque", "structure")


CONTEXT = {"session_id": "s", "program_id": "s:researcher", "agent_id": "researcher"}
CLAUDE_USER = "user_0a1b_account_11111111-2222_session_s"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "s", "user": CLAUDE_USER.replace("_s", "_other")},
        {"session_params": {"session_id": "s"}},
        {"vllm_xargs": {"agentic_context": CONTEXT}},
        {"vllm_xargs": {"agentic_context": json.dumps(CONTEXT)}},
        {"nvext": {"agent_context": {"session_type_id": "research", "session_id": "s", "trajectory_id": "s:one"}}},
        {"metadata": {"user_id": CLAUDE_USER}},
        {"metadata": {"user_id": CLAUDE_USER.replace("11111111-2222", "")}},
        {"metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})}},
        {"user": CLAUDE_USER},
        {"user": '{"session_id":"s"}', "metadata": None},
    ],
)
def test_a_body_names_its_session_as_agents_do(fields: dict[str, Any]) -> None:
    read = reader()
    before, behind = chat_body(turns(3), "compact", **fields), chat_body(turns(3), **fields)
    assert [read.chat(body).session_name for body in (before, behind)] == ["s", "s"]
    longer = chat_body(turns(5), "compact", **fields)
    assert read.chat(longer).session_name == "s"
    assert read.memory.counters.found == 1, "the next turn is found by its raw bytes, session and all"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "the shop's assistant"},
        {"user": "8d6f0a5e-6d0f-4d0c-8a46-0f6f4c0a1b2c"},
        {"user": "user_0a1b_account__session_"},
        {"user": '{"session_id":["s"]}'},
        {"user": "{" * 500},
        {"user": ["s"], "metadata": {"user_id": {"session_id": "s"}}},
        {"metadata": {"user_id": "u", "session": "s"}},
        {"vllm_xargs": {"agentic_context": "s"}, "nvext": {"agent_context": "s"}},
        {"vllm_xargs": {"agentic_context": json.dumps({**CONTEXT, "note": "x" * 20_000})}},
        {"vllm_xargs": {"agentic_context": '{"session_id":"\ud800"}'}},
        {"session_params": "s", "nvext": 1, "prompt_cache_key": ""},
        {"prompt_cache_key": "x" * 513},
    ],
)
def test_what_names_a_user_or_nothing_names_no_session(fields: dict[str, Any]) -> None:
    assert reader().chat(chat_body(turns(3), **fields)).session_name == ""

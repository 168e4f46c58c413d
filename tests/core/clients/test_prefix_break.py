"""What breaks the prefix of a conversation is found, placed and named; what engines do not see breaks nothing."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ranvier_py.core.clients import client_watch, prompt_sketch
from ranvier_py.core.clients.client_watch import BRANCHES_MAX, CONVERSATIONS_MAX, ClientWatch, client_rows
from ranvier_py.core.clients.known_clients import CLIENTS, client_of, session_of
from ranvier_py.core.clients.prefix_break import PrefixBreak, prefix_break
from ranvier_py.core.clients.prompt_sketch import SECTIONS_MAX, Line, PromptSketch, sketch_of, volatile_words
from ranvier_py.core.prompts.request_apis import CHAT, MESSAGES, RESPONSES, Api
from tests.examples import examples
from tests.node.turns import OCCUPIED_S_MAX, least_s

KEY = 0x5EED
BILLING = "x-anthropic-billing-header: cc_version=2.1.161.1ab; cc_entrypoint=cli; cch=%s;"
CLAUDE = {b"x-claude-code-session-id": b"one", b"user-agent": b"claude-cli/2.1.161 (external, cli)"}
CLIENT = "claude-code"

Body = dict[str, Any]


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"does {name}", "input_schema": {"type": "object"}}


def other_message(role: str) -> Body:
    return {"role": role, "content": "Something else that was not there before."}


def agent_body() -> Body:
    """A turn of an agent, by /v1/messages."""
    return {
        "model": "m",
        "tools": [tool("read"), tool("write")],
        "system": [
            {"type": "text", "text": BILLING % "5fa2b"},
            {"type": "text", "text": "You help.\nToday is 2026-11-22.\nSession 9d0c1c9e-0c4b-4b3a-9a53-6f3b5d1f1a11."},
            {"type": "text", "text": "It is 2026-11-22T10:15:00Z.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": "Please look into the file. <left>900 tokens left</left>"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I will."}],
            },
            {"role": "user", "content": [{"type": "text", "text": "And then change the second line of it."}]},
        ],
    }


def next_turn(body: Body) -> Body:
    grown = copy.deepcopy(body)
    grown["messages"] += [
        {"role": "assistant", "content": "It is done, both lines are changed."},
        {"role": "user", "content": "Thanks, now the third one."},
    ]
    return grown


def broken(before: Body, now: Body, api: Api = MESSAGES) -> PrefixBreak | None:
    return prefix_break(sketch_of(before, api, KEY), sketch_of(now, api, KEY))


def replace_text(place: int, old: str, new: str) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        block = body["system"][place]
        assert old in block["text"]
        block["text"] = block["text"].replace(old, new)

    return change


def add_tool(body: Body) -> None:
    body["tools"].append(tool("search"))


def change_model(body: Body) -> None:
    body["model"] = "other"


@pytest.mark.parametrize(
    ("change", "cause", "path"),
    [
        (replace_text(0, "5fa2b", "0c91d"), "nonce", "$.system[0]"),
        (replace_text(0, "5fa2b", "12345"), "nonce", "$.system[0]"),
        (replace_text(1, "9d0c1c9e", "11111111"), "uuid", "$.system[1]"),
        (replace_text(1, "2026-11-22", "2026-11-23"), "date", "$.system[1]"),
        (replace_text(2, "10:15:00", "10:16:30"), "time", "$.system[2]"),
        (
            lambda body: body["messages"][0].update(content="Please look into the file. <left>850 tokens left</left>"),
            *("counter", "$.messages[0].content"),
        ),
        (lambda body: body["messages"].insert(1, other_message("system")), "system_turn", "$.messages[1].content"),
        (lambda body: body["messages"].insert(0, other_message("user")), "moved_block", "$.messages[0].content"),
        (lambda body: body["messages"][1]["content"].pop(0), "reasoning_dropped", "$.messages[1].content"),
        (lambda body: body.update(messages=[other_message("user")]), "compaction", "$.messages[0].content"),
        (lambda body: body["tools"].reverse(), "tools_reordered", "$.tools[0]"),
        (add_tool, "tools_changed", "$.tools[2]"),
        (change_model, "model", "$.model"),
        (lambda body: body["messages"][0].update(other_message("user")), "edited", "$.messages[0].content"),
    ],
)
def test_each_cause_of_a_break_is_named_with_its_place(change: Callable[[Body], object], cause: str, path: str) -> None:
    before = agent_body()
    now = next_turn(before)
    change(now)
    found = broken(before, now)
    assert found is not None
    assert (found.cause, found.path) == (cause, path)


def test_the_line_of_what_is_volatile_is_known() -> None:
    now = agent_body()
    replace_text(1, "9d0c1c9e", "11111111")(now)
    found = broken(agent_body(), now)
    assert found is not None
    assert found.line == 2


WORDS = (
    *("Thu", "Wednesday", "Nov", "November", "26", "2026", "2026-11-26", "10:15", "10:15:00.5", "PM", "Z", "a1b2c3"),
    *("9d0c1c9e-0c4b-4b3a-9a53-6f3b5d1f1a11", "Sess_0123456789abcdef", "of", " ", " ", "  ", ",", ", ", "-", "_", "\t"),
)


@settings(max_examples=examples(400))
@given(st.lists(st.sampled_from(WORDS), max_size=30).map(lambda words: "".join(words).encode()))
@example(b"it is Thu, Nov 26, 10:15 PM")
def test_what_is_volatile_is_found_around_digits_as_it_is_found_by_reading_all(line: bytes) -> None:
    def places(found: Iterable[re.Match[bytes]]) -> list[tuple[object, ...]]:
        return [(match.span(), match.lastgroup) for match in found]

    assert places(volatile_words(line)) == places(prompt_sketch.VOLATILE.finditer(line))


def test_what_is_repeated_behind_a_break_is_lost_and_what_is_before_it_is_not() -> None:
    before = agent_body()
    now = next_turn(before)
    replace_text(2, "10:15:00", "10:16:30")(now)
    found = broken(before, now)
    sketch = sketch_of(before, MESSAGES, KEY)
    assert found is not None
    assert found.shared + found.lost == sketch.size
    assert 0 < found.shared < found.lost + sketch.size


def move_cache_marks(body: Body) -> None:
    del body["system"][2]["cache_control"]
    body["messages"][2]["content"][0]["cache_control"] = {"type": "ephemeral"}


def text_for_list(body: Body) -> None:
    body["messages"][2]["content"] = body["messages"][2]["content"][0]["text"]


@pytest.mark.parametrize("change", [lambda _: None, move_cache_marks, text_for_list])
def test_what_engines_do_not_render_breaks_nothing(change: Callable[[Body], object]) -> None:
    before = agent_body()
    now = next_turn(before)
    change(now)
    assert broken(before, now) is None


def test_ids_of_items_break_nothing_in_responses() -> None:
    def turn(prefix: str) -> Body:
        call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
        items = [
            {"role": "user", "content": "Read it."},
            call,
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ]
        return {
            "model": "m",
            "instructions": "Help.",
            "input": [{**item, "id": f"{prefix}{i}"} for i, item in enumerate(items)],
        }

    assert broken(turn("a"), turn("b"), RESPONSES) is None
    other = turn("a")
    other["instructions"] = "Do not help."
    found = broken(turn("a"), other, RESPONSES)
    assert found is not None
    assert found.path == "$.instructions"


texts = st.text(max_size=40)
blocks = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": texts | blocks}),
    max_size=8,
)


@given(turns, turns, st.sampled_from([CHAT, MESSAGES]))
def test_a_conversation_that_only_grows_never_breaks(old: list[Any], new: list[Any], api: Api) -> None:
    assert broken({"messages": old}, {"messages": [*old, *new]}, api) is None


@given(turns, turns)
@example([{"role": "user", "content": []}, {"role": "system", "content": ""}], [{"role": "system", "content": ""}])
def test_a_break_is_found_exactly_where_the_parts_of_two_prompts_differ_first(old: list[Any], new: list[Any]) -> None:
    def parts(messages: list[Any]) -> list[tuple[str, bool, str]]:
        found, leads = [], True  # a system message that leads is another part than one behind a user's
        for message in messages:
            content, role = message["content"], message["role"]
            leads = leads and role == "system"
            blocks = [content] if isinstance(content, str) else [block["text"] for block in content]
            found += [(role, leads, text) for text in blocks]
        return found

    before, now = parts(old), parts(new)
    found = broken({"messages": old}, {"messages": new}, CHAT)
    at = next(
        (i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), min(len(before), len(now))
    )
    if at == len(before):
        assert found is None
    else:
        assert found is not None
        assert found.shared == sum(len(text) for _, _, text in before[:at])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | texts, lambda each: st.lists(each) | st.dictionaries(texts, each)
    )
)
def test_no_json_makes_the_sketch_raise(value: Any) -> None:
    for api in (CHAT, MESSAGES, RESPONSES):
        for member in ("messages", "input", "system", "instructions", "tools", "model"):
            sketch_of({member: value, "messages": [{"content": value}]}, api, KEY)


def timed(body: Body) -> tuple[PromptSketch, float]:
    """The sketch of a body, and the processor time that it takes."""

    def took_s() -> float:
        began = time.thread_time()
        sketch_of(body, CHAT, KEY)
        return time.thread_time() - began

    return sketch_of(body, CHAT, KEY), least_s(took_s)


def test_a_prompt_of_many_parts_is_sketched_up_to_the_bound_and_not_looked_at_beyond() -> None:
    messages, many = [other_message("user")] * 2 * SECTIONS_MAX, [1] * 500_000
    for body in ({"messages": messages}, {"messages": [{"content": many}]}, {"messages": [], "tools": many}):
        sketch, took_s = timed(body)
        assert (len(sketch.sections), took_s <= OCCUPIED_S_MAX) == (SECTIONS_MAX, True)


@pytest.mark.parametrize(
    "line",
    ["1", "1 2 3 4 5 6 7 8", "Nov Nov Nov Nov 1", *(f"{word}1" for word in ("a-" * 250, "a_" * 250, "-" * 500))],
    ids=lambda line: line[:12],
)
def test_no_text_is_dear_to_sketch_or_to_keep(line: str) -> None:
    text = "\n".join([line] * (4096 // len(line)))
    sketch, took_s = timed({"messages": [{"role": "user", "content": text}] * 32})
    assert took_s <= OCCUPIED_S_MAX, "requests wait meanwhile"
    lines = [each for several in sketch.lines.values() for each in several]
    count, words = len(lines), sum(len(each.volatile) for each in lines if isinstance(each, Line))
    assert sketch.pieces == len(sketch.sections) + count + words
    assert count <= prompt_sketch.LINES_MAX
    assert words <= prompt_sketch.WORDS_MAX


# --- whole conversations ----------------------------------------------------------------------------------------------


def observe(
    watch: ClientWatch, client: str, session: int, body: Body, api: Api, tokens: int, end: int = 0
) -> PrefixBreak | None:
    """The break of a prompt, counted."""
    found = watch.observe(client, session, body, api, tokens, end)
    if found is None:
        return None
    watch.broke(client, found, token_s=0.001)
    return found.found


def breaks_of(watch: ClientWatch, client: str = "claude-code") -> Mapping[tuple[str, str, str], int]:
    rows = [row for row in client_rows(watch) if row["client"] == client]
    return {(each["cause"], each["path"], each["scope"]): each["count"] for row in rows for each in row["breaks"]}


def test_a_nonce_in_each_turn_is_counted_once_a_turn_with_its_tokens() -> None:
    watch, body = ClientWatch(KEY), agent_body()
    for number in range(5):
        body["system"][0]["text"] = BILLING % f"{number}fa2b"
        observe(watch, CLIENT, 1, body, MESSAGES, 1000)
        body = next_turn(body)
    assert breaks_of(watch) == {("nonce", "$.system[0]", "turn"): 4}
    (row,) = client_rows(watch)
    assert 1500 < row["break_tokens"] < 4000
    assert row["break_prefill_s"] == pytest.approx(row["break_tokens"] / 1000, abs=1e-6)


def test_what_keeps_sessions_from_sharing_the_system_prompt_is_counted_by_session() -> None:
    watch = ClientWatch(KEY)
    for number in range(1, 4):
        body = agent_body()
        body["system"][0]["text"] = BILLING % f"{number}fa2b"
        body["messages"][0]["content"] = f"Task {number}"
        observe(watch, CLIENT, number, body, MESSAGES, 1000)
    assert breaks_of(watch) == {("nonce", "$.system[0]", "session"): 2}


def test_a_session_is_compared_with_the_one_before_however_often_that_broke_its_own_prefix() -> None:
    watch, turns = ClientWatch(KEY), BRANCHES_MAX + 2
    for number in range(1, 3 * turns + 1):
        body, session = agent_body(), (number - 1) // turns
        body["system"][0]["text"] = BILLING % f"{number}fa2b"
        body["messages"][0]["content"] = f"Task {session}"
        observe(watch, CLIENT, session, body, MESSAGES, 1000)
    assert breaks_of(watch)["nonce", "$.system[0]", "session"] == 2


@pytest.mark.parametrize("session", [0, 1])
@pytest.mark.parametrize(
    ("change", "cause", "path"), [(add_tool, "tools_changed", "$.tools[2]"), (change_model, "model", "$.model")]
)
def test_a_conversation_that_goes_on_by_another_model_or_with_other_tools_broke_by_that(
    change: Callable[[Body], object], cause: str, path: str, session: int
) -> None:
    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, session, body, MESSAGES, 1000)
    body = next_turn(body)
    change(body)
    for _ in range(3):
        observe(watch, CLIENT, session, body, MESSAGES, 2000)
        body = next_turn(body)
    assert breaks_of(watch) == {(cause, path, "turn"): 1}, "once: the rest goes on from there"
    assert client_rows(watch)[0]["break_tokens"] > 500


@pytest.mark.parametrize("change", [add_tool, change_model])
def test_another_application_that_is_asked_the_same_or_in_another_session_goes_on_from_nothing(
    change: Callable[[Body], object],
) -> None:
    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, 1, body, MESSAGES, 1000)
    change(body)
    observe(watch, CLIENT, 1, body, MESSAGES, 1000)
    observe(watch, CLIENT, 2, next_turn(body), MESSAGES, 2000)
    assert breaks_of(watch) == {}


def test_other_tasks_and_side_branches_are_no_breaks() -> None:
    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, 1, body, MESSAGES, 1000)
    suggestion = copy.deepcopy(body)
    suggestion["messages"].append({"role": "user", "content": "Suggest what the user may ask next."})
    observe(watch, CLIENT, 1, suggestion, MESSAGES, 1000)
    observe(watch, CLIENT, 1, next_turn(body), MESSAGES, 1000)
    title = {
        "model": "m",
        "system": "Give it a title.",
        "messages": [{"role": "user", "content": "Please look into 3 files"}],
    }
    observe(watch, CLIENT, 1, title, MESSAGES, 100)
    another = agent_body()
    another["messages"] = [{"role": "user", "content": "Write 12 tests."}]
    observe(watch, CLIENT, 2, another, MESSAGES, 1000)
    assert breaks_of(watch) == {}


def test_what_is_known_of_conversations_is_bounded() -> None:
    watch = ClientWatch(KEY)
    for number in range(CONVERSATIONS_MAX + 10):
        body = {"messages": [{"role": "user", "content": "Hello."}]}
        observe(watch, CLIENT, number, body, CHAT, 10)
    assert watch.dropped == 10
    for _ in range(3 * BRANCHES_MAX):
        observe(watch, CLIENT, 0, {"messages": [{"role": "user", "content": "x" * 50}]}, CHAT, 10)
    assert watch.dropped == 11


def test_a_conversation_that_grows_is_bounded_as_one_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_watch, "PIECES_MAX", 60)
    watch = ClientWatch(KEY)
    for number in (1, 2):
        observe(watch, CLIENT, number, {"messages": [{"role": "user", "content": f"{number}"}]}, CHAT, 10, end=number)
    messages = [{"role": "user", "content": f"{place}"} for place in range(19)]
    watch.extend(2, 3, messages, CHAT, 1)
    assert watch.dropped == 1, "the older one made room while the other grew"
    watch.extend(3, 4, messages, CHAT, 20)
    assert watch.dropped == 2, "one that is too long alone is forgotten itself"
    watch.extend(4, 5, messages, CHAT, 39)
    assert watch.dropped == 2


def test_what_came_with_known_histories_is_compared_as_well() -> None:
    """A prompt that goes on from a known history is not parsed whole: what came with it is added to the sketch."""
    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, 1, body, MESSAGES, 1000, end=11)
    for end in (12, 13):
        known = len(body["messages"])
        body = next_turn(body)
        messages = [message for item in body["messages"][known:] for message in MESSAGES.messages(item)]
        watch.extend(end - 1, end, messages, MESSAGES, known)
    assert observe(watch, CLIENT, 1, next_turn(body), MESSAGES, 1000) is None
    body["messages"][5]["content"] = "It was not done."
    found = observe(watch, CLIENT, 1, body, MESSAGES, 1000)
    assert found is not None
    assert found.path == "$.messages[5].content"


def test_a_side_branch_adds_nothing_to_what_the_conversation_is_compared_with() -> None:
    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, 1, body, MESSAGES, 1000, end=11)
    for end, text in ((12, "Suggest something."), (13, "Go on, please.")):
        watch.extend(11, end, [{"role": "user", "content": text}], MESSAGES, 3)
    main = agent_body()
    main["messages"].append({"role": "user", "content": "Go on, please."})
    assert observe(watch, CLIENT, 1, main, MESSAGES, 1000) is None
    watch.extend(99, 100, [{"role": "user", "content": "Nobody knows what this goes on from."}], MESSAGES, 3)


def test_clients_are_known_by_fields_of_their_own_before_the_product_they_name() -> None:
    assert client_of(CLAUDE) == "claude-code"
    qwen = {b"user-agent": b"claude-cli/0.24.4 (external, cli)", b"accept-language": b"*"}
    assert client_of(qwen) == "qwen-code"
    assert client_of({b"user-agent": b"opencode/1.18.33 ai-sdk/provider-utils/4.0.46"}) == "opencode"
    assert client_of({b"user-agent": b"OpenAI/Python 2.20.0"}) == "openai-sdk"
    assert client_of({b"user-agent": b"\xff\x00 Mozilla"}) == client_of({}) == "other"
    assert {client_of({b"user-agent": name.encode()}) for name in ("curl/8", "evil/1")} <= set(CLIENTS)


def test_a_session_is_named_by_the_one_that_began_it() -> None:
    assert session_of(CLAUDE) == b"one"
    assert session_of({**CLAUDE, b"x-parent-session-id": b"parent"}) == b"parent"
    assert session_of({b"x-session-id": b"", b"thread-id": b"t"}) == b"t"
    assert session_of({b"x-dynamo-session-id": b"child", b"x-dynamo-parent-session-id": b"root"}) == b"root"
    assert session_of({**CLAUDE, b"x-dynamo-session-id": b"mine"}) == b"mine", "who sends it means it, as Dynamo does"
    assert session_of({}) == b""


def test_what_could_be_reused_is_what_an_earlier_prompt_had_before_and_behind_a_break() -> None:
    def reusable(watch: ClientWatch) -> float:
        return float(client_rows(watch)[0]["reusable_share"])

    watch, body = ClientWatch(KEY), agent_body()
    observe(watch, CLIENT, 1, body, MESSAGES, 1000)
    assert reusable(watch) == 0.0, "the first prompt of all"
    grown = next_turn(body)
    observe(watch, CLIENT, 1, grown, MESSAGES, 1000)
    part = sketch_of(body, MESSAGES, KEY).size / sketch_of(grown, MESSAGES, KEY).size
    assert reusable(watch) == pytest.approx(part / 2, abs=0.001)
    grown["system"][0]["text"] = BILLING % "77a1c"
    observe(watch, CLIENT, 1, grown, MESSAGES, 1000)
    assert reusable(watch) == pytest.approx((part + 1) / 3, abs=0.001), "all of it, had the nonce been left out"
    another = agent_body()
    another["messages"] = [{"role": "user", "content": "x" * sketch_of(body, MESSAGES, KEY).size}]
    before = watch.counts(CLIENT).reusable_tokens
    observe(watch, CLIENT, 2, another, MESSAGES, 1000)
    assert 0 < watch.counts(CLIENT).reusable_tokens - before < 600, "a new session shares tools and system prompt"
    watch.compared(CLIENT, 1000, 5000)
    assert reusable(watch) <= 1.0

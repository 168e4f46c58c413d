"""Rules change what they are of and no other byte; files of rules are read strictly."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ranvier_py.core.clients
from ranvier_py.core.clients import mended_body
from ranvier_py.core.clients.body_mender import BodyMender, Engines, Mended, ProofOptions, rule_for
from ranvier_py.core.clients.client_rules import RuleBook, RuleSetting, rules_of, version_of
from ranvier_py.core.clients.client_watch import ClientWatch
from ranvier_py.core.clients.mended_body import (
    BODY_BYTES_MAX,
    EDITS_MAX,
    ELEMENTS_MAX,
    MARKS_MAX,
    MEMBERS_MAX,
    PATTERN_CHARACTERS_MAX,
    BodyChange,
    RawBody,
    raw_body,
    value_at,
)
from ranvier_py.core.clients.prefix_break import prefix_break
from ranvier_py.core.clients.prompt_sketch import sketch_of
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.prompts.request_apis import APIS, CHAT, MESSAGES, RESPONSES, Api
from tests.replay.traces.given import DATA

SHIPPED = (Path(ranvier_py.core.clients.__file__).parent / "client_rules.toml").read_text()
CLAUDE = b"claude-cli/2.1.330 (external, cli)"
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.%s; cc_entrypoint=cli; cch=5fa2b;"
VLLM = Engines(hosted=False, owned_by=[frozenset({"vllm"})] * 2)
SGLANG = Engines(hosted=False, owned_by=[frozenset({"vllm"}), frozenset({"sglang"})])
UNKNOWN = Engines(hosted=False, owned_by=[frozenset()])
HOSTED = Engines(hosted=True, owned_by=[frozenset({"vllm"})])
OPTIONS = ProofOptions(sessions=40, control_share=0.25)
ALL = ProofOptions(sessions=40, control_share=0.01)


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16, key=b"of the cluster").digest()


def mender(*settings: str, options: ProofOptions = ALL, text: str = SHIPPED) -> BodyMender:
    return BodyMender(RuleBook(rules_of(text), [RuleSetting.parse(each) for each in settings]), digest, options)


def mend(
    at_work: BodyMender, body: bytes, api: Api = MESSAGES, engines: Engines = VLLM, session: bytes = b"s1"
) -> Mended | None:
    client = "claude-code" if api is MESSAGES else "other"
    return at_work.mend(body, api, client, CLAUDE, session, lambda _: engines)


# --- each rule that ships ---------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Api, bytes, bytes, bytes]] = {
    "claude-code-billing": (
        MESSAGES,
        b'{"model":"m", "system":[ BILLING , {"type":"text","text":"H\\u00e4lp\xc3\xa9"}], "messages":[]}'.replace(
            b"BILLING", b'{"type":"text","text":"%b"}' % (BILLING % "1ab").encode()
        ),
        b'{"type":"text","text":"%b"} , ' % (BILLING % "1ab").encode(),
        b"",
    ),
    "claude-code-billing-line": (
        CHAT,
        b'{"messages":[{"role":"system","content":"%b\\n\\nYou \\"help\\"."},{"role":"user","content":"x"}]}'
        % (BILLING % "1ab").encode(),
        b"%b\\n\\n" % (BILLING % "1ab").encode(),
        b"",
    ),
    "claude-code-counter-turns": (
        MESSAGES,
        (
            b'{"messages":[{"role":"user"},{"content":"<total_tokens>9 left</total_tokens>", "role" : "system"},'
            b'{"role":"system","content":"b"}]}'
        ),
        b'"role" : "system"',
        b'"role" : "user"',
    ),
    "claude-code-system-turns": (
        MESSAGES,
        (
            b'{"messages":[{"role":"system","content":"first"},{"role":"user","content":"a"},'
            b'{"role":"system","content":[{"type":"text","text":"Your list."}]}]}'
        ),
        b'"system","content":[',
        b'"user","content":[',
    ),
    "tools-by-name": (
        RESPONSES,
        b'{"tools":[{"type":"function","name":"write"},\n {"type":"web_search"}, {"name":"read", "type":"function"}]}',
        b'{"type":"function","name":"write"},\n {"type":"web_search"}, {"name":"read", "type":"function"}',
        b'{"name":"read", "type":"function"},\n {"type":"web_search"}, {"type":"function","name":"write"}',
    ),
    "system-clock-to-day": (
        RESPONSES,
        (
            b'{"instructions":"Caf\\u00e9 \\ud83d\\ude00\\nNow 2026-11-22T10:15:00Z, then 2026-11-23 09:05.\\t\\"x\\"",'
            b'"input":"at 2026-11-22T10:15"}'
        ),
        b"2026-11-22T10:15:00Z, then 2026-11-23 09:05.",
        b"2026-11-22, then 2026-11-23.",
    ),
    "qwen3-keep-thoughts": (
        CHAT,
        b'{"model":"Qwen/Qwen3-8B","messages":[],"chat_template_kwargs":{"enable_thinking":true} }',
        b'{"enable',
        b'{"preserve_thinking": true,"enable',
    ),
}
"""Of each rule: the API, a body, what is changed in it, and to what."""


@pytest.mark.parametrize("name", [rule.name for rule in rules_of(SHIPPED)])
def test_each_rule_that_ships_changes_what_it_is_of_and_no_other_byte(name: str) -> None:
    api, before, old, new = CASES[name]
    after = before.replace(old, new)
    assert before.count(old) == 1
    found = mend(mender(f"{name}=rewrite"), before, api)
    assert found is not None
    assert found.sent == found.body == after
    assert found.uses[0].rule == name
    again = mend(mender(f"{name}=rewrite"), after, api)
    assert again is None, "what is mended has nothing to mend"
    assert mend(mender(), before, api) is None, "nothing is changed unless an operator turned it on"


def test_members_that_are_set_are_added_where_the_client_has_none_and_its_own_stand() -> None:
    at_work = mender("qwen3-keep-thoughts=rewrite")

    def sent(rest: bytes) -> bytes | None:
        found = mend(at_work, b'{"messages":[],"model":"qwen3"%b' % rest, CHAT)
        return None if found is None else found.sent[len(b'{"messages":[],"model":"qwen3"') :]

    assert sent(b" }") == b' ,"chat_template_kwargs":{"preserve_thinking": true}}'
    assert sent(b',"chat_template_kwargs":null}') == b',"chat_template_kwargs":{"preserve_thinking": true}}'
    assert sent(b',"chat_template_kwargs":{}}') == b',"chat_template_kwargs":{"preserve_thinking": true}}'
    assert sent(b',"chat_template_kwargs":{"preserve_thinking":false}}') is None
    assert sent(b',"chat_template_kwargs":7}') is None
    assert mend(at_work, b'{"messages":[],"model":"llama"}', CHAT) is None


def test_blocks_go_with_their_commas_wherever_they_are_and_never_all_of_them() -> None:
    nonce = b'{"type":"text","text":"%b"}' % (BILLING % "1ab").encode()
    other = b'{"type":"text","text":"Help."}'
    at_work = mender("claude-code-billing=rewrite")
    for blocks, left in (
        ([nonce, other, nonce, nonce], [other]),
        ([other, nonce, other], [other, other]),
        ([nonce, nonce, other], [other]),
    ):
        found = mend(at_work, b'{"system":[%b],"messages":[]}' % b",".join(blocks))
        assert found is not None
        assert found.sent == b'{"system":[%b],"messages":[]}' % b",".join(left)
    for body in (
        b'{"system":[%b],"messages":[]}' % nonce,
        b'{"system":[],"messages":[],"x":"x-anthropic-billing-header:"}',
    ):
        assert mend(at_work, body) is None


# --- for any body -----------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.text('at12-: TZ"\\\né😀', max_size=30)
names = st.sampled_from(["read", "write", "list", "é"])
tools = st.lists(st.fixed_dictionaries({"name": names, "description": texts}), max_size=5)
blocks = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": texts | blocks}),
    max_size=5,
)
bodies = st.fixed_dictionaries({"system": texts | blocks, "messages": turns}, optional={"tools": tools, "x": texts})
spelling = st.sampled_from(
    [{"ensure_ascii": True}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}]
)


@given(bodies, spelling)
def test_a_replaced_text_is_what_the_pattern_makes_of_it_and_the_rest_keeps_its_bytes(
    fields: dict[str, Any], how: dict[str, Any]
) -> None:
    text = json.dumps(fields, **how)
    raw = RawBody(text, MESSAGES)
    pattern = re.compile(r"(\d)[-a:]+")
    edits = raw.edits(BodyChange(kind="replace", where="history", pattern=pattern, replacement=r"\1é\""))
    expected = json.loads(text)
    for message in expected["messages"]:
        if isinstance(message["content"], str):
            message["content"] = pattern.sub('\\1é\\"', message["content"])
        else:
            for block in message["content"]:
                block["text"] = pattern.sub('\\1é\\"', block["text"])
    assert json.loads(raw.edited(edits)) == expected
    assert [raw.text[edit.start : edit.end] for edit in edits] == [
        m[0]
        for message in fields["messages"]
        for part in (
            [message["content"]] if isinstance(message["content"], str) else [b["text"] for b in message["content"]]
        )
        for m in pattern.finditer(part)
    ]


@pytest.mark.parametrize("beyond", range(-1, 22))
def test_what_ends_beyond_the_characters_that_a_pattern_sees_stays_whole(beyond: int) -> None:
    at_work, clock = mender("system-clock-to-day=rewrite"), "2026-11-27T10:15:33Z"
    filler = "x" * (PATTERN_CHARACTERS_MAX + beyond - len(clock) - 1)
    body = json.dumps({"messages": [{"role": "system", "content": f"{filler} {clock} Help."}]}).encode()
    found = mend(at_work, body, CHAT)
    assert (found is not None) == (beyond <= 0)
    assert found is None or b" 2026-11-27 Help." in found.sent


@given(bodies, spelling)
def test_sorted_tools_are_the_same_tools_by_name_in_the_bytes_they_came_in(
    fields: dict[str, Any], how: dict[str, Any]
) -> None:
    raw = RawBody(json.dumps(fields, **how), MESSAGES)
    after = raw.edited(raw.edits(BodyChange(kind="sort_tools")))
    found = json.loads(after)
    assert [tool["name"] for tool in found.pop("tools", [])] == sorted(t["name"] for t in fields.pop("tools", []))
    assert found == fields
    assert sorted(after) == sorted(raw.text)


@given(bodies, spelling)
def test_turns_get_another_role_where_they_are(fields: dict[str, Any], how: dict[str, Any]) -> None:
    raw = RawBody(json.dumps(fields, **how), MESSAGES)
    action = BodyChange(kind="rerole", pattern=re.compile(r"[\s\S]*"), role="system", to="user")
    found = json.loads(raw.edited(raw.edits(action)))["messages"]
    first = next((i for i, turn in enumerate(fields["messages"]) if turn["role"] != "system"), len(found))
    for place, (before, after) in enumerate(zip(fields["messages"], found, strict=True)):
        mended = place > first and before["role"] == "system" and before["content"] != []
        assert after == (
            {**before, "role": "user"} if mended or (place > first and before["role"] == "system") else before
        )


@given(st.binary(max_size=60) | bodies.map(lambda each: json.dumps(each).encode()[:-3]))
def test_what_is_no_body_goes_on_as_it_came(body: bytes) -> None:
    try:
        is_object = isinstance(json.loads(body.decode()), dict)
    except ValueError:
        is_object = False
    assert (raw_body(body, MESSAGES) is not None) == is_object


@pytest.mark.parametrize(
    "body", [b'{"a":' + b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"a":1} x', b'{"a":"\xff"}', b"[1]", b""]
)
def test_bodies_that_only_look_like_objects_are_none(body: bytes) -> None:
    assert raw_body(body, CHAT) is None


def test_what_would_take_long_to_walk_is_let_be_and_counted() -> None:
    at_work = mender("tools-by-name=rewrite", "system-clock-to-day=rewrite")
    tools = [{"name": f"{number % 7}"} for number in range(8 * EDITS_MAX)]
    assert raw_body(json.dumps({"tools": tools}).encode(), CHAT) is None
    assert raw_body(json.dumps({"messages": [], "x": "y" * BODY_BYTES_MAX}).encode(), CHAT) is None
    assert mend(at_work, b'{"messages":[%b[]]}' % (b"[]," * MARKS_MAX), CHAT) is None
    assert at_work.counters.unread == 1
    for count, changes in ((EDITS_MAX, True), (EDITS_MAX + 1, False)):
        clock = {"messages": [{"role": "system", "content": "2026-11-22T10:15 " * count}]}
        found = mend(at_work, json.dumps(clock).encode(), CHAT)
        assert (found is not None) is changes, "all of it or nothing"


def long_chat(size: int, count: int = 200) -> bytes:
    """A body that most rules are of, and most of which is its history."""
    turns = [{"role": ("user", "system")[n % 2], "content": "It is\n" * (size // count // 7)} for n in range(count)]
    system = [{"type": "text", "text": text} for text in (BILLING % "1ab", "2026-11-22T10:15 You help.")]
    tools = [{"name": f"tool {-number}"} for number in range(20)]
    return json.dumps({"model": "qwen3", "messages": turns, "system": system, "tools": tools}).encode()


def test_a_long_body_is_scanned_little_more_than_once_however_many_rules_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scanned = 0

    def counting(text: str, at: int) -> tuple[Any, int]:
        nonlocal scanned
        value, end = value_at(text, at)
        scanned += end - at
        return value, end

    monkeypatch.setattr(mended_body, "value_at", counting)
    rules = ("claude-code-billing", "system-clock-to-day", "tools-by-name")
    body = long_chat(900_000)
    found = mend(mender(*(f"{rule}=rewrite" for rule in rules)), body)
    assert found is not None
    assert len(found.uses) == 3
    assert len(body) <= scanned < 1.02 * len(body)
    scanned = 0
    roles = mender(*(f"{rule}=rewrite" for rule in rules), "claude-code-system-turns=rewrite")
    assert mend(roles, body) is not None
    assert scanned < 2.1 * len(body), "what changes in half of the messages is read again, the rest is not"


def test_a_body_above_the_bounds_is_not_scanned_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = mender("tools-by-name=rewrite")
    monkeypatch.setattr(mended_body, "value_at", lambda *_: pytest.fail("it was scanned"))
    assert mend(at_work, long_chat(BODY_BYTES_MAX)) is None
    assert at_work.counters.unread == 1


def test_a_body_of_too_many_parts_is_left_alone_and_counted() -> None:
    at_work = mender("tools-by-name=rewrite", "claude-code-billing=rewrite")
    tools = b'"tools":[{"name":"b"},{"name":"a"}]'
    members = b",".join(b'"%d":0' % number for number in range(MEMBERS_MAX))
    for number, body in enumerate(
        (
            b'{"messages":[%b0],%b}' % (b"0," * ELEMENTS_MAX, tools),
            b"{%b,%b}" % (members, tools),
            b'{"tools":[%b0],"messages":[]}' % (b"0," * ELEMENTS_MAX),
        ),
        1,
    ):
        assert mend(at_work, body) is None
        assert at_work.counters.unread == number
    assert mend(at_work, b'{"messages":[%b0],%b}' % (b"0," * (ELEMENTS_MAX - 1), tools)) is not None


def test_rules_change_the_body_as_it_came_and_of_two_changes_to_one_place_the_first_is_made() -> None:
    def replacing(old: str, new: str, where: str = "system") -> str:
        return f'action = "replace"\npattern = "{old}"\nreplacement = "{new}"\nwhere = "{where}"'

    def setting(member: str, **values: int) -> str:
        of = ", ".join(f"{name} = {value}" for name, value in values.items())
        return f'action = "set"\nmember = "{member}"\nvalues = {{ {of} }}'

    actions = {
        "a": replacing("one two", "1"),
        "b": replacing("two", "2"),
        "c": replacing("three", "3"),
        "d": 'action = "rerole"\npattern = "later"\nrole = "system"\nto = "user"',
        "e": replacing("late", "l", "history"),
        "f": setting("x", y=1),
        "g": setting("x", y=2, z=3),
        "h": setting("w", v=1),
        "i": setting("x", u=4),
    }
    of_all = 'client = "*"\napis = ["chat"]\ncauses = []\nsource = "x"'
    text = "format = 1\n" + "".join(f'[[rule]]\nname = "{n}"\n{of_all}\n{each}\n' for n, each in actions.items())
    at_work = mender(*(f"{name}=rewrite" for name in actions), text=text)
    turn = '{"role": "%s", "content": "%s"}'
    body = '{"messages": [%s, %s, %s]%s}'
    before = body % (turn % ("system", "one two three two"), turn % ("user", "hi"), turn % ("system", "later"), "")
    added = ',"x":{"y": 1, "z": 3, "u": 4},"w":{"v": 1}'
    found = mend(at_work, before.encode(), CHAT)
    assert found is not None
    assert json.loads(found.sent) == json.loads(
        body % (turn % ("system", "1 3 2"), turn % ("user", "hi"), turn % ("user", "lr"), added)
    )
    assert [use.rule for use in found.uses] == list(actions)


# --- real agents ------------------------------------------------------------------------------------------------------


def captured(name: str) -> Iterator[tuple[Api, bytes]]:
    paths = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
    file = DATA / "clients" / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip("the captures of clients are not here (set SHARED_DATA)")
    with gzip.open(file) as lines:
        for line in lines:
            found = json.loads(line)
            api = paths.get(found["path"].partition("?")[0])
            if api is not None:
                yield api, json.dumps(found["body"], ensure_ascii=False).encode()


@pytest.mark.parametrize("name", ["codex", "opencode-anthropic", "qwen"])
def test_real_agents_whose_tools_come_in_any_order_break_nothing_once_they_are_sorted(name: str) -> None:
    at_work, rng = mender("tools-by-name=rewrite"), Random(1)
    watches, lost = (ClientWatch(1), ClientWatch(1)), [0, 0]
    for api, body in captured(name):
        fields = json.loads(body)
        rng.shuffle(fields.get("tools") or [])
        shuffled = json.dumps(fields, ensure_ascii=False).encode()
        mended = at_work.mend(shuffled, api, "other", b"", b"s", lambda _: VLLM)
        sent = shuffled if mended is None else mended.sent
        assert sorted(sent) == sorted(shuffled), "the same tools in the same bytes"
        for place, one in enumerate((shuffled, sent)):
            found = watches[place].observe("other", 1, json.loads(one), api, 1000)
            lost[place] += found.tokens if found is not None and found.kind.cause == "tools_reordered" else 0
    assert lost[0] > 0
    assert lost[1] == 0


# --- where rules act --------------------------------------------------------------------------------------------------

NONCE = CASES["claude-code-billing"][1]
BARE = NONCE.replace(CASES["claude-code-billing"][2], b"")


def test_no_rule_acts_while_a_hosted_provider_may_serve_the_model() -> None:
    for mode in ("rewrite", "key"):
        at_work = mender(f"claude-code-billing={mode}")
        assert mend(at_work, NONCE, engines=HOSTED) is None
        assert at_work.counters.withheld == {"hosted": 1}


def test_mode_key_changes_fingerprints_alone_and_only_for_engines_that_leave_it_out() -> None:
    at_work = mender("claude-code-billing=key")
    found = mend(at_work, NONCE)
    assert found is not None
    assert (found.body, found.sent) == (BARE, NONCE)
    assert at_work.counters.keyed == {"claude-code-billing": 1}
    assert at_work.counters.rewritten == {}
    assert mend(at_work, NONCE, engines=SGLANG) is None
    assert mend(at_work, NONCE, engines=UNKNOWN) is None
    assert at_work.counters.withheld == {"engine": 2}


def test_a_rewritten_body_stays_so_beside_a_rule_of_mode_key() -> None:
    at_work = mender("claude-code-billing=key", "tools-by-name=rewrite")
    body = NONCE.replace(b'"messages":[]', b'"messages":[],"tools":[{"name":"b"},{"name":"a"}]')
    found = mend(at_work, body)
    assert found is not None
    assert found.sent == body.replace(b'{"name":"b"},{"name":"a"}', b'{"name":"a"},{"name":"b"}')
    assert found.body == found.sent.replace(CASES["claude-code-billing"][2], b"")


def test_versions_clients_and_models_limit_a_rule_and_the_last_setting_that_fits_counts() -> None:
    at_work = mender("claude-code-billing=rewrite", "claude-code-billing=observe,model=M*")
    assert mend(at_work, NONCE) is None
    assert mend(at_work, NONCE.replace(b'"m"', b'"other"')) is not None
    one = mender("claude-code-billing=rewrite")
    for agent in (b"claude-cli/2.1.28", b"claude-cli", b""):
        assert one.mend(NONCE, MESSAGES, "claude-code", agent, b"s", lambda _: VLLM) is None
    assert one.mend(NONCE, MESSAGES, "claude-code", b"claude-cli/2.1.29", b"s", lambda _: VLLM) is not None
    assert one.mend(NONCE, MESSAGES, "opencode", CLAUDE, b"s", lambda _: VLLM) is None
    assert one.mend(NONCE, CHAT, "claude-code", CLAUDE, b"s", lambda _: VLLM) is None
    only = mender("tools-by-name=rewrite,client=codex")
    assert mend(only, CASES["tools-by-name"][1], RESPONSES) is None
    assert version_of(b"codex_cli_rs/0.169.0 (x)") == (0, 169)


# --- which rule would mend a break ------------------------------------------------------------------------------------


def test_a_break_is_given_the_rule_that_changes_what_made_it_and_no_other() -> None:
    book = mender().book

    def named(before: bytes, now: bytes, api: Api = MESSAGES) -> str:
        found = prefix_break(*(sketch_of(json.loads(each), api, 1) for each in (before, now)))
        assert found is not None
        return rule_for(book, found, now, api, "claude-code")

    assert named(NONCE, NONCE.replace(b"5fa2b", b"77a1c")) == "claude-code-billing"
    other = b'{"system":[{"type":"text","text":"Request %b."},{"type":"text","text":"x"}],"messages":[]}'
    assert named(other % b"4be01", other % b"91c2f") == "", "a nonce of another kind is none of a rule's"
    tools = b'{"messages":[],"tools":[{"name":"b"},{"name":"a"}]}'
    assert named(tools.replace(b"b", b"c").replace(b'a"}', b'b"}').replace(b'c"}', b'a"}'), tools) == "tools-by-name"
    clock = b'{"system":"Now 2026-11-22T10:%b:00Z.","messages":[]}'
    assert named(clock % b"15", clock % b"16") == "system-clock-to-day"
    assert mender("claude-code-billing=off").book.may_mend("nonce", "claude-code", "messages", "m") is not None
    off = mender("claude-code-billing=off", "claude-code-billing-line=off").book
    assert not list(off.may_mend("nonce", "claude-code", "messages", "m"))


# --- files and settings -----------------------------------------------------------------------------------------------

GOOD = """
format = 1
[[rule]]
name = "own"
client = "*"
apis = ["chat"]
causes = ["uuid"]
action = "replace"
pattern = "a(b)"
replacement = '\\1'
source = "ours"
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("format = 1", "format = 2", "format = 1"),
        ("format = 1", "format = 1\nother = 3", "nothing else"),
        ("[[rule]]", "[[rule", "not TOML"),
        ('name = "own"', "", "rule 1: needs name"),
        ('name = "own"', 'name = "Own!"', "small letters"),
        ('client = "*"', 'client = "nobody"', "client must be"),
        ('client = "*"', "client = 3", "client must be a text"),
        ('["chat"]', '["chat", "soap"]', "apis: soap unknown"),
        ('["chat"]', "[1]", "apis must be a list of texts"),
        ('["uuid"]', '["bad"]', "causes: bad unknown"),
        ('"replace"', '"destroy"', "action must be one of drop_block"),
        ('"replace"', '"drop_block"', "drop_block has no replacement"),
        ('pattern = "a(b)"', "", "replace needs pattern"),
        ('"a(b)"', '"a("', "no regular expression"),
        ("'\\1'", "'\\2'", "no regular expression"),
        ('source = "ours"', 'source = " "', "source must name"),
        ('source = "ours"', 'source = "ours"\nwhere = "nowhere"', "where must be one of"),
        ('source = "ours"', 'source = "ours"\nversions = "~2"', "versions must be like"),
        ('source = "ours"', 'source = "ours"\nsorce = "x"', "unknown 'sorce'"),
    ],
)
def test_a_file_that_is_no_rules_is_refused_with_the_rule_and_the_reason(old: str, new: str, why: str) -> None:
    assert rules_of(GOOD)[0].name == "own"
    assert old in GOOD
    with pytest.raises(ValueError, match=re.escape(why)):
        rules_of(GOOD.replace(old, new))


def test_two_rules_of_one_file_have_two_names() -> None:
    with pytest.raises(ValueError, match="another rule has this name"):
        rules_of(GOOD + GOOD.partition("format = 1")[2])


@pytest.mark.parametrize(
    "text",
    ["", "own", "own=on", "=key", "own=key,model=", "own=off,client=nobody", "own=off,x=1", "own=off,model=a,model=b"],
)
def test_a_setting_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # each has a reason of its own
        RuleSetting.parse(text)


def test_a_setting_of_no_rule_or_of_a_mode_that_would_be_a_lie_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no rule 'none'"):
        mender("none=rewrite")
    with pytest.raises(ValueError, match="tools-by-name can't have mode key"):
        mender("tools-by-name=key")


def test_options_of_proof_have_limits() -> None:
    with pytest.raises(ConfigError):
        ProofOptions(sessions=3)
    with pytest.raises(ConfigError):
        ProofOptions(control_share=0.0)


def test_every_action_is_of_every_api_it_is_allowed_for() -> None:
    for rule in rules_of(SHIPPED):
        assert set(rule.apis) <= set(APIS)
        assert rule.source

"""Members that only routers may set: found where engines read them, and removed to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.outer_members import is_doubled, without
from ranvier_py.core.prompts.reserved_members import (
    CONTAINERS,
    HITS_MAX,
    ID_MEMBERS,
    LEVELS_MAX,
    NAME_PARTS,
    NOTHING,
    RANK_MEMBERS,
    ROUTERS,
    SLICE_BYTES,
    TRANSFER_MEMBERS,
    BodySearch,
    has_address,
    reserved_in,
    slices,
)

NAMES = (*TRANSFER_MEMBERS, *RANK_MEMBERS, *ID_MEMBERS)
ADDRESS = "x___prefill_addr_10.0.0.1:9___decode_addr_10.0.0.2:9_y"

leaves = st.one_of(st.none(), st.integers(), st.text(max_size=8), st.just(ADDRESS))
names = st.one_of(st.sampled_from([*NAMES, *CONTAINERS, "messages", "tools"]), st.text(max_size=4))
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4))
)
bodies = st.dictionaries(names, values, max_size=6)


def cleaned(value: Any, level: int = 0) -> Any:
    """What is left of a body, by the rule and not by its text."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, inner in value.items():
        if name in NAMES and (name not in ID_MEMBERS or has_address(inner)):
            continue
        if name in CONTAINERS and level < LEVELS_MAX:
            each = [cleaned(one, level + 1) for one in inner] if isinstance(inner, list) else cleaned(inner, level + 1)
            kept[name] = each
        else:
            kept[name] = inner
    return kept


@given(bodies, st.booleans(), st.sampled_from([None, 2]))
def test_what_is_found_is_removed_and_nothing_else(
    fields: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = reserved_in(fields).router
    changed = without(body, found)
    assert json.loads(changed) == cleaned(fields)
    assert (changed == body) is (not found)
    assert reserved_in(json.loads(changed)).router == ()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"kv_transfer_params":{},"a":1}', '{"a":1}'),
        ('{ "a":1 ,\n "kv_transfer_params" : [1,{}] }', '{ "a":1 }'),
        ('{"a":1,"bootstrap_host":"x","bootstrap_room":1}', '{"a":1}'),
        ('{"bootstrap_host":"x", "a":1.0, "bootstrap_room":1, "b":"\\u0062"}', '{"a":1.0, "b":"\\u0062"}'),
        ('{"kv_transfer_params":null}', "{}"),
        ('{"kv\\u005ftransfer_params":1,"kv_transfer_params":2,"a":1,"a":2}', '{"a":1,"a":2}'),
        ('\ufeff{"kv_transfer_params":1,"a":2}', '\ufeff{"a":2}'),
        ('{"sampling_params":[{"n":1, "bootstrap_port":1},{}],"x":"}"}', '{"sampling_params":[{"n":1},{}],"x":"}"}'),
        ('{"vllm_xargs":{"kv_transfer_params":1},"a":"\ud800"}', '{"vllm_xargs":{},"a":"\ud800"}'),
    ],
)
def test_all_other_bytes_stay(body: str, expected: str) -> None:
    found = without(body.encode("utf-8", "surrogatepass"), NAMES)
    assert found == expected.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    "body",
    [
        "{" + '"a":1,' * 60_000 + '"rid":1}',
        '{"sampling_params":[' + ",".join(['{"bootstrap_host":1}'] * 40_000) + "]}",
        '{"sampling_params":[' + ",".join(["{}"] * 60_000) + "]}",
    ],
)
def test_a_body_of_very_many_members_is_not_walked_to_its_end(body: str) -> None:
    with pytest.raises(ValueError, match="too many"):
        without(body.encode(), NAMES)


def test_a_body_with_none_of_the_names_is_not_looked_at_further() -> None:
    assert reserved_in({"model": "m", "messages": [], "stream": True}) is NOTHING


def found_in(body: bytes, *, form: bool = False) -> str:
    search = BodySearch(TRANSFER_MEMBERS, form=form)
    found = next((name for piece in slices(body) if (name := search.find(piece))), "")
    ids = BodySearch(ID_MEMBERS, form=form)
    return found or next((name for piece in slices(body) if search.has_address and (name := ids.find(piece))), "")


def test_a_search_for_parts_of_names_misses_no_name() -> None:
    assert all(any(part in name.encode() for part in NAME_PARTS) for name in ROUTERS)


def wide(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


MEMBER = '{"messages":[],"ec_transfer_params" \n:\t{}}'
FOUND = {
    "plain": MEMBER.encode(),
    "escaped": MEMBER.replace("ec_t", "e\\u0063\\u005Ft").encode(),
    "all escaped": MEMBER.replace(
        "ec_transfer_params", "".join(f"\\u{ord(c):04X}" for c in "ec_transfer_params")
    ).encode(),
    **{name: wide(MEMBER, name) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")},
    "utf-16, escaped": MEMBER.replace("ec_t", "e\\u0063_t").encode("utf-16-le"),
    "between slices": b"[" + b"1" * (SLICE_BYTES - 8) + MEMBER.encode() + b"2" * SLICE_BYTES,
    "far colon": MEMBER.replace(" \n:", " " * 100_000 + ":").encode(),
    "too many escapes": b"{" + b'"\\u0061",' * (HITS_MAX + 1) + b"}",
    "too many escapes in texts": b'["' + b"\\\\u0061" * 30_000 + b'"]',
    "too many values": b"[" + b'"ec_transfer_params",' * (HITS_MAX + 1) + b"]",
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_search_finds_each_spelling_of_a_name(kind: str) -> None:
    assert found_in(FOUND[kind])


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"content":"set \\"kv_transfer_params\\": {} there, or kv_transfer_params:"}]}',
        b'{"content":"\\\\u006bv_transfer_params", "x":"\\u0060\\u00e9"}',
        b'["kv_transfer_params", "bootstrap_host" ]',
        b'{"content":"name=kv_transfer_params"}',
        b'{"request_id":"mine","content":"y"}',
        b'{"content":"' + ADDRESS.encode() + b'"}',
        bytes(range(256)) * 100,
    ],
)
def test_a_search_finds_no_name_in_a_text(body: bytes) -> None:
    assert found_in(body) == ""


@pytest.mark.parametrize(
    "part", ['name="kv_transfer_params"', "NAME = kv_transfer_params", "name*=UTF-8''kv_transfer_params"]
)
def test_a_search_finds_the_field_of_a_form(part: str) -> None:
    form = f"--x\r\ncontent-disposition: form-data; {part}\r\n\r\n{{}}\r\n--x--\r\n".encode()
    assert found_in(form, form=True) == "kv_transfer_params"
    inner = b'--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{"bootstrap_host": 1}\r\n--x--\r\n'
    assert found_in(inner, form=True) == "bootstrap_host"


def test_a_search_finds_a_request_id_with_an_address_however_far_apart_they_stand() -> None:
    body = b'{"request_id":"' + b"x" * 3 * SLICE_BYTES + ADDRESS.encode() + b'"}'
    assert found_in(body) == "request_id"
    assert found_in(b'{"request_id":"' + ADDRESS.replace("_", "\\u005f").encode() + b'"}') == "request_id"


def test_a_name_that_stands_twice_is_seen_whatever_its_spelling() -> None:
    wanted = ("conversation",)
    assert is_doubled(b'{"conversation":1,"conversation":null}', wanted)
    assert is_doubled(b'{"conversation":1,"c\\u006fnversation":null}', wanted)
    assert not is_doubled(b'{"conversation":1,"x":{"conversation":2},"y":["conversation"]}', wanted)

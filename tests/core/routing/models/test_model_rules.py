"""Who serves a name that has a table: precedence, tenants, aliases of aliases, cycles, shares and settings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.routing.models.model_rules import CHAIN_MAX, ModelRule, ModelTable, share_of


def table(*rules: ModelRule) -> ModelTable:
    made = ModelTable(rules)
    assert list(made.problems()) == []
    return made


def rule(name: str, *to: str, **fields: Any) -> ModelRule:
    return ModelRule(name, dict.fromkeys(to, 1.0), **fields)


def chain(made: ModelTable, name: str, tenant: str = "", listed: Sequence[str] = ()) -> list[str]:
    return [each.model for each in made.chain(name, tenant, listed)]


def test_a_name_goes_before_a_glob_and_a_longer_glob_before_a_shorter_one() -> None:
    rules = [rule("*", "any"), rule("claude-*", "qwen"), rule("claude-opus-*", "big"), rule("claude-opus-4", "four")]
    for made in (table(*rules), table(*reversed(rules))):
        served = {name: chain(made, name) for name in ("x", "claude-haiku", "claude-opus-5", "claude-opus-4")}
        assert served == {"x": ["any"], "claude-haiku": ["qwen"], "claude-opus-5": ["big"], "claude-opus-4": ["four"]}


def test_brackets_are_part_of_names_in_globs_too() -> None:
    made = table(rule("claude-*[1m]", "long[v2]"), rule("a[b]", "c"))
    names = ("claude-opus[1m]", "claude-opus1", "a[b]", "ab")
    assert [chain(made, name) for name in names] == [["long[v2]"], [], ["c"], []]


def test_a_name_without_a_table_is_left_alone() -> None:
    made = table(rule("a", "b"), rule("c-*", "d"))
    assert [chain(made, name) for name in ("b", "x", "c", "A", "")] == [[], [], [], [], []]


def test_a_glob_takes_no_name_that_engines_list_but_a_table_of_that_name_does() -> None:
    made = table(rule("*", "any"), rule("mine", "other"))
    listed = ("any", "mine", "theirs")
    assert [chain(made, name, "", listed) for name in ("theirs", "mine", "new")] == [[], ["other"], ["any"]]


def test_settings_of_a_glob_without_targets_hold_for_what_engines_list() -> None:
    (served,) = table(rule("llama-*", max_tokens=7)).chain("llama-3", "", ("llama-3",))
    assert (served.model, served.max_tokens) == ("llama-3", 7)


def test_an_alias_of_an_alias_is_the_last_of_them_with_globs_and_adapters_among_them() -> None:
    made = table(rule("gpt-*", "fast"), rule("fast", "faster"), rule("faster", "base:adapter"))
    assert chain(made, "gpt-4o") == ["base:adapter"]


def test_no_target_is_taken_by_a_glob_that_is_for_what_clients_ask() -> None:
    """Else all targets would be the one of a glob for everything, until engines list them."""
    assert chain(table(rule("*", "any"), rule("gpt-4o", "mine", fallback=("spare",))), "gpt-4o") == ["mine", "spare"]


def test_two_models_may_be_the_fallbacks_of_each_other() -> None:
    made = table(rule("a", fallback=("b",)), rule("b", fallback=("a",)))
    assert [chain(made, name) for name in "ab"] == [["a", "b"], ["b", "a"]]


def test_a_table_that_leads_to_its_own_name_means_the_engines_model() -> None:
    made = table(rule("m", "m", fallback=("n", "m")), rule("*", "m", "n"))
    assert chain(made, "m") == ["m", "n"]
    assert chain(made, "x")[0] in ("m", "n")


def test_a_tenants_table_goes_before_that_for_all_even_a_glob_before_a_name() -> None:
    made = table(
        rule("gpt-4o", "small"), rule("gpt-*", "large", tenants=("gold",)), rule("gpt-4o", "x", tenants=("y",))
    )
    assert [chain(made, "gpt-4o", tenant) for tenant in ("", "gold", "y", "z")] == [
        ["small"],
        ["large"],
        ["x"],
        ["small"],
    ]
    assert [chain(made, "gpt-5", tenant) for tenant in ("", "gold")] == [[], ["large"]]


def test_a_chain_has_each_model_once_those_of_fallbacks_behind() -> None:
    made = table(
        rule("a", "b", fallback=("c", "d", "b")),
        rule("b", "b1", fallback=("b2",)),
        rule("c", "b2", fallback=("b1", "e")),
    )
    assert chain(made, "a") == ["b1", "b2", "e", "d"]


def test_a_chain_that_was_found_is_found_anew_once_engines_list_other_models() -> None:
    made, first, second = table(rule("a-*", "b"), rule("c", "d", "e")), {"x": None}, {"a-1": None}
    for _ in range(2):
        assert [chain(made, "a-1", "", first), chain(made, "a-1", "", second)] == [["b"], []]
    keys = [b"%d" % number for number in range(20)]
    assert {made.chain("c", "", first, lambda key=key: key)[0].model for key in keys} == {"d", "e"}  # type: ignore[misc]


def test_a_chain_is_bounded_and_so_is_the_work_of_finding_it() -> None:
    """Each of twenty tables leads to all those behind it, on a million ways."""
    names = [f"m{number}" for number in range(20)]
    made = table(*(rule(name, fallback=tuple(names[at + 1 :])) for at, name in enumerate(names)))
    began = time.perf_counter()
    assert chain(made, "m0") == names[:CHAIN_MAX]
    assert [each.model for each in made.reachable("m0")] == names
    assert time.perf_counter() - began < 1.0


def test_all_cycles_and_second_tables_are_named_at_once() -> None:
    rules = [
        *(rule("a", "b"), rule("b", "c"), rule("c", "a"), rule("c", "z"), rule("leads", "a")),
        *(rule("gpt-*", "claude-1"), rule("claude-*", "gpt-1"), rule("ok", "ok", fallback=("fine",))),
        *(rule("one", fallback=("two",)), rule("two", fallback=("one",))),
        *(rule("t", "u"), rule("u", "t", tenants=("acme",)), rule("t", "v", tenants=("acme", "b", "acme2"))),
    ]
    found = dict(ModelTable(rules).problems())
    assert found == {
        0: "to: it leads back to itself: a -> b -> c -> a",
        1: "to: it leads back to itself: b -> c -> a -> b",
        2: "to: it leads back to itself: c -> a -> b -> c",
        3: "name: c has a table already",
    }
    assert list(ModelTable([rule("t", "u"), rule("u", "t", tenants=("acme",))]).problems()) == [
        (1, "to: it leads back to itself: u -> t -> u")
    ]


NAMES = st.sampled_from(["a", "b", "c", "d", "a*", "*"])
RULES = st.lists(
    st.builds(
        lambda name, to, fallback, tenant: rule(name, *to, fallback=tuple(fallback), tenants=tenant),
        NAMES,
        st.lists(st.sampled_from("abcdef"), max_size=2, unique=True),
        st.lists(st.sampled_from("abcdef"), max_size=2, unique=True),
        st.sampled_from([(), ("t",)]),
    ),
    max_size=6,
)


@example([rule("a*", "a"), rule("*")], "a", "", [])
@given(RULES, st.sampled_from("abcdefgh"), st.sampled_from(["", "t"]), st.lists(st.sampled_from("abcdef")))
def test_every_chain_ends_whatever_the_tables_are(
    rules: list[ModelRule], name: str, tenant: str, listed: list[str]
) -> None:
    """Also of tables with cycles, which are refused, and with lists of engines that nobody knew before."""
    made = ModelTable(rules)
    list(made.problems())
    found, reachable = made.chain(name, tenant, listed), made.reachable(name, tenant, listed)
    assert (made.find(name, tenant, listed) is None) == (not found)
    assert len({each.model for each in found}) == len(found)
    assert {each.model for each in found} <= {each.model for each in reachable} or not found


WEIGHTS = st.dictionaries(st.text(min_size=1, max_size=8), st.floats(0.1, 100), min_size=2, max_size=6)


@given(WEIGHTS, st.floats(0, 200), st.lists(st.binary(max_size=12), min_size=1, max_size=200, unique=True), st.data())
def test_another_weight_moves_only_chats_to_or_from_that_target(
    weights: dict[str, float], weight: float, chats: list[bytes], data: Any
) -> None:
    changed = data.draw(st.sampled_from(sorted(weights)))
    for chat in chats:
        before, after = share_of(weights, chat), share_of({**weights, changed: weight}, chat)
        assert before == after or changed in (before, after)
        if changed in (before, after) and before != after:
            assert after == changed if weight > weights[changed] else before == changed


@given(WEIGHTS, st.binary(max_size=40))
def test_which_target_serves_a_chat_follows_from_names_and_weights_alone(
    weights: dict[str, float], chat: bytes
) -> None:
    assert share_of(weights, chat) == share_of(dict(reversed(weights.items())), chat) in weights


@pytest.mark.parametrize("weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 3}])
def test_shares_follow_the_weights(weights: Mapping[str, float]) -> None:
    chats = 20_000
    counts = Counter(share_of(weights, b"chat %d" % number) for number in range(chats))
    for name, weight in weights.items():
        assert counts[name] / chats == pytest.approx(weight / sum(weights.values()), abs=0.01)


def test_settings_are_those_of_the_name_asked_for_then_of_what_it_leads_to_but_the_smallest_cap() -> None:
    made = table(
        rule("a", "b", max_tokens=100, first_event_s=5.0, defaults={"top_p": 1, "seed": 1}),
        rule("b", "m", max_tokens=50, first_event_s=9.0, stall_s=7.0, defaults={"seed": 2, "top_k": 3}),
        rule("m", max_tokens=80),
    )
    (served,) = made.chain("a")
    assert (served.model, served.max_tokens, served.first("first_event_s"), served.first("stall_s")) == (
        "m",
        50,
        5.0,
        7.0,
    )
    assert served.defaults == {"top_p": 1, "seed": 1, "top_k": 3}
    assert served.first("total_retries_max") is None


def test_an_engines_key_is_that_of_its_model_and_a_fallbacks_engine_gets_no_other_ones() -> None:
    made = table(rule("a", "m", "m", fallback=("n", "k"), api_key="of a"), rule("k", api_key="of k"), rule("b", "k"))
    assert [(each.model, each.api_key) for each in made.chain("a")] == [("m", "of a"), ("n", ""), ("k", "of k")]
    assert made.chain("b")[0].api_key == "of k"
    assert "of k" not in repr(made.rules)


def test_an_alias_is_shown_with_the_card_of_the_first_of_its_models_that_engines_list() -> None:
    made = table(
        *(rule("a", "gone", fallback=("here",)), rule("b", "gone"), rule("here", max_tokens=3), rule("c-*", "here")),
        rule("own", "here", tenants=("t",)),
        ModelRule("w", {"rare": 1, "often": 9}),
    )
    listed = ("here", "rare", "often")
    assert made.shown(listed) == {"a": "here", "w": "often"}
    assert made.shown(listed, "t") == {"a": "here", "w": "often", "own": "here"}
    assert [made.card_of(name, listed) for name in ("c-1", "b", "here", "x")] == ["here", "", "", ""]


def test_targets_that_no_engine_serves_are_named_by_table() -> None:
    made = table(rule("a", "b", fallback=("m",)), rule("b", "gone"), rule("c", "c", fallback=("lost",)))
    assert made.unknown(lambda model: model in ("gone", "lost", "b")) == {"a": ["gone"], "b": ["gone"], "c": ["lost"]}

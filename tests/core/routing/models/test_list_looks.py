"""When engines are asked for their lists out of turn: in virtual time."""

from itertools import pairwise
from random import Random

import pytest

from ranvier_py.core.routing.models.list_looks import MISSING_MAX, MISSING_S, PAUSE_MAX_S, PAUSE_S, QUIET_S, ListLooks


def look(looks: ListLooks, now: float, *, found: bool = False) -> None:
    looks.begin(now)
    looks.end(found=found)


def test_the_first_name_is_looked_for_at_once_and_the_next_after_a_second() -> None:
    looks = ListLooks()
    assert looks.is_worth_it("a", 10)
    assert looks.next_at <= 10
    look(looks, 10)
    assert looks.next_at == 10 + PAUSE_S
    assert looks.is_worth_it("b", 10.1)


def test_pauses_double_while_nothing_is_found_and_begin_anew_with_a_find_or_after_a_quiet_while() -> None:
    looks, now, pauses = ListLooks(), 0.0, []
    for _ in range(6):
        look(looks, now)
        pauses.append(looks.next_at - now)
        now = looks.next_at
    assert pauses == [1, 2, 4, 8, 8, 8]
    assert max(pauses) == PAUSE_MAX_S
    assert not looks.is_worth_it("a", looks.next_at - 4), "its client would wait in vain"
    look(looks, now, found=True)
    assert looks.next_at == now + PAUSE_S
    for _ in range(3):
        look(looks, now)
    look(looks, now + QUIET_S + 1)
    assert looks.next_at == now + QUIET_S + 1 + PAUSE_S


def test_a_name_that_was_looked_for_in_vain_is_refused_for_a_while() -> None:
    looks = ListLooks()
    look(looks, 10)
    looks.missed("a", 9.9, 10.5)
    assert not looks.is_worth_it("a", 11)
    assert looks.is_worth_it("b", 11)
    assert looks.is_worth_it("a", 10.5 + MISSING_S)
    assert (looks.counters.waited, looks.counters.refused) == (2, 1)


def test_a_look_that_had_begun_before_a_name_was_wanted_proves_nothing_of_it() -> None:
    looks = ListLooks()
    looks.begin(10)
    looks.missed("a", 10.1, 10.2)
    looks.end(found=False)
    assert looks.is_worth_it("a", 10.3)


def test_the_memory_of_missing_names_is_bounded() -> None:
    looks = ListLooks()
    for number in range(MISSING_MAX + 7):
        looks.missed(str(number), float("-inf"), 0)
    assert looks.counters.dropped == 7
    assert looks.is_worth_it("3", 1)
    assert not looks.is_worth_it("8", 1)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_asked_for_looks_stay_a_pause_apart(seed: int) -> None:
    rng, looks, now, began = Random(seed), ListLooks(), 0.0, list[float]()
    for _ in range(200):
        now += rng.choice([0.0, 0.01, 0.5, 3.0, 40.0])
        name = str(rng.randrange(30))
        if looks.is_worth_it(name, now):
            at = max(now, looks.next_at)
            began.append(at)
            look(looks, at, found=rng.random() < 0.1)
            looks.missed(name, now, at)
            now = at
    assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(began))

"""What backends say again and again when they refuse."""

from __future__ import annotations

from itertools import pairwise

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.blame.wordings import PATIENCE_MAX, ROWS_MAX, Wordings, wording_of

A, B = BackendId(0), BackendId(1)
TOOLS = wording_of(400, "tools are not supported here")


def test_what_one_refuses_again_in_the_same_words_is_doubted() -> None:
    wordings = Wordings()
    assert [wordings.refused(each, TOOLS) for each in (A, B, A)] == [False, False, True]


def test_the_first_refusal_of_one_in_doubt_is_doubted_until_others_have_shared_such() -> None:
    wordings = Wordings()
    assert wordings.refused(A, TOOLS, is_doubtful=True)
    wordings.shared(A, TOOLS)
    assert [wordings.refused(A, TOOLS, is_doubtful=True) for _ in range(3)] == [False, False, True]


def test_words_are_equal_but_for_their_numbers() -> None:
    assert wording_of(400, "at most 4096 tokens") == wording_of(400, "at most 512 tokens")
    assert len({TOOLS, wording_of(422, "tools are not supported here"), wording_of(400, "no tools"), 0}) == 4


def test_the_more_was_shared_the_more_is_believed_until_another_one_serves_it() -> None:
    wordings, doubted = Wordings(), []
    for number in range(4 * PATIENCE_MAX):
        if wordings.refused(A, TOOLS):
            wordings.shared(A, TOOLS)
            doubted.append(number)
    gaps = [after - before for before, after in pairwise(doubted)]
    assert gaps[:4] == [3, 5, 9, 17]
    assert gaps[-1] == PATIENCE_MAX + 1
    wordings.contradicted(TOOLS)
    assert [wordings.refused(A, TOOLS) for _ in range(3)][1:] == [True, True]


def test_another_process_has_refused_nothing() -> None:
    wordings = Wordings()
    wordings.refused(A, TOOLS)
    wordings.refused(B, TOOLS)
    wordings.forget(A)
    assert (wordings.refused(A, TOOLS), wordings.refused(B, TOOLS)) == (False, True)


def test_words_that_clients_invent_fill_no_memory() -> None:
    wordings = Wordings()
    for number in range(ROWS_MAX + 5):
        wordings.refused(A, number + 1)
        wordings.shared(A, number + 1)
    assert len(wordings.rows) == ROWS_MAX

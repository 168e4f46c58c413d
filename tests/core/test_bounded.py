from time import process_time

from ranvier_py.core.bounded import BoundedDict, FoundOf


def test_the_entry_that_was_set_longest_ago_makes_room_and_is_counted() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    for place, key in enumerate("abac"):
        table[key] = place
    assert (list(table.items()), table.dropped) == ([("a", 2), ("c", 3)], 1)


def test_an_entry_of_a_full_table_takes_no_longer_than_one_of_a_table_with_room() -> None:
    """Owners of responses are learned with requests: a search for the oldest would take a hundred times as long."""
    table: BoundedDict[int, None] = BoundedDict(65_536)
    table.update(dict.fromkeys(range(65_536)))
    began = process_time()
    for number in range(65_536, 165_536):
        table[number] = None
    assert process_time() - began < 1.0
    assert (next(iter(table)), table.dropped) == (100_000, 100_000)


def test_what_was_found_of_an_object_is_not_that_of_its_equal_and_the_oldest_goes() -> None:
    found: FoundOf[list[int], str] = FoundOf(2)
    lists = [[1], [1], [1]]
    for number, each in enumerate(lists):
        assert found.get(each) is None
        assert found.keep(each, f"of {number}") == f"of {number}"
    assert [found.get(each) for each in (*lists, [1])] == [None, "of 1", "of 2", None]

"""Ranks in URLs and on metrics pages."""

from __future__ import annotations

import pytest

from cluster.engine.engine_metrics import merged
from ranvier_py.core.engine_cache.sources.engine_metrics import read_metrics
from ranvier_py.core.routing.processes.ranks import entries_of, placeable, rank_in, rank_of, without_rank

PAGE = b'# TYPE x gauge\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\nprocess_start_time_seconds 7\n'


@pytest.mark.parametrize("url", ["http://h:1#rank=64", "http://h:1#rank=-1", "http://h:1#rank=", "http://h:1#x"])
def test_a_fragment_that_is_no_rank_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="rank=N"):
        rank_of(url)


def test_a_url_may_name_a_rank() -> None:
    assert (rank_of("http://h:1#rank=63"), rank_of("http://h:1")) == (63, None)
    assert without_rank("http://h:1#rank=0") == "http://h:1"


def test_the_page_of_an_engine_with_ranks_has_the_figures_of_each() -> None:
    page = merged([PAGE, PAGE.replace(b"3.0", b"4.0")])
    assert (read_metrics(page).ranks, read_metrics(page).running) == (2, 7)
    assert (read_metrics(page, 1).ranks, read_metrics(page, 1).running) == (1, 4)
    assert (rank_in(b'model="m",engine="7"'), rank_in(b'my_engine="7"')) == (7, None)
    assert read_metrics(b'sglang:num_running_reqs{engine="1"} 1\n').ranks is None


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ("0", 1),
        ("0 1", 2),
        ("2 0 1", 3),
        (" ".join(map(str, range(64))), 64),
        (" ".join(map(str, range(65))), 1),
        (" ".join(map(str, range(10_000))), 1),
        ("2 3", 1),  # of the second node, with hybrid load balancing
        ("0 2", 1),
        ("0 01", 1),
        ("0 1 x", 1),
        ("1", 1),  # of one process among several, with external load balancing
    ],
)
def test_ranks_are_placed_where_they_are_numbered_from_0(ranks: str, count: int) -> None:
    page = b"".join(PAGE.replace(b'engine="0"', b'engine="%b"' % rank.encode()) for rank in ranks.split())
    assert placeable(ranks.split()) == count
    assert read_metrics(page).placeable == count


def test_what_a_page_shows_outweighs_what_publishes_and_a_page_without_ranks_shows_nothing() -> None:
    assert read_metrics(b"vllm:num_requests_running 3.0\n").placeable is None
    assert entries_of(1, (0, 1), is_vllm=True) == 1
    assert entries_of(None, (0, 1), is_vllm=True) == 2
    assert entries_of(None, (1, 2), is_vllm=True) == 1
    assert entries_of(None, (0, 1), is_vllm=False) is None
    assert entries_of(None, (), is_vllm=True) is None

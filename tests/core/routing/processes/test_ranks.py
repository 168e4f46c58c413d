"""Ranks in URLs and on metrics pages."""

from __future__ import annotations

import pytest

from cluster.engine.engine_metrics import merged
from ranvier_py.core.engine_cache.sources.engine_metrics import read_metrics
from ranvier_py.core.routing.processes.ranks import rank_in, rank_of, without_rank

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

import pytest

from ranvier_py.core.pauses import doubled


@pytest.mark.parametrize(("times", "pause_s"), [(0, 0.5), (1, 1.0), (3, 4.0), (6, 30.0), (1024, 30.0), (10**6, 30.0)])
def test_a_pause_doubles_up_to_its_bound_however_many_failures_there_were(times: int, pause_s: float) -> None:
    assert doubled(0.5, times, 30.0) == pause_s

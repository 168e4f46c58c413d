"""`benchmarks.constants` changes a constant wherever it is used, and says how far that moved each cell."""

from __future__ import annotations

from benchmarks.constants.__main__ import CONSTANTS, changed, row_of
from ranvier_py.core.routing.placement import affinity, ttft


def test_each_constant_is_changed_wherever_it_is_imported_and_only_meanwhile() -> None:
    for name, module in CONSTANTS.items():
        before = getattr(module, name)
        with changed(name, 2.0):
            assert getattr(module, name) == 2 * before
        assert getattr(module, name) is before
    with changed("COMMON_SHARE", 0.5):
        assert affinity.COMMON_SHARE == ttft.COMMON_SHARE == 0.25
    with changed("LOOK_EVERY", 0.01):
        assert CONSTANTS["LOOK_EVERY"].LOOK_EVERY == 1, "a number of things stays one"


def test_a_result_counts_the_cells_in_which_a_changed_constant_moves_p90s_beyond_the_goal() -> None:
    row = row_of("LIGHTEST", 2.0, [1.0, 1.02, 2.2], [1.0, 1.0, 2.0])
    assert (row["cells"], row["least"], row["most"], row["over"]) == (3, 1.0, 1.1, 1)
    assert 1.0 < row["ratio"] < 1.1

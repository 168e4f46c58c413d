"""Calibration against engines that evict: what answers teach, beside knowing nothing and knowing all."""

import pytest

from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.replay.engine.model import EngineLimits
from ranvier_py.replay.replay_nodes import prepare
from tests.replay.knowing import Known, pressed, run_knowing
from tests.replay.synthetic import BLOCK

TRACE = pressed(250, 8, think_s=60.0, within_s=450.0)
ITEMS = prepare(TRACE)
WORKING_SET_TOKENS = BLOCK * len({block for request in TRACE.requests for block in request.blocks})
ENGINES = 4


def known(knowledge: str, share: float, *, policy: str = "affinity", nodes: int = 1) -> Known:
    """`share`: of the working set, in all caches together."""
    limits = EngineLimits(cache_tokens=int(WORKING_SET_TOKENS * share / ENGINES) // BLOCK * BLOCK)
    return run_knowing(ITEMS, BLOCK, limits, knowledge, engines=ENGINES, nodes=nodes, policy=policy)


@pytest.mark.parametrize(("share", "policy"), [(0.25, "affinity"), (0.5, "affinity"), (0.25, "ttft")])
def test_calibration_alone_recovers_half_of_what_events_would(share: float, policy: str) -> None:
    """Of the tokens predicted in vain; and what is believed no more is not what would have been found."""
    nothing, calibrated, exact = (known(each, share, policy=policy) for each in ("none", "calibrated", "exact"))
    assert nothing.error > 0.02
    assert exact.error < 0.002
    assert nothing.error - calibrated.error >= 0.5 * (nothing.error - exact.error)
    assert calibrated.recall > 0.97
    assert calibrated.hit_rate > nothing.hit_rate - 0.01


def test_a_cache_that_holds_everything_is_never_doubted() -> None:
    nothing, calibrated = (known(each, 4.0) for each in ("none", "calibrated"))
    assert calibrated.hit_rate == nothing.hit_rate
    assert calibrated.precision == nothing.precision > 0.999
    [view, *_] = calibrated.calibrations[0].views(1e6)
    assert (view.capacity_learned_tokens, view.refuted, view.biases) == (None, 0, ())
    assert view.precision == pytest.approx(1.0)


def test_the_learned_capacity_is_near_the_engines_own() -> None:
    run = known("calibrated", 0.25)
    own = WORKING_SET_TOKENS * 0.25 / ENGINES
    for view in run.calibrations[0].views(1e6):
        assert view.capacity_learned_tokens is not None
        assert own / 2 < view.capacity_learned_tokens < 1.5 * own
        assert view.biases == (Bias.SMALL_CACHE,)
        assert view.refuted > 0


@pytest.mark.slow
def test_nodes_that_see_a_part_of_the_traffic_learn_as_well() -> None:
    nothing, calibrated, exact = (known(each, 0.25, nodes=2) for each in ("none", "calibrated", "exact"))
    assert nothing.error - calibrated.error >= 0.5 * (nothing.error - exact.error)


def test_a_router_and_its_calibration_agree_on_the_error() -> None:
    run = known("calibrated", 0.5)
    views = run.calibrations[0].views(1e6)
    right = sum(view.right_tokens for view in views)
    assert right / sum(view.predicted_tokens for view in views) == pytest.approx(run.precision)
    assert right / sum(view.cached_tokens for view in views) == pytest.approx(run.recall)
    assert sum(view.error.count for view in views) == sum(view.answers for view in views) == len(ITEMS)

"""What a warm turn costs may only fall: `python -m benchmarks.request_cost` records it where it does."""

import json
import platform

import pytest

from benchmarks.harness.bench import RESULTS
from benchmarks.request_cost.__main__ import CASES, counted

SPREAD = 1.02  # of two runs: what readiness finds in one look is the kernel's to say


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_warm_turn_takes_no_more_calls_instructions_and_switches_than_were_recorded(name: str) -> None:
    recorded = json.loads((RESULTS / "request_cost.json").read_text())
    if recorded["machine"]["python"].rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        pytest.skip("recorded with another Python")
    found, before = counted(CASES[name]), recorded["cases"][name]
    for figure in ("calls", "instructions", "switches"):
        assert found[figure] <= before[figure] * SPREAD, figure


def test_four_limits_cost_a_turn_an_eighth_at_most_beside_its_key() -> None:
    cases = json.loads((RESULTS / "request_cost.json").read_text())["cases"]
    assert cases["chat_3kB_limits"]["instructions"] <= 1.122 * cases["chat_3kB_key"]["instructions"]

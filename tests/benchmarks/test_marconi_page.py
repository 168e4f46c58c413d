"""The page of Marconi's figures, as it was recorded."""

from __future__ import annotations

import json

from benchmarks.harness.bench import RESULTS
from benchmarks.harness.marconi_figures import reuse_of
from benchmarks.harness.marconi_page import UNVERIFIED, page
from ranvier_py.replay.hybrid.alpha_search import TokenRequest

RESULT = json.loads((RESULTS / "marconi.json").read_text())


def test_the_recorded_references_are_all_found() -> None:
    assert RESULT["differ"] == []
    assert RESULT["checked"] >= 90
    assert {row["trace"] for row in RESULT["rows"]} == {"lmsys", "sharegpt", "swebench", "rag"}


def test_the_page_is_that_of_the_recorded_result_and_marks_what_is_not_verified() -> None:
    text = page(RESULT)
    assert (RESULTS / "marconi.html").read_text() == text
    numbers = [each["number"] for each in RESULT["figures"]]
    assert numbers == ["3a", "3b", "5", "7", "8", "9", "10a", "10b", "11", "12a", "12b", "13a", "13b", "14"]
    published = [each["published"] for each in RESULT["figures"] if each["published"] is not None]
    assert text.count(f"({UNVERIFIED})</figcaption>") == len(published) == 11
    assert (
        text.count("<svg ")
        == text.count("</svg>")
        == len(numbers) + sum(not isinstance(each, str) for each in published)
    )


def test_a_state_is_reused_where_a_request_goes_on_and_blocks_up_to_there() -> None:
    def tokens(*blocks: int) -> bytes:
        return b"".join(bytes([each, 0, 0, 0]) * 32 for each in blocks)

    requests = [TokenRequest(tokens(1), tokens(1, 2)), TokenRequest(tokens(1, 2, 3), tokens(1, 2, 3, 4))]
    assert reuse_of(requests) == (2 / 4, 1 / 4)

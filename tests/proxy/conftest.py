"""What tests of whole nodes ask for by name."""

from __future__ import annotations

import pytest

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.node.parts import request_parts


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[RequestSummary]:
    """The requests that nodes of this test log, as they are handed to the log."""
    summaries: list[RequestSummary] = []
    monkeypatch.setattr(request_parts, "request_line", lambda: summaries.append)
    return summaries

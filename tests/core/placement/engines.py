"""Backends as a policy sees them, for the tests of policies."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.ids import BackendId


@dataclass(slots=True)
class Engine:
    """A placement.Candidate that is what it is said to be."""

    id: BackendId
    name: str
    weight: float = 1.0
    load: int = 0
    pending_tokens: int = 0
    decoding: int = 0
    waiting: int = 0
    progress_at: float = 0.0
    success_rate: float = 1.0

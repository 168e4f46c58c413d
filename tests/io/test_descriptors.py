"""How many descriptors a process gets."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ranvier_py.io.descriptors import raise_descriptor_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Those of this process, as they will be again."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    assert raise_descriptor_limit() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

"""Freed memory is kept where the C library can be told so."""

import sys

import pytest

from ranvier_py.io.allocator import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_glibc_takes_the_settings() -> None:
    assert keep_freed_memory()

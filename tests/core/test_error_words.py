"""What an operator reads of an error that a library raised."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trio

from ranvier_py.core.errors import words_of

GARBAGE = Path(__file__)  # no certificate
NOBODY = 1  # a port


async def connected() -> None:
    await trio.open_tcp_stream("127.0.0.1", NOBODY)


FAILING: list[tuple[Callable[[], object], str]] = [
    (lambda: httpx.get(f"http://127.0.0.1:{NOBODY}", trust_env=False), "Connection refused"),
    (lambda: trio.run(connected), "Connection refused"),
    (lambda: ssl.create_default_context().load_cert_chain(GARBAGE), "no certificate or key in PEM, or a damaged one"),
    (lambda: ssl.create_default_context(cafile="nowhere"), "No such file or directory"),
    ((GARBAGE / "x").read_bytes, f"Not a directory: '{GARBAGE / 'x'}'"),
    (lambda: {}["a"], "'a'"),
]


@pytest.mark.parametrize(("failing", "words"), FAILING, ids=[words for _, words in FAILING])
def test_an_error_is_named_without_what_only_its_library_understands(failing: Callable[[], object], words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of many libraries
        failing()
    assert words_of(caught.value) == words
    assert not re.search(r"Errno|_ssl\.c|\[SSL", words_of(caught.value))

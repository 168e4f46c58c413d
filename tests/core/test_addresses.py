from __future__ import annotations

import pytest

from ranvier_py.core.addresses import host_port, is_address, is_loopback


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert host_port(text) == expected


@pytest.mark.parametrize("text", ["", ":80", "a", "a:", "a:b", "a:-1", "::1:80", "a:²", "a:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        host_port(text)


def test_only_this_machine_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")))


def test_a_name_is_no_address() -> None:
    assert all(map(is_address, ("10.0.0.1", "::1", "0.0.0.0")))
    assert not any(map(is_address, ("localhost", "10.0.0", "", "[::1]")))

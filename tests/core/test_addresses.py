from __future__ import annotations

import encodings.idna
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.addresses import (
    checked_host,
    checked_url,
    host_port,
    is_address,
    is_loopback,
    parse_host_port,
    parts_of_url,
    without_secrets,
)
from ranvier_py.core.engine_cache.sources.publishers import parse_endpoint
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.routing.backend import normal_url

LONG = "a" * 63
NAMES = (
    "a",
    "localhost",
    "my_engine-1",
    "Engine.Example",
    "a.b.",
    LONG,
    ".".join([LONG] * 3) + "." + "a" * 61,
    "1a.2b",
)
REFUSED = {
    "empty label": ("a..b", ".a", "a..", ".", "", "10.0.0..1"),
    "at most 63 characters": (f"{LONG}a", f"b.{LONG}a.c"),
    "at most 253 characters": (".".join([LONG] * 4),),
    "not begin or end with -": ("-a", "a-.b", "xn--", "xn--b-"),
    "letters, digits": ("a!", "a\\b", "a b", "a\n", "a.xn--\u0000"),
    "no IPv4 address": ("10.0.0.256", "10.0.1", "10.0.0.1.", "010.0.0.1", "2130706433", "0x7f.1", "a.0x"),
    "xn--": ("bücher.example", "☃", "١٢٧.0.0.1"),
    "no international name": ("xn--99999999",),
    "network interface": ("fe80::1%a b",),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert host_port(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ":80", "a", "a:", "a:b", "a:-1", "::1:80", "a:²", "a:65536", "a:" + "9" * 5000),
        *("[10.0.0.1]:80", "[a]:80", "[[::1]]:80", "a..b:80", "10.0.0.256:80"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|must have"):
        host_port(text)


def test_only_this_machine_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")))


def test_a_name_is_no_address() -> None:
    assert all(map(is_address, ("10.0.0.1", "::1", "0.0.0.0")))
    assert not any(map(is_address, ("localhost", "10.0.0", "", "[::1]")))


@pytest.mark.parametrize("host", [*NAMES, "10.0.0.1", "::1", "::ffff:10.0.0.1", "xn--bcher-kva.example"])
def test_names_and_addresses_are_good_as_they_are_wherever_a_host_is_written(host: str) -> None:
    assert checked_host(host) == host
    beside_port = f"[{host}]" if ":" in host else host
    assert host_port(f"{beside_port}:80") == parse_host_port(f"{beside_port}:80") == (host, 80)
    assert parse_host_port(host) == (host, 7946)
    assert checked_url(f"http://{beside_port}:80", ("http",)).hostname == host.lower()
    assert normal_url(f"http://{beside_port}") == f"http://{beside_port.lower()}:80"
    found = parse_endpoint(f"tcp://{beside_port}:80")
    assert found is not None
    assert found.port == 80


@pytest.mark.parametrize(("host", "why"), [(host, why) for why, hosts in REFUSED.items() for host in hosts])
def test_a_host_that_no_resolver_can_be_asked_for_is_refused_with_the_reason_wherever_it_is_written(
    host: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        checked_host(host)
    for parse in (host_port, parse_host_port, lambda text: normal_url(f"http://{text}"), checked_websocket):
        with pytest.raises((ValueError, BadRequest), match=r"must|network interface"):
            parse(f"{host}:80")
    assert parse_endpoint(f"tcp://{host}:80") is None


def test_no_credentials_of_a_url_are_shown() -> None:
    assert without_secrets("http://user:password@host:81/path?key=secret") == "http://host:81/path"
    assert without_secrets("unix://user:password@/run/redis?db=1") == "unix:///run/redis"


def checked_websocket(text: str) -> object:
    return checked_url(f"ws://{text}", ("ws", "wss"))


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:80", "//a", "ftp://a", "http:a", "http://", "http://:80", "http://a:b", "http://a:99999"),
        *("http://a:0", "http://a:+80", "http://a:" + "1" * 5000, "http://a\t:80", "http://\na", "http://a b"),
        *("http://a:80:90", "http://word@b..c", "http://::1", "http://[::1", "http://[::1]]", "http://[::1]x:80"),
        *("http://x[::1]:80", "http://[a]:80", "http://[10.0.0.1]", "http://[v1.a]", "http://[fe80::1%25eth0]"),
        *("http://[fe80::1%eth0]", "http://[]:80"),
    ],
)
def test_what_is_no_url_with_a_host_and_a_port_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        checked_url(url, ("http", "https"))
    assert "word" not in str(caught.value)
    assert caught.value.__cause__ is None or "word" not in str(caught.value.__cause__)


@given(st.text(st.sampled_from("a.-_01:[]%xXnf é@/\x00ü☃\n"), max_size=12) | st.text(max_size=300))
@example("xn--a")
@example("xn--n3h")
@example("\udcff")
def test_no_accepted_host_makes_an_encoder_fail_on_the_path_to_a_resolver(text: str) -> None:
    try:
        host = checked_host(text)
    except ValueError:
        return
    assert host.encode("ascii")
    encodings.idna.Codec().encode(host)  # what socket.getaddrinfo and ssl do
    try:
        socket.getaddrinfo(host, 80, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
        assert is_address(host)
    except socket.gaierror:  # a name, or an interface that is not here
        assert not is_address(host) or "%" in host


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://a.example:80", "a.example"),
        ("http://a.example:8080", "a.example:8080"),
        ("http://a.example:443", "a.example:443"),
        ("https://[2001:db8::80]:443", "[2001:db8::80]"),
        ("http://[2001:db8::80]", "[2001:db8::80]"),
    ],
)
def test_the_host_field_names_no_port_that_is_the_usual_one(url: str, authority: str) -> None:
    assert parts_of_url(url).authority == authority

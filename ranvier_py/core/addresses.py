"""Parses and checks addresses as an operator writes them.

Nothing is resolved: a name stays a name. An address that passes can be given to a resolver, to a socket and to TLS; the
only error left is that it is not found. Error messages never repeat the text, which may contain a password.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

GOSSIP_PORT = 7946  # memberlist's, which firewalls may know already
OFF = "off"  # in place of an address: turned off

PORT, PORT_MAX = re.compile("[0-9]{1,5}"), 65_535
NAME_CHARACTERS_MAX, LABEL_CHARACTERS_MAX = 253, 63  # RFC 1035, 2.3.4, as text without the last dot
LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?")
"""One label of a host name. RFC 1123 does not allow the underscore, but names of containers often have it."""

NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
"""A last label that makes a name an IPv4 address, or meant as one (WHATWG URL, «ends in a number»)."""

DEFAULT_PORTS = MappingProxyType({"http": 80, "https": 443, "ws": 80, "wss": 443})

ZONE = re.compile(r"[A-Za-z0-9._-]{1,32}")  # of an IPv6 address: a network interface
AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::([0-9]{0,5}))?")

HostPort = tuple[str, int]


def checked_host(host: str) -> str:
    """Return `host` if it is an IP address or a name that a resolver accepts. Raises ValueError with the reason."""
    if is_address(host):
        zone = host.partition("%")[2]
        if zone and not ZONE.fullmatch(zone):
            raise ValueError("the zone of the address must be the name of a network interface")
        return host
    if not host.isascii():
        raise ValueError("the host must be ASCII: an international name is written with xn--")
    name = host.removesuffix(".")
    labels = name.split(".")
    if len(name) > NAME_CHARACTERS_MAX:
        raise ValueError(f"the host must have at most {NAME_CHARACTERS_MAX} characters")
    if "" in labels:
        raise ValueError("the host must have no empty label, as between two dots")
    if max(map(len, labels)) > LABEL_CHARACTERS_MAX:
        raise ValueError(f"a label of the host must have at most {LABEL_CHARACTERS_MAX} characters")
    if not all(map(LABEL.fullmatch, labels)):
        raise ValueError("a label of the host must be letters, digits, - and _, and not begin or end with -")
    if NUMBER.fullmatch(labels[-1]):
        raise ValueError("the host must be a name or an IP address: it ends in a number and is no IPv4 address")
    if not all(map(is_punycode, labels)):
        raise ValueError("the host must be a name: what follows an xn-- is no international name")
    return host


def is_punycode(label: str) -> bool:
    """Whether a label that claims to be an international name can be decoded; True for others."""
    try:
        return not label.lower().startswith("xn--") or bool(label[4:].encode().decode("punycode"))
    except UnicodeError:
        return False


def checked_url(text: str, schemes: Collection[str]) -> SplitResult:
    """Return the parts of a URL with one of these schemes and a valid host and port. Raises ValueError."""
    if not all("!" <= character <= "~" for character in text):
        raise ValueError("must be visible ASCII characters: an international name is written with xn--")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError("must be a URL: its host is none") from error
    if parts.scheme not in schemes:
        raise ValueError(f"must be a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    place = AUTHORITY.fullmatch(parts.netloc.rpartition("@")[2])
    if place is None or not place[1]:
        raise ValueError("must name a host, and perhaps a port, after the two slashes")
    beside_port(place[1])
    if place[2] and not 0 < int(place[2]) <= PORT_MAX:
        raise ValueError(f"the port must be 1 to {PORT_MAX}")
    return parts


def beside_port(host: str) -> str:
    """Check the host that stands beside a port: IPv6 in brackets, without a zone; else none. Raises ValueError."""
    plain = host[1:-1] if host.startswith("[") else host
    if (":" in plain) is not host.startswith("["):
        raise ValueError("the host must be in brackets if it is an IPv6 address, and only then")
    if "%" in plain or (":" in plain and not is_address(plain)):
        raise ValueError("the host in brackets must be an IPv6 address, without a zone")
    return checked_host(plain)


def host_port(text: str) -> HostPort:
    """Parse "127.0.0.1:9180" to ("127.0.0.1", 9180), and "[::1]:9180". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host) is not bracketed or not PORT.fullmatch(port):
        raise ValueError("must be HOST:PORT, like 127.0.0.1:8080 or [::1]:8080")
    if int(port) > PORT_MAX:
        raise ValueError(f"the port must be 0 to {PORT_MAX}")
    return checked_host(host.removeprefix("[").removesuffix("]")), int(port)


def is_address(host: str) -> bool:
    """Whether `host` is an IP address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost may point anywhere."""
    return ip_address(host).is_loopback if is_address(host) else host == "localhost"


def parse_host_port(text: str, port: int = GOSSIP_PORT) -> HostPort:
    """Parse "a" to ("a", 7946); also "a:80", "::1", "[::1]", "[::1]:80". Raises ValueError."""
    plain = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(plain) and (":" in plain or plain == text):
        return checked_host(plain), port
    if ":" in text:
        return host_port(text)
    return checked_host(text), port


def without_secrets(url: str) -> str:
    """Return a URL that is safe to show: without user, password and query."""
    place = urlsplit(url)
    return f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"


def spelled(where: HostPort) -> str:
    host, port = where
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class UrlParts(NamedTuple):
    """What is asked over HTTP. `authority` is as the Host field has it: without a port that is the scheme's own."""

    url: str
    is_secure: bool
    host: str
    authority: str


def parts_of_url(url: str) -> UrlParts:
    place = urlsplit(url)
    authority = place.netloc.removesuffix(f":{DEFAULT_PORTS[place.scheme]}")
    return UrlParts(url, place.scheme == "https", place.hostname or "", authority)


def is_wildcard(host: str) -> bool:
    return is_address(host) and ip_address(host).is_unspecified

"""Addresses as an operator writes them: text -> checked parts.

Nothing is resolved: a name stays a name. Messages of errors never repeat the text, which may carry a password.
"""

from __future__ import annotations

from ipaddress import ip_address

GOSSIP_PORT = 7946  # memberlist's, which firewalls may know already
OFF = "off"  # in the place of an address: it is not to be

HostPort = tuple[str, int]


def host_port(text: str) -> HostPort:
    """("127.0.0.1", 9180) of "127.0.0.1:9180"; "[::1]:9180" for IPv6. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError("must be HOST:PORT, like 127.0.0.1:8080 or [::1]:8080")
    if int(port) > 65535:
        raise ValueError("the port must be 0 to 65535")
    return host.strip("[]"), int(port)


def is_address(host: str) -> bool:
    """Whether it is an IP address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost may point anywhere."""
    return ip_address(host).is_loopback if is_address(host) else host == "localhost"


def parse_host_port(text: str, port: int = GOSSIP_PORT) -> HostPort:
    """("a", 7946) of "a"; also "a:80", "::1", "[::1]:80". Raises ValueError."""
    if is_address(text.strip("[]")):
        return text.strip("[]"), port
    if ":" in text:
        return host_port(text)
    if not text or any(blank in text for blank in " \t\r\n/@,"):
        raise ValueError("must be HOST or HOST:PORT, like 10.0.0.1, router.example:7946 or [::1]:7946")
    return text, port


def spelled(where: HostPort) -> str:
    host, port = where
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    return is_address(host) and ip_address(host).is_unspecified

"""Asks the control port of a node, for `explain`, `status`, `clients` and `lint`."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ranvier_py.commands.bearer_keys import bearer_key
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_UNREACHABLE, CommandError
from ranvier_py.config.config_names import FILE_VARIABLE, variable_of
from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.core.errors import words_of

ADMIN_TIMEOUT_S = 10.0
DEFAULT_CONTROL = "http://127.0.0.1:9180"
NEAR = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # where a node listens that listens on all addresses


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    variables = f"${variable_of('control')}, else the control of the configuration, else {DEFAULT_CONTROL}"
    parser.add_argument("--control", metavar="URL", help=f"control port; else {variables}")
    config = f"the node's configuration, for its control port and key; else ${FILE_VARIABLE} names it"
    parser.add_argument("--config", dest="control_config", type=Path, metavar="FILE", help=config)
    parser.add_argument("--control-ca", metavar="FILE", help="PEM authorities that it must prove; the system's without")
    parser.add_argument("--control-certificate", metavar="FILE", help="PEM certificate and key to prove oneself to it")
    add_control_key_flag(parser)


def add_control_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control-key-file",
        type=Path,
        metavar="FILE",
        help=f"its key; else ${variable_of('control_key')} is it, or ${variable_of('control_key_file')} names a file",
    )


class OfConfig(NamedTuple):
    """What the configuration of a node has for its tools; each may be empty."""

    control: str = ""
    key: str = ""
    key_file: str = ""


def of_config(file: Path | None) -> OfConfig:
    """Read it from this file, else from the one in the environment. Whatever else is in it is the node's matter."""
    named = os.environ.get(FILE_VARIABLE)
    if file is None and not named:
        return OfConfig()
    from ranvier_py.config.config_loader import FoundValues, read_file

    values, _ = read_file(file or Path(named or ""), FoundValues())
    control, key, key_file = (str(values.get(name) or "") for name in ("control", "control_key", "control_key_file"))
    scheme = "https://" if control and values.get("control_tls_certificate_file") else ""
    return OfConfig(scheme + control, key, key_file)


def control_client(options: argparse.Namespace, address: str | None = None) -> httpx.Client:
    """Return a client for `address`, else --control. Raises CommandError or ConfigError; no message shows the key."""
    found = of_config(getattr(options, "control_config", None))
    key = bearer_key(variable_of("control_key"), options.control_key_file) or found.key
    if not key and found.key_file:
        key = read_secret_file(Path(found.key_file))
    given = getattr(options, "control", None)
    if given is None:
        given = os.environ.get(variable_of("control")) or found.control or DEFAULT_CONTROL
    url = control_url(given if address is None else address)
    headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
    return httpx.Client(
        base_url=url, headers=headers, timeout=ADMIN_TIMEOUT_S, trust_env=False, verify=trusted(options)
    )


def trusted(options: argparse.Namespace) -> ssl.SSLContext | bool:
    """Return whom the client trusts over TLS. Raises CommandError."""
    authorities, certificate = (getattr(options, name, None) for name in ("control_ca", "control_certificate"))
    if authorities is None and certificate is None:
        return True
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, password="")
    except OSError as error:  # ssl.SSLError is one
        raise CommandError(
            f"--control-ca, --control-certificate: can't be used: {words_of(error)}", EXIT_CONFIG
        ) from error
    return context


def control_url(address: str) -> httpx.URL:
    """Parse "HOST:PORT" or a URL. Raises CommandError, which shows no password."""
    if "@" in address:
        raise CommandError("a control port takes no name and password in its URL, but --control-key-file", EXIT_CONFIG)
    with suppress(httpx.InvalidURL, ValueError):
        url = httpx.URL(address if "://" in address else f"http://{address}")
        if url.scheme in ("http", "https") and url.host:
            return url.copy_with(host=NEAR.get(url.host, url.host))
    raise CommandError(f"{address!r} is no control port, expected one like {DEFAULT_CONTROL}", EXIT_CONFIG)


def asked(client: httpx.Client, method: str, path: str, also: int = 200, **sent: Any) -> httpx.Response:
    """Return the node's answer. Raises CommandError, with the node's message if it refuses, or if there is no node."""
    try:
        response = client.request(method, path, **sent)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(client.base_url, error) from error
    except ValueError as error:  # a number that is none or too large, or an argument that is no text
        raise CommandError(f"what was given can't be sent to a node: {error}", EXIT_CONFIG) from error
    if response.status_code not in (httpx.codes.OK, also):
        key = " (--control-key-file names its file)" if response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise CommandError(f"{response.status_code}: {refusal(response)}{key}", EXIT_FAILED)
    return response


def unreachable(url: httpx.URL | str, error: Exception) -> CommandError:
    return CommandError(f"{url} can't be reached: {words_of(error)}", EXIT_UNREACHABLE)


@contextmanager
def of_a_node(client: httpx.Client) -> Iterator[None]:
    """Raise CommandError if reading the answers inside fails, because an engine, say, answered instead of a node."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"{client.base_url} answers, but not as the control port of a node of this version does"
        raise CommandError(f"{text} ({type(error).__name__}: {error})"[:400], EXIT_FAILED) from error


def refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]

"""Certificates of TLS, as an operator would recognise them."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path


def described(path: Path) -> str:
    """Return until when the first certificate of a PEM file is valid, and its fingerprint. Raises ValueError, OSError.

    Blocks for one small file.
    """
    from cryptography import x509  # noqa: PLC0415  # only nodes with TLS need it
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415

    found = x509.load_pem_x509_certificate(path.read_bytes())
    return f"valid until {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, sha256 {found.fingerprint(SHA256()).hex()}"


def ends_of(paths: Iterable[Path]) -> dict[Path, float]:
    """Return until when all certificates of each file are valid, in seconds of the wall clock; without files that have
    none. Blocks for some small files."""
    from cryptography import x509  # noqa: PLC0415  # only nodes with TLS need it

    found = {}
    for path in paths:
        with suppress(ValueError, OSError):
            chain = x509.load_pem_x509_certificates(path.read_bytes())
            found[path] = min(each.not_valid_after_utc.timestamp() for each in chain)
    return found


def public_context() -> ssl.SSLContext:
    """Return how to ask for what everybody may read and nobody acts on, such as the time, whoever answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def engine_context(authorities: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return how this node connects over TLS: it trusts these authorities, by default the system's, and proves itself
    by its certificate. Raises OSError. Blocks for some small files."""
    context = ssl.create_default_context(cafile=authorities)
    if certificate is not None:
        context.load_cert_chain(certificate, key, password="")  # OpenSSL would ask at the terminal
    return context


def digests(paths: Iterable[Path]) -> dict[Path, bytes]:
    """Return a digest of each file; empty for one that can't be read. Blocks for some small files."""
    return {path: digest_of(path) for path in paths}


def digest_of(path: Path) -> bytes:
    """Return a digest of a file; empty if it can't be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return b""

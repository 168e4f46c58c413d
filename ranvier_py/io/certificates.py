"""Certificates of TLS, as an operator would recognise them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""All workers must make the same certificate, however their clocks differ from those of its readers."""


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


def worker_certificate(key: bytes) -> tuple[str, bytes]:
    """Return the certificate that all workers of one node make of their common key, and its private key, in PEM."""
    from cryptography import x509  # noqa: PLC0415  # only nodes with TLS need it
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    private = Ed25519PrivateKey.from_private_bytes(blake2b(key, digest_size=32, person=b"certificate").digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "worker")])
    builder = x509.CertificateBuilder(name, name, private.public_key(), 1, ALWAYS[0], ALWAYS[1])
    encodings = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made = builder.sign(private, None).public_bytes(serialization.Encoding.PEM)
    return made.decode(), private.private_bytes(*encodings)


def prove_worker(context: ssl.SSLContext, key: bytes) -> None:
    """Have a context prove itself as one of the workers with this key."""
    with os.fdopen(os.memfd_create("worker"), "wb") as file:  # ssl reads files alone, and the disk may be read-only
        certificate, private = worker_certificate(key)
        file.write(certificate.encode() + private)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def digests(paths: Iterable[Path]) -> dict[Path, bytes]:
    """Return a digest of each file; empty for one that can't be read. Blocks for some small files."""
    return {path: digest_of(path) for path in paths}


def digest_of(path: Path) -> bytes:
    """Return a digest of a file; empty if it can't be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return b""

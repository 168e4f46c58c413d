"""Certificates of TLS, as an operator would recognise them."""

from __future__ import annotations

from pathlib import Path


def described(path: Path) -> str:
    """Return until when the first certificate of a PEM file is valid, and its fingerprint. Raises ValueError, OSError.

    Blocks for one small file.
    """
    from cryptography import x509  # noqa: PLC0415  # only nodes with TLS need it
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415

    found = x509.load_pem_x509_certificate(path.read_bytes())
    return f"valid until {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, sha256 {found.fingerprint(SHA256()).hex()}"

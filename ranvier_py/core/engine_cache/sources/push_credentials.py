"""The credential that lets a worker report to the router, and only for itself. Pure.

    ranvier reporter --make-key WORKER      run where the control key is; the worker's machine gets the output

The credential has the worker's name and a keyed hash of it. It opens `/internal/*` and nothing else of the control
port. A report that it authenticates for another worker is refused, so whoever took over one worker cannot erase what is
known of the others. The control key itself is a credential for all workers: one reporter may speak for many. Mutual TLS
or a separate network, as the Purdue report asks for, belong in front of the port, in addition.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

CREDENTIAL_CHARACTERS_MAX = 1024
DIGEST_BYTES = 32


def credential(control_key: str, worker: str) -> str:
    """Return the bearer key of one worker."""
    name = urlsafe_b64encode(worker.encode()).decode().rstrip("=")
    return f"{name}.{_digest(control_key, worker)}"


def worker_of(bearer: str, control_key: str) -> str | None:
    """Return the worker whose credential this is; None if it is not valid."""
    if len(bearer) > CREDENTIAL_CHARACTERS_MAX or not bearer.isascii():
        return None
    name, dot, digest = bearer.partition(".")
    try:
        worker = urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    known = _digest(control_key, worker)
    return worker if dot and hmac.compare_digest(digest, known) else None


def _digest(control_key: str, worker: str) -> str:
    key = blake2b(control_key.encode(), digest_size=DIGEST_BYTES, person=b"ranvier-push").digest()
    return blake2b(worker.encode(), digest_size=DIGEST_BYTES, key=key).hexdigest()

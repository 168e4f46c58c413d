"""Raises the limit of files and sockets that this process may have open at once."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one. Returns how many may be open now.

    The soft limit is usually 1024, for programs that use select(2); this one does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft

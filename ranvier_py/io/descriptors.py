"""How many files and sockets this process may have open at once."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one. Returns what may be open now.

    The soft limit is 1024 as a rule, for the sake of programs that wait by select(2), which this one does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a hard limit that cannot be had
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft

"""Tells the service manager that started this process that it serves: READY=1 to NOTIFY_SOCKET, as in sd_notify(3).

Rule: it never waits and never raises; a manager that can't be told is logged, and stops waiting by its own deadline. Of
several workers each tells it, and the first one counts.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from ranvier_py.core.log_events import event

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"


def notify_ready(variables: Mapping[str, str] = os.environ) -> bool:
    """Tell the manager. Returns False if there is none, or it can't be told."""
    address = variables.get(VARIABLE, "")
    if not address:
        return False
    if address.startswith("@"):  # a name of Linux that is no file's
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
            manager.sendto(b"READY=1", address)
    except OSError as error:
        log.warning(event("node.manager_not_told", variable=VARIABLE, value=variables[VARIABLE], why=str(error)))
        return False
    return True

"""Starts a command that cannot outlive its parent: `python guard.py PARENT_PID COMMAND …`.

On Linux it asks the kernel to kill this process when the parent ends, however that happens, and then becomes the
command; the request survives exec. Elsewhere it only becomes the command, so a parent that is killed leaves children
behind. The kernel means the parent's *thread*: start it from one that lives as long as the process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

ORPHANED = 70
"""Exit code if the parent had ended before the command began."""


def main(argv: list[str]) -> int:
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(command[0], command)  # noqa: S606  # no shell is what is wanted
    return ORPHANED


if __name__ == "__main__":
    sys.exit(main(sys.argv))

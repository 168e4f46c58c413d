"""What commands return, and the error that ends one."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_ADDRESS, EXIT_UNREACHABLE = range(5)
EXIT_STATUS_UNKNOWN = 3
"""Of `ranvier status`, whose codes up to 2 are the state of a node: there is none to be had."""

EXIT_CUT = 130  # as shells have it for SIGINT
EXIT_CODES = """exit codes:
  0  done, or stopped by a signal after draining
  1  failed while running, or the node refused what was asked
  2  the command line or the configuration is wrong; every problem is listed
  3  an address can't be listened on
  4  the control port can't be reached
  130  a second Ctrl-C cut answers short"""


PROBLEMS = "the configuration has problems:"


class CommandError(Exception):
    """Ends a command with a message for stderr and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

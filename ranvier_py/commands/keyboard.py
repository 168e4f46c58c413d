"""The keys of a terminal, one at a time, and its screen for as long as they are read.

Rule: the terminal is as before when this ends, however it ends. Without a terminal on both sides there are no keys.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}
"""What terminals send for keys without a character (ECMA-48, as xterm has them)."""

READ_BYTES = 64


class Keyboard:
    """The keys that are typed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that came within this time; [] if none did."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return []
        data = os.read(self._descriptor, READ_BYTES)
        if not data:  # the terminal is gone
            return ["q"]
        return [*keys_in(data)]


def keys_in(data: bytes) -> Iterator[str]:
    """Yield the names of the keys that these bytes are. Unknown sequences are skipped."""
    while data:
        known = next((each for each in sorted(NAMES, key=len, reverse=True) if data.startswith(each)), b"")
        if known == b"\x1b" and len(data) > 1:  # a sequence that has no name here
            return
        if known:
            yield NAMES[known]
            data = data[len(known) :]
            continue
        words = data.decode(errors="ignore")
        if not words:
            return
        if words[0].isprintable():
            yield words[0]
        data = words[1:].encode()


@contextmanager
def keyboard() -> Iterator[Keyboard | None]:
    """Give the keys of the terminal, and an empty screen; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C stays
        sys.stdout.write("\x1b[?1049h\x1b[?25l")  # another screen, no cursor
        yield Keyboard(descriptor)
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

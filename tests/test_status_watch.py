"""A status that is watched at a real terminal: keys in, screens out, and the terminal as before at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time

import pytest

from ranvier_py.commands.keyboard import keys_in
from tests.fake_control import FakeControl
from tests.pages import serving

DEADLINE_S = 30.0
ROWS, COLUMNS = 24, 80
NEW_SCREEN, OLD_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str) -> None:
        self.process, self.descriptor = pty.fork()
        if not self.process:  # pragma: no cover  # the child
            os.execv(command[0], command)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.written = b""

    def screen(self) -> str:
        last = self.written.rpartition(b"\x1b[H")[2].decode()
        return re.sub(r"\x1b\[[?0-9]*[A-Za-z]", "", last).replace("\r", "")

    def until(self, words: str) -> str:
        """The screen as soon as it has these words."""
        until = time.monotonic() + DEADLINE_S
        while words not in self.screen():
            assert select.select([self.descriptor], [], [], until - time.monotonic())[0], self.screen()
            self.written += os.read(self.descriptor, 65536)
        return self.screen()

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def end(self) -> int:
        """The exit code, and all that was written."""
        try:
            while data := os.read(self.descriptor, 65536):
                self.written += data
        except OSError:  # it is gone
            pass
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def test_a_status_is_watched_with_keys_and_leaves_the_terminal_as_it_was() -> None:
    with serving(FakeControl) as control:
        terminal = Terminal(sys.executable, "-m", "ranvier_py", "status", "--watch", "--control", control.url)
        screen = terminal.until("1-1 of 1 by trouble")
        assert screen.startswith("WELL  n1 ")
        assert len(screen.splitlines()) <= ROWS
        assert max(map(len, screen.splitlines())) <= COLUMNS
        for keys, words in (
            (b"s", "by name"),
            (b"/zzz", "/zzz_"),
            (b"\r", "no engine by name, with"),
            (b"\x1b", "1-1 of 1 by name"),
            (b"e", "http://a:1"),
            (b" ", "1-1 of 1 by name"),
            (b"?", "one engine in full"),
            (b" ", "1-1 of 1 by name"),
        ):
            terminal.type(keys)
            terminal.until(words)
        terminal.type(b"q")
        assert terminal.end() == 0
    assert terminal.written.count(NEW_SCREEN) == terminal.written.count(OLD_SCREEN) == 1


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[5~x", ["pageup", "x"]),
        (b"\x1b[99;5uj", []),
        ("ü".encode(), ["ü"]),
        (b"\xff\xfe", []),
        (b"\x00a", ["a"]),
    ],
)
def test_keys_are_read_as_terminals_send_them(data: bytes, keys: list[str]) -> None:
    assert [*keys_in(data)] == keys

"""The tokenizer process: python -m ranvier_py.node.tokenizer_child SOCKET …

It loads the tokenizer that the node asks for over the first socket, and answers with its facts or with what is wrong.
Then it does jobs, with one thread for each socket but the last, which a fork serves for learning: that runs only when
nothing else on the machine wants to, and so must not hold an interpreter lock that others wait for.
Rules: it ends when the other side closes a socket, never by a signal for the node; once started it prints nothing, so
that nothing of a client is logged; its memory grows by MEMORY_GROWTH_BYTES at most, and the kernel ends it first.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix, KeyHasher
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.tokenize.tokenize_frames import (
    FRAME_HEAD,
    Setup,
    decode_jobs,
    decode_setup,
    encode_results,
    encode_start,
    frame_length,
)
from ranvier_py.core.tokenize.tokenize_service import TokenizeService
from ranvier_py.io.tokenizer import ChatTokenizer

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a service manager sends them to all its processes
SWITCH_INTERVAL_S = 0.0005  # longest time for which one prompt keeps the interpreter from another one that waits
MEMORY_GROWTH_BYTES = 1 << 30
"""Enough for three batches of `TOKENS_MAX` at 200 bytes a token, and for their bodies as objects."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
OOM_SCORE = "500"  # of 1000: ends before any process with the usual 0, unless that has half of all memory more


class Warnings(logging.Handler):
    """Keeps warnings that are logged while the tokenizer is loaded, for the node to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class TokenizerChild:
    """Does the jobs that arrive over the sockets."""

    def __init__(self, setup: Setup) -> None:
        """Load the tokenizer. Raises ConfigError."""
        tokenizer = ChatTokenizer.load(setup.source, chat_template=setup.chat_template or None)
        self.facts = tokenizer.facts
        self._keyed: dict[int, list[KeyedPrefix]] = {}  # by the thread whose job has them
        self._hasher = KeyHasher(setup.key, setup.block_tokens, notify=self._note, lengths=(), short=setup.short)
        self._service = TokenizeService(
            tokenizer, self._hasher, hoists_system=self.facts.hoists_system, reads_parts=tokenizer.profile.parts
        )

    def serve(self, sock: socket.socket) -> None:
        """Answer batch after batch, and then end the process."""
        code = 1
        try:
            while True:
                payload = receive_frame(sock)
                if not payload:
                    code = 0
                    break
                sock.sendall(self._answer(payload))
        except OSError:  # the node is gone
            code = 0
        finally:
            os._exit(code)

    def _answer(self, payload: bytes) -> bytes:
        began_s = time.thread_time()
        jobs, lengths = decode_jobs(payload)
        if lengths != self._hasher.lengths:
            self._hasher.keep(lengths)
        keyed = self._keyed[threading.get_ident()] = []
        results = self._service.results(jobs)
        return encode_results(results, keyed, time.thread_time() - began_s)

    def _note(self, keyed: KeyedPrefix) -> None:
        self._keyed[threading.get_ident()].append(keyed)


def run_when_idle() -> None:
    """Let this process run only when no other one wants the processor, and end it with the process that forked it.

    With mere niceness it would keep a request waiting until its time slice ends, for milliseconds (sched(7),
    SCHED_IDLE).
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def receive_frame(sock: socket.socket) -> bytes:
    """Return one frame; b"" at the end of the stream. Raises OSError."""
    head = sock.recv(FRAME_HEAD.size, socket.MSG_WAITALL)
    if len(head) < FRAME_HEAD.size:
        return b""
    length = frame_length(head)
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = sock.recv_into(view[done:])
        if not count:
            return b""
        done += count
    return bytes(data)


def bound_memory() -> None:
    """Bound the further growth of memory, as far as the kernel can do that, and offer this process for an early end."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_GROWTH_BYTES, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def main(arguments: Sequence[str]) -> int:
    """`arguments` are the sockets' file descriptors. Returns only if it could not start."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    first, *others = [socket.socket(fileno=int(number)) for number in arguments]
    warnings = Warnings()
    logging.getLogger("ranvier_py").addHandler(warnings)
    try:
        setup = receive_frame(first)
        if not setup:
            return 1
        child = TokenizerChild(decode_setup(setup))
    except ConfigError as error:
        first.sendall(encode_start(None, warnings.lines, error.problems))
        return 1
    except ConnectionError:
        raise
    except Exception:
        traceback.print_exc()  # nothing from a client is here yet
        return 1
    gc.freeze()  # exempts libraries and vocabulary from collections
    bound_memory()
    learning, silent = others.pop(), os.open(os.devnull, os.O_WRONLY)
    if os.fork() == 0:
        os.dup2(silent, 2)
        for sock in (first, *others):
            sock.close()
        run_when_idle()
        child.serve(learning)
    learning.close()
    first.sendall(encode_start(child.facts, warnings.lines))
    os.dup2(silent, 2)
    for sock in others:
        threading.Thread(target=child.serve, args=(sock,), daemon=True).start()
    child.serve(first)
    return 0


if __name__ == "__main__":
    with suppress(ConnectionError):  # the node is gone, so nobody would read why
        sys.exit(main(sys.argv[1:]))

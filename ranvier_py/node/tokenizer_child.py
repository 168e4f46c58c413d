"""What runs in the tokenizer's process: python -m ranvier_py.node.tokenizer_child SOCKET …

Loads the tokenizer that the node asks for over the first socket, answers with what it found out of it or with what is
wrong, and then does jobs: one thread for each socket, but for the last one, for learning. That is a fork of its own: it
shares what was loaded, gives way to every other thread of the machine, for nobody waits for it, and so must hold no
interpreter lock that others wait for.

Rules: ends when a socket is closed by the other side, and by no signal that was meant for the node. What a client sent
is never logged: from the start of its work on the process prints nothing, not even what a foreign library says of its
own faults. Memory is bounded to MEMORY_GROWTH_BYTES beyond what loading took, and where memory runs out on the whole
machine the kernel is asked to end this process before others: a new one costs matches only.
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
    encode_facts,
    encode_problems,
    encode_results,
    frame_length,
)
from ranvier_py.core.tokenize.tokenize_service import TokenizeService
from ranvier_py.io.tokenizer import ChatTokenizer

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a service manager sends them to all of its processes
SWITCH_INTERVAL_S = 0.0005  # the longest that one prompt keeps the interpreter from another that waits to be placed
MEMORY_GROWTH_BYTES = 1 << 30
"""Three batches of `TOKENS_MAX` at 200 bytes a token, and their bodies as objects."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
OOM_SCORE = "500"  # of 1000: before any process of the usual 0 that is not half of the machine's memory larger


class Warnings(logging.Handler):
    """Keeps what is logged while the tokenizer is loaded, for the node to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class TokenizerChild:
    """Does what comes over the sockets."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigError."""
        tokenizer = ChatTokenizer.load(setup.source, chat_template=setup.chat_template or None)
        self.facts = tokenizer.facts
        self._keyed: dict[int, list[KeyedPrefix]] = {}  # by the thread that met them
        self._hasher = KeyHasher(setup.key, setup.block_tokens, notify=self._note, lengths=(), short=setup.short)
        self._service = TokenizeService(tokenizer, self._hasher, hoists_system=self.facts.hoists_system)

    def serve(self, sock: socket.socket) -> None:
        """Answer batch after batch. Does not return."""
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
    """Have this process run only where no other wants the processor, and no longer than the one that forked it.

    A merely nicer one keeps a request that has come waiting until its time slice ends, milliseconds (sched(7),
    SCHED_IDLE).
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def receive_frame(sock: socket.socket) -> bytes:
    """Empty at the end. Raises OSError."""
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
    """From here on, only so much more. Where the kernel can't do that, it is not bounded."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_GROWTH_BYTES, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def main(arguments: Sequence[str]) -> int:
    """`arguments`: file descriptors of the sockets. Returns only when it could not start."""
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
        first.sendall(encode_problems(error.problems, warnings.lines))
        return 1
    except ConnectionError:
        raise
    except Exception:
        traceback.print_exc()  # nothing of a client's is here yet
        return 1
    gc.freeze()  # libraries and vocabulary stay
    bound_memory()
    learning, silent = others.pop(), os.open(os.devnull, os.O_WRONLY)
    if os.fork() == 0:
        os.dup2(silent, 2)
        for sock in (first, *others):
            sock.close()
        run_when_idle()
        child.serve(learning)
    learning.close()
    first.sendall(encode_facts(child.facts, warnings.lines))
    os.dup2(silent, 2)
    for sock in others:
        threading.Thread(target=child.serve, args=(sock,), daemon=True).start()
    child.serve(first)
    return 0


if __name__ == "__main__":
    with suppress(ConnectionError):  # the node is gone, and with it who would read why
        sys.exit(main(sys.argv[1:]))

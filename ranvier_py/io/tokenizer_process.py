"""Runs the tokenizer in a child process of the node, asks it over sockets, and replaces it when it ends.

Tokenizing is long and large: the event loop shall share neither lock nor memory with it. Invariant: the node itself
loads no tokenizer, and losing the process fails no request (test_tokenizer_process.py). Rule: a batch that is not
answered in time, or not with its results, ends the child: callers get TokenizerLost, and a new one is started after a
pause. The first start raises what is wrong; later ones log it. The child ends when the node does, because its sockets
are closed then; signals for the process group do not reach it.
Bound: one batch on each socket; FIRST_SOCKETS have a thread each, learning has a fork of the child.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import trio

from ranvier_py.core.errors import ConfigError, RanvierError, TokenizerLost
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.tokenize.tokenize_frames import (
    FRAME_HEAD,
    BadResults,
    Reply,
    Setup,
    decode_results,
    decode_start,
    encode_jobs,
    encode_setup,
    frame_length,
)
from ranvier_py.core.tokenize.tokenize_job import TokenizeJob, TokenizerFacts

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "ranvier_py.node.tokenizer_child")
FIRST_SOCKETS = 2  # prompts tokenized before placement at the same time; more would take the event loop's core
OWN_VARIABLES = "RANVIER_"  # the child gets none of the configuration's variables, since keys are among them

BATCH_LIMIT_S = 60.0
TOKEN_LIMIT_S = 0.0004
"""Time limit of a batch, plus one per token as estimated: two hundred times what a token takes on an idle machine.
The child has low priority, so on a fully loaded machine it hardly runs; to kill it then would only add load. Prompts
do not wait so long: each has its own deadline."""

END_S = 1.0
START_LIMIT_S = 120.0  # of a restart, when the files are already on this machine
RESTART_DELAY_S, RESTART_DELAY_S_MAX = 0.5, 30.0
STABLE_S = 60.0
RECEIVE_BYTES = 1 << 16
LOSSES = (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, BadResults)
"""How a batch may end without results."""


@dataclass(slots=True)
class ProcessCounters:
    """The tokenizer process as its node sees it."""

    up: int = gauge("Whether there is a tokenizer process that can be asked.")
    restarts: int = counter("Tokenizer processes that were started because the one before had ended.")
    killed: int = counter("Tokenizer processes that were killed: too late with an answer, or with a wrong one.")
    busy_seconds: float = counter("Seconds of processor time that the tokenizer processes took for jobs.")


class Child:
    """One process, and those of its sockets that are not in use."""

    def __init__(self, process: trio.Process, streams: Sequence[trio.SocketStream]) -> None:
        self.process, self.streams = process, streams
        self.free = {True: list(streams[:FIRST_SOCKETS]), False: list(streams[FIRST_SOCKETS:])}
        self.started_at = time.monotonic()

    async def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self.process.kill()
        with trio.CancelScope(shield=True):
            for stream in self.streams:
                await trio.aclose_forcefully(stream)
            await self.process.wait()


class TokenizerProcess:
    """Has a child process answer batches of jobs. Call `start` first, then `run` for as long as it is used.

    `facts` are available after `start` and never change.
    """

    facts: TokenizerFacts

    def __init__(
        self, setup: Setup, command: Sequence[str] = COMMAND, *, restart_delay_s: float = RESTART_DELAY_S
    ) -> None:
        self.counters = ProcessCounters()
        self.setup, self._command, self._restart_delay_s = setup, command, restart_delay_s
        self._child: Child | None = None
        self._begun: Child | None = None  # by `begin`
        self._up = trio.Event()
        self._limiters = {True: trio.CapacityLimiter(FIRST_SOCKETS), False: trio.CapacityLimiter(1)}

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is a child."""
        return self._child.process.pid if self._child else None

    async def begin(self) -> None:
        """Have the first child load while the caller does something else before `start`. Raises OSError."""
        self._begun = await self._spawn()

    async def start(self) -> None:
        """Start the first child, or wait until it has loaded. Raises ConfigError, TokenizerLost, OSError."""
        begun, self._begun = self._begun, None
        child, self.facts = await self._open(begun)
        self._take(child)

    async def run(self) -> None:
        """Replace each child that ends, for ever."""
        delay_s = self._restart_delay_s
        while True:
            if self._child is not None:
                code = await self._child.process.wait()
                self._lose()
                await self._child.end()
                if time.monotonic() - self._child.started_at >= STABLE_S:
                    delay_s = self._restart_delay_s
                self._child = None
                log.warning(event("tokenizer.ended", code=code, delay_s=delay_s))
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, RESTART_DELAY_S_MAX)
            await self._restart()

    async def close(self) -> None:
        """End the child, also one that has only begun. Nobody may ask after this."""
        self._lose()
        for child in (self._child, self._begun):
            if child is not None:
                await child.end()

    async def ready(self) -> None:
        """Wait until there is a child to ask."""
        await self._up.wait()

    def reject(self, why: Exception) -> None:
        """Kill the child, because an answer of it is not a valid result."""
        if self._child is not None:
            self._kill(self._child, why)

    async def ask(self, jobs: Sequence[TokenizeJob], lengths: Sequence[int] = (), *, first: bool) -> Reply:
        """Return the results of a batch. `first`: prompts wait for it. Raises TokenizerLost."""
        async with self._limiters[first]:
            child = self._child
            if child is None or not self.counters.up:
                raise TokenizerLost("there is no tokenizer process just now")
            stream = child.free[first].pop()
            tokens = sum(max(0, job.length - job.state.tokens) for job in jobs)  # a length may be an estimate
            try:
                with trio.fail_after(BATCH_LIMIT_S + TOKEN_LIMIT_S * tokens):
                    await stream.send_all(encode_jobs(jobs, lengths))
                    reply = decode_results(await receive_frame(stream), len(jobs))
            except BaseException as error:
                self._kill(child, error)
                if isinstance(error, LOSSES):
                    raise TokenizerLost("it ended before it had answered") from error
                raise
            child.free[first].append(stream)
        self.counters.busy_seconds += reply.busy_s
        return reply

    def _take(self, child: Child) -> None:
        self._child = child
        self.counters.up = 1
        self._up.set()

    def _lose(self) -> None:
        if self.counters.up:
            self.counters.up = 0
            self._up = trio.Event()

    def _kill(self, child: Child, why: BaseException) -> None:
        """Kill this child, because it failed or its caller was cancelled, unless it is already gone."""
        if child is not self._child or not self.counters.up:
            return
        self._lose()
        if not isinstance(why, trio.BrokenResourceError):  # that means that it has ended by itself
            self.counters.killed += 1
            log.warning(event("tokenizer.killed", why=type(why).__name__))
        child.process.kill()

    async def _restart(self) -> None:
        """Try to start a child. Raises nothing: after a failure the caller tries again."""
        try:
            with trio.fail_after(START_LIMIT_S):
                child, facts = await self._open()
        except (RanvierError, OSError, trio.TooSlowError) as error:
            log.error(event("tokenizer.not_restarted", kind=type(error).__name__, why=str(error)))
            return
        if facts != self.facts:
            log.error(event("tokenizer.changed"))
            await child.end()
            return
        self.counters.restarts += 1
        self._take(child)

    async def _open(self, begun: Child | None = None) -> tuple[Child, TokenizerFacts]:
        """Start a child and wait until it is ready. Raises ConfigError, TokenizerLost, OSError."""
        child = begun or await self._spawn()
        try:
            problems, warnings, facts = decode_start(await receive_frame(child.streams[0]))
            for warning in warnings:
                log.warning(event("tokenizer.warned", words=warning))
            if facts is None:
                raise ConfigError(list(problems))
        except (trio.BrokenResourceError, BadResults) as error:
            with trio.move_on_after(END_S):  # sockets close a moment before the process has ended
                await child.process.wait()
            await child.end()
            raise TokenizerLost(f"it ended at its start, with code {child.process.returncode}") from error
        except BaseException:
            await child.end()
            raise
        return child, facts

    async def _spawn(self) -> Child:
        with ExitStack() as mine, ExitStack() as theirs:
            pairs = []
            for _ in range(FIRST_SOCKETS + 1):
                pair = socket.socketpair()
                pairs.append((mine.enter_context(pair[0]), theirs.enter_context(pair[1])))
            numbers = [other.fileno() for _, other in pairs]
            process = await trio.lowlevel.open_process(
                [*self._command, *map(str, numbers)],
                pass_fds=numbers,
                stdin=DEVNULL,
                stdout=DEVNULL,
                process_group=0,  # not a session: niceness would count for nothing between Linux' autogroups
                env=environment(),
            )
            mine.pop_all()  # our sockets stay open
        child = Child(process, [trio.SocketStream(trio.socket.from_stdlib_socket(own)) for own, _ in pairs])
        with suppress(trio.BrokenResourceError):  # it has ended, as its answer shows
            await child.streams[0].send_all(encode_setup(self.setup))
        return child


def environment() -> dict[str, str]:
    """Return the node's environment without its configuration; modules are found where the node finds them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    return {**kept, "PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path)}


async def receive_frame(stream: trio.SocketStream) -> bytes:
    """Receive one frame. Raises BadResults, and trio.BrokenResourceError if the other side is gone."""
    data, length = bytearray(), FRAME_HEAD.size
    while len(data) < length:
        more = await stream.receive_some(RECEIVE_BYTES)
        if not more:
            raise trio.BrokenResourceError
        data += more
        if length == FRAME_HEAD.size <= len(data):
            length += frame_length(data[: FRAME_HEAD.size])
    if len(data) > length:
        raise BadResults("more than one frame")
    return bytes(data[FRAME_HEAD.size :])

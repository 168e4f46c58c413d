"""Starts the lab's child processes, waits until they are ready, watches them, and ends them with the lab.

Rules: a child that ends unasked is an error that carries the last lines of its log; no child outlives the lab, even if
the lab is killed (`guard`). Each child has its own process group, so Ctrl-C reaches only the lab, which then ends the
children in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from cluster.load.http_client import ExchangeFailed, fetch

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `python -m cluster` works only from here."""

GUARD = Path(__file__).with_name("guard.py")
POLL_INTERVAL_S = 0.05
"""How often a starting child is polled: a small part of the second that it takes to start."""

POLL_TIMEOUT_S = 2.0
STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL. A node without traffic drains at once."""

TAIL_LINES = 15


class ChildDied(Exception):
    """A child ended unasked."""

    def __init__(self, name: str, code: int, tail: str, log: Path) -> None:
        ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{name} {ending}; the last lines of {log}:\n{tail or '(nothing)'}")


class ChildNotReady(Exception):
    """A child did not become ready in time."""

    def __init__(self, name: str, seconds: float, last: str, log: Path) -> None:
        super().__init__(f"{name} was not ready after {seconds:g} s ({last}); the last lines of {log}:\n{tail(log)}")


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and the address that answers with status 200 once it is ready."""

    name: str
    argv: tuple[str, ...]
    ready_host: str
    ready_port: int
    ready_path: str
    tree: Path = ROOT  # the checkout whose code runs


class Child:
    """One process. `stopping`: the lab has asked it to end."""

    def __init__(self, command: Command, process: subprocess.Popen[bytes], log: Path) -> None:
        self.command = command
        self.process = process
        self.log = log
        self.stopping = False

    def ask_to_stop(self) -> None:
        self.stopping = True
        if self.process.poll() is None:
            self.process.terminate()


def environment() -> dict[str, str]:
    """Return the lab's environment without settings that were meant for real nodes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RANVIER_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


def start(command: Command, logs: Path) -> Child:
    """Start a child. Must be called from the main thread, see `guard`. Raises OSError."""
    log = logs / f"{command.name}.log"
    guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*guard, *command.argv],
            cwd=command.tree,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Child(command, process, log)


async def watch(child: Child) -> None:
    """Wait for the child's end. Raises ChildDied if the lab did not ask for it."""
    code = await wait_end(child)
    if not child.stopping:
        raise ChildDied(child.command.name, code, tail(child.log), child.log)


async def wait_end(child: Child) -> int:
    """Return the child's exit code; negative for a signal. Each wait has its own thread, so waits don't queue."""
    limiter = trio.CapacityLimiter(1)
    return await trio.to_thread.run_sync(child.process.wait, abandon_on_cancel=True, limiter=limiter)


def tail(log: Path) -> str:
    with log.open(errors="replace") as file:
        return "".join(deque(file, maxlen=TAIL_LINES)).rstrip()


async def wait_ready(child: Child, deadline_s: float) -> None:
    """Poll until the child answers with 200, or has ended, which `watch` reports. Raises ChildNotReady."""
    command, last = child.command, "nothing answered"
    with trio.move_on_after(deadline_s):
        while child.process.poll() is None:
            with trio.move_on_after(POLL_TIMEOUT_S):
                try:
                    status, _ = await fetch(command.ready_host, command.ready_port, command.ready_path)
                except ExchangeFailed as error:
                    last = error.failure.reason
                else:
                    if status == 200:
                        return
                    last = f"{command.ready_path} says {status}"
            await trio.sleep(POLL_INTERVAL_S)
        return
    raise ChildNotReady(command.name, deadline_s, last, child.log)


async def wait_all_ready(children: Iterable[Child], deadline_s: float) -> None:
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(wait_ready, child, deadline_s)


async def stop(children: Sequence[Child], grace_s: float = STOP_GRACE_S) -> None:
    """End all children: by SIGTERM, and by SIGKILL after the grace. Leaves none, even if it is cancelled."""
    for child in children:
        child.ask_to_stop()
    try:
        with trio.move_on_after(grace_s, shield=True):
            for child in children:
                await wait_end(child)
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()


async def end_on_signal(scope: trio.CancelScope, report: Callable[[str], object]) -> None:
    """Report the first signal that asks for an end, and cancel the scope."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for number in signals:
            report(signal.Signals(number).name)
            scope.cancel()

"""The processes of a chaos run: starts, kills, pauses, slows and exhausts them, and ends them with the run.

A process that ends unasked is logged as a crash. No process is left behind, however the run ends.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import trio

from cluster.faulted_value import FaultedValue
from cluster.processes.children import Child, Command, start, stop, tail, wait_end, wait_ready
from cluster.processes.request_log import RequestLog

READY_S = 240.0
"""Two seconds on an idle machine, two minutes for all of a run together on one with ten runnable processes a core."""

DRAIN_S = 40.0
"""A node may take 30 s for its last answers. After DRAIN_S it is killed, which the run reports."""

SLICE_S = 0.05
"""A slowed process runs for this long, then stands still for `factor - 1` times as long, by turns."""

STALL_FACTOR = 1000.0
"""From this factor on a slowed process does not run at all until the fault ends."""

SPARE_DESCRIPTORS = 4
"""Descriptors that an exhausted process has left: enough to begin something, not enough to finish it."""

Undo = Callable[[], Awaitable[None]] | None
"""Ends a fault; None if there is nothing to end."""


@dataclass(slots=True)
class Member:
    """One node or engine. `who` is its name in the log: a node's IP, an engine's name."""

    name: str
    who: str
    command: Callable[[], Command]
    child: Child | None = None
    generation: int = 0
    wanted: bool = False
    pauses: FaultedValue[bool] = field(init=False)  # faults of the present process that keep it from running at all
    slices: FaultedValue[bool] = field(init=False)  # of slowed processes: those in which it stands still just now
    exhausted: FaultedValue[tuple[int, int]] = field(init=False)  # with the limits of descriptors before
    slowing: list[trio.CancelScope] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pauses, self.slices = (FaultedValue(False, self._hold) for _ in "12")
        self.exhausted = FaultedValue((0, 0))

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.process.poll() is None

    @property
    def pid(self) -> int:
        """The running process's id; 0 without one."""
        return self.child.process.pid if self.child is not None and self.running else 0

    def _hold(self, _: bool) -> None:
        self.signal(signal.SIGSTOP if self.pauses or self.slices else signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        if self.running and self.child is not None:
            self.child.process.send_signal(number)

    def forget(self) -> None:
        """End the faults of a process that has ended."""
        for faults in (self.pauses, self.slices, self.exhausted):
            faults.clear()

    def unwanted(self) -> Child | None:
        """Return the process that is to end, at full speed; None if none runs."""
        self.wanted = False
        self.end_slowing()
        return self.child if self.running else None

    def end_slowing(self) -> None:
        for scope in self.slowing:
            scope.cancel()
        self.slowing.clear()


@dataclass(slots=True)
class Fleet:
    """All processes of a run. `clock` is the run's."""

    log: RequestLog
    logs: Path
    clock: Callable[[], float]
    nursery: trio.Nursery
    children: list[Child] = field(default_factory=list)

    async def start(self, member: Member) -> None:
        """Start a process and wait until it is ready. Raises ChildNotReady, OSError."""
        if member.running:
            return
        member.forget()
        member.generation += 1
        command = member.command()
        name = command.name if member.generation == 1 else f"{command.name}-{member.generation}"
        member.wanted = True
        member.child = child = start(replace(command, name=name), self.logs)
        self.children.append(child)
        self.nursery.start_soon(self.watch, member, child)
        self.note(f"{member.name} started, process {child.process.pid}")
        await wait_ready(child, READY_S)

    async def watch(self, member: Member, child: Child) -> None:
        """Log the child's end as a crash if the lab did not ask for it."""
        code = await wait_end(child)
        if not child.stopping:
            last = tail(child.log)
            self.log.crashes.append(f"{member.name} ended by itself with code {code}; {child.log}:\n{last}")
            self.note(f"{member.name} CRASHED with code {code}")

    async def kill(self, member: Member) -> None:
        """Kill with SIGKILL, and wait until the process has ended."""
        child = member.unwanted()
        if child is None:
            return
        child.stopping = True
        self.log.died(self.clock(), member.who)
        child.process.kill()
        self.note(f"{member.name} killed")
        await wait_end(child)

    async def stop(self, member: Member) -> None:
        """Send SIGTERM, and wait until the process has drained."""
        child = member.unwanted()
        if child is None:
            return
        child.ask_to_stop()
        self.note(f"{member.name} asked to stop")
        with trio.move_on_after(DRAIN_S):
            code = await wait_end(child)
            self.note(f"{member.name} stopped with code {code}")
            if code != 0:
                self.log.crashes.append(f"{member.name} stopped with code {code}; {child.log}:\n{tail(child.log)}")
            return
        self.log.crashes.append(f"{member.name} did not stop within {DRAIN_S:g} s")
        child.process.kill()

    def pause(self, member: Member) -> Undo:
        """Pause with SIGSTOP; the undo sends SIGCONT."""
        if not member.running:
            return None
        self.note(f"{member.name} paused")
        end = member.pauses.begin(True)

        async def undo() -> None:
            if end() and not member.pauses:
                self.note(f"{member.name} goes on")

        return undo

    def slow(self, member: Member, factor: float) -> Undo:
        """Let a process run only a part of the time until that is undone; from STALL_FACTOR on it is a pause."""
        if factor >= STALL_FACTOR:
            return self.pause(member)
        self.note(f"{member.name} slowed {factor:g} times")
        scope = trio.CancelScope()
        member.slowing.append(scope)
        self.nursery.start_soon(self.run_slowed, member, factor, scope)

        async def undo() -> None:
            scope.cancel()

        return undo

    async def run_slowed(self, member: Member, factor: float, scope: trio.CancelScope) -> None:
        with scope:
            while member.running:
                end = member.slices.begin(True)
                try:
                    await trio.sleep(SLICE_S * (factor - 1))
                finally:
                    end()
                await trio.sleep(SLICE_S)
        self.note(f"{member.name} is slowed no more")

    def exhaust(self, member: Member) -> Undo:
        """Leave a process SPARE_DESCRIPTORS descriptors; the undo restores its limit. Linux only."""
        if not member.running:
            return None
        exhausted = member.exhausted
        before = exhausted.value if exhausted else resource.prlimit(member.pid, resource.RLIMIT_NOFILE)
        limit = limit_leaving(SPARE_DESCRIPTORS, {int(name) for name in os.listdir(f"/proc/{member.pid}/fd")})
        resource.prlimit(member.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        self.note(f"{member.name} has {SPARE_DESCRIPTORS} descriptors left")
        end = exhausted.begin(before)

        async def undo() -> None:
            if end() and not exhausted and member.running:
                resource.prlimit(member.pid, resource.RLIMIT_NOFILE, before)
                self.note(f"{member.name} has descriptors again")

        return undo

    def wake(self, member: Member) -> None:
        """End the slowing and the pauses of a process."""
        member.end_slowing()
        member.pauses.clear()

    def note(self, text: str) -> None:
        self.log.note(self.clock(), text)

    async def end(self) -> None:
        """End all processes, even if the run is being cancelled."""
        for child in self.children:
            child.stopping = True
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
        await stop(self.children)


def limit_leaving(spare: int, held: set[int]) -> int:
    """Return the limit below which `spare` descriptor numbers are free. The system takes the lowest free one first."""
    free = 0
    for number in count():
        if free == spare:
            return number
        free += number not in held
    raise AssertionError  # numbers do not end

"""Connects the nodes of a chaos run and cuts links between them, in one of three modes, which the run prints.

*namespaces*: each node has its own network (Linux, root or user namespaces), joined by a bridge. A direction is cut by
a neighbour entry that leads nowhere, or refused by an unreachable route. Nodes resolve names by the lab's DNS, and
their state files are on small disks of their own. Of the system's tools it needs `unshare`, `mount` and `ip`.
*relay*: all nodes are on loopback, and gossip passes a relay: cuts by plane, loss, delay, and a record of packets.
*direct*: all nodes are on loopback without a relay; nothing can be cut.

A mode refuses what it cannot do before the run begins (`refusal`), and never skips it. No packet leaves the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import trio

from cluster.network.links import PLANES, Links
from cluster.processes.commands import ENGINES_MAX, NODES_MAX
from cluster.scenario import VERBS, Scenario, Step
from ranvier_py.core.mesh.mesh_values import Plane

LINK_MODES = ("auto", "namespaces", "relay", "direct")
PRIVATE_FLAG = "--inside"
PROBE_S = 10.0
STATE_BYTES_MAX = 1024 * 1024
"""Size of a node's own disk: room for its state file of 64 KiB, its copy, and not much more."""

BRIDGE_IP = "10.77.0.1"
SECOND_IP = "10.77.0.254"
"""The bridge's other address, to which an engine's name can move."""

NOWHERE = "02:00:00:00:00:ff"
"""A hardware address that no interface of the lab has (locally administered)."""


class CannotDo(Exception):
    """The run asks for something that this machine or this mode cannot do. No process was started."""


@dataclass(frozen=True, slots=True)
class LinkMode:
    """How links are made, and why this mode was chosen."""

    name: str
    why: str


# --- which mode ------------------------------------------------------------------------------------------------------


def private_command() -> list[str]:
    """Return the command that gives another command its own networks and mounts."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [shutil.which("unshare") or "unshare", *user, "--net", "--mount", "--propagation", "private"]


def can_be_private() -> str:
    """Return why namespaces can't be made here; "" if they can. Tries it in a process that ends at once."""
    missing = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"no {', '.join(missing)}" if missing else "not Linux"
    probe = (
        "mount -t tmpfs -o size=64k none /run && ip link set lo up && ip netns add probe && "
        "ip link add probe0 type bridge && ip link add probe1 type veth peer name eth0 netns probe"
    )
    try:
        done = subprocess.run(
            [*private_command(), "sh", "-c", probe], capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be made ({error})"
    words = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else f"namespaces cannot be made ({words[-1] if words else done.returncode})"


def choose(wanted: str, scenario: Scenario) -> LinkMode:
    """Return the mode for this scenario on this machine. Raises CannotDo."""
    if wanted not in LINK_MODES:
        raise CannotDo(f"no mode {wanted!r}; there are: {', '.join(LINK_MODES)}")
    if wanted in ("relay", "direct"):
        return checked(LinkMode(wanted, "asked for"), scenario)
    obstacle = can_be_private()
    if wanted == "namespaces":
        if obstacle:
            raise CannotDo(f"namespaces were asked for: {obstacle}")
        return checked(LinkMode(wanted, "asked for"), scenario)
    in_kernel = refusal("namespaces", scenario)
    if not obstacle and not in_kernel:
        return LinkMode("namespaces", "this machine can make them")
    return checked(LinkMode("relay", obstacle or in_kernel), scenario)


def checked(mode: LinkMode, scenario: Scenario) -> LinkMode:
    if reason := refusal(mode.name, scenario):
        raise CannotDo(f"{reason} (why {mode.name}: {mode.why})")
    return mode


def refusal(mode: str, scenario: Scenario) -> str:
    """Return what this mode cannot do of this scenario; "" if it can do all."""
    if not (1 <= scenario.cluster.nodes <= NODES_MAX and 1 <= scenario.cluster.engines <= ENGINES_MAX):
        return f"want 1 … {NODES_MAX} nodes and 1 … {ENGINES_MAX} engines"
    if scenario.cluster.log_entries:
        return "[cluster] log_entries: a node has no such setting"
    if scenario.cluster.dns != "all" and mode != "namespaces":
        return f"[cluster] dns = {scenario.cluster.dns}: only nodes in namespaces ask the lab's DNS"
    return next((word for step in scenario.steps if (word := step_refusal(mode, step))), "")


def step_refusal(mode: str, step: Step) -> str:
    where = f"step at {step.at_s:g} s ({step.do})"
    if "processes" not in VERBS[step.do].runs_on:
        return f"{where}: only the simulator does that"
    if step.do in ("dns", "disk_full", "engine_moves") and mode != "namespaces":
        return f"{where}: needs namespaces (names and disks of the nodes' own)"
    if step.do == "link" and mode != "relay":
        return f"{where}: needs the relay"
    if step.do == "cut" and (mode == "direct" or (mode == "namespaces" and set(step.planes) != set(PLANES))):
        return f"{where}: needs {'the relay, to cut one plane' if mode == 'namespaces' else 'namespaces or the relay'}"
    if step.do == "cut" and step.refuse and mode != "namespaces":
        return f"{where}: needs namespaces, to refuse"
    return ""


def enter_private(argv: Sequence[str]) -> None:
    """Become `python -m cluster ARGV --inside` in namespaces. Returns only by raising OSError."""
    command = [*private_command(), sys.executable, "-m", "cluster", *argv, PRIVATE_FLAG]
    os.execv(command[0], command)  # noqa: S606  # no shell is what is wanted


# --- the modes -------------------------------------------------------------------------------------------------------


class LinkControl:
    """Links without namespaces: direct, or by the relay, which reads the rules itself; `wake` wakes its streams."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake

    def prefix(self, node: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return the words before a node's command."""
        return ()

    async def apply(self) -> None:
        """Make the links as their rules now say."""
        self.wake()

    async def disk(self, node: int, *, full: bool) -> None:  # noqa: ARG002
        """Fill the node's disk, or make room again."""
        assert not full, "refused before the run"


class NamespaceControl(LinkControl):
    """A network for each node, inside the one of this process. They end with the last process inside."""

    def __init__(self, links: Links, nodes: int, states: Sequence[Path], resolv: Path) -> None:
        super().__init__()
        self.links = links
        self.nodes = nodes
        self.states = states
        self.resolv = resolv
        self.ip = shutil.which("ip") or "ip"
        self.applied: dict[tuple[int, int], tuple[bool, bool]] = {}  # (cut, refuse) of directions as last set

    async def set_up(self) -> None:
        """Make the bridge, the nodes' networks and disks, and the resolver's file. Raises CannotDo."""
        await run("mount", "-t", "tmpfs", "-o", "size=1m", "none", "/run")  # hides namespaces' names from outside
        await run("ip", "link", "set", "lo", "up")
        await run("ip", "link", "add", "lab0", "type", "bridge")
        for ip in (BRIDGE_IP, SECOND_IP):
            await run("ip", "addr", "add", f"{ip}/24", "dev", "lab0")
        await run("ip", "link", "set", "lab0", "up")
        for node in range(self.nodes):
            name, outer = f"n{node}", f"lab-n{node}"
            await run("ip", "netns", "add", name)
            await run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            await run("ip", "link", "set", outer, "master", "lab0", "up")
            await run("ip", "-n", name, "addr", "add", f"{node_ip(node)}/24", "dev", "eth0")
            await run("ip", "-n", name, "link", "set", "eth0", "up")
            await run("ip", "-n", name, "link", "set", "lo", "up")
            await run("mount", "-t", "tmpfs", "-o", f"size={STATE_BYTES_MAX}", "none", str(self.states[node]))
        self.resolv.write_text(f"nameserver {BRIDGE_IP}\n")
        await run("mount", "--bind", str(self.resolv), "/etc/resolv.conf")

    def prefix(self, node: int) -> tuple[str, ...]:
        return (self.ip, "netns", "exec", f"n{node}")

    async def apply(self) -> None:
        """Apply cuts of both planes, the only condition that the mode does not refuse before the run."""
        for pair in permutations(range(self.nodes), 2):
            link = self.links.link(*pair, Plane.DATAGRAM)
            wanted = link.cut, link.refuse
            if self.applied.get(pair, (False, False)) != wanted:
                self.applied[pair] = wanted
                await self.set(*pair, cut=link.cut, refuse=link.refuse)

    async def set(self, sender: int, receiver: int, *, cut: bool, refuse: bool) -> None:
        name, ip = f"n{sender}", node_ip(receiver)
        await run("ip", "-n", name, "neigh", "del", ip, "dev", "eth0", must=False)
        await run("ip", "-n", name, "route", "del", "unreachable", f"{ip}/32", must=False)
        if cut and refuse:
            await run("ip", "-n", name, "route", "add", "unreachable", f"{ip}/32")
        elif cut:
            entry = ("lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
            await run("ip", "-n", name, "neigh", "replace", ip, *entry)

    async def disk(self, node: int, *, full: bool) -> None:
        filler = self.states[node] / "filler"
        if not full:
            filler.unlink(missing_ok=True)
            return
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:  # no space is left on the device, as intended
                return


def node_ip(node: int) -> str:
    """Return a node's address in namespaces."""
    return f"10.77.0.{2 + node}"


async def run(*argv: str, must: bool = True) -> None:
    """Run a command of the system. Raises CannotDo if it fails, unless `must` is False."""
    done = await trio.run_process(argv, check=False, capture_stdout=True, capture_stderr=True)
    if must and done.returncode:
        raise CannotDo(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}")

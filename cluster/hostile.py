"""`python -m cluster hostile` sends every port of a real node what nobody should send, as its client and its server.

    public    clients send malformed requests, and an engine malformed answers
    control   clients send malformed requests, and an engine malformed pages that the node polls by itself
    gossip    strangers and a member with the cluster's key send bad packets; the member spoils the node's streams

After each case the node must run, be healthy, and serve a plain chat. At the end its engine must have got nothing but
strict HTTP, the node's log must have no traceback, and the node must end with code 0. With `--seconds`, mixtures follow
the cases for that long: cases that are cut, doubled or have bytes replaced or inserted, drawn from a seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import trio

from cluster.hostile_answers import AnswerCase, answer_cases, poll_cases
from cluster.hostile_lab import HostileLab, StrictEngine, hostile_lab
from cluster.hostile_peer import MET_S, lies, sealed_bodies, stranger_packets, stranger_streams
from cluster.hostile_requests import CLOSED, RequestCase, control_cases, control_request, get, post, public_cases
from ranvier_py.core.mesh.wire.messages import Message

POLLED_S = 10.0
IDLE_STREAMS = 100
SIDES = ("public", "control", "answers", "polls", "strangers", "member")


@dataclass(frozen=True, slots=True)
class HostileCase:
    """One case; `run` returns what was wrong, or an empty text."""

    side: str
    name: str
    run: Callable[[], Awaitable[str]]


@dataclass
class HostileReport:
    """What a run found. `found`: one line for each fault. `cases`: how many cases ran, by side."""

    cases: dict[str, int]
    found: list[str]


def statuses_of(reply: bytes) -> list[int]:
    """Return the statuses of all answers in these bytes. No line of their bodies may begin like a status line."""
    return [int(part[:3]) for part in reply.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


# --- cases ------------------------------------------------------------------------------------------------------------


def all_cases(lab: HostileLab, rng: Random) -> Iterator[HostileCase]:
    for request in (*public_cases(), *control_cases()):
        yield HostileCase(request.port, request.name, partial(ask, lab, request))
    for answer in answer_cases():
        yield HostileCase("answers", answer.name, partial(be_answered, lab, answer))
    for name, path, page in poll_cases():
        yield HostileCase("polls", name, partial(be_polled, lab, path, page))
    for name, packet in stranger_packets(rng):
        yield HostileCase("strangers", f"a datagram: {name}", partial(send_datagram, lab, packet))
    for name, data in stranger_streams(rng):
        yield HostileCase("strangers", f"a stream: {name}", partial(send_stream, lab, data))
    yield HostileCase("strangers", "a hundred streams that say nothing", partial(hold_streams, lab))
    for name, kind, body in sealed_bodies(rng):
        yield HostileCase("member", name, partial(be_a_member, lab, kind, body))
    for name, message in lies(lab.peer):
        yield HostileCase("member", name, partial(lie, lab, message))


async def ask(lab: HostileLab, case: RequestCase) -> str:
    to = lab.public if case.port == "public" else lab.control
    found = statuses_of(await lab.talk(to, case.pieces, half_close=case.half_close)) or [CLOSED]
    if len(found) < case.count or any(each not in case.statuses for each in found[: case.count]):
        return f"answered {found}, expected {case.count} of {list(case.statuses)[:9]}"
    return ""


async def be_answered(lab: HostileLab, case: AnswerCase) -> str:
    body = b'{"model":"lab-model",%b"messages":[{"role":"user","content":"hello"}]}'
    asked = post(body % (b'"stream":true,' if case.stream else b""), b"x-hostile: " + case.name.encode())
    found = statuses_of(await lab.talk(lab.public, (asked,)))[:1] or [CLOSED]
    return "" if found[0] in case.statuses else f"answered {found}, expected one of {list(case.statuses)}"


async def be_polled(lab: HostileLab, path: str, page: bytes) -> str:
    """Add an engine that serves this page, wait until the node polls it, and remove the engine."""
    engine = StrictEngine({}, {path: page})
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        url = b'{"url":"%b"}' % engine.url.encode()
        added = statuses_of(await lab.talk(lab.control, (control_request(b"POST", "/admin/backends", url),)))
        with trio.move_on_after(POLLED_S):
            await engine.polled[path].wait()
        listed = statuses_of(await lab.talk(lab.public, (get(b"/v1/models"),)))
        removed = statuses_of(await lab.talk(lab.control, (control_request(b"DELETE", "/admin/backends", url),)))
        nursery.cancel_scope.cancel()
    if not engine.polled[path].is_set():
        return "nobody asked for this page"
    return "" if (added, listed, removed) == ([200], [200], [200]) else f"{added}, /v1/models {listed}, {removed}"


async def send_datagram(lab: HostileLab, packet: bytes) -> str:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.sendto(packet, lab.gossip)
        with trio.move_on_after(0.02):
            answered, _ = await sock.recvfrom(1 << 16)
            if len(answered) > len(packet):
                return f"a stranger's {len(packet)} bytes are answered with {len(answered)}"
    return ""


async def send_stream(lab: HostileLab, data: bytes) -> str:
    stream = await trio.open_tcp_stream(*lab.gossip)
    async with stream:
        with suppress(trio.BrokenResourceError), trio.move_on_after(0.05):
            await stream.send_all(data)
            if await stream.receive_some():
                return "a stranger is answered on its stream"
    return ""


async def hold_streams(lab: HostileLab) -> str:
    streams = [await trio.open_tcp_stream(*lab.gossip) for _ in range(IDLE_STREAMS)]
    trouble = await lab.alive()
    for stream in streams:
        await stream.aclose()
    return trouble


async def be_a_member(lab: HostileLab, kind: int, body: bytes) -> str:
    """Send the body as the member, by datagram and by stream."""
    await lab.peer.send(kind, body)
    return await send_stream(lab, lab.peer.frame(kind, body))


async def lie(lab: HostileLab, message: Message) -> str:
    await lab.peer.tell(message)
    return ""


# --- mixtures ---------------------------------------------------------------------------------------------------------


def spoilt(data: bytes, rng: Random) -> bytes:
    """Return a copy of the first 256 KiB that is cut, doubled in part, or has bytes replaced or inserted."""
    made = bytearray(data[: 1 << 18])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            made[at:at] = made[at : at + rng.randrange(64)]
        elif kind == 2:
            made[at : at + 1] = rng.randbytes(1)
        else:
            made[at:at] = rng.choice((b"\r\n", b"\0", b"[", b"{", b'"', b"\xff", b": ", b"0"))
    return bytes(made)


async def mix(lab: HostileLab, rng: Random, seconds: float) -> list[str]:
    """Send spoilt cases to both HTTP ports and to gossip for so many seconds, or until a fault; return the faults."""
    requests = [*public_cases(), *control_cases()]
    packets = [packet for _, packet in stranger_packets(rng)]
    end, found = time.monotonic() + seconds, list[str]()
    while time.monotonic() < end and not found:
        case = rng.choice(requests)
        to = lab.public if case.port == "public" else lab.control
        pieces = tuple(spoilt(piece, rng) for piece in case.pieces)
        answered = statuses_of(await lab.talk(to, pieces, half_close=True))
        if any(each >= 500 and each not in (501, 502, 503, 505) for each in answered):
            found.append(f"mixture: {case.name}: {answered}: {pieces!r:.2000}")
        await send_datagram(lab, spoilt(rng.choice(packets), rng))
        _, kind, body = rng.choice(list(sealed_bodies(rng)))
        await lab.peer.send(kind, spoilt(body, rng))
        if trouble := await lab.alive():
            found.append(f"mixture: {case.name}: {trouble}: {pieces!r:.2000}")
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


async def run(seed: int, seconds: float, sides: Sequence[str] = SIDES) -> HostileReport:
    """Run all cases of these sides, then mixtures for so many seconds. The run breaks off when the node has ended."""
    rng = Random(seed)  # no secrets
    report = HostileReport(dict.fromkeys(sides, 0), [])
    answers = {case.name: case.pieces for case in answer_cases()}
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        async with hostile_lab(answers, Path(folder), rng) as lab:
            with trio.fail_after(MET_S):
                await lab.peer.met.wait()
            for case in all_cases(lab, rng):
                if case.side not in sides:
                    continue
                report.cases[case.side] += 1
                wrong = await case.run() or await lab.alive()
                if wrong:
                    report.found.append(f"{case.side}: {case.name}: {wrong}")
                if lab.process.poll() is not None:
                    break
            if seconds:
                report.found += await mix(lab, rng, seconds)
            report.found += [f"the engine got what is not strict: {each}" for each in lab.engine.violations]
        if lab.process.returncode:
            report.found.append(f"the node ended with code {lab.process.returncode}")
        log = lab.log.read_text(errors="replace")
        if "Traceback" in log:
            report.found.append("the log has a traceback: " + log[max(0, log.index("Traceback") - 500) :][:6000])
    return report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="of mixtures, after the cases")
    parser.add_argument("--only", nargs="*", choices=SIDES, default=SIDES)
    arguments = parser.parse_args(argv)
    report = trio.run(run, arguments.seed, arguments.seconds, arguments.only)
    for line in report.found:
        print(line)
    counted = ", ".join(f"{count} {side}" for side, count in report.cases.items())
    print(f"seed {arguments.seed}: {sum(report.cases.values())} cases ({counted}), {len(report.found)} faults")
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

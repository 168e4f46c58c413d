"""Commands of the operator that every node follows: add a backend, remove one. How they spread: see `join_table`.

Rules: a command is signed with the admin key, since an address taken from gossip could send prompts anywhere; without
that key a node signs, follows and passes on nothing. Of one URL the command with the greatest clock holds; a removal is
kept like an addition, or an old addition would return. A command is taken for VALID_S after it was signed, and signed
anew by those that follow it: it expires with the last of them, so no recorded one returns. Only here the time of day
decides, since nothing else outlives all nodes. Bounds: COMMANDS_MAX URLs, FLOORS_MAX in the state file.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import repeat
from random import Random
from struct import pack
from typing import Any, ClassVar, NamedTuple

from ranvier_py.core.mesh.join_table import ClockedTable
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer
from ranvier_py.core.mesh.wire.codec import Codec, Kind
from ranvier_py.core.mesh.wire.columns import SIGNATURE_BYTES, packed, parts_field, unpacked
from ranvier_py.core.mesh.wire.frame import amount, bad, text
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backend import NAME_CHARS_MAX

COMMANDS_MAX = 4096  # URLs: as many as there can be backends
FLOORS_MAX = 1024  # kept across a restart: 16 KiB
REPAIR_INTERVAL_S = 30.0
VALID_S = 3600.0  # as long an old command can be replayed
RETRY_S = 300.0  # a failed command is tried again after this: a name that it needs may be free now
RENEW_S = 1200.0  # two renewals may fail before the command expires
SKEW_S = 300.0  # allowed difference between the clocks of two nodes
CLOCK_AHEAD_MS = 86_400_000  # for a wrong clock where the command was given; no more, or one could exhaust it
COMMANDS_PER_MESSAGE = 64
NODE = "node:"  # stands for a node itself in commands among its workers
REFUSALS = {
    "time": "it was signed long ago or in the future: do the clocks agree?",
    "old": "it had a later one before its restart",
    "full": f"it knows of {COMMANDS_MAX} engines already",
}
HOSTED = (None, False, True)
TLS_NAME_BYTES_MAX, BASE_PATH_BYTES_MAX = 253, 200
COMMAND_BYTES_MAX = (16, 512, NAME_CHARS_MAX)
"""The most bytes of a command's verb, URL and name."""


class CommandOptions(NamedTuple):
    """What else a new backend is given. A node of protocol 4 refuses a command with some: its signature has them."""

    hosted: int = 0  # index into HOSTED
    any_model: bool = False
    tls_name: str = ""  # at most 253 bytes
    base_path: str = ""  # at most 200 bytes


NO_OPTIONS = CommandOptions()


class Command(NamedTuple):
    """An operator's command, signed with the admin key: taken only where the configuration allows it."""

    clock: int  # u64: of commands about one URL the greatest decides
    signed_ms: int  # u64: the time of day when it was signed, perhaps again
    verb: str  # add, remove
    url: str  # at most 512 bytes
    weight: float
    name: str
    signature: bytes  # 32 bytes, HMAC-SHA256
    options: CommandOptions = NO_OPTIONS


class Commands(NamedTuple):
    """`options`: those of each command, which has them itself before and after; empty if no command has any."""

    commands: tuple[Command, ...]
    options: tuple[CommandOptions, ...] = ()


class OwnCommands(NamedTuple):
    """The same among the workers of one node."""

    commands: tuple[Command, ...]
    options: tuple[CommandOptions, ...] = ()


def read_command(
    clock: int, signed_ms: int, verb: bytes, url: bytes, weight: float, name: bytes, signature: bytes
) -> Command:
    if len(signature) != SIGNATURE_BYTES:
        bad("signature of a command")
    texts = map(text, (verb, url, name), COMMAND_BYTES_MAX)
    return Command(
        clock=clock,
        signed_ms=signed_ms,
        verb=next(texts),
        url=next(texts),
        weight=amount(weight),
        name=next(texts),
        signature=signature,
    )


def read_options(hosted: int, any_model: int, tls_name: bytes, base_path: bytes) -> CommandOptions:
    if hosted >= len(HOSTED) or any_model > 1:
        bad("options of a command")
    texts = text(tls_name, TLS_NAME_BYTES_MAX), text(base_path, BASE_PATH_BYTES_MAX)
    return CommandOptions(hosted, bool(any_model), *texts)


def check(message: Commands | OwnCommands) -> None:
    if message.options and len(message.options) != len(message.commands):
        bad("number of options")


COMMANDS = parts_field("command", "Q Q *B *H d *B 32s", COMMANDS_PER_MESSAGE, read_command)
OPTIONS = parts_field("options", "B B *B *B", COMMANDS_PER_MESSAGE, read_options)._replace(since=5)
KIND = Kind("backends", 50, Commands, (COMMANDS, OPTIONS), check)
OWN_KIND = Kind("backends", 55, OwnCommands, (COMMANDS, OPTIONS), check, since=5)


class HeldCommand(NamedTuple):
    """A command that is kept. `signed_at` is on our monotonic clock, in seconds."""

    command: Command
    signed_at: float


@dataclass(slots=True)
class CommandCounters:
    refused: dict[str, int] = counter(
        "Operators' commands from peers that were not followed, by reason.", label="reason"
    )

    def __post_init__(self) -> None:
        self.refused.update(dict.fromkeys(("signature", "time", "old", "full", "wire"), 0))


class CommandOutcomes:
    """What became of commands: of COMMANDS_MAX URLs at most, and those that are tried again."""

    def __init__(self, now: float) -> None:
        self.failed: dict[str, Command] = {}  # by URL, until the next try
        self.retry_at = now
        self.of: dict[int, tuple[int, str]] = {}  # by digest of a URL: clock, and why it was not followed

    def note(self, command: Command, why_not: str) -> None:
        digest = digest_of(command.url)
        if command.clock >= self.of.get(digest, (0, ""))[0]:
            self.of[digest] = command.clock, why_not
        if len(self.of) > COMMANDS_MAX:
            del self.of[next(iter(self.of))]


class SignedCommands(ClockedTable[str, Command]):
    """The commands that one node knows. With an empty `admin_key` none are given or taken."""

    kinds = (KIND,)
    VERBS: ClassVar[Sequence[str]] = ("add", "remove")
    ROWS_MAX = COMMANDS_PER_MESSAGE
    REPEAT_S = REPAIR_INTERVAL_S

    def __init__(
        self,
        admin_key: bytes,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        wall_ms: int = 0,
        floors: Mapping[int, int] = {},
    ) -> None:
        super().__init__(outbox, rng, now, wall_ms)
        self.new: list[Command] = []  # to be followed, see `take_new`
        self.counters = CommandCounters()
        self._key = admin_key
        self._floors = dict(floors)
        self._forgotten = 0  # the greatest clock of a removal that was replaced
        self._known: dict[str, HeldCommand] = {}
        self._outcomes = CommandOutcomes(now)

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_commands": self.counters}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def floors(self) -> dict[int, int]:
        """Return digest of URL -> clock of its last command, FLOORS_MAX at most: a new run refuses older ones."""
        known = {digest_of(url): held.command.clock for url, held in self._known.items()}
        latest = sorted((self._floors | known).items(), key=lambda item: item[1], reverse=True)
        return dict(latest[:FLOORS_MAX])

    @property
    def signs(self) -> bool:
        return bool(self._key)

    def stored(self) -> list[str]:
        """Return the commands that hold, each as a text to be kept across a restart."""
        rows = [held.command for held in self._known.values()]
        return [packed([COMMANDS, OPTIONS], [(row,), (row.options,)]).hex() for row in rows]

    def restore(self, stored: Iterable[str], now: float) -> None:
        """Take what `stored` returned before a restart, but for what has expired or another key has signed.

        Without it an order would be lost if all that follow it are restarted while a node is away. Raises ValueError.
        """
        for each in stored:
            (row,), (options,) = unpacked([COMMANDS, OPTIONS], bytes.fromhex(each))
            command: Command = row._replace(options=options)
            if not self._refusal(command, now) and self._has_room(command):
                self._take(command, now)

    def clock_of(self, url: str) -> int:
        """Return the clock of the last command about this URL."""
        held = self._known.get(url)
        return held.command.clock if held is not None else max(self._forgotten, self._floors.get(digest_of(url), 0))

    def give(
        self,
        verb: str,
        url: str,
        weight: float,
        name: str,
        now: float,
        options: CommandOptions = NO_OPTIONS,
        *,
        above: int = 0,
    ) -> bool:
        """Give an operator's command, with a clock `above` this one. False: it is not shared, because this node has no
        key for that, or refused it."""
        if not self._key:
            return False
        clock = max(self.clock_of(url) + 1, above + 1, self._wall_ms(now))
        command = Command(
            clock=clock,
            signed_ms=0,
            verb=verb,
            url=url,
            weight=weight,
            name=name,
            signature=bytes(SIGNATURE_BYTES),
            options=options,
        )
        try:
            Codec(self.kinds).encode(self._message((command,)))
        except ValueError:
            self.counters.refused["wire"] += 1
            return False
        if not self._has_room(command):
            self.counters.refused["full"] += 1
            return False
        self._signed(command, now)
        self._changed[url] = None
        return True

    def take_new(self) -> list[Command]:
        """Return the commands to follow now in the order in which they were given, earlier failures included.

        In that order a name or a place is free when the next command needs it, even if they arrived otherwise.
        """
        if self.new:
            self._try_again()
        new, self.new = sorted(self.new, key=by_clock), []
        return new

    def followed(self, command: Command, why_not: str = "") -> None:
        """Note that a command was followed, or why not: it is tried again after the next new one, and every RETRY_S."""
        self._outcomes.note(command, why_not)
        if why_not and self._holds(command):
            self._outcomes.failed[command.url] = command

    def outcome(self, digest: int, clock: int) -> str | None:
        """Return why the command with this clock about a URL was not followed; "": it, or a later one, was; None: not
        yet. `digest`: of the URL."""
        if not self._key:
            return "it has no key for orders of others: gossip_admin_key"
        at, why_not = self._outcomes.of.get(digest, (-1, ""))
        return why_not if at >= clock else None

    def _try_again(self) -> None:
        self.new += filter(self._holds, self._outcomes.failed.values())
        self._outcomes.failed.clear()

    def _holds(self, command: Command) -> bool:
        held = self._known.get(command.url)
        return held is not None and by_clock(held.command) == by_clock(command)

    def tick(self, now: float) -> None:
        if now >= self._rounds.repeat_at:
            self._send(self._peers, self._renew(now))
            if now >= self._outcomes.retry_at and self._outcomes.failed:
                self._outcomes.retry_at = now + RETRY_S
                self._try_again()
        super().tick(now)

    def receive(self, _peer: Peer, message: Commands | OwnCommands, now: float) -> None:
        rows = zip(message.commands, message.options or repeat(NO_OPTIONS), strict=False)
        for command in [row._replace(options=options) for row, options in rows]:
            reason = self._refusal(command, now) or ("" if self._has_room(command) else "full")
            if reason:
                self.counters.refused[reason] += 1
                if reason != "signature":  # else anybody could say what this node refused
                    self._outcomes.note(command, f"it refuses the command: {REFUSALS[reason]}")
            else:
                self._take(command, now)

    def _refusal(self, command: Command, now: float) -> str:
        """Return why a command is refused; empty if it may be taken."""
        wall_ms = self._wall_ms(now)
        if not self._key or command.verb not in self.VERBS:
            return "signature"
        if not hmac.compare_digest(signature_of(self._key, command), command.signature):
            return "signature"
        if not -1000 * SKEW_S <= wall_ms - command.signed_ms <= 1000 * (VALID_S + SKEW_S):
            return "time"
        if command.clock > wall_ms + CLOCK_AHEAD_MS:
            return "time"
        if command.url not in self._known and (
            command.clock <= self._forgotten or command.clock < self._floors.get(digest_of(command.url), 0)
        ):
            return "old"
        return ""

    def _has_room(self, command: Command) -> bool:
        """Whether the command's URL is known, or one more fits, if need be in place of the oldest removal."""
        if command.url in self._known or len(self._known) < COMMANDS_MAX:
            return True
        removals = [held.command for held in self._known.values() if held.command.verb == "remove"]
        oldest = min(removals, key=by_clock, default=command)
        if oldest.clock >= command.clock:
            return False
        del self._known[oldest.url]
        self._changed.pop(oldest.url, None)
        self._forgotten = max(self._forgotten, oldest.clock)
        return True

    def _take(self, command: Command, now: float) -> None:
        held = self._known.get(command.url)
        is_later = held is None or by_clock(command) > by_clock(held.command)
        if held is not None and (*by_clock(command), command.signed_ms) <= (
            *by_clock(held.command),
            held.command.signed_ms,
        ):
            return
        age_s = (self._wall_ms(now) - command.signed_ms) / 1000
        self._known[command.url] = HeldCommand(command, now - max(0.0, age_s))
        if is_later:
            self._changed[command.url] = None
            self.new.append(command)

    def _renew(self, now: float) -> list[Command]:
        """Sign the commands that would expire again, whoever gave them, and return them."""
        old = [held.command for held in self._known.values() if now - held.signed_at > RENEW_S]
        return [self._signed(command, now) for command in old]

    def _signed(self, command: Command, now: float) -> Command:
        command = command._replace(signed_ms=self._wall_ms(now))
        command = command._replace(signature=signature_of(self._key, command))
        self._known[command.url] = HeldCommand(command, now)
        return command

    def _rows(self, keys: dict[str, None] | None, now: float) -> Sequence[Command]:
        if keys is not None:
            return [self._known[url].command for url in keys]
        self._renew(now)
        return [held.command for held in self._known.values()]

    def _message(self, rows: Sequence[Command]) -> Commands | OwnCommands:
        options = tuple([row.options for row in rows])
        commands = tuple([row._replace(options=NO_OPTIONS) for row in rows])
        message: Commands | OwnCommands = self.kinds[0].make(
            commands, options if any(each != NO_OPTIONS for each in options) else ()
        )
        return message


class WorkerCommands(SignedCommands):
    """The commands among the workers of one node: signed with a key that these alone have, and sent to no one else.

    They may concern the node itself, too: NODE in place of a URL. `is_worker`: whether one is at an address.
    """

    kinds = (OWN_KIND,)
    VERBS = ("add", "remove", "drain", "undrain")

    def __init__(
        self,
        key: bytes,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        is_worker: Callable[[Address], bool],
        wall_ms: int = 0,
    ) -> None:
        super().__init__(key, outbox, rng, now, wall_ms=wall_ms)
        self._is_worker = is_worker

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_worker_commands": self.counters}

    def met(self, peers: LivePeers, now: float) -> None:
        super().met(peers._replace(near=[peer for peer in peers.near if self._is_worker(peer.address)]), now)

    @property
    def workers(self) -> Sequence[int]:
        """The sessions of the other workers."""
        return [peer.session for peer in self._peers]


def by_clock(command: Command) -> tuple[int, str, float, str, CommandOptions]:
    """Return the sort key of commands about one URL, of which the greatest holds. The time of signing is not in it."""
    return command.clock, command.verb, command.weight, command.name, command.options


def digest_of(url: str) -> int:
    return int.from_bytes(blake2b(url.encode(), digest_size=8, person=b"command url").digest(), "little")


def signature_of(key: bytes, command: Command) -> bytes:
    """Return the HMAC-SHA256 over all fields of a command but the signature, each part with its length."""
    numbers = pack("<QQd", command.clock, command.signed_ms, command.weight)
    parts = [numbers, command.verb.encode(), command.url.encode(), command.name.encode()]
    if command.options != NO_OPTIONS:  # else it is signed as in protocol 4
        parts += [bytes(command.options[:2]), command.options.tls_name.encode(), command.options.base_path.encode()]
    return hmac.new(key, b"".join(pack("<I", len(part)) + part for part in parts), sha256).digest()

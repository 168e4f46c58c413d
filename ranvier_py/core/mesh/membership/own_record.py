"""This node's own record, and how it answers what others report about this node.

Rule: an accusation is answered by the next incarnation, so one answer settles it; a record with our name and a higher
epoch by the next epoch, for it may be of an earlier run of ours; a session that overtakes us all the same is alive, and
we take another name. Who began later has the higher epoch, so it is answered first, and is the one that is renamed.
Nothing is compared with the time of day (scylladb#5164). In the last epoch nobody can be
overtaken and no accusation answered: a namesake in it gets the name, and no node believes such an accusation.
Invariant: (epoch, incarnation) only rises, and the state is ALIVE until `leave`, then LEFT (test_own_record.py).
"""

from __future__ import annotations

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.mesh.wire.records import NAME_BYTES_MAX

EPOCH_MAX = 2**63 - 1  # 292 million years of milliseconds: higher ones in records are dropped
EPOCH_AHEAD_MAX = 2**42  # 139 years of milliseconds: no two clocks are further apart, however wrong they are
INCARNATION_MAX = 2**32 - 1  # what the wire holds
INCARNATION_STEP_MAX = 2**16  # the most that one message may raise ours: an honest accuser repeats our own record

OVERTAKEN_MAX = 2  # answers: an earlier run of ours is overtaken once and stays silent; one that comes back is alive
NAMESAKES_MAX = 16  # sessions with our name that are remembered; the oldest is forgotten first


def first_epoch(remembered: int, wall_ms: int) -> int:
    """Return the first epoch of a run: above that of the last run, `remembered`, unless that is absurdly high."""
    wall_ms = min(max(0, wall_ms), EPOCH_AHEAD_MAX)
    return max(remembered + 1, wall_ms) if remembered <= wall_ms + EPOCH_AHEAD_MAX else wall_ms


class OwnRecord:
    """The record of this node, as it changes."""

    __slots__ = ("_digits", "_given_name", "_namesakes", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        self._given_name = record.name
        self._digits = 0  # how many digits of the session the name has
        self._namesakes: BoundedDict[int, int] = BoundedDict(NAMESAKES_MAX)  # session -> times it answered us, alive

    @property
    def leaving(self) -> bool:
        return self.record.state is State.LEFT

    def leave(self) -> None:
        self.record = self.record._replace(state=State.LEFT)

    def move(self, name: str, host: str, public: str) -> None:
        """Take another address and name, by the next incarnation."""
        self._given_name, self._digits = name, 0
        self._rise(self.record.epoch, self.record.incarnation + 1)
        self.record = self.record._replace(name=name, host=host, public=public)

    def outbid(self, claim: Record) -> None:
        """Rise above a record that others hold of this session. `claim` is at least as high as our own record. One far
        above, or the last there is, begins a new epoch (memberlist#358: one such message evicted a member for ever)."""
        epoch, incarnation = self.record.epoch, self.record.incarnation
        if claim.epoch > epoch:
            self._rise(claim.epoch + 1, incarnation)
        elif claim.incarnation >= INCARNATION_MAX or claim.incarnation - incarnation > INCARNATION_STEP_MAX:
            self._rise(epoch + 1, incarnation)  # beats all of the old one (memberlist#358)
        else:
            self._rise(epoch, claim.incarnation + 1)

    def outranks(self, other: Record) -> bool:
        """Whether this session is the later one of two with one name."""
        return (self.record.epoch, self.record.session) > (other.epoch, other.session)

    def overtake(self, other: Record) -> bool:
        """Answer a record with our name that outranks ours, of an earlier run of ours or of a namesake. Returns
        whether the name was given up: to one that answers our epoch with the one after it, twice, and so is alive."""
        answers = other.epoch == self.record.epoch + 1  # several epochs of one earlier run are no answer
        times = self._namesakes.get(other.session, 0) + (answers and other.state <= State.SUSPECT)
        self._namesakes[other.session] = times
        if times >= OVERTAKEN_MAX or other.epoch >= EPOCH_MAX:
            self._rename()
            return True
        self._rise(other.epoch + 1, self.record.incarnation)
        return False

    @property
    def is_renamed(self) -> bool:
        return self.record.name != self._given_name

    @property
    def given_name(self) -> str:
        return self._given_name

    def is_namesake(self, session: int) -> bool:
        """Whether this session had our name for a while, of those that are remembered."""
        return session in self._namesakes

    def regain(self, above: int) -> None:
        """Take the given name again, above the epoch of whoever had it."""
        self._digits = 0
        self._rise(max(self.record.epoch, above + 1), self.record.incarnation + 1)
        self.record = self.record._replace(name=self._given_name)

    def _rename(self) -> None:
        """Take a new name, with more digits of the session each time, since another node may have just that name."""
        self._digits = min(16, self._digits + 4)
        tail = "-" + f"{self.record.session:016x}"[: self._digits]
        head = self._given_name.encode()[: NAME_BYTES_MAX - len(tail)].decode(errors="ignore")
        self._rise(self.record.epoch, self.record.incarnation + 1)
        self.record = self.record._replace(name=head + tail)

    def _rise(self, epoch: int, incarnation: int) -> None:
        if incarnation > INCARNATION_MAX:
            epoch, incarnation = epoch + 1, 0
        if epoch > EPOCH_MAX:  # there is no higher epoch: raise what is left to raise
            epoch, incarnation = EPOCH_MAX, min(self.record.incarnation + 1, INCARNATION_MAX)
        elif self.record.incarnation == INCARNATION_MAX and epoch > self.record.epoch:
            incarnation = 0
        self.record = self.record._replace(epoch=epoch, incarnation=incarnation)

"""The checkpoints of one backend that a router knows of: positions by prefix, bounded. Pure.

Rule: a checkpoint is stored under the shallowest key at or behind its block: every prompt with that key shares it.
Where a prompt has no such key, under the deepest key before it, as one `beyond`. Those by rule or by count are
believed for `ttl_s` after their last evidence, and only until more than `kept_max` others were used since, because
engines give states up without a message; those that events brought stay until events take them. A new generation
begins with none.
Bounds: `names_max` names of keys, the one written longest ago makes room; POSITIONS_MAX positions each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.capacity import StackClock
from ranvier_py.core.routing.checkpoints.cache_profile import CheckpointKind

CHECKPOINT_TTL_S = 600.0
"""Shorter than a route's: states are few, and engines give them up without a message (SGLang #23678)."""

NAMES_MAX = 131_072
"""Names of one backend: what thousands of chats leave within CHECKPOINT_TTL_S, or the keys around some thousand states
by events; 40 MB at most."""

POSITIONS_MAX = 4
"""Between one key and the next there are 256 tokens at most: four states of the finest grid on which any are kept."""

POSITION_MAX = 2**32 - 1
"""The limit of a position on the wire."""

# A mark is one byte, as it travels between nodes. Bit 0: keys and values are there; bit 1: the checkpoint is, too;
# bit 2: the engine itself said so; bits 3 to 5: its `CheckpointKind`.
KV, STATE, CONFIRMED = 1, 2, 4
KIND_SHIFT = 3
MARK_BITS = 63

NO_KEY: PrefixKey = (0, 0, 0)


class Checkpoint(NamedTuple):
    """A position in tokens, its mark, and the second of its latest evidence."""

    position: int
    mark: int
    at: int

    @property
    def kind(self) -> CheckpointKind:
        return CheckpointKind(self.mark >> KIND_SHIFT & 7)


class KeptCheckpoint(NamedTuple):
    """A checkpoint, and the key that it is stored under. `is_new`: peers may not know of it."""

    key: PrefixKey
    checkpoint: Checkpoint
    is_new: bool


def mark_of(kind: CheckpointKind) -> int:
    """Return the mark of an existing checkpoint of this kind."""
    return KV | STATE | kind << KIND_SHIFT | (CONFIRMED if kind >= CheckpointKind.ANSWERED else 0)


@dataclass(slots=True)
class CheckpointCounters:
    names: int = gauge("Prefixes under which checkpoints are known.")
    learned: int = counter("Checkpoints of hybrid models noted, or noted again.")
    unplaced: int = counter("Checkpoints that no known prefix leads to.")
    refuted: int = counter("Checkpoints forgotten because an answer was cached to less.")
    lost: int = counter("Checkpoints that events, or peers, took back.")
    dropped: int = counter("Checkpoints forgotten for want of room.")


class CheckpointIndex:
    """Stores the checkpoints of one backend, see the module. `now` is monotonic seconds."""

    def __init__(self, block_tokens: int, *, ttl_s: float = CHECKPOINT_TTL_S, names_max: int = NAMES_MAX) -> None:
        self.counters = CheckpointCounters()
        self.ttl_s = ttl_s
        self.uses = StackClock()  # of checkpoints, counted under each of their names, instead of tokens
        self.kept_max = inf  # uses after which the engine has given a checkpoint up
        self._block_tokens = block_tokens
        self._names_max = names_max
        self._to_renew: list[int] = []
        self._known: OrderedDict[int, tuple[Checkpoint, ...]] = OrderedDict()  # by fingerprint, the last written last

    def __len__(self) -> int:
        """How many names have checkpoints."""
        return len(self._known)

    def latest(self, most: int) -> Iterator[tuple[int, Checkpoint]]:
        """Yield (name, checkpoint) of the `most` names that were written last, these last. Names may come and go
        meanwhile."""
        for name in reversed(list(islice(reversed(self._known), most))):
            yield from ((name, each) for each in self._known.get(name, ()))

    def clear(self) -> None:
        self._known.clear()
        self.uses = StackClock()
        self.counters.names = 0

    # --- what a prompt can go on from --------------------------------------------------------------------------------

    def deepest(
        self,
        keys: Iterable[PrefixKey],
        held: int,
        limit: int,
        now: float,
        *,
        by_events: bool = False,
        given_up: bool = False,
        promised: Callable[[int], bool] = lambda _: False,
    ) -> Checkpoint | None:
        """Return the deepest checkpoint on this path under the keys of its first `held` tokens, not behind `limit`.

        Args:
            keys: the prompt, deepest first; read no further than needed.
            by_events: only checkpoints that events brought count.
            given_up: those count, too, that are thought to be given up because many others were used since.
            promised: for one AHEAD: whether this prompt is believed to have left a checkpoint at its position.
        """
        known, oldest = self._known, now - self.ttl_s
        if self.kept_max < inf and not given_up:
            oldest = max(oldest, self.uses.second_before(self.kept_max))
        # a prompt whose next key is at or before the checkpoint does not share it
        reach = limit + 1  # a checkpoint beyond the top key must lie before the prompt's next key
        is_top = True
        for tokens, token, text in keys:
            if tokens > held:
                reach = min(reach, tokens)
                continue
            found = known.get(token) or known.get(text)
            if found is not None:
                end = reach - 1 if is_top else tokens + self._block_tokens - 1
                for checkpoint in reversed(found):
                    kind = checkpoint.kind
                    # events bring no prefix behind a prompt's last whole block: it is credited only to prompts that
                    # left one just there
                    if kind is CheckpointKind.AHEAD:
                        if checkpoint.position <= limit and promised(checkpoint.position):
                            return checkpoint
                        continue
                    if checkpoint.position > min(limit, end):
                        continue
                    if kind is CheckpointKind.EVENT or (checkpoint.at > oldest and not by_events):
                        return checkpoint
            is_top = False
        return None

    def has(self, keys: Sequence[PrefixKey], position: int, now: float) -> bool:
        """Whether this path is believed to have a checkpoint at exactly this position, as `learn` noted it."""
        block = max(1, position // self._block_tokens * self._block_tokens)
        key = next((key for key in reversed(keys) if key[0] >= block), NO_KEY)
        found = self._known.get(key[1]) or self._known.get(key[2]) or ()
        return any(each.position == position and each.at > now - self.ttl_s for each in found)

    # --- learning ----------------------------------------------------------------------------------------------------

    def learn(self, keys: Iterable[PrefixKey], marks: Sequence[tuple[int, int]], now: float) -> list[KeptCheckpoint]:
        """Note checkpoints of one path: (position, mark), the deepest first. Returns those stored, with their keys."""
        waiting, size = list(reversed(marks)), self._block_tokens
        placed: list[KeptCheckpoint] = []
        behind: PrefixKey | None = None
        for key in chain(keys, (NO_KEY,)):
            while waiting and key[0] < max(1, waiting[-1][0] // size * size):
                position, mark = waiting.pop()
                if behind is None:
                    self.counters.unplaced += 1
                    continue
                checkpoint = Checkpoint(position, mark, int(now))
                placed.append(KeptCheckpoint(behind, checkpoint, self.put(behind, checkpoint)))
            if not waiting:
                break
            behind = key
        return placed

    def beyond(
        self, keys: Iterable[PrefixKey], held: int, position: int, mark: int, now: float
    ) -> list[KeptCheckpoint]:
        """Note a checkpoint beyond the deepest key that was held, for other prompts that have this key."""
        key = next((key for key in keys if key[0] <= held), NO_KEY)
        if not 0 < key[0] < position // self._block_tokens * self._block_tokens:
            return []
        checkpoint = Checkpoint(position, mark, int(now))
        return [KeptCheckpoint(key, checkpoint, self.put(key, checkpoint))]

    def put(self, key: PrefixKey, checkpoint: Checkpoint) -> bool:
        """Note a checkpoint under both names of a key. Returns whether it may be new to peers."""
        return sum([self.note(name, checkpoint) for name in key[1:] if name]) > 0

    def note(self, name: int, checkpoint: Checkpoint) -> bool:
        """Note a checkpoint under one name. For a known position the greater mark and the later evidence count. Returns
        whether the position or mark is new, or its life grew by more than a quarter of `ttl_s`."""
        known = self._known
        if checkpoint.position > POSITION_MAX:
            self.counters.unplaced += 1
            return False
        before = known.pop(name, ())
        old = next((each for each in before if each.position == checkpoint.position), None)
        if old is not None:
            checkpoint = Checkpoint(old.position, max(old.mark, checkpoint.mark), max(old.at, checkpoint.at))
            self.uses.take(1.0, old.at)
        self.uses.add(1.0, checkpoint.at)
        others = [each for each in before if each.position != checkpoint.position]
        kept = sorted([*others, checkpoint])
        if len(kept) > POSITIONS_MAX:
            self.counters.dropped += 1
            kept.remove(next((each for each in kept if each.kind is CheckpointKind.AHEAD), kept[0]))
        known[name] = tuple(kept)
        self.counters.learned += 1
        if len(known) > self._names_max:
            self.counters.dropped += len(known.popitem(last=False)[1])
        self.counters.names = len(known)
        return old is None or checkpoint.mark != old.mark or checkpoint.at - old.at > self.ttl_s / 4

    # --- forgetting --------------------------------------------------------------------------------------------------

    def refute(self, keys: Iterable[PrefixKey], above: int, to: int) -> list[KeptCheckpoint]:
        """Forget the checkpoints of this path behind `above` tokens, up to `to`: an answer was cached to no more.
        Returns them. Those that events brought stay, since events take them themselves."""
        gone: list[KeptCheckpoint] = []
        for key in keys:
            found = self._known.get(key[1]) or self._known.get(key[2]) or ()
            wrong = [each for each in found if above < each.position <= to and each.kind is not CheckpointKind.EVENT]
            gone += [KeptCheckpoint(key, each, is_new=True) for each in wrong]
        for key, checkpoint, _ in gone:
            for name in key[1:]:
                self._forget(name, checkpoint.position)
        self.counters.refuted += len(gone)
        return gone

    def lose(self, name: int, position: int, at: float, *, ahead: bool = False) -> bool:
        """Forget a checkpoint that went at `at`, with `ahead` only one AHEAD. False: none known, or later evidence."""
        known = self._known.get(name, ())
        gone = [each for each in known if each.position == position and each.at <= at]
        found = any(not ahead or each.kind is CheckpointKind.AHEAD for each in gone) and self._forget(name, position)
        self.counters.lost += found
        return found

    def renew_events(self, now: float, names_max: int) -> Iterator[tuple[int, Checkpoint]]:
        """Renew what events brought and have not taken: of the next `names_max` names, checkpoints with evidence older
        than half the time to live. Yields them, for peers. Called each second it comes round in time."""
        if not self._to_renew:
            self._to_renew = list(self._known)
        turn, self._to_renew = self._to_renew[-names_max:], self._to_renew[:-names_max]
        for name in turn:
            found = self._known.get(name, ())
            old = [each for each in found if each.kind is CheckpointKind.EVENT and now - each.at > self.ttl_s / 2]
            if old:
                self._known[name] = tuple([each._replace(at=int(now)) if each in old else each for each in found])
                yield from ((name, each._replace(at=int(now))) for each in old)

    def doubt_events(self, now: float) -> None:
        """Believe what events brought for `ttl_s` only, as what an answer proved; forget those AHEAD. O(all)."""
        mark = mark_of(CheckpointKind.ANSWERED)
        for name, found in self._known.items():
            self._known[name] = tuple(
                [
                    Checkpoint(each.position, mark, int(now)) if each.kind is CheckpointKind.EVENT else each
                    for each in found
                    if each.kind is not CheckpointKind.AHEAD
                ]
            )

    def _forget(self, name: int, position: int) -> bool:
        before = self._known.get(name)
        if before is None:
            return False
        left = tuple([each for each in before if each.position != position])
        for each in before:
            if each.position == position:
                self.uses.take(1.0, each.at)
        if left:
            self._known[name] = left
        else:
            del self._known[name]
        self.counters.names = len(self._known)
        return len(left) < len(before)

"""Tracks where one engine keeps recurrent states, by the events of their groups: positions under our fingerprints.

Rule: a state is named by the attention block at whose end it lies, whatever tokens the event spans (vLLM #44451). A
position counts only if all groups of states have one there, in the GPU. It is listed under the prefix at its own end
and every prefix behind it, in every branch, up to an anchor, since prompts look for states at anchors and at the ends
of messages; where prompts branch before that, also back to the anchor before. At an anchor in its own block it is
`ahead`. A state waits until its block has a fingerprint, and outlives its block until it is removed itself.
Bound: STATES_MAX names of blocks; further states are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ranvier_py.core.engine_cache.blocks import Block, KnownBlock
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, EngineHash, Tier
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.fingerprint import is_anchor

STATE_KINDS = frozenset(("mamba",))
"""Kinds of cache group that keep recurrent states (vLLM's name for Mamba, short convolutions, linear attention)."""

STATES_MAX = 1 << 17
"""More than fit beside any model: one state has megabytes."""

NAMES_MAX = 4096
"""Prefixes under which one state is listed, and blocks behind it that are looked at: some hundred branches. Later
branches find it at its own end only."""

READY = KnownBlock.READY


class StateMoved(NamedTuple):
    """A prompt that continues this prefix can, or can no longer, start from a state at `position`."""

    fingerprint: Fingerprint
    position: int
    present: bool
    ahead: bool = False  # if the prompt goes on as that state's own prompt does, which is not known here


Place = tuple[Fingerprint, bool]
"""A prefix, and whether the state lies ahead of it."""


@dataclass(slots=True)
class StateCounters:
    stored: int = counter("Recurrent states that an engine reported as kept.")
    removed: int = counter("Recurrent states that an engine reported as gone.")
    refused: int = counter("Recurrent states for which there was no room.")


@dataclass(slots=True)
class _Listed:
    """A state that is listed: its position, and the places that list it."""

    position: int
    places: dict[Place, None] = field(default_factory=dict)
    is_behind: bool = False  # it is listed back to the anchor before it


class StateGroups:
    """Recurrent states by the names of their blocks."""

    def __init__(self, block_of: Callable[[EngineHash], Block | None], counters: StateCounters, size: int) -> None:
        self._block_of = block_of
        self._counters = counters
        self._size = size  # tokens of one of our blocks
        self._groups: dict[int, int] = {}  # group -> its bit
        self._kept: dict[EngineHash, int] = {}  # bits of the groups that have a state there
        self._placed: dict[EngineHash, _Listed] = {}
        self._known: dict[tuple[Place, int], int] = {}  # states per entry: branches may have equally deep ones
        self._waiting: dict[EngineHash, None] = {}  # for `drain` to look at
        self._changes: list[StateMoved] = []

    def store(self, event: BlocksStored) -> None:
        bit = self._groups.get(event.group)
        if bit is None:
            bit = self._groups[event.group] = 1 << len(self._groups)
            self._waiting.update(dict.fromkeys(self._kept))
        if event.tier is not Tier.GPU:
            return
        for key in event.hashes:
            if key not in self._kept and len(self._kept) >= STATES_MAX:
                self._counters.refused += 1
                continue
            self._kept[key] = self._kept.get(key, 0) | bit
            self._waiting[key] = None

    def clear(self) -> None:
        """Note that no state is kept any more."""
        self._waiting.update(dict.fromkeys(self._kept))
        self._kept.clear()

    def remove(self, event: BlocksRemoved) -> bool:
        """Note that states are gone. False: this event is about no group of states."""
        bit = self._groups.get(event.group)
        if bit is None or event.tier is not Tier.GPU:
            return bit is not None
        for key in event.hashes:
            left = self._kept.get(key, 0) & ~bit
            if left:
                self._kept[key] = left
            else:
                self._kept.pop(key, None)
            self._waiting[key] = None
        return True

    def resolved(self, chain: Iterable[Block]) -> None:
        """Note blocks that have fingerprints now: they may be a state's own, or continue from states above them."""
        for block in chain:
            self._waiting.update({block.key: None} if block.key in self._kept else {})
            for above, part in self._states_above(block):
                state = self._placed[above.key]
                self._note(state, self._ahead(block, state.position))
                if part:
                    self._note_behind(state, above)

    def drain(self) -> tuple[StateMoved, ...]:
        """Return what changed since the last call."""
        waiting, self._waiting = self._waiting, {}
        everywhere = (1 << len(self._groups)) - 1
        for key in waiting:
            is_kept, is_placed = self._kept.get(key, 0) == everywhere, key in self._placed
            if is_kept and not is_placed:
                self._place(key)
            elif is_placed and not is_kept:
                state = self._placed.pop(key)
                self._counters.removed += 1
                for place in state.places:
                    self._forget(place, state.position)
        changes, self._changes = tuple(self._changes), []
        return changes

    def all(self) -> Iterator[StateMoved]:
        """All states that are there, as of the last `drain`."""
        return (StateMoved(name, at, present=True, ahead=ahead) for (name, ahead), at in self._known)

    def _place(self, key: EngineHash) -> None:
        block = self._block_of(key)
        if block is None or block.known is not READY or block.state is None:
            if block is None or block.known is not KnownBlock.OPAQUE:
                self._waiting[key] = None
            return
        state = self._placed[key] = _Listed(block.state.tokens)
        self._counters.stored += 1
        behind, part = self._behind(block), has_several(block)
        self._note(state, behind[:1])
        within = behind[1 : len(block.prints)]
        self._note(state, [each for each in within[-1:] if is_anchor(each[1] // self._size)], ahead=True)
        below = list(islice(block.children(), NAMES_MAX))
        for left in range(NAMES_MAX, 0, -1):
            if not below:
                break
            child = below.pop()
            if child.known is READY:
                ahead = self._ahead(child, state.position)
                self._note(state, ahead)
                if not (ahead and is_anchor(ahead[-1][1] // self._size)):
                    part = part or has_several(child)
                    below += islice(child.children(), left)
        if part:
            self._note_behind(state, block)

    def _note_behind(self, state: _Listed, block: Block) -> None:
        if not state.is_behind:
            state.is_behind = True
            self._note(state, self._behind(block))

    def _note(self, state: _Listed, found: Sequence[tuple[Fingerprint, int]], *, ahead: bool = False) -> None:
        places, position = state.places, state.position
        for name, _ in found:
            place = (name, ahead)
            if place not in places and len(places) < NAMES_MAX:
                places[place] = None
                before = self._known.get((place, position), 0)
                self._known[place, position] = before + 1
                if not before:
                    self._changes.append(StateMoved(name, position, present=True, ahead=ahead))

    def _forget(self, place: Place, position: int) -> None:
        left = self._known.pop((place, position)) - 1
        if left:
            self._known[place, position] = left
        else:
            self._changes.append(StateMoved(place[0], position, present=False, ahead=place[1]))

    def _behind(self, block: Block) -> list[tuple[Fingerprint, int]]:
        """Return the prefixes from the end of this block back to the first at an anchor, the deepest first."""
        found: list[tuple[Fingerprint, int]] = []
        at: Block | None = block
        while at is not None and at.prints is not None:
            for name, tokens in reversed(at.prints):
                found.append((name, tokens))
                if is_anchor(tokens // self._size):
                    return found
            at = at.parent
        return found

    def _ahead(self, block: Block, position: int) -> list[tuple[Fingerprint, int]]:
        """Return the prefixes that end in this block at or after `position`, up to the first at an anchor."""
        found: list[tuple[Fingerprint, int]] = []
        for name, tokens in block.prints:
            if tokens >= position:
                found.append((name, tokens))
                if is_anchor(tokens // self._size):
                    break
        return found

    def _states_above(self, block: Block) -> Iterator[tuple[Block, bool]]:
        """Yield each block with a state before this one, up to the nearest with an anchor, and whether prompts branch
        between them and this one."""
        above, part = block.parent, False
        while above is not None and above.state is not None:
            part = part or has_several(above)
            if above.key in self._placed:
                yield above, part
            if any(is_anchor(tokens // self._size) for _, tokens in above.prints):
                return
            above = above.parent


def has_several(block: Block) -> bool:
    """Whether prompts continue this block in several branches."""
    return block.child is not None and block.child.after is not None

"""Where one engine keeps recurrent states, by the events of their groups: positions under our fingerprints.

An engine names a state as the block of attention at whose end it lies, so it is found in the tree of those: its parent
chain has the depth, whatever tokens the event spans (vLLM #44451 lists blocks that were kept and tokens of those that
were not, too). A model has several groups of states; one is there where all of them have it.

A prompt asks at anchors and at ends of its messages. So a state is known at its own end and under every prefix behind
it, in every branch, up to an anchor; and where prompts part before that, also back to the anchor before it, for the
next one that parts there: the end of a single prompt is no place that others pass. At an anchor in its own block it is
known as one `ahead`, too: whoever holds that anchor holds the block, and behind it events tell no more of its prompt.
Rules: a state whose block is not known, or has no fingerprint, waits for it. What a removed block leaves goes with its
own removal. Bounds: STATES_MAX names of blocks; beyond, a state is not noted, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranvier_py.core.engine_cache.blocks import Block, KnownBlock
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, EngineHash
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.fingerprint import is_anchor

STATE_KINDS = frozenset(("mamba",))
"""Kinds of cache group that keep recurrent states (vLLM's names: Mamba, short convolutions and linear attention)."""

STATES_MAX = 1 << 17
"""More than fit beside any model: a state weighs megabytes."""

NAMES_MAX = 4096
"""Of one state: some hundred branches. Those that come later ask at its own end."""

READY = KnownBlock.READY


class StateMoved(NamedTuple):
    """A prompt that goes on from this prefix can, or can no more, begin at `position`."""

    fingerprint: Fingerprint
    position: int
    present: bool
    ahead: bool = False  # if it goes on from here as that state's own prompt does, which is not known here


Place = tuple[Fingerprint, bool]
"""A prefix, and whether the state lies ahead of it."""


@dataclass(slots=True)
class StateCounters:
    stored: int = counter("Recurrent states that an engine reported as kept.")
    removed: int = counter("Recurrent states that an engine reported as gone.")
    refused: int = counter("Recurrent states for which there was no room.")


class StateGroups:
    """States by the names of their blocks."""

    def __init__(self, block_of: Callable[[EngineHash], Block | None], counters: StateCounters, size: int) -> None:
        self._block_of = block_of
        self._counters = counters
        self._size = size  # tokens of a block of ours
        self._groups: dict[int, int] = {}  # group -> its bit
        self._kept: dict[EngineHash, int] = {}  # which groups have it
        self._placed: dict[EngineHash, tuple[int, dict[Place, None]]] = {}  # position, and where it is known
        self._known: dict[tuple[Place, int], int] = {}  # states in several branches may lie equally deep
        self._waiting: dict[EngineHash, None] = {}  # to be looked at
        self._changes: list[StateMoved] = []

    def store(self, event: BlocksStored) -> None:
        bit = self._groups.get(event.group)
        if bit is None:
            bit = self._groups[event.group] = 1 << len(self._groups)
            self._waiting.update(dict.fromkeys(self._kept))
        for key in event.hashes:
            if key not in self._kept and len(self._kept) >= STATES_MAX:
                self._counters.refused += 1
                continue
            self._kept[key] = self._kept.get(key, 0) | bit
            self._waiting[key] = None

    def remove(self, event: BlocksRemoved) -> bool:
        """False: these are no states."""
        bit = self._groups.get(event.group)
        if bit is None:
            return False
        for key in event.hashes:
            left = self._kept.get(key, 0) & ~bit
            if left:
                self._kept[key] = left
            else:
                self._kept.pop(key, None)
            self._waiting[key] = None
        return True

    def resolved(self, chain: Iterable[Block]) -> None:
        """These blocks have fingerprints now. They may go on from a state."""
        for block in chain:
            self._waiting.update({block.key: None} if block.key in self._kept else {})
            for above, part in self._states_above(block):
                position, names = self._placed[above.key]
                self._note(position, names, self._ahead(block, position))
                if part:
                    self._note(position, names, self._behind(above))

    def drain(self) -> tuple[StateMoved, ...]:
        """What changed since the last call."""
        waiting, self._waiting = self._waiting, {}
        everywhere = (1 << len(self._groups)) - 1
        for key in waiting:
            is_kept, is_placed = self._kept.get(key, 0) == everywhere, key in self._placed
            if is_kept and not is_placed:
                self._place(key)
            elif is_placed and not is_kept:
                position, names = self._placed.pop(key)
                self._counters.removed += 1
                for name in names:
                    self._forget(name, position)
        changes, self._changes = tuple(self._changes), []
        return changes

    def all(self) -> Iterator[StateMoved]:
        """All that are there, as of the last `drain`."""
        return (StateMoved(name, at, present=True, ahead=ahead) for (name, ahead), at in self._known)

    def _place(self, key: EngineHash) -> None:
        block = self._block_of(key)
        if block is None or block.known is not READY or block.state is None:
            if block is None or block.known is not KnownBlock.OPAQUE:
                self._waiting[key] = None
            return
        position, names = block.state.tokens, dict[Place, None]()
        self._placed[key] = position, names
        self._counters.stored += 1
        behind, part = self._behind(block), has_several(block)
        self._note(position, names, behind[:1])
        within = behind[1 : len(block.prints)]
        self._note(position, names, [each for each in within[-1:] if is_anchor(each[1] // self._size)], ahead=True)
        below = list(block.children())
        while below:
            child = below.pop()
            if child.known is READY:
                ahead = self._ahead(child, position)
                self._note(position, names, ahead)
                if not (ahead and is_anchor(ahead[-1][1] // self._size)):
                    part = part or has_several(child)
                    below += child.children()
        if part:
            self._note(position, names, behind)

    def _note(
        self,
        position: int,
        names: dict[Place, None],
        found: Sequence[tuple[Fingerprint, int]],
        *,
        ahead: bool = False,
    ) -> None:
        for name, _ in found:
            place = (name, ahead)
            if place not in names and len(names) < NAMES_MAX:
                names[place] = None
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
        """Prefixes up to the end of this block, the deepest first, down to one at an anchor."""
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
        """Prefixes that end in this block, behind `position`, up to one at an anchor."""
        found: list[tuple[Fingerprint, int]] = []
        for name, tokens in block.prints:
            if tokens >= position:
                found.append((name, tokens))
                if is_anchor(tokens // self._size):
                    break
        return found

    def _states_above(self, block: Block) -> Iterator[tuple[Block, bool]]:
        """Blocks before this one, with a state, from which nobody asks at an anchor first; and whether prompts part
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
    """Whether prompts go on from it differently."""
    return block.child is not None and block.child.after is not None

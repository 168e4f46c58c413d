"""What an engine holds whose blocks are called by our fingerprints already: the modelled engines of a replay.

A trace names each prefix once, for routers and engines alike, so nothing has to be decoded or hashed: stores and
removals become Changes for EngineCaches at once. The rest is as in a Residency: a name stored twice is held until it
was removed twice, and a prefix is held while all before it are.

Bound: what the engine holds, and the ancestors of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import UNKNOWN, Fingerprint
from ranvier_py.core.prompts.fingerprint import is_anchor


class _Named:
    """One block."""

    __slots__ = ("above", "anchor", "below", "copies", "depth", "held")

    def __init__(self, above: int, depth: int, anchor: int) -> None:
        self.above = above
        self.depth = depth  # in blocks
        self.anchor = anchor  # the nearest one above it, 0 for none
        self.below: dict[int, None] = {}
        self.copies = 0
        self.held = False  # with all that is above it


class NamedBlocks:
    """A Held. Hand in what the engine did; `changes` is what that comes to, for EngineCaches."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int, _Named] = {}
        self._before: dict[int, tuple[_Named, bool]] = {}  # as it was at the last call of `changes`
        self._cleared = False

    def stored(self, names: Sequence[int], parent: int = 0) -> None:
        """Consecutive blocks can be found from now on. `parent` is the name before them, 0 at the start of a prompt.

        What continues a block that was never told of is left out: nobody could find it.
        """
        if parent and parent not in self._blocks:
            return
        for name in names:
            block = self._blocks.get(name) or self._add(name, parent)
            block.copies += 1
            above = self._blocks.get(block.above)
            if above is None or above.held:
                self._spread(name, block, held=True)
            parent = name

    def removed(self, name: int) -> None:
        """One copy is gone."""
        block = self._blocks.get(name)
        if block is None or not block.copies:
            return
        block.copies -= 1
        if not block.copies:
            self._spread(name, block, held=False)
            self._release(name)

    def cleared(self) -> None:
        """The engine holds nothing."""
        self._blocks.clear()
        self._before.clear()
        self._cleared = True

    def changes(self) -> Changes:
        """What changed since the last call."""
        cleared, self._cleared = self._cleared, False
        before, self._before = self._before, {}
        found = [
            self._change(name, block, tier)
            for name, (block, was) in before.items()
            if ((tier := self.tier(Fingerprint(name))) is Tier.GPU) is not was
        ]
        return Changes(cleared, tuple(found), complete=True)

    def tier(self, fingerprint: Fingerprint) -> Tier:
        block = self._blocks.get(fingerprint)
        return Tier.GPU if block is not None and block.held else Tier.ABSENT

    # Inside

    def _add(self, name: int, parent: int) -> _Named:
        above = self._blocks.get(parent)
        depth = above.depth + 1 if above is not None else 1
        anchor = 0
        if above is not None:
            above.below[name] = None
            anchor = parent if is_anchor(above.depth) else above.anchor
        block = self._blocks[name] = _Named(parent, depth, anchor)
        return block

    def _spread(self, name: int, block: _Named, *, held: bool) -> None:
        """This block is held now, or not, and so are those below it that have copies."""
        todo = [(name, block)]
        while todo:
            name, block = todo.pop()
            if block.held is held or (held and not block.copies):
                continue
            self._before.setdefault(name, (block, block.held))
            block.held = held
            todo.extend((child, self._blocks[child]) for child in block.below)

    def _release(self, name: int) -> None:
        """Forget a block without copies and followers, and those above it that were kept for its sake alone."""
        while (block := self._blocks.get(name)) is not None and not block.copies and not block.below:
            del self._blocks[name]
            above = self._blocks.get(block.above)
            if above is not None:
                del above.below[name]
            name = block.above

    def _change(self, name: int, block: _Named, tier: Tier) -> Change:
        """`block` may have been forgotten, and come anew."""
        anchor = Fingerprint(block.anchor) if block.anchor else UNKNOWN
        return Change(Fingerprint(name), block.depth * self._block_tokens, tier, anchor)

"""Keeps what one engine (or one data-parallel rank) holds by its own events: its block names -> our fingerprints.

Rule: token ids in events are hashed as those of prompts are; names of blocks are compared, never computed. A prefix is
held if every block that it reaches into is held, at the farthest of their tiers. A name is gone when removed as often
as stored. Blocks of more than tokens, and what continues them, have no fingerprint. Of several cache groups the first
dense one counts; with others than recurrent states it is `mixed`: what is held may be of no use.
Invariant: settled changes sum to a walk over all blocks (test_residency_properties.py, test_vllm_oracle.py).
Bounds: `entries_max` blocks and fingerprints (`_make_room`), `orphaned_max` unresolved ones; all drops are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ranvier_py.core.engine_cache.blocks import (
    COPIES_BITS,
    COPIES_MASK,
    TOKEN_BYTES,
    Block,
    BlockIndex,
    KnownBlock,
    Print,
    chain_of,
    hash_chains,
)
from ranvier_py.core.engine_cache.prefixes import HeldPrefixes
from ranvier_py.core.engine_cache.residency_values import (
    Changes,
    Lack,
    RepeatedRuns,
    ResidencyCounters,
    ResidencyView,
    Roots,
    Scope,
    SnapshotState,
    salt_and_media,
    unplaced_in,
)
from ranvier_py.core.engine_cache.sources.event_values import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Event,
    Tier,
    TierCleared,
)
from ranvier_py.core.engine_cache.states import STATE_KINDS, StateCounters, StateGroups, StateMoved
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher, is_anchor

DENSE_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of cache group that keep every token of a prefix (vLLM's names)."""

SETTLE_STEPS_MAX = 20_000
"""Blocks that one call of `settle` looks at."""

FRESH_MAX = 4096
"""Stored blocks that are hashed together: one call for a few blocks costs as much as one for hundreds."""

ROOM_STEPS = 4
"""Blocks that one new block may cause to be forgotten: those that others continue free no room yet."""

NAME, READY, OPAQUE = KnownBlock.NAME, KnownBlock.READY, KnownBlock.OPAQUE
GPU, ABSENT = Tier.GPU, Tier.ABSENT

Waiting = BlocksStored | BlocksRemoved | TierCleared
"""Events that wait while a snapshot is written, and then for their turn. Emptying a tier takes a walk over all blocks:
it always waits for a turn, with all that follows, and of several about one tier only the last is carried out."""

WAITING_MAX, WAITING_BYTES_MAX = 50_000, 32 << 20
"""Events that wait, and their bytes: a busy engine's of some seconds. Beyond that a snapshot is given up, and the
oldest waiting event is applied at once."""


class Residency:
    """The blocks of one engine. Call `apply` for each event, then `settle` for what changed."""

    def __init__(
        self,
        hasher: TokenHasher,
        namespace_of: Callable[[Scope], Fingerprint | None],
        *,
        entries_max: int = 2_000_000,
        orphaned_max: int = 100_000,
        repeats: bool = False,
    ) -> None:
        """`namespace_of` returns the fingerprint of the empty prefix; None if no prompt of ours can have this scope.
        `repeats`: the engine may report blocks that a request reuses as if it stored them, see `RepeatedRuns`.
        """
        self._hasher = hasher
        self._namespace_of = namespace_of
        self._entries_max = entries_max
        self._orphaned_max = orphaned_max
        self._repeats = repeats
        self._cleared, self._freezes = False, 0
        self.block_tokens = 0  # the engine's, by its last event; 0: no event came yet
        self.mixed = False  # it has cache groups of unknown kinds; clearing the cache does not reset this
        self.has_states = False  # some of its groups keep recurrent states; not reset either
        self.counters = ResidencyCounters()
        self.state_counters = StateCounters()
        self._start()

    def _start(self) -> None:
        self.frozen = 0  # number of the freeze that is in force; 0: none
        self._waiting: deque[Waiting] = deque()
        self._waiting_bytes = 0
        self._emptied: dict[Tier, TierCleared] = {}  # the last event about each tier
        self._adopt(BlockIndex())
        self._held = HeldPrefixes()
        self._roots = Roots(self._hasher, self._namespace_of)
        self._group: int | None = None  # the cache group that counts
        self._repeated = RepeatedRuns()
        self.lack = Lack.NOTHING
        self._fresh: list[Block] = []  # stored, not hashed yet
        self._unsettled: deque[Block] = deque()

    def _adopt(self, index: BlockIndex) -> None:
        self._index = index
        self._states = StateGroups(index.blocks.get, self.state_counters, self._hasher.block_tokens)

    def clear(self, *, singly: bool = False) -> None:
        """Drop everything: the engine was restarted, or reported that it holds nothing.

        Args:
            singly: other ranks hold some of the same prefixes: report each as gone by itself, instead of `cleared`.
        """
        before = self._held
        self._start()
        self.counters.cleared += 1
        if singly and not self._cleared:
            self._held.replaces(before)
        else:
            self._cleared = True

    def apply(self, event: Event) -> None:
        kind = type(event)
        if kind is CacheCleared:
            self.clear()
        elif self.frozen or self._waiting or kind is TierCleared:
            self._wait(event)  # type: ignore[arg-type]  # mypy does not follow `kind`
        elif kind is BlocksStored:
            self._store(event)  # type: ignore[arg-type]
        else:
            self._remove(event)  # type: ignore[arg-type]

    def _apply(self, event: Waiting) -> None:
        kind = type(event)
        take = self._store if kind is BlocksStored else self._remove if kind is BlocksRemoved else self._empty
        take(event)  # type: ignore[arg-type]  # mypy does not follow `kind`

    def settle(self, steps_max: int = SETTLE_STEPS_MAX) -> Changes:
        """Return what changed since the last call, as far as `steps_max` blocks show. A frozen one does not change."""
        if not self.frozen:
            self._go_on(steps_max)
        cleared, self._cleared = self._cleared, False
        changes = self._held.drain(steps_max)
        left = not self.frozen and (self._unsettled or self._waiting)
        states = self._states.drain() if self.has_states else None
        return Changes(cleared, changes, not (left or self._held.undrained), states)

    # A snapshot for a peer, or from one

    def freeze(self) -> int:
        """Keep this state until `thaw`, and let applied events wait meanwhile. Returns the number of this freeze.

        When too much waits, or the cache is cleared, the freeze ends early; `frozen` then has another number.
        """
        self._resolve()
        self._freezes += 1
        self.frozen = self._freezes
        return self.frozen

    def thaw(self) -> None:
        """End the freeze. The next calls of `settle` apply the events that waited."""
        self.frozen = 0

    def parts(self) -> tuple[Block, Sequence[Block], int | None]:
        """Return, for `snapshot`, the root of blocks without a fingerprint, the other roots, the group that counts."""
        return self._roots.nameless, self._roots.all(), self._group

    def catch_up(self) -> None:
        """Apply the events that still wait since the last freeze, so that this state is as recent as its stream."""
        while self._waiting and not self.frozen:
            self._apply(self._first_waiting())

    def install(self, snapshot: SnapshotState) -> None:
        """Replace the state by that of a snapshot, which is used up. The next `settle` returns what changed."""
        before = self._held
        self._start()
        self._adopt(snapshot.index)
        self._held = snapshot.held
        self.mixed |= self.has_states  # no snapshot has states
        self._roots.adopt(snapshot.nameless, snapshot.roots)
        self._group, self.block_tokens = snapshot.group, snapshot.block_tokens
        if not self._cleared:
            self._held.replaces(before)
        self.counters.copied += len(snapshot.index.blocks)

    def _wait(self, event: Waiting) -> None:
        self._waiting.append(event)
        if isinstance(event, TierCleared):
            self._emptied[event.tier] = event
        self._waiting_bytes += len(event.token_bytes) if isinstance(event, BlocksStored) else 0
        while len(self._waiting) > WAITING_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self.thaw()
            self._apply(self._first_waiting())

    def _first_waiting(self) -> Waiting:
        event = self._waiting.popleft()
        self._waiting_bytes -= len(event.token_bytes) if isinstance(event, BlocksStored) else 0
        return event

    def _go_on(self, steps: int) -> None:
        while self._waiting and steps > 0:
            event = self._first_waiting()
            if not isinstance(event, TierCleared):
                steps -= len(event.hashes)
            elif self._emptied[event.tier] is event:
                steps -= len(self._index.blocks)
            self._apply(event)
        self._resolve()
        unsettled, settle_block = self._unsettled, self._settle_block
        while unsettled and steps > 0:
            settle_block(unsettled.popleft())
            steps -= 1

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        """Return those of these prefixes that are held, each with its tier, as of the last `settle`."""
        return self._held.held_among(fingerprints)

    def states(self) -> Iterator[StateMoved]:
        """Where recurrent states are, as of the last `settle`."""
        return self._states.all()

    def tiers(self) -> Mapping[Fingerprint, Tier]:
        """All prefixes that are held, with their tiers, as of the last `settle`. O(all)."""
        return self._held.tiers()

    def copies(self, tier: Tier) -> dict[EngineHash, int]:
        """How many copies of each block the engine holds at one tier: its block table as we know it. O(blocks)."""
        return {key: block.count(tier) for key, block in self._index.blocks.items() if block.count(tier)}

    def view(self) -> ResidencyView:
        index = self._index
        return ResidencyView(
            blocks=len(index.blocks),
            orphaned=len(index.orphaned),
            prefixes=len(self._held),
            entries=index.weight,
            block_tokens=self.block_tokens,
            unsettled=len(self._unsettled),
        )

    # Events

    def _store(self, event: BlocksStored) -> None:
        if not self._is_counted_group(event):
            self.counters.other_groups += 1
            return
        width, data, hashes = event.block_tokens * TOKEN_BYTES, event.token_bytes, event.hashes
        if data and (not width or len(data) != width * len(hashes)):
            self.counters.mismatched += 1
            data = b""
        if data:
            self.block_tokens = event.block_tokens
        salt, opaque_from = salt_and_media(event) if event.extra_keys or event.media else (event.salt, len(hashes))
        tier, weight = event.tier, self._weight_of(event.block_tokens)
        self._make_room(event, weight * len(hashes))
        parent = self._parent_of(event, salt)
        repeated, unplaced = event.reused, 0
        if event.parent is None:
            repeated = repeated or (self._repeats and self._repeated.has(event, self._index))
            unplaced = unplaced_in(event, salt, has_tokens=bool(data))
        index, blocks, fresh, counters = self._index, self._index.blocks, self._fresh, self.counters
        entries_max = self._entries_max
        for place, key in enumerate(hashes):
            own = data[place * width : (place + 1) * width] if place >= unplaced else b""
            block: Block | None
            is_new = own and key not in blocks and index.weight + weight <= entries_max
            if is_new and parent is not None and parent.known is not OPAQUE:
                block = index.born(key, parent, own, weight, tier)
                counters.stored += 1
                fresh.append(block)
            else:
                block = None if parent is None else self._place(key, parent if place >= unplaced else None)
                if block is not None:
                    self._store_again(block, tier, own, weight, repeated=repeated)
                else:
                    counters.refused += len(hashes) - place
                    self.lack = Lack.ROOM
                    break
            if place >= opaque_from:
                self._darken(block)
            parent = block
        if len(self._fresh) >= FRESH_MAX or self._index.orphaned_weight > self._orphaned_max:
            self._resolve()
        while self._index.orphaned_weight > self._orphaned_max:
            self.counters.dropped += self._index.drop(next(iter(self._index.orphaned.values())))
            self.lack = Lack.ROOM

    def _store_again(self, block: Block, tier: Tier, own: bytes, weight: int, *, repeated: bool) -> None:
        """Store a block that is known already, or can't have a fingerprint yet."""
        if repeated and block.count(tier):
            self.counters.repeated += 1
        else:
            self.counters.stored += 1
            self.counters.uncounted += not block.more(tier)
            self._index.moved(block)
        if block.known is READY:
            self._look(block)
        elif block.known is NAME and self._report(block, own, weight):
            self._fresh.append(block)
        elif block.known is NAME and not own and tier is GPU:
            self.lack = Lack.TOKENS  # copies at other tiers are of blocks stored with tokens

    def _is_counted_group(self, event: BlocksStored) -> bool:
        is_counted = self._is_first_dense_group(event)
        if event.kind in STATE_KINDS:
            self.has_states = True
            self._states.store(event)
        else:
            self.mixed |= not is_counted and event.tier is GPU  # offloading names no kind
        return is_counted

    def _is_first_dense_group(self, event: BlocksStored) -> bool:
        if event.kind is None:
            return event.group == (self._group or 0)
        if event.kind not in DENSE_KINDS:
            if self._group is None and self.lack is Lack.NOTHING:
                self.lack = Lack.GROUP
            return False
        if self._group is None:
            self._group = event.group
            if self.lack is Lack.GROUP:
                self.lack = Lack.NOTHING
        return event.group == self._group

    def _parent_of(self, event: BlocksStored, salt: str | None) -> Block | None:
        """Return the block that this run continues; None if there is no room for it."""
        if event.parent is not None:
            return self._index.blocks.get(event.parent) or self._add(event.parent)
        found = self._roots.find(Scope(event.lora_name, event.lora_id, salt))
        if found is None or found is self._roots.nameless:
            self.counters.roots_refused += found is None
            self.lack = Lack.NAMES
        return found or self._roots.nameless

    def _place(self, key: EngineHash, parent: Block | None) -> Block | None:
        """Return the block of that name, attached to `parent` unless that is None. None: there is no room for it."""
        block = self._index.blocks.get(key) or self._add(key)
        if block is None or parent is None:
            return block
        if block.parent is None:
            block.attach(parent)
        elif block.parent is not parent:
            self.counters.contradicted += 1
        return block

    def _make_room(self, event: BlocksStored, wanted: int) -> None:
        """Forget blocks held below the GPU alone, the oldest first, until `wanted` entries fit, at most ROOM_STEPS for
        each new block: some tiers never report removals."""
        index, steps = self._index, ROOM_STEPS * len(event.hashes)
        if event.parent is not None and event.parent in index.below:
            index.moved(index.blocks[event.parent])
        while steps and index.weight + wanted > self._entries_max and (block := index.oldest_below()) is not None:
            steps -= 1
            block.copies = 0
            self.counters.forgotten += 1
            if block.known is not READY:
                index.release(block)
            elif not block.queued:  # else `settle` looks at it anyway
                self._settle_block(block)

    def _add(self, key: EngineHash) -> Block | None:
        return self._index.add(key) if self._index.weight < self._entries_max else None

    def _weight_of(self, tokens: int) -> int:
        """The entries that a block of so many tokens counts for: itself, and the fingerprints in it."""
        return 1 - tokens // -self._hasher.block_tokens

    def _report(self, block: Block, data: bytes, weight: int) -> bool:
        """Give tokens to a block known by name only. False: its parent is OPAQUE, or tokens or room are lacking."""
        if block.parent is not None and block.parent.known is OPAQUE:
            self._darken(block)
            return False
        if not data or self._index.weight + weight - block.weight > self._entries_max:
            self.counters.refused += bool(data)
            self.lack = Lack.ROOM if data else self.lack
            return False
        block.token_bytes, block.known = data, KnownBlock.TOKENS
        self._index.weigh(block, weight)
        return True

    def _remove(self, event: BlocksRemoved) -> None:
        is_state = self.has_states and self._states.remove(event)
        if is_state or event.group != (self._group or 0):
            self.counters.other_groups += 1
            self.mixed |= not is_state and self._group is None and self.block_tokens > 0  # else stores name its kind
            return
        blocks, counters, shift = self._index.blocks, self.counters, COPIES_BITS * event.tier
        counted, one = COPIES_MASK << shift, 1 << shift
        for key in event.hashes:
            block = blocks.get(key)
            if block is None or not block.copies & counted:
                counters.removed_unknown += 1
                self._repeated.removed(key, event.tier)
                continue
            block.copies -= one
            self._index.moved(block)
            counters.removed += 1
            self._taken(block)

    def _empty(self, event: TierCleared) -> None:
        """Note that nothing is held at a tier any more, unless a later event will do so. O(all)."""
        if self._emptied[event.tier] is not event:
            return
        for block in self._index.emptied(event.tier):
            self.counters.removed += 1
            self._taken(block)
        if event.tier is GPU:
            self._states.clear()

    def _taken(self, block: Block) -> None:
        """Update a block that has lost copies."""
        if block.known is READY:
            self._look(block)
        elif not block.copies:
            self._index.release(block)

    # From tokens to fingerprints

    def _resolve(self) -> None:
        """Hash the fresh blocks whose parents are READY, and the orphaned blocks that waited below them."""
        fresh, self._fresh = self._fresh, []
        starts, resolved = fresh, 0
        while starts:
            branches: list[Block] = []
            chains = [chain_of(block, branches) for block in starts if block.is_next]
            hash_chains(self._hasher, chains)
            for chain in chains:
                resolved += len(chain)
                self._index.resolved(chain)
                if self.has_states:
                    self._states.resolved(chain)
                self._unsettled.extend(chain)
            starts = branches
        self.counters.resolved_late += resolved - sum([block.known is READY for block in fresh])

    def _darken(self, block: Block) -> None:
        """Make a block OPAQUE, with all blocks that waited below it: none of them will have a fingerprint."""
        below = [block]
        while below:
            each = below.pop()
            if each.known in (KnownBlock.NAME, KnownBlock.TOKENS):
                each.token_bytes = b""
                self._index.weigh(each, 1)
                self._index.settled(each, KnownBlock.OPAQUE)
                self.counters.opaque += 1
                below.extend(each.children())

    # From blocks to prefixes

    def _look(self, block: Block) -> None:
        """Queue a READY block for `settle`: it, or a block before it, may now be held otherwise."""
        if not block.queued:
            block.queued = True
            self._unsettled.append(block)

    def _settle_block(self, block: Block) -> None:
        block.queued = False
        parent = block.parent
        assert parent is not None
        copies, above, before = block.copies, parent.reach, block.reach
        nearest = block.nearest if copies and not copies & COPIES_MASK else None
        reach = (above if copies else ABSENT) if nearest is None else max(nearest, above)  # max(GPU, above) is above
        if reach is not before:
            prints = block.prints
            if len(prints) == 1:
                fingerprint, tokens = prints[0]
                self._held.move(fingerprint, tokens, parent.anchor, before, reach)
            else:
                self._move(prints, parent.anchor, before, reach)
            block.reach = reach
            child = block.child
            while child is not None:
                if child.known is READY and not child.queued:
                    self._look(child)
                child = child.after
        if not copies and block.child is None:
            self._index.release(block)

    def _move(self, prints: Sequence[Print], anchor: Fingerprint, before: Tier, reach: Tier) -> None:
        """Move all prefixes that end in a block that is larger than ours."""
        size = self._hasher.block_tokens
        for fingerprint, tokens in prints:
            self._held.move(fingerprint, tokens, anchor, before, reach)
            if is_anchor(tokens // size):
                anchor = fingerprint

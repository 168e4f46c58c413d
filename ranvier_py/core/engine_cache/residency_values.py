"""Values that a residency takes and returns: scopes, roots, changes, snapshots, counters, gauges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.engine_cache.blocks import Block, BlockIndex, root
from ranvier_py.core.engine_cache.prefixes import Change, HeldPrefixes
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored, EngineHash, Tier
from ranvier_py.core.engine_cache.states import StateMoved
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.fingerprint import TokenHasher

ROOTS_MAX = 4096
"""Adapters and salts under which something is held at a time; each takes some 500 bytes."""

ROOM_EACH = 64
"""New scopes from one walk over all roots to the next, which makes room: a walk takes as long as a hundred events."""

REPEATED_MAX = 4096
"""Names remembered as reused. If one of them was stored instead, its removal shows that, and it will be a late one."""


class Scope(NamedTuple):
    """The namespace of a prompt beside its model, as an engine names it."""

    lora_name: str | None
    lora_id: int | None
    salt: str | None


def salt_and_media(event: BlocksStored) -> tuple[str | None, int]:
    """Return the prompt's salt, if this event has the prompt's start, and the first place that hashes more than that.

    vLLM's extra keys of a block are: adapter, media, salt (first block of a prompt only), embeddings. A single string
    after the adapter is the salt; older versions wrote media as a bare string, too, which becomes a salt that no prompt
    has.
    """
    salt, opaque_from = event.salt, 0 if event.media else len(event.hashes)
    for place, keys in enumerate(event.extra_keys[:opaque_from]):
        left = keys[1:] if keys and event.lora_name is not None and keys[0] == event.lora_name else keys
        if not left:
            continue
        if place == 0 and event.parent is None and len(left) == 1 and isinstance(left[0], str):
            salt = left[0]
        else:
            return salt, place
    return salt, opaque_from


def unplaced_in(event: BlocksStored, salt: str | None, *, has_tokens: bool) -> int:
    """Return how many of the first blocks of an event without a parent come without the one that they continue.

    vLLM names blocks that it promotes from storage to the CPU one by one: without parent and tokens, or with them but
    without the salt of a prompt's start. Later stores in the GPU show where these blocks belong.
    """
    if not has_tokens:
        return len(event.hashes)
    return int(event.tier is not Tier.GPU and salt is None and not event.extra_keys)


class Roots:
    """The blocks without tokens from which the hashing of one engine's prompts starts, one for each adapter and salt.
    `nameless` is the root of all blocks that have no fingerprint.

    A snapshot brings roots by their sum alone, because no salt travels; a root's scope shows when an event stores
    there. Bound: ROOTS_MAX; roots without blocks make room. If none do, the new blocks have no fingerprint, and the
    caller counts them.
    """

    def __init__(self, hasher: TokenHasher, namespace_of: Callable[[Scope], Fingerprint | None]) -> None:
        self.nameless = root(None)
        self._hasher = hasher
        self._namespace_of = namespace_of
        self._named: dict[Scope, Block] = {}
        self._unclaimed: dict[int, Block] = {}  # roots of a snapshot, by the total of their state
        self._new = 0  # scopes that were new, since roots were last looked through for room

    def adopt(self, nameless: Block, unclaimed: dict[int, Block]) -> None:
        """Take the roots of a snapshot."""
        self.nameless, self._unclaimed = nameless, unclaimed

    def all(self) -> list[Block]:
        """All roots but the nameless one."""
        return [*self._named.values(), *self._unclaimed.values()]

    def find(self, scope: Scope) -> Block | None:
        """Return this scope's root: `nameless` if no request of ours can mean it; None if there is no room for it."""
        found = self._named.get(scope)
        if found is not None:
            return found
        self._new += 1
        if len(self._named) >= ROOTS_MAX:
            if self._new >= ROOM_EACH:
                self._new = 0
                self._named = {scope: block for scope, block in self._named.items() if block.child is not None}
            if len(self._named) >= ROOTS_MAX:
                return None
        namespace = self._namespace_of(scope)
        if namespace is None:
            return self.nameless
        state = self._hasher.start(namespace)
        self._named[scope] = found = self._unclaimed.pop(state.total, None) or root(state)
        return found


class RepeatedRuns:
    """Recognises stores of blocks that a request only reuses: vLLM reports these in the same form, from the prompt's
    start on, if the request asks for that (`kv_cache_report_mode`).

    vLLM looks its cache up before it computes, so it stores no second copy of a block that it has, except the only
    block of a short prompt. A request for its prompt's logprobs skips the look-up. A block that is removed more often
    than counted at the same tier shows this: from then on every store is a copy. Bound: REPEATED_MAX names; the oldest
    are dropped.
    """

    def __init__(self) -> None:
        self._reports = False  # the engine reports blocks that it reuses
        self._doubles = False  # it stores blocks that it has already
        self._latest: BoundedDict[EngineHash, Tier] = BoundedDict(REPEATED_MAX)

    def has(self, event: BlocksStored, index: BlockIndex) -> bool:
        """Whether this event, which has no parent, only reports blocks that were reused."""
        if self._doubles:
            return False
        first = index.blocks.get(event.hashes[0]) if event.hashes else None
        if first is None or not first.count(event.tier):
            return False
        self._reports |= len(event.hashes) > 1
        for key in event.hashes[1:] if self._reports else ():
            self._latest[key] = event.tier
        return self._reports

    def removed(self, key: EngineHash, tier: Tier) -> None:
        """Note that a block was removed of which no copy was known at this tier."""
        self._doubles |= self._latest.get(key) is tier


@dataclass(slots=True)
class SnapshotState:
    """What the engine holds by a peer's snapshot, built beside the current state until it is installed."""

    index: BlockIndex
    held: HeldPrefixes
    nameless: Block
    roots: dict[int, Block]  # by the total of their state; see `Roots`
    group: int | None = None
    block_tokens: int = 0


class Lack(Enum):
    """Why less is known than the engine reported; as a rule until its cache is cleared or a snapshot replaces it."""

    NOTHING = ""
    SCHEMA = "its events have names that we do not know"  # set by `EventStream`, not here
    GROUP = "none of its groups of caches keeps whole prefixes"
    MIXED = "a hybrid: its attention's blocks are of use only where its other caches have theirs"
    TOKENS = "it reports blocks without their tokens, or with others"
    NAMES = "adapters without a name, or too many salts at a time"
    ROOM = "it reports more blocks than there is room for"


class Changes(NamedTuple):
    """What became of the prefixes. `cleared`: everything reported before is void, and `changes` come after that.

    `complete`: nothing is left to look at; otherwise call `settle` again. `states`: changes of recurrent states; None
    if no event is about them.
    """

    cleared: bool
    changes: tuple[Change, ...]
    complete: bool
    states: tuple[StateMoved, ...] | None = None


@dataclass(slots=True)
class ResidencyCounters:
    stored: int = counter("KV cache blocks that an engine reported as stored.")
    repeated: int = counter("KV cache blocks reported again because a request reused them: no new copies.")
    removed: int = counter("KV cache blocks that an engine reported as removed.")
    cleared: int = counter("Times that an engine reported its cache as cleared.")
    resolved_late: int = counter("KV cache blocks that were orphaned until their parent was reported.")
    removed_unknown: int = counter("KV cache blocks reported as removed of which no copy was known.")
    refused: int = counter("KV cache blocks of engines that were not noted for want of room.")
    dropped: int = counter("KV cache blocks forgotten because their parent was not reported for too long.")
    forgotten: int = counter("KV cache blocks held only outside the GPU that were forgotten to make room for others.")
    opaque: int = counter("KV cache blocks whose hash covers more than tokens, such as media.")
    mismatched: int = counter("KV events whose tokens do not fit the blocks that they name.")
    contradicted: int = counter("KV cache blocks reported again with another parent.")
    other_groups: int = counter("KV events of cache groups that do not decide what can be reused.")
    roots_refused: int = counter("KV events refused because an engine has too many namespaces.")
    uncounted: int = counter("Copies of a KV cache block beyond those that are counted.")
    copied: int = counter("KV cache blocks taken over from peers' snapshots.")


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """What is there now. `block_tokens` are the engine's, 0 before its first event."""

    blocks: int = gauge("KV cache blocks that an engine holds now.")
    orphaned: int = gauge("KV cache blocks of an engine whose parents are not known.")
    prefixes: int = gauge("Prefixes of prompts that an engine holds now.")
    entries: int = gauge("KV cache blocks and prefixes of an engine that this node remembers.")
    unsettled: int = gauge("KV cache blocks of an engine whose changes are not applied yet.")
    block_tokens: int = 0

"""Where threads that hash prompts hand over the prefix hashes that they meet (core/engine_cache/sources/push_keys.py).

A prompt that is new is tokenized in a worker thread before it is placed. Its key must have reached the event loop by
then, or what workers told of it is not found for this very prompt: so the thread waits until the inbox was emptied,
while somebody reports such keys. Else it appends and goes on.

Bound: INBOX_MAX keys, the oldest are dropped. Cost: an append; a hop to the event loop and back, 100 us, while it is
urgent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident

import trio

from ranvier_py.core.engine_cache.sources.push_keys import PREFIX_TOKENS, KeyedPrefix, KeyHasher
from ranvier_py.core.prompts.fingerprint import UNCOMPUTED_TOKENS
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoaded

INBOX_MAX = 65_536  # half a second's new prompts at most wait; emptied twice a second


class KeyInbox:
    """Where threads that hash tokens leave the keys they met; `hasher` is what prompts are to be hashed with.

    `urgent`: somebody waits for the keys. They are noted from the start where the policy is the report's, else from the
    first worker on that reports such keys: prompts that were known before are not linked to theirs.
    """

    def __init__(self, key: bytes, block_tokens: int, policy: str, prefix_tokens: int = PREFIX_TOKENS) -> None:
        lengths = (prefix_tokens,) if policy == StickyLeastLoaded.name else ()
        self.hasher = KeyHasher(key, block_tokens, told=self.told, lengths=lengths, short=UNCOMPUTED_TOKENS)
        self.prefix_tokens = prefix_tokens
        self.waiting: deque[KeyedPrefix] = deque(maxlen=INBOX_MAX)
        self.urgent = False
        self.loop = 0  # the thread of the event loop
        self.drain: Callable[[], object] = lambda: None

    def told(self, keyed: KeyedPrefix) -> None:
        """Any thread. Returns after the keys were taken in where that matters and can be waited for."""
        self.waiting.append(keyed)
        if not self.urgent:
            return
        if get_ident() == self.loop:
            self.drain()
            return
        try:
            trio.from_thread.run_sync(self.drain)
        except (RuntimeError, trio.Cancelled):  # a thread of somebody else's, or the node is going down
            return

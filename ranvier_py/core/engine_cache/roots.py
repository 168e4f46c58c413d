"""Where the prompts of one engine begin: a stem for each adapter and salt, from which hashing starts.

A copy of a peer brings stems by their sum alone, for no salt travels; whose they are shows when something is stored
there. Bound: STEMS_MAX; those under which nothing hangs make room, and what finds none has no fingerprint, and is
counted by who asks.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier_py.core.engine_cache.blocks import Block, root
from ranvier_py.core.engine_cache.residency_values import Scope
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher

ROOTS_MAX = 4096
"""Adapters and salts of which something is held at a time; each costs some 500 bytes."""


class Roots:
    """`nameless` stands above all that has no fingerprint."""

    def __init__(self, hasher: TokenHasher, namespace_of: Callable[[Scope], Fingerprint | None]) -> None:
        self.nameless = root(None)
        self._hasher = hasher
        self._namespace_of = namespace_of
        self._named: dict[Scope, Block] = {}
        self._unclaimed: dict[int, Block] = {}  # of a copy, by their state's total

    def adopt(self, nameless: Block, unclaimed: dict[int, Block]) -> None:
        """Those of a copy."""
        self.nameless, self._unclaimed = nameless, unclaimed

    def all(self) -> list[Block]:
        """All but the nameless one."""
        return [*self._named.values(), *self._unclaimed.values()]

    def find(self, scope: Scope) -> Block | None:
        """Where prompts of this scope begin; None: there is no room for one more."""
        found = self._named.get(scope)
        if found is not None:
            return found
        if len(self._named) >= ROOTS_MAX:
            self._named = {scope: block for scope, block in self._named.items() if block.child is not None}
            if len(self._named) >= ROOTS_MAX:
                return None
        namespace = self._namespace_of(scope)
        if namespace is None:
            return self.nameless
        state = self._hasher.start(namespace)
        self._named[scope] = found = self._unclaimed.pop(state.total, None) or root(state)
        return found

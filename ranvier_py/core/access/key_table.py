"""The keys and tenants of one file. A key is found by its SHA-256 digest, which is all that is known of it.

Rule: rows stay as they were read, as JSON, and become values when they are asked for: 50,000 keys hold up no event
loop, and no collection of garbage looks through them. A look-up by digest shows nothing of a key by the time it takes.
Bound: MADE_MAX identities are kept made, those that were asked for last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

import orjson

from ranvier_py.core.access.identity import AccessKey, Identity, Tenant, identity_of
from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits, Mode, Unit
from ranvier_py.core.bounded import BoundedDict

MADE_MAX = 4096
LINES_AT_ONCE = 4096  # of a packed table: some milliseconds

Row = Mapping[str, Any]
"""A checked table of the file: the names are those of the fields of AccessKey or Tenant, and of their limits."""


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


class KeyTable:
    """Finds identities. `keys`: rows by digest; `tenants`: rows by name; `patterns`: what the file says of models, and
    where each first stands."""

    def __init__(
        self,
        keys: Mapping[bytes, bytes] = {},
        tenants: Mapping[str, bytes] = {},
        patterns: Mapping[str, str] = {},
    ) -> None:
        self.keys, self.tenants, self.patterns = keys, tenants, patterns
        self._made = BoundedDict[bytes | str, Identity](MADE_MAX)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, digest: bytes) -> Identity | None:
        """Return whose key has this digest, valid or not; None for nobody's."""
        found = self._made.get(digest)
        if found is None:
            row = self.keys.get(digest)
            if row is not None:
                self._made[digest] = found = self._identity(row)
        return found

    def has_id(self, key_id: str) -> bool:
        """Whether there is a key of this id, which takes a look at all."""
        named = b'"id":' + orjson.dumps(key_id)
        return any(named in row for row in self.keys.values())

    def named(self, tenant: str) -> Identity:
        """Return whom a trusted proxy names by a tenant alone."""
        found = self._made.get(tenant)
        if found is None:
            self._made[tenant] = found = Identity(self._tenant(tenant))
        return found

    def _tenant(self, name: str) -> Tenant:
        """Return a tenant; one that the file does not have has no limits."""
        row = self.tenants.get(name)
        return Tenant(name) if row is None else tenant_of(orjson.loads(row))

    def identities(self, first: int, count: int) -> Iterator[Identity]:
        """Yield so many in the order of the file, from this one on."""
        return map(self._identity, islice(self.keys.values(), first, first + count))

    def _identity(self, row: bytes) -> Identity:
        key = key_of(orjson.loads(row))
        return identity_of(self._tenant(key.tenant), key)

    def packed(self) -> Iterator[bytes]:
        """Yield lines from which `unpacked` makes the same table."""
        yield orjson.dumps({"tenants": len(self.tenants), "patterns": self.patterns})
        for row in self.tenants.values():
            yield row
        for digest, row in self.keys.items():
            yield digest.hex().encode() + row


def unpacked(lines: Sequence[bytes]) -> Iterator[KeyTable | None]:
    """Make a table of the lines of `packed`; yield None between two portions, and the table at the end."""
    head = orjson.loads(lines[0])
    count = head["tenants"] + 1
    tenants = {orjson.loads(row)["name"]: row for row in lines[1:count]}
    keys = dict[bytes, bytes]()
    for start in range(count, len(lines), LINES_AT_ONCE):
        keys.update((bytes.fromhex(line[:64].decode()), line[64:]) for line in lines[start : start + LINES_AT_ONCE])
        yield None
    yield KeyTable(keys, tenants, head["patterns"])


def key_of(row: Row) -> AccessKey:
    own = {name: value for name, value in row.items() if name in KEY_FIELDS}
    return AccessKey(**own, limits=limits_of(row))


def tenant_of(row: Row) -> Tenant:
    by_model = [(each["models"], limits_of(each)) for each in row.get("model_limits", ())]
    return Tenant(row["name"], limits_of(row), by_model)


def limits_of(row: Row) -> Limits:
    """Return the limits that stand in a row among its other members."""
    own = {name: value for name, value in row.items() if name in LIMIT_FIELDS}
    if "budget" in own:
        own["budget"] = [budget_of(each) for each in own["budget"]]
    if "mode" in own:
        own["mode"] = Mode(own["mode"])
    return Limits(**own)


def budget_of(row: Row) -> Budget:
    return Budget(row["amount"], CalendarWindow(row["window"]), Unit(row.get("unit", Unit.TOKENS.value)))


KEY_FIELDS = frozenset(("id", "tenant", "models", "priority", "not_before", "expires", "disabled", "role"))
LIMIT_FIELDS = frozenset(Limits.__dataclass_fields__)

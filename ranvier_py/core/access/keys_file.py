"""Checks the tables of a file of keys, and makes the table in which keys are found.

Rule: everything that is wrong is said at once, with its line; then there is no table. Without `tenant`, a key is a
tenant of its own, so no other has its id for a name. A tenant that a key names must have a table: else a typing error
would be a tenant without limits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time
from math import inf
from typing import Any

from orjson import dumps

from ranvier_py.core.access.key_table import KeyTable, Row
from ranvier_py.core.access.limit_values import CalendarWindow, Mode, Unit
from ranvier_py.core.access.model_patterns import PATTERNS_MAX, is_watched

NAME = re.compile(r"[\x21-\x7e]{1,64}")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
GLOB_CHARACTERS_MAX, GLOBS_MAX = 200, 64
PRIORITY_MAX = 1000
BUDGETS_MAX = 8
NUMBER_MAX = 1 << 53  # whole numbers that JSON's readers agree upon
PROBLEMS_MAX = 20  # with more of them the file is another one
ROLES = ("read", "operate", "admin")
"""Of keys of the control port, each with what the one before it may."""

Check = Callable[[Any], Any]
"""Returns a value as a row has it. Raises ValueError with what it must be."""


def label(value: object) -> str:
    if type(value) is not str or NAME.fullmatch(value) is None:
        raise ValueError("must have 1 to 64 printable characters of ASCII and no blank")
    return value


def digest(value: object) -> str:
    if type(value) is not str or DIGEST.fullmatch(value) is None:
        raise ValueError("must be the SHA-256 of the key, 64 hexadecimal digits: ranvier keys make prints it")
    return value.lower()


def glob(value: object) -> str:
    if type(value) is not str or not 0 < len(value) <= GLOB_CHARACTERS_MAX or not value.isprintable():
        raise ValueError("must be a model's name, perhaps with * and ?")
    return value


def globs_of(value: object) -> list[str]:
    if type(value) is not list or not 0 < len(value) <= GLOBS_MAX:
        raise ValueError(f"must be a list of 1 to {GLOBS_MAX} names of models; without it every model may be used")
    return [glob(each) for each in value]


def switch(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def moment(value: object) -> float:
    """Read a date, or a date with its time, as seconds of UTC, in which times without a zone are."""
    try:
        if type(value) is str:
            value = datetime.fromisoformat(value)
        elif type(value) is date:
            value = datetime.combine(value, time())
        if isinstance(value, datetime):
            return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        pass
    raise ValueError("must be a time such as 2027-01-31T12:00:00Z")


def whole(least: int, most: int = NUMBER_MAX) -> Check:
    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            above = f"at least {least}" if most == NUMBER_MAX else f"from {least} to {most}"
            raise ValueError(f"must be a whole number, {above}")
        return value

    return check


def word(*words: str) -> Check:
    def check(value: object) -> str:
        if type(value) is not str or value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return check


def amount(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= NUMBER_MAX:  # type: ignore[operator]
        raise ValueError("must be a number above 0")
    return value  # type: ignore[return-value]


def tables(checks: Mapping[str, Check], *needed: str, most: int, unique: Mapping[str, object]) -> Check:
    """Return the check of a list of tables of these members. `unique`: members, with what they are by default, in which
    each table differs from all others: they would count in one place, and twice."""

    def check(value: object) -> list[Row]:
        if type(value) is not list or not 0 < len(value) <= most:
            raise ValueError(f"must be a list of 1 to {most} tables with {', '.join(needed)}")
        rows = []
        for table in value:
            row, wrong = checked(table, checks, needed)
            if wrong:
                raise ValueError("; ".join([f"{name} {words}".strip() for name, words in wrong.items()]))
            rows.append(row)
        kinds = [tuple(row.get(name, usual) for name, usual in unique.items()) for row in rows]
        if len({*kinds}) < len(kinds):
            raise ValueError(f"has two tables with the same {' and '.join(unique)}")
        return rows

    return check


BUDGET: Mapping[str, Check] = {
    "amount": amount,
    "window": word(*[each.value for each in CalendarWindow]),
    "unit": word(*[each.value for each in Unit]),
}
LIMITS: Mapping[str, Check] = {
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "uncached_tokens_per_minute"), whole(1)),
    "concurrent": whole(1),
    "budget": tables(BUDGET, "amount", "window", most=BUDGETS_MAX, unique={"window": "", "unit": Unit.TOKENS.value}),
    "mode": word(*[each.value for each in Mode]),
    "uncounted": switch,
}
VALIDITY: Mapping[str, Check] = {
    "id": label,
    "sha256": digest,
    "not_before": moment,
    "expires": moment,
    "disabled": switch,
}
KEY: Mapping[str, Check] = {
    **VALIDITY,
    "tenant": label,
    "models": globs_of,
    "priority": whole(-PRIORITY_MAX, PRIORITY_MAX),
    **LIMITS,
}
TENANT: Mapping[str, Check] = {
    "name": label,
    **LIMITS,
    "model_limits": tables({"models": glob, **LIMITS}, "models", most=GLOBS_MAX, unique={"models": ""}),
}
CONTROL_KEY: Mapping[str, Check] = {**VALIDITY, "role": word(*ROLES)}
FILES: Mapping[str, Mapping[str, tuple[Mapping[str, Check], tuple[str, ...]]]] = {
    "keys_file": {"key": (KEY, ("id", "sha256")), "tenant": (TENANT, ("name",))},
    "control_keys_file": {"key": (CONTROL_KEY, ("id", "sha256", "role"))},
}
"""The tables of each kind of file: their members, and those that must be there."""

UNIQUE = ("id", "sha256", "name")
"""Members of which no two tables have the same."""


def checked(table: object, checks: Mapping[str, Check], needed: tuple[str, ...]) -> tuple[Row, dict[str, str]]:
    """Return the good members of a table as they are kept, and what is wrong by member; "" is the table itself."""
    if not isinstance(table, Mapping):
        return {}, {"": f"must be a table with {', '.join(needed)}"}
    row, wrong = {}, {}
    for member, value in table.items():
        check = checks.get(member)
        try:
            if check is None:
                raise ValueError(f"there is no such member, expected {', '.join(checks)}")
            row[member] = check(value)
        except ValueError as error:
            wrong[str(member)[:64]] = str(error)
    missing = [member for member in needed if member not in table]
    return row, wrong if not missing else {**wrong, "": f"{', '.join(missing)} is missing"}


def packed(row: Row) -> bytes:
    """Return a row as JSON, without the room that the encoder reserves behind it."""
    return bytes(memoryview(dumps(row)))


class KeyTables:
    """Takes the tables of one file, or of one piece of it after another. `place` says where a table or a member of it
    stands."""

    def __init__(self, kind: str, place: Callable[[str], str]) -> None:
        self.problems: list[str] = []
        self._kinds, self._place = FILES[kind], place
        self._seen: dict[tuple[str, str, object], str] = {}  # what may stand but once -> where it stands
        self._named: dict[str, str] = {}  # tenants that keys name -> where the first of them does
        self._alone: dict[str, None] = {}  # ids of keys that are tenants of their own
        self._keys: dict[bytes, bytes] = {}
        self._tenants: dict[str, bytes] = {}
        self._patterns: dict[str, str] = {}  # what is named of models, and where first
        self._taken = Counter[str]()  # tables of each kind, in the pieces before

    def take(self, values: Mapping[str, Any]) -> None:
        for other in values:
            if other not in self._kinds:
                self._wrong(str(other)[:64], f"there is no such table, expected [[{']], [['.join(self._kinds)}]]")
        for at, row in self._rows("tenant", values):
            self._tenants[row["name"]] = packed(row)
            named = [limits["models"] for limits in row.get("model_limits", ())]
            self._watch(named, f"{at}.model_limits", f"tenant {row['name']}")
        for at, row in self._rows("key", values):
            if "tenant" in row:
                self._named.setdefault(row["tenant"], f"{at}.tenant")
            else:
                self._alone[row["id"]] = None
            self._watch(row.get("models", ()), f"{at}.models", f"key {row['id']}")
            own = {"tenant": row["id"], **row}
            self._keys[bytes.fromhex(own.pop("sha256"))] = packed(own)

    def table(self) -> KeyTable:
        """Return what the file has; what is wrong is in `problems`."""
        for tenant, at in self._named.items():
            if tenant not in self._tenants:
                self._wrong(at, f"there is no [[tenant]] with the name {tenant}")
        for tenant in self._tenants:
            if tenant in self._alone:
                words = "is the name of a [[tenant]] as well: name that as its tenant, or give the key another id"
                self._wrong(self._seen["key", "id", tenant], words)
        return KeyTable(self._keys, self._tenants, self._patterns)

    def _watch(self, patterns: Sequence[str], at: str, whose: str) -> None:
        for pattern in patterns:
            if pattern not in self._patterns and len(self._patterns) < PATTERNS_MAX and is_watched(pattern):
                self._patterns[pattern] = f"{self._place(at)}: {whose}"

    def _rows(self, kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Row]]:
        """Yield the good tables of a kind, each with its place."""
        found = values.get(kind, [])
        if kind not in self._kinds:
            return
        if type(found) is not list:
            self._wrong(kind, f"must be tables, [[{kind}]]")
            return
        checks, needed = self._kinds[kind]
        first_number, self._taken[kind] = self._taken[kind], self._taken[kind] + len(found)
        for number, table in enumerate(found, first_number):
            at = f"{kind}[{number}]"
            row, wrong = checked(table, checks, needed)
            for member in set(needed).intersection(UNIQUE, row):
                first = self._seen.setdefault((kind, member, row[member]), f"{at}.{member}")
                if first != f"{at}.{member}":
                    wrong[member] = f"stands twice, first in {self._place(first)}"
            if row.get("not_before", -inf) >= row.get("expires", inf):
                wrong["expires"] = "must be later than not_before: the key would never be valid"
            for member, words in wrong.items():
                self._wrong(f"{at}.{member}" if member else at, words)
            if not wrong:
                yield at, row

    def _wrong(self, at: str, words: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{self._place(at)}: {at}: {words}")

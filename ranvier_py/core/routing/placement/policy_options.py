"""Options of policies: fields of frozen dataclasses that know their meaning and their limits.

A policy writes its options once, in its own file, as a subclass of Options whose fields are made by `option`. From
there come the default, the check, and the line of the reference. Making one checks every field and reports all
problems at once, by a ConfigError with one line each. Limits that tie several fields together are `contradictions`,
asked for when each field alone is good.

Cost: paid when a policy is made, never when a request is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ranvier_py.core.errors import ConfigError

OptionValue = bool | int | float | str
Value = TypeVar("Value", bool, int, float, str)


class Limits(NamedTuple):
    """What one option is and may be. `least` and `most` are for numbers, both included; `one_of` for words."""

    default: OptionValue
    meaning: str
    least: float
    most: float
    one_of: Sequence[str]


def option(default: Value, meaning: str, *, least: float = 0.0, most: float = 1e9, one_of: Sequence[str] = ()) -> Value:
    """A field of Options. Its type is that of `default`."""
    limits = Limits(default, meaning, least, most, one_of)
    made: Value = field(default=default, metadata=MappingProxyType({"limits": limits}))
    return made


@dataclass(frozen=True, slots=True)
class Options:
    """What one policy may be told. This one has no options."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in limits_of(type(self))}
        problems = [
            f"{name}: must be {expected(limits)}, not {values[name]!r}"
            for name, limits in limits_of(type(self)).items()
            if not fits(values[name], limits)
        ] or self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """What is wrong with fields that are good each by itself, one line each."""
        return []


def limits_of(kind: type[Options]) -> dict[str, Limits]:
    """All options of a kind by name, in the order in which they are written."""
    return {one.name: one.metadata["limits"] for one in fields(kind)}


def fits(value: object, limits: Limits) -> bool:
    """Whether a value has the type of the default and keeps its limits. A whole number is a number."""
    default = limits.default
    if isinstance(default, str):
        return value in limits.one_of
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(value, int) or (isinstance(default, float) and isinstance(value, float)):
        return limits.least <= value <= limits.most
    return False


def expected(limits: Limits) -> str:
    """What a value must be, in words."""
    if isinstance(limits.default, bool):
        return "true or false"
    if isinstance(limits.default, str):
        return f"one of {', '.join(limits.one_of)}"
    whole = "a whole number, " if isinstance(limits.default, int) else ""
    return f"{whole}{limits.least:.15g} to {limits.most:.15g}"


def read(text: str, default: OptionValue) -> OptionValue:
    """A value that came as text (from a command line), by the type of the default; the text itself where it is none."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return type(default)(text)
    except ValueError:
        return text


def chosen(kind: type[Options], named: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Those of `named` that are options of this kind, read from text where they are no words."""
    return {
        name: read(value, limits.default) if isinstance(value := named[name], str) else value
        for name, limits in limits_of(kind).items()
        if name in named
    }

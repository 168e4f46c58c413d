"""Options: what may be set of a component, as fields of a frozen dataclass that know their meaning and their limits.

A component writes its options once, in its own file, as a subclass of Options whose fields are made by `option`. From
there come the default and the check. What has a meaning and a section of the reference, its own or its component's, an
operator may set: from its key come the flag, the variable, and the line of the file and of the reference (`config/`).
Options of policies are set by their names. So no default exists twice. Making an Options checks every field and
reports all problems at once, by a ConfigError with one line each. Limits that tie several fields together are
`contradictions`, asked for when each field alone is good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from ranvier_py.core.errors import ConfigError

OptionValue = bool | int | float | str

SECONDS_MAX = 86_400.0
"""The longest time that an operator may set: a day."""


class Option(NamedTuple):
    """What one option is and may be. `above`, `least` and `most` are for numbers, `one_of` for words."""

    default: Any
    meaning: str
    least: float
    most: float
    above: float  # excluded itself
    one_of: Sequence[str]
    key: str  # by which an operator sets it; empty: PREFIX and the name of its field
    section: str  # of the reference; empty: SECTION


def option(  # noqa: PLR0913  # one declaration says all
    default: Any,
    meaning: str = "",
    *,
    least: float = 0.0,
    most: float = inf,
    above: float = -inf,
    one_of: Sequence[str] = (),
    key: str = "",
    section: str = "",
) -> Any:
    """A field of Options. Numbers, words and switches are checked by the type of the default; other values are not."""
    made = Option(default, meaning, least, most, above, one_of, key, section)
    return field(default=default, metadata=MappingProxyType({"option": made}))


def seconds(default: float, meaning: str = "", *, key: str = "", section: str = "") -> Any:
    """An option that is a time: above 0, at most a day."""
    return option(default, meaning, above=0.0, most=SECONDS_MAX, key=key, section=section)


def part(kind: type[Any]) -> Any:
    """A field of Options that holds the options of a component."""
    return field(default_factory=kind)


@dataclass(frozen=True, slots=True)
class Options:
    """What may be set of one component. This one has no options.

    SECTION is where its options stand in the reference, PREFIX how their keys begin, unless one says otherwise.
    """

    SECTION: ClassVar[str] = ""
    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        options = options_of(type(self))
        problems = [
            f"{name}: must be {expected(limits)}, not {getattr(self, name)!r}"
            for name, limits in options.items()
            if not fits(getattr(self, name), limits)
        ] or self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """What is wrong with fields that are good each by itself, one line each."""
        return []


def options_of(kind: type[Any]) -> dict[str, Option]:
    """All options of a kind by the name of their field, in the order in which they are written."""
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


def fits(value: object, limits: Option) -> bool:
    """Whether a value has the type of the default and keeps its limits. A whole number is a number."""
    default = limits.default
    if isinstance(default, str) and limits.one_of:
        return value in limits.one_of
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if not isinstance(default, int | float):
        return True
    if isinstance(value, int) or (isinstance(default, float) and isinstance(value, float)):
        return limits.least <= value <= limits.most and value > limits.above and value != inf
    return False


def expected(limits: Option) -> str:
    """What a value must be, in words."""
    if isinstance(limits.default, bool):
        return "true or false"
    if isinstance(limits.default, str):
        return f"one of {', '.join(limits.one_of)}"
    whole = "a whole number, " if isinstance(limits.default, int) else ""
    if limits.above >= limits.least:
        return f"{whole}above {limits.above:.15g}" + ("" if limits.most == inf else f", at most {limits.most:.15g}")
    if limits.most == inf:
        return f"{whole}at least {limits.least:.15g}"
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
        for name, limits in options_of(kind).items()
        if name in named
    }

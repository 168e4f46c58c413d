"""Options: the settings of a component, as fields of a frozen dataclass that know their meaning and limits.

A component declares its options once, in its own file, as a subclass of Options whose fields are made by `option`. The
default and the check follow from that, so no default exists twice. An operator may set an option that has a meaning and
a section of the reference, its own or its component's; flag, variable, and the lines of the file and of the reference
follow from its key (`config/`). Options of policies are set by their names. Creating an Options checks every field and
raises one ConfigError with a line for each problem. `contradictions` checks limits that tie several fields together,
once each field alone is good.
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

WHOLE_MAX = 2**53
"""The greatest whole number without a limit of its own: any JSON reader and any counter of C holds it."""


class Option(NamedTuple):
    """Meaning and limits of one option. `above`, `least` and `most` are for numbers, `one_of` for words."""

    default: Any
    meaning: str
    least: float
    most: float
    above: float  # exclusive
    one_of: Sequence[str]
    key: str  # the operator's name for it; empty: PREFIX and the name of its field
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
    """Declare a field of Options. Numbers, words and switches are checked by the default's type, other values never."""
    made = Option(
        default=default,
        meaning=meaning,
        least=least,
        most=most,
        above=above,
        one_of=one_of,
        key=key,
        section=section,
    )
    return field(default=default, metadata=MappingProxyType({"option": made}))


def seconds(default: float, meaning: str = "", *, key: str = "", section: str = "") -> Any:
    """Declare an option that is a time: above 0, at most a day."""
    return option(default, meaning, above=0.0, most=SECONDS_MAX, key=key, section=section)


def part(kind: type[Any]) -> Any:
    """Declare a field of Options that holds the options of a component."""
    return field(default_factory=kind)


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one component. This base class has none.

    SECTION is their section in the reference, and PREFIX begins their keys, unless an option names its own.
    """

    SECTION: ClassVar[str] = ""
    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        options = options_of(type(self))
        problems = [
            f"{name}: must be {expected(limits, getattr(self, name))}, not {getattr(self, name)!r}"
            for name, limits in options.items()
            if not fits(getattr(self, name), limits)
        ] or self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """Return what is wrong between fields that are each good alone, one line each."""
        return []


def options_of(kind: type[Any]) -> dict[str, Option]:
    """Return all options of a class by the name of their field, in the order of declaration."""
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


def fits(value: object, limits: Option) -> bool:
    """Whether a value has the type of the default and is within its limits. An int is allowed where a float is."""
    default = limits.default
    if isinstance(default, str) and limits.one_of:
        return value in limits.one_of
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if not isinstance(default, int | float):
        return True
    if isinstance(value, int) or (isinstance(default, float) and isinstance(value, float)):
        most = min(limits.most, WHOLE_MAX) if isinstance(default, int) else limits.most
        return limits.least <= value <= most and value > limits.above and value != inf
    return False


def is_huge(value: object) -> bool:
    return isinstance(value, int) and value > WHOLE_MAX


def expected(limits: Option, value: object = None) -> str:
    """Describe in words what a value must be, instead of the one that it is."""
    if isinstance(limits.default, bool):
        return "true or false"
    if isinstance(limits.default, str):
        return f"one of {', '.join(limits.one_of)}"
    whole = "a whole number, " if isinstance(limits.default, int) else ""
    if limits.above >= limits.least:
        return f"{whole}above {limits.above:.15g}" + ("" if limits.most == inf else f", at most {limits.most:.15g}")
    if limits.most == inf:
        return f"{whole}at least {limits.least:.15g}" + (f", at most {WHOLE_MAX}" if is_huge(value) else "")
    return f"{whole}{limits.least:.15g} to {limits.most:.15g}"


def read(text: str, default: OptionValue) -> OptionValue:
    """Convert a text (of a command line) to the type of the default; return the text itself if it is none."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return type(default)(text)
    except ValueError:
        return text


def chosen(kind: type[Options], named: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return those of `named` that are options of this class, converted from text unless they are words."""
    return {
        name: read(value, limits.default) if isinstance(value := named[name], str) else value
        for name, limits in options_of(kind).items()
        if name in named
    }

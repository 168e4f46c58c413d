"""Writes the annotated reference: every key of the configuration as TOML, with its help, unit and default.

It is generated from the options alone, so it can't be out of date. Loaded as it is, it yields the defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

from ranvier_py.config.config_model import KEYS, SECRETS, Config, Key
from ranvier_py.config.config_values import (
    Address,
    Backends,
    Isolation,
    Label,
    LiteralPlace,
    Networks,
    OptionalLabel,
    OptionalPath,
    Origins,
    Place,
    Places,
    PolicyName,
    PolicyNames,
    PolicyOptions,
    RuleSettings,
    jsonable,
)
from ranvier_py.config.discovery_settings import DnsTexts
from ranvier_py.config.model_tables import Models
from ranvier_py.core.routing.placement.policies import option_reference

WIDTH_CHARACTERS = 110
FORMS: Sequence[tuple[Any, str]] = (
    (OptionalPath, "FILE"),
    (Address, "HOST:PORT"),
    (Place, "HOST:PORT"),
    (LiteralPlace, "IP:PORT"),
    (Places, "HOST:PORT"),
    (Backends, "URL"),
    (Models, "NAME=MODEL"),
    (Origins, "ORIGIN"),
    (Networks, "NETWORK"),
    (DnsTexts, "NAME:PORT"),
    (Label, "NAME"),
    (OptionalLabel, "NAME"),
    (Isolation, "WHOSE"),
    (RuleSettings, "RULE=MODE"),
    (PolicyName, "POLICY"),
    (PolicyNames, "POLICY"),
    (PolicyOptions, "OPTION=VALUE"),
    (int, "N"),
    (float, "NUMBER"),
)
"""What the value of a flag is called, by the type of its key."""

BARE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # of a key of TOML


def unit_of(name: str) -> str:
    """Return the unit in the name of a key; empty for plain numbers and texts."""
    units = {
        "_s": "seconds",
        "_bytes_max": "bytes",
        "_bytes_min": "bytes",
        "_bytes_per_s_max": "bytes per second",
        "_tokens": "tokens",
    }
    for mark, unit in units.items():
        if name.endswith(mark):
            return unit
    return ""


def reference() -> str:
    """Return every key as TOML with its help, unit and default. Loaded as it is, it yields the defaults."""
    lines = [
        "# Every key of ranvier with its default.",
        "# A key is also a flag (--probe-interval-s) and a variable (RANVIER_PROBE_INTERVAL_S).",
        "# Precedence: flag, variable, file, default. Secrets have no flag. Empty text means: not set.",
        "# A secret and its file are one key: of control_key and control_key_file, the one set in the source of higher",
        "# precedence counts; both in one source are an error.",
    ]
    section, defaults = "", Config().masked()
    for name, key in KEYS.items():
        if key.option.section != section:
            section = key.option.section
            lines.append(f"\n\n# --- {section} " + "-" * (WIDTH_CHARACTERS - len(section)))
        lines.append("\n" + "\n".join(f"# {line}" for line in wrapped(help_of(key))))
        if name == "policy_option":
            lines += policy_lines()
        lines.append(f"{name} = {toml_value(defaults[name])}")
    return "\n".join(lines) + "\n"


def as_toml(config: Config, origins: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the keys that were set, as a file that loads to the same. Shows no secret but URLs without password."""
    lines, values = [f"# {note}" for note in notes], config.masked()
    for name in sorted(origins, key=list(KEYS).index):
        value, secret = values[name], KEYS[name].value_in(config)
        if name in SECRETS:
            value = secret.get_secret_value() if secret is not None else ""
            if value and ("://" not in value or "@" in value or "?" in value):
                lines.append(f"\n# {name} is a secret: write it into a file that {name}_file names ({origins[name]})")
                continue
        if name == "model":
            lines += [
                f"# api_key of {each['name']} is a secret: use api_key_file" for each in value if "api_key" in each
            ]
            value = [{key: inner for key, inner in each.items() if key != "api_key"} for each in value]
        lines.append(f"\n# {origins[name]}\n{name} = {toml_value(value)}")
    if values["backend"] and "backend" not in origins:  # from event sources
        lines.append(f"\nbackend = {toml_value(values['backend'])}")
    return "\n".join(lines).lstrip("\n") + "\n"


def policy_lines() -> list[str]:
    """Return every option of every policy, as comments."""
    return [
        f"#   {line}"
        for policy, name, one in option_reference()
        for line in wrapped(f"{policy}: {name}={toml_value(one.default)}: {one.meaning}", WIDTH_CHARACTERS - 4)
    ]


def help_of(key: Key) -> str:
    """Return the meaning of a key, with its unit."""
    unit = unit_of(key.name)
    return f"{key.option.meaning} In {unit}." if unit else key.option.meaning


def flag_help(key: Key) -> str:
    """Return the meaning of a key with its unit, and its default if it has one that counts."""
    default = jsonable(key.option.default)
    return f"{help_of(key)} Default: {shown(default)}." if default not in (None, "", [], False) else help_of(key)


def shown(value: object) -> str:
    return value if isinstance(value, str) else toml_value(value)


def placeholder_of(key: Key) -> str:
    """Return what the value of a flag is, in one word."""
    kind, unit = key.annotation, unit_of(key.name)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if unit:
        return unit.split()[0].upper()
    return next((form for each, form in FORMS if each == kind), "TEXT")


def wrapped(text: str, width: int = WIDTH_CHARACTERS) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def toml_value(value: object) -> str:
    """Return a JSON value as TOML, on one line."""
    if value is None:
        return '""'
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_name(name)} = {toml_value(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def toml_name(name: str) -> str:
    return name if BARE_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)

"""The flags of the configuration, derived from the fields of Config: no key is repeated here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ranvier_py.config.config_loader import Loaded, load
from ranvier_py.config.config_model import KEYS, SECRETS
from ranvier_py.config.config_names import FILE_VARIABLE, RENAMED, flag_of
from ranvier_py.config.config_reference import flag_help, placeholder_of
from ranvier_py.core.errors import ConfigError

MORE_FLAGS = {"record_file": ("--record",), **{key: (flag_of(name),) for name, key in RENAMED.items()}}
"""Additional flags of a key."""


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config, and one flag for each key that is no secret. Flags that are not given set nothing."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML or YAML file; ${FILE_VARIABLE} names one too"
    )
    groups: dict[str, Any] = {}
    for name, key in KEYS.items():
        if name in SECRETS:
            continue
        section = key.option.section
        group = groups[section] = groups.get(section) or parser.add_argument_group(section)
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": flag_help(key).replace("%", "%%"),
        }
        form = placeholder_of(key)
        if key.annotation is bool:
            group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **options)
        elif isinstance(key.option.default, tuple):
            group.add_argument(flag_of(name), action="append", metavar=form, **options)
        else:
            group.add_argument(flag_of(name), *MORE_FLAGS.get(name, ()), metavar=form, **options)


def load_from(options: argparse.Namespace, file: Path | None = None, **more: Any) -> Loaded:
    """Load the configuration of these flags. Raises ConfigError with all problems, those of flags first."""
    given = vars(options)
    flags = {name: given[name] for name in KEYS if name in given}
    try:
        loaded = load(flags, file or options.config, **more)
    except ConfigError as error:
        raise ConfigError([*options.problems, *error.problems]) from error
    if options.problems:
        raise ConfigError(options.problems)
    return loaded

"""`ranvier config`: the reference of all keys, a check of a configuration, or a file of YAML as TOML."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ranvier_py.commands.config_flags import add_config_flags, load_from
from ranvier_py.commands.exit_codes import EXIT_OK
from ranvier_py.config.config_loader import Loaded, file_in_use
from ranvier_py.config.config_reference import as_toml, reference, toml_value
from ranvier_py.core.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier config [--check | --from FILE.yaml] [--config FILE] [--KEY VALUE ...]"
    parser.add_argument("--check", action="store_true", help="load the configuration instead, and list what is wrong")
    meaning = "print this file, TOML or YAML, also one of Continuum Router, as TOML instead"
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help=meaning)
    add_config_flags(parser)


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        config, origins, notes = load_from(options, options.source)
        print(as_toml(config, origins, notes), end="")
        return EXIT_OK
    if not options.check:
        if options.problems:
            raise ConfigError(options.problems)
        print(reference(), end="")
        return EXIT_OK
    config, origins, notes = checked_config(options)
    values = config.shown()
    for name, origin in origins.items():
        print(f"{name} = {toml_value(values[name])}  # from {origin}")
    for note in notes:
        print(f"note: {note}")
    print(f"good: {len(origins)} keys are set, {len(values) - len(origins)} have their defaults")
    return EXIT_OK


def checked_config(options: argparse.Namespace) -> Loaded:
    """Load the configuration, and check all of its files. Raises ConfigError, whose last problems are the notes."""
    from ranvier_py.node.config_check import file_notes, file_problems

    notes: list[str] = []

    def problems(found: Loaded) -> Iterator[str]:
        notes.extend([*found.notes, *file_notes(found, file_in_use(options.config))])
        yield from file_problems(found.config)

    try:
        config, origins, _ = load_from(options, also=problems)
    except ConfigError as error:
        raise ConfigError([*error.problems, *(f"note: {note}" for note in notes)]) from error
    return Loaded(config, origins, notes)

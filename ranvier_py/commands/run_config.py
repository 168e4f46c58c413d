"""`ranvier config`: the reference of all keys, a check of a configuration, or a file of YAML as TOML."""

from __future__ import annotations

import argparse
from pathlib import Path

from ranvier_py.commands.config_flags import add_config_flags, load_from
from ranvier_py.commands.exit_codes import EXIT_OK
from ranvier_py.commands.live_report import examined, report
from ranvier_py.config.config_reference import as_toml, reference, toml_value
from ranvier_py.core.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier config [--check [--live] | --from FILE.yaml] [--config FILE] [--KEY VALUE ...]"
    parser.add_argument("--check", action="store_true", help="load the configuration instead, and list what is wrong")
    parser.add_argument("--live", action="store_true", help="with --check: all that `ranvier check` looks at")
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
    if options.live:
        return report(options, as_json=False)
    (config, origins, notes), problems = examined(options)
    if problems:
        raise ConfigError([*problems, *(f"note: {note}" for note in notes)])
    values = config.shown()
    for name, origin in origins.items():
        print(f"{name} = {toml_value(values[name])}  # from {origin}")
    for note in notes:
        print(f"note: {note}")
    print(f"good: {len(origins)} keys are set, {len(values) - len(origins)} have their defaults")
    return EXIT_OK

"""Loads the rules against breakers of prefixes: those that ship with the package, and the operator's own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ranvier_py.config.toml_file import NotToml, check_depth
from ranvier_py.core.clients.client_rules import Rule, RuleBook, RuleSetting, rules_of
from ranvier_py.core.errors import ConfigError

SHIPPED = "ranvier_py.core.clients", "client_rules.toml"
RULE_FILE_BYTES_MAX = 1 << 20


def rule_book(file: Path | None = None, settings: Sequence[str] = ()) -> RuleBook:
    """Return all rules; the operator's replace ours of the same name. Raises ConfigError with the key that is wrong."""
    package, name = SHIPPED
    rules = {rule.name: rule for rule in rules_of(files(package).joinpath(name).read_text(encoding="utf-8"))}
    if file is not None:
        rules |= {rule.name: rule for rule in own_rules(file)}
    try:
        return RuleBook(list(rules.values()), [RuleSetting.parse(text) for text in settings])
    except ValueError as error:
        raise ConfigError([f"client_rules: {error}"]) from error


def own_rules(file: Path) -> Sequence[Rule]:
    """Read the operator's rules. Raises ConfigError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(RULE_FILE_BYTES_MAX + 1)
        if len(content) > RULE_FILE_BYTES_MAX:
            raise ValueError(f"is larger than {RULE_FILE_BYTES_MAX} bytes")
        text = content.decode()
        check_depth(text)
        return rules_of(text)
    except OSError as error:
        raise ConfigError([f"client_rules_file: {file} can't be read: {error.strerror}"]) from error
    except NotToml as error:
        raise ConfigError([f"client_rules_file: {file}:{error.line}: {error.why}"]) from error
    except ValueError as error:
        raise ConfigError([f"client_rules_file: {file}: {error}"]) from error

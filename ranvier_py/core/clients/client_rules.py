"""Rules that mend the prefixes which clients break: what each applies to, and in which mode an operator set it.

Rule: a rule is data (`client_rules.toml`). Mode `key` requires that all engines that may serve the model are known to
leave out what it concerns; otherwise fingerprints would be wrong, and the rule does nothing. Nor does any mode while a
hosted provider may serve the model. Bound: RULES_MAX.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ranvier_py.core.clients.known_clients import CLIENTS
from ranvier_py.core.clients.mended_body import ACTIONS, BodyChange
from ranvier_py.core.clients.prefix_break import CAUSES
from ranvier_py.core.prompts.request_apis import APIS

FORMAT = 1
RULES_MAX = 256
ANY = "*"
MODES = ("off", "observe", "key", "rewrite")
"""observe: `ranvier clients` names it beside the breaks that it would mend; key: fingerprints leave out what it
concerns, because the engine does, and the body stays; rewrite: the body is changed before an engine sees it."""
PLACES = ("system", "first", "history")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")
VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,3}")
TERM = re.compile(r"(>=|<=|==|>|<)\s*(\d{1,9}(?:\.\d{1,9}){0,3})")

Version = tuple[int, ...]

COMPARED = {
    ">=": lambda one, other: one >= other,
    "<=": lambda one, other: one <= other,
    "==": lambda one, other: one == other,
    ">": lambda one, other: one > other,
    "<": lambda one, other: one < other,
}

FIELDS: Mapping[str, type[Any]] = {
    **dict.fromkeys(("name", "client", "versions", "action", "source", "mark", "where"), str),
    **dict.fromkeys(("pattern", "replacement", "role", "to", "member"), str),
    **dict.fromkeys(("models", "apis", "causes", "left_out_by"), list),
    "values": dict,
}
NEEDED = ("name", "client", "apis", "causes", "action", "source")
TAKES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "drop_block": (("pattern",), ("where",)),
    "replace": (("pattern", "replacement"), ("where",)),
    "rerole": (("pattern", "role", "to"), ()),
    "sort_tools": ((), ()),
    "set": (("member", "values"), ()),
}
"""The fields that each action needs, and those that it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `mark`: bytes that a body must contain; empty: none. `definition`: the whole rule, as it was read."""

    name: str
    client: str
    versions: Sequence[tuple[str, Version]]
    models: Sequence[str]
    apis: Sequence[str]
    causes: Sequence[str]
    action: BodyChange
    left_out_by: frozenset[str]
    mark: bytes
    source: str
    definition: str

    def fits(self, client: str, version: Version, api: str) -> bool:
        """Whether the rule applies to requests of this client, version and API."""
        if self.client not in (ANY, client) or api not in self.apis:
            return False
        return not self.versions or (bool(version) and all(COMPARED[term](version, v) for term, v in self.versions))

    def fits_model(self, model: str) -> bool:
        return not self.models or fits_any(model, self.models)


class RuleSetting(NamedTuple):
    """The mode that an operator set for a rule, for one client or all, and for models by a pattern."""

    rule: str
    mode: str
    client: str = ANY
    model: str = ANY

    @classmethod
    def parse(cls, text: str) -> RuleSetting:
        """Read `RULE=MODE` or `RULE=MODE,client=NAME,model=PATTERN`. Raises ValueError."""
        first, *others = text.split(",")
        rule, equals, mode = first.partition("=")
        if not rule or not equals or mode not in MODES:
            raise ValueError(
                f"must be RULE=MODE, with a mode of {', '.join(MODES)}; ,client=NAME,model=PATTERN limit it"
            )
        limits: dict[str, str] = {}
        for other in others:
            name, _, value = other.partition("=")
            if name not in ("client", "model") or name in limits or not value:
                raise ValueError("only client=NAME and model=PATTERN may follow a rule's mode, each once")
            limits[name] = value
        if limits.get("client", ANY) not in (ANY, *CLIENTS):
            raise ValueError(f"client must be one of {', '.join(CLIENTS)}")
        return cls(rule, mode, **limits)


class RuleBook:
    """All rules, and their modes. Of several `settings` that fit, the last one counts."""

    def __init__(self, rules: Sequence[Rule], settings: Sequence[RuleSetting] = ()) -> None:
        """Raises ValueError for a setting of a rule that does not exist, or of a mode that the rule cannot have."""
        self.rules = {rule.name: rule for rule in rules}
        self.settings = tuple(settings)
        for setting in self.settings:
            rule = self.rules.get(setting.rule)
            if rule is None:
                raise ValueError(f"there is no rule {setting.rule!r}: there are {', '.join(self.rules)}")
            if setting.mode == "key" and not rule.left_out_by:
                raise ValueError(f"{rule.name} can't have mode key: no engine is known to leave out what it is of")
        changing = {setting.rule for setting in self.settings if setting.mode in ("key", "rewrite")}
        self.changing = tuple(rule for rule in rules if rule.name in changing)

    def mode(self, rule: Rule, client: str, model: str) -> str:
        for setting in reversed(self.settings):
            if setting.rule == rule.name and setting.client in (ANY, client) and fits_any(model, [setting.model]):
                return setting.mode
        return "observe"

    def may_mend(self, cause: str, client: str, api: str, model: str) -> Iterator[Rule]:
        """Yield the rules that may mend a break of this cause, and are not off."""
        for rule in self.rules.values():
            fits = cause in rule.causes and rule.client in (ANY, client) and api in rule.apis
            if fits and rule.fits_model(model) and self.mode(rule, client, model) != "off":
                yield rule


def fits_any(model: str, patterns: Sequence[str]) -> bool:
    """Whether a model's name fits one of these patterns. Case does not count."""
    return any(fnmatchcase(model.lower(), pattern.lower()) for pattern in patterns)


def version_of(user_agent: bytes) -> Version:
    """Return the version of the first product; empty if it has none."""
    product = user_agent.strip().partition(b" ")[0].partition(b"/")[2].decode("latin-1")
    match = VERSION.match(product)
    return numbers(match[0]) if match is not None else ()


def numbers(text: str) -> Version:
    found = tuple(int(part) for part in text.split("."))
    while found and found[-1] == 0:  # 2.1 is 2.1.0
        found = found[:-1]
    return found or (0,)


def rules_of(text: str) -> list[Rule]:
    """Read a file of rules. Raises ValueError that names the rule and what is wrong with it."""
    try:
        found = tomllib.loads(text)
    except ValueError as error:  # also of a number that is too long to be converted
        raise ValueError(f"not TOML: {error}") from error
    if found.get("format") != FORMAT or set(found) - {"format", "rule"}:
        raise ValueError(f"must have format = {FORMAT} and [[rule]] tables, and nothing else")
    tables = found.get("rule", [])
    if type(tables) is not list or len(tables) > RULES_MAX or any(type(table) is not dict for table in tables):
        raise ValueError(f"rules must be [[rule]] tables, at most {RULES_MAX}")
    rules: dict[str, Rule] = {}
    for number, table in enumerate(tables, 1):
        place = f"rule {number} ({table['name']})" if type(table.get("name")) is str else f"rule {number}"
        try:
            rule = rule_of(table)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if rule.name in rules:
            raise ValueError(f"{place}: another rule has this name")
        rules[rule.name] = rule
    return list(rules.values())


def rule_of(table: Mapping[str, Any]) -> Rule:
    """Read one rule. Raises ValueError."""
    for name, value in table.items():
        kind = FIELDS.get(name)
        if kind is None:
            raise ValueError(f"unknown {name!r}: there are {', '.join(FIELDS)}")
        if type(value) is not kind or (kind is list and any(type(item) is not str for item in value)):
            raise ValueError(f"{name} must be {'a list of texts' if kind is list else KINDS[kind]}")
    if missing := [name for name in NEEDED if name not in table]:
        raise ValueError(f"needs {', '.join(missing)}")
    if NAME.fullmatch(table["name"]) is None:
        raise ValueError("name must be of small letters, digits and hyphens")
    if not table["source"].strip():
        raise ValueError("source must name where this is known from")
    for name in ("apis", "causes"):
        allowed: Sequence[str] = tuple(APIS) if name == "apis" else CAUSES
        if others := [value for value in table[name] if value not in allowed]:
            raise ValueError(f"{name}: {', '.join(others)} unknown: there are {', '.join(allowed)}")
    if table["client"] not in (ANY, *CLIENTS):
        raise ValueError(f"client must be {ANY} or one of {', '.join(CLIENTS)}")
    return Rule(
        name=table["name"],
        client=table["client"],
        versions=versions_of(table.get("versions", "")),
        models=table.get("models", []),
        apis=table["apis"],
        causes=table["causes"],
        action=action_of(table),
        left_out_by=frozenset(table.get("left_out_by", ())),
        mark=table.get("mark", "").encode(),
        source=table["source"],
        definition=json.dumps(table, sort_keys=True, default=str),
    )


KINDS: Mapping[type, str] = {str: "a text", dict: "a table"}


def versions_of(text: str) -> Sequence[tuple[str, Version]]:
    """Read the terms of a version range. Raises ValueError."""
    found = []
    for part in filter(None, text.split(",")):
        match = TERM.fullmatch(part.strip())
        if match is None:
            raise ValueError("versions must be like >=2.1.29,<2.2")
        found.append((match[1], numbers(match[2])))
    return tuple(found)


def action_of(table: Mapping[str, Any]) -> BodyChange:
    """Read a rule's action. Raises ValueError."""
    kind = table["action"]
    if kind not in ACTIONS:
        raise ValueError(f"action must be one of {', '.join(ACTIONS)}")
    needed, optional = TAKES[kind]
    given = [name for name in ("where", "pattern", "replacement", "role", "to", "member", "values") if name in table]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{kind} needs {', '.join(missing)}")
    if others := [name for name in given if name not in needed and name not in optional]:
        raise ValueError(f"{kind} has no {', '.join(others)}")
    values = {name: table[name] for name in given if name != "pattern"}
    if values.get("where", PLACES[0]) not in PLACES:
        raise ValueError(f"where must be one of {', '.join(PLACES)}")
    try:
        pattern = re.compile(table["pattern"]) if "pattern" in given else None
        if pattern is not None and "replacement" in values:
            pattern.sub(values["replacement"], "")  # reads the replacement: the groups that it names must exist
    except (re.error, IndexError) as error:
        raise ValueError(f"pattern or replacement is no regular expression: {error}") from error
    return BodyChange(kind=kind, pattern=pattern, **values)

"""Which models serve a name that clients ask for: aliases, shares and fallbacks, by the operator's `[[model]]` tables.

Rule: of the tables for a name those of the tenant go before those for all, a name before a glob, a longer glob before a
shorter one. A glob with targets is for what clients ask for, and no engine lists. A target is looked up in turn, unless
its own table has led to it: then it is the engines' model. Which of several targets serves follows from a hash of chat
and target (`share_of`): all nodes agree without state, a chat keeps its model, and other weights move only the share
that changed. Invariant: no name leads back to itself, since such tables are refused (test_model_rules.py).
Bounds: TABLES_MAX, KEPT_MAX, DEPTH_MAX, CHAIN_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, log
from typing import Any, NamedTuple

from ranvier_py.core.access.identity import globs
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.bounded import BoundedDict

TABLES_MAX = 1024
KEPT_MAX = 1024  # chains that are not looked for anew: of a name with a tenant
DEPTH_MAX = 16  # tables that lead to one another
CHAIN_MAX = 8  # models that serve one request at most: each has retries of its own

GLOB = re.compile(r"[*?]")  # brackets are part of names

EMPTY, OVERLOADED, ERROR, TIMEOUT, TOO_LONG = "empty", "overloaded", "error", "timeout", "too_long"
KINDS = (EMPTY, OVERLOADED, ERROR, TIMEOUT, TOO_LONG)
"""For what a fallback is asked: no engine of the model can be, all refuse for want of room, they fail or break off,
they do not begin in time, or the prompt is too long for them."""


@dataclass(frozen=True, slots=True)
class ModelRule:
    """One table. `to`: the targets with their weights; without any it is the model itself. What is None or empty is as
    everywhere."""

    name: str  # or a glob
    to: Mapping[str, float] = field(default_factory=dict)
    fallback: Sequence[str] = ()
    fallback_on: Collection[str] = KINDS[:-1]
    tenants: Sequence[str] = ()  # for which alone it is
    first_event_s: float | None = None
    stall_s: float | None = None
    worker_retries_max: int | None = None
    total_retries_max: int | None = None
    retry_statuses: tuple[int, ...] | None = None
    api_key: str = field(default="", repr=False)
    max_tokens: int | None = None  # of an answer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # members of bodies that have none
    cost: ModelCost | None = None
    names_asked: bool = False  # answers name the model that was asked for

    @property
    def targets(self) -> Sequence[str]:
        return (*self.to, *self.fallback)


class Served(NamedTuple):
    """A model that may serve a name, and the tables that lead to it, that of the name first. `own`: those of them that
    a fallback does not lead through."""

    model: str
    rules: Sequence[ModelRule]
    own: Sequence[ModelRule]

    def first(self, setting: str) -> Any:
        """Return a setting as the first table has it that does; None if none does."""
        return next((value for rule in self.rules if (value := getattr(rule, setting)) is not None), None)

    @property
    def is_own(self) -> bool:
        """Whether it is no fallback."""
        return len(self.own) == len(self.rules)

    @property
    def api_key(self) -> str:
        """The engine's key: that of the model, else of what leads to it. A fallback's engine gets no other one's."""
        return next((rule.api_key for rule in reversed(self.own) if rule.api_key), "")

    @property
    def max_tokens(self) -> int | None:
        """The smallest of the caps."""
        return min((rule.max_tokens for rule in self.rules if rule.max_tokens is not None), default=None)

    @property
    def defaults(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for rule in self.rules:
            found = {**rule.defaults, **found}
        return found


class TenantRules:
    """The tables of one tenant, or those for all."""

    def __init__(self) -> None:
        self.names: dict[str, ModelRule] = {}
        self.globs: list[tuple[re.Pattern[str], ModelRule]] = []

    def add(self, rule: ModelRule) -> None:
        if GLOB.search(rule.name):
            self.globs.append((globs([rule.name]), rule))
            self.globs.sort(key=lambda each: -len(each[1].name))
        self.names.setdefault(rule.name, rule)

    def find(self, name: str, *, listed: bool) -> ModelRule | None:
        rule = self.names.get(name)
        if rule is not None:
            return rule
        return next((rule for glob, rule in self.globs if not (listed and rule.to) and glob.match(name)), None)


class ModelTable:
    """The tables of one configuration. `listed` in its methods: whether engines list a name themselves."""

    def __init__(self, rules: Sequence[ModelRule]) -> None:
        self.rules = rules
        self.targets = frozenset(target for rule in rules for target in rule.targets)
        self._all, self._of_tenants = TenantRules(), dict[str, TenantRules]()
        self._kept: BoundedDict[tuple[str, str], Sequence[Served]] = BoundedDict(KEPT_MAX)  # chains without shares
        self._listed: Collection[str] = ()  # with which those were found
        for rule in rules:
            for tenant in rule.tenants:
                self._of_tenants.setdefault(tenant, TenantRules()).add(rule)
            if not rule.tenants:
                self._all.add(rule)

    def find(self, name: str, tenant: str = "", listed: Collection[str] = ()) -> ModelRule | None:
        """Return the table for a name; None if there is none."""
        own, is_listed = self._of_tenants.get(tenant), name in listed
        rule = own.find(name, listed=is_listed) if own is not None else None
        return rule or self._all.find(name, listed=is_listed)

    def chain(
        self, name: str, tenant: str = "", listed: Collection[str] = (), key: Callable[[], bytes] = bytes
    ) -> Sequence[Served]:
        """Return the models that serve a name, in the order in which they are asked, each once; none without a table.

        `key`: what tells one chat from others, asked for only where targets have shares."""
        if listed is not self._listed:
            self._kept.clear()
            self._listed = listed
        if (kept := self._kept.get((name, tenant))) is not None:
            return kept
        if self.find(name, tenant, listed) is None:
            return ()
        found: dict[str, Served] = {}
        shares = list[str]()

        def chosen(rule: ModelRule) -> Sequence[str]:
            shares.append(share_of(rule.to, key()))
            return shares[-1:]

        for served in self._reached(name, tenant, listed, chosen, set()):
            found.setdefault(served.model, served)
            if len(found) == CHAIN_MAX:
                break
        chain = tuple(found.values())
        if not shares:  # it is the same for every chat
            self._kept[name, tenant] = chain
        return chain

    def reachable(self, name: str, tenant: str = "", listed: Collection[str] = ()) -> Sequence[Served]:
        """Return all models that may ever serve a name, those with the greatest shares first."""
        found: dict[str, Served] = {}
        for served in self._reached(name, tenant, listed, by_share, set()):
            found.setdefault(served.model, served)
        return tuple(found.values())

    def _reached(
        self,
        name: str,
        tenant: str,
        listed: Collection[str],
        chosen: Callable[[ModelRule], Sequence[str]],
        seen: set[str],
        rules: Sequence[ModelRule] = (),
        own: Sequence[ModelRule] = (),
    ) -> Iterator[Served]:
        rule = self.find(name, tenant, (name,) if rules else listed)
        if rule is None or rule in rules:  # its own table has led here
            if rule is None or not rule.to or name in rule.targets:  # else it is an alias, whose models are found
                yield Served(name, rules, own)
            return
        if name in seen or len(rules) == DEPTH_MAX:  # all that it leads to was found
            return
        if rules:  # the name that was asked for may lead to itself, where it has another table
            seen.add(name)
        rules, own = (*rules, rule), (*own, rule)
        if rule.to:
            for target in chosen(rule) if len(rule.to) > 1 else rule.to:
                yield from self._reached(target, tenant, listed, chosen, seen, rules, own)
        else:
            yield Served(name, rules, own)
        for target in rule.fallback:
            yield from self._reached(target, tenant, listed, chosen, seen, rules)

    def shown(self, listed: Collection[str], tenant: str = "") -> Mapping[str, str]:
        """Return each alias that is no glob with the listed model that its card is made of."""
        own = self._of_tenants.get(tenant)
        names = dict.fromkeys([*self._all.names, *(own.names if own is not None else ())])
        found = {name: self.card_of(name, listed, tenant) for name in names if not GLOB.search(name)}
        return {name: model for name, model in found.items() if model}

    def card_of(self, name: str, listed: Collection[str], tenant: str = "") -> str:
        """Return the listed model that an alias stands for; "" if it is none, or none of its models is listed."""
        rule = self.find(name, tenant, listed)
        if rule is None or not rule.to:
            return ""
        return next((each.model for each in self.reachable(name, tenant, listed) if each.model in listed), "")

    def unknown(self, lacks: Callable[[str], bool]) -> Mapping[str, Sequence[str]]:
        """Return by table what it leads to that no engine serves."""
        found: dict[str, Sequence[str]] = {}
        for rule in self.rules:
            tenant = rule.tenants[0] if rule.tenants else ""
            models = [each for target in rule.targets for each in self._ends(target, tenant, rule)]
            if missing := [model for model in dict.fromkeys(models) if lacks(model)]:
                found[rule.name] = missing
        return found

    def _ends(self, target: str, tenant: str, rule: ModelRule) -> Iterator[str]:
        yield from (each.model for each in self._reached(target, tenant, (), by_share, set(), (rule,)))

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield what is wrong between the tables: which one, and why."""
        seen: dict[tuple[str, str], int] = {}
        for number, rule in enumerate(self.rules):
            for tenant in rule.tenants or ("",):
                first = seen.setdefault((rule.name, tenant), number)
                if first != number:
                    yield number, f"name: {rule.name} has a table already" + (f" for {tenant}" if tenant else "")
                elif cycle := self._cycle(rule, tenant):
                    yield (
                        number,
                        f"to: it leads {'too far' if cycle[-1] == '…' else 'back to itself'}: {' -> '.join(cycle)}",
                    )

    def _cycle(self, rule: ModelRule, tenant: str) -> Sequence[str]:
        """Return the names by which a table leads back to itself, or too far; none if it does neither. One that only
        leads into a cycle is not named. Two models may be the fallbacks of each other."""
        waiting, seen = list[tuple[str, ...]]((rule.name, target) for target in rule.to), {rule.name}
        while waiting:
            *path, name = waiting.pop()
            found = self.find(name, tenant, (name,))
            if found is rule and name not in rule.to:  # else it is the engines' model of that name
                return (*path, name)
            if len(path) > DEPTH_MAX:
                return (*path, name, "…")
            if found is not None and name not in seen:
                seen.add(name)
                waiting += [(*path, name, target) for target in found.to if target != name]
        return ()


def by_share(rule: ModelRule) -> Sequence[str]:
    return sorted(rule.to, key=rule.to.__getitem__, reverse=True)


def share_of(weights: Mapping[str, float], key: bytes) -> str:
    """Return the target of a chat: the one with the highest score = -weight / ln(u), as `placement.rendezvous` has it,
    where u in (0, 1) is a hash of the chat and the target's name."""
    best, most = "", -inf
    for target, weight in weights.items():
        digest = blake2b(
            key, key=blake2b(target.encode("utf-8", "surrogatepass"), digest_size=32).digest(), digest_size=8
        )
        score = -weight / log((int.from_bytes(digest.digest()) + 0.5) / (1 << 64)) if weight else 0.0
        if score > most:
            best, most = target, score
    return best

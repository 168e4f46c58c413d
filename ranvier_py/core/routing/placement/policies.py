"""All policies by name, and their options by name.

Options of all policies share one space of names, so that a configuration says `cache_threshold`, whatever the policy.
Where two policies have an option of one name, it means the same and is set for both. The meaning and limits of an
option are written in its policy's own module (`options.option`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.options import Option, Options, OptionValue, chosen, options_of
from ranvier_py.core.routing.placement import Policy
from ranvier_py.core.routing.placement.affinity import Affinity, AffinityOptions
from ranvier_py.core.routing.placement.baselines import LeastLoaded, PowerOfTwo, RoundRobin, WeightedRandom
from ranvier_py.core.routing.placement.bounded_load import BoundedLoad, BoundedLoadOptions
from ranvier_py.core.routing.placement.cache_aware import CacheAware, CacheAwareOptions
from ranvier_py.core.routing.placement.cache_aware_smg import CacheAwareSmg, CacheAwareSmgOptions
from ranvier_py.core.routing.placement.chwbl import Chwbl, ChwblOptions
from ranvier_py.core.routing.placement.kv_score import KvScore, KvScoreOptions
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoaded, StickyLeastLoadedOptions
from ranvier_py.core.routing.placement.ttft import Ttft

AnyOptions = TypeVar("AnyOptions", bound=Options)


class PolicyKind(NamedTuple):
    """How to make a policy, and the class of its options."""

    make: Callable[[Any], Policy]  # given its own options
    options: type[Options] = Options


POLICIES: Mapping[str, PolicyKind] = MappingProxyType(
    {
        "affinity": PolicyKind(Affinity, AffinityOptions),
        "ttft": PolicyKind(lambda _: Ttft()),
        "cache_aware": PolicyKind(CacheAware, CacheAwareOptions),
        "cache_aware_smg": PolicyKind(CacheAwareSmg, CacheAwareSmgOptions),
        "bounded_load": PolicyKind(BoundedLoad, BoundedLoadOptions),
        "chwbl": PolicyKind(Chwbl, ChwblOptions),
        "kv_score": PolicyKind(KvScore, KvScoreOptions),
        "sticky_least_loaded": PolicyKind(StickyLeastLoaded, StickyLeastLoadedOptions),
        "round_robin": PolicyKind(lambda _: RoundRobin()),
        "random": PolicyKind(lambda _: WeightedRandom()),
        "least_loaded": PolicyKind(lambda _: LeastLoaded()),
        "power_of_two": PolicyKind(lambda _: PowerOfTwo()),
    }
)


def option_reference() -> list[tuple[str, str, Option]]:
    """Return (policy, name, option) of every option of every policy, in the order in which they are written."""
    return [(policy, name, one) for policy, kind in POLICIES.items() for name, one in options_of(kind.options).items()]


class PlacementOptions:
    """Options of policies by name, checked for every policy that knows them. Options that are not named have defaults.

    Numbers and booleans may be given as text, as on a command line.
    Raises ConfigError with all problems at once: names that no policy knows, values that make no sense.
    """

    def __init__(self, /, **named: OptionValue) -> None:
        self.named: Mapping[str, OptionValue] = MappingProxyType(named)
        known = dict.fromkeys(name for _, name, _ in option_reference())
        unknown = [name for name in named if name not in known]
        problems = [f"{name}: no policy has this option; there are {', '.join(known)}" for name in unknown]
        for kind in POLICIES.values():
            try:
                self.build(kind.options)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))  # an option of two policies is reported once

    @classmethod
    def parse(cls, items: Iterable[str]) -> PlacementOptions:
        """Make options from NAME=VALUE texts; the last value of each name counts. Raises ConfigError."""
        named = {}
        for item in items:
            name, equals, value = item.partition("=")
            if not (name and equals):
                raise ConfigError([f"expected NAME=VALUE, not {item!r}"])
            named[name] = value
        return cls(**named)

    def build(self, kind: type[AnyOptions]) -> AnyOptions:
        """Return the options of one policy, of class `kind`."""
        return kind(**chosen(kind, self.named))


def make_policy(name: str, options: PlacementOptions | None = None) -> Policy:
    """Make a policy with its own state. Raises ConfigError if no policy has this name."""
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError([f"policy: must be one of {', '.join(POLICIES)}, not {name!r}"])
    return kind.make((options or PlacementOptions()).build(kind.options))

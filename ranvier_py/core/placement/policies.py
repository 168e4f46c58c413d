"""The policies by name. An option of a policy is a field of PlacementOptions, written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.placement import Policy
from ranvier_py.core.placement.affinity import Affinity
from ranvier_py.core.placement.least_loaded import LeastLoaded
from ranvier_py.core.placement.power_of_two import PowerOfTwo
from ranvier_py.core.placement.random import WeightedRandom
from ranvier_py.core.placement.round_robin import RoundRobin


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """`divert_*`: affinity leaves a holder whose load exceeds divert_factor x median + divert_floor (requests)."""

    divert_factor: float = 2.0  # Ranvier's
    divert_floor: int = 2  # Ranvier's: two requests at an idle cluster are no reason to leave a warm cache

    def __post_init__(self) -> None:
        problems = []
        if not 1.0 <= self.divert_factor <= 1000.0:
            problems.append(f"divert_factor: must be 1 to 1000, not {self.divert_factor}")
        if not 0 <= self.divert_floor <= 1_000_000:
            problems.append(f"divert_floor: must be 0 to 1000000, not {self.divert_floor}")
        if problems:
            raise ConfigError(problems)


POLICIES: Mapping[str, Callable[[PlacementOptions], Policy]] = MappingProxyType(
    {
        "affinity": lambda options: Affinity(options.divert_factor, options.divert_floor),
        "round_robin": lambda _: RoundRobin(),
        "random": lambda _: WeightedRandom(),
        "least_loaded": lambda _: LeastLoaded(),
        "power_of_two": lambda _: PowerOfTwo(),
    }
)


def make_policy(name: str, options: PlacementOptions | None = None) -> Policy:
    """A new policy with its own state. Raises ConfigError for a name that is none."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError([f"policy: must be one of {', '.join(POLICIES)}, not {name!r}"])
    return factory(options or PlacementOptions())

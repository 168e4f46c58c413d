"""Who asks: the key that a client showed, the tenant that it belongs to, and what both may do.

Models are named by globs, with case. Times are those of UTC, in seconds. Nothing here knows a key itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from math import inf

from ranvier_py.core.access.limit_values import Limits

NO_LIMITS = Limits()
ALL_MODELS = re.compile("", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tenant:
    """For whom requests are served. `model_limits`: limits of its requests for the models of each glob."""

    name: str
    limits: Limits = NO_LIMITS
    model_limits: Sequence[tuple[str, Limits]] = ()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """What is known of a key. `models`: globs of those it may use; none: all. `role`: of a key of the control port."""

    id: str
    tenant: str = ""
    models: Sequence[str] = ()
    priority: int = 0
    not_before: float = -inf
    expires: float = inf
    disabled: bool = False
    limits: Limits = NO_LIMITS
    role: str = ""

    def refusal(self, now: float) -> str:
        """Return why the key is not valid at this time, a word for metrics; "" if it is."""
        if self.disabled:
            return "disabled"
        return "early" if now < self.not_before else "expired" if now >= self.expires else ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request. Without a key, a trusted proxy has named the tenant."""

    tenant: Tenant
    key: AccessKey | None = None
    allowed: re.Pattern[str] = field(default=ALL_MODELS, repr=False, compare=False)

    @property
    def key_id(self) -> str:
        return self.key.id if self.key is not None else ""

    @property
    def priority(self) -> int:
        return self.key.priority if self.key is not None else 0

    @property
    def is_limited_to_models(self) -> bool:
        return self.allowed is not ALL_MODELS

    def may_use(self, model: str) -> bool:
        """Whether this may use a model of this name. For others it must be as if there were none."""
        return self.allowed.match(model) is not None


ANYBODY = Identity(Tenant(""))
"""Who asks where nobody is told apart."""


def identity_of(tenant: Tenant, key: AccessKey) -> Identity:
    return Identity(tenant, key, globs(key.models) if key.models else ALL_MODELS)


def globs(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return one expression for all of these globs. Brackets are part of names."""
    return re.compile("|".join([translate(pattern.replace("[", "[[]")) for pattern in patterns]))

"""A number to be seen from outside, as a value. What produces samples need not know who renders them, or how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ranvier_py.core.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Sample:
    """One time series at this moment.

    `name` has its unit last and neither our prefix nor `_total`: "requests", "first_token_seconds". All samples of one
    name have the same kind and help, and differ in their labels. Values of labels come from short lists: each new one
    is a new time series for ever.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: float | Histogram
    labels: Mapping[str, str] = field(default_factory=dict)

"""How figures of a replay are written: with their unit, and as short as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping


def seconds(value: float) -> str:
    """Up to minutes: what requests take."""
    if 0.0 < value < 0.001:
        return f"{value * 1e3:.2g} ms"
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.2f} s" if value < 10.0 else f"{value:.0f} s"


def length(value: float) -> str:
    """A length of time up to days, to three digits or so."""
    for unit_s, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * unit_s:
            return f"{value / unit_s:,.0f} {unit}"
    if 0.0 < value < 0.001:
        return f"{value * 1000.0:.2g} ms"
    return f"{value:.1f} s" if value >= 10.0 else f"{value:.2f} s" if value >= 1.0 else f"{value * 1000.0:.0f} ms"


def percent(value: float) -> str:
    return f"{value:.1%}"


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + "s" * (count != 1)


def change(now: float, before: float) -> str:
    """What `now` is against `before`, as «12% less»."""
    if before <= 0:
        return "no different"
    part = now / before - 1
    return "as much" if abs(part) < 0.005 else f"{abs(part):.0%} {'less' if part < 0 else 'more'}"


def named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())

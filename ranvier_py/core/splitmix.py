"""Mixing 64-bit numbers, so that each bit of the result depends on each bit of the argument (splitmix64)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's finaliser (Steele, Lea, Flood 2014)
UNMIX_1, UNMIX_2 = pow(MIX_1, -1, 1 << 64), pow(MIX_2, -1, 1 << 64)
FACTOR_1, FACTOR_2, SHIFT_30, SHIFT_27, SHIFT_31 = map(np.uint64, (MIX_1, MIX_2, 30, 27, 31))


def mix(value: int) -> int:
    """Bijective 64-bit finaliser."""
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def unmix(value: int) -> int:
    """Invert `mix`."""
    value = (unshifted(value, 31) * UNMIX_2) & MASK
    value = (unshifted(value, 27) * UNMIX_1) & MASK
    return unshifted(value, 30)


def unshifted(value: int, bits: int) -> int:
    """Return the x for which `value` is x ^ (x >> bits), for `bits` of at least 22."""
    return value ^ (value >> bits) ^ (value >> 2 * bits)


def mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply `mix` to each element; arithmetic is modulo 2^64."""
    mixed = values ^ (values >> SHIFT_30)
    mixed *= FACTOR_1
    mixed ^= mixed >> SHIFT_27
    mixed *= FACTOR_2
    mixed ^= mixed >> SHIFT_31
    return mixed

"""Bucket sums in three levels, so that equal tables are seen to be equal by 8 bytes, and nearly equal ones by some 100.

A bucket's sum is the XOR of a number for each of its claims (`routes.scan`); that of a group of 64 buckets, and that of
the whole table, are the XOR of theirs. So one number stands for as much as all of them do, but for one chance in 2**64.

    total    8 bytes             of all buckets
    groups   64 of 8 bytes       of 64 buckets each
    part     some groups, 64 of 8 bytes each

All are little-endian columns, as in messages. Cost: 20 us for each call.
"""

from __future__ import annotations

import numpy as np

from ranvier_py.core.gossip.wire.columns import GROUPS


def group_sums(sums: bytes) -> bytes:
    """The sums of all groups, of those of all buckets."""
    return bytes(np.bitwise_xor.reduce(np.frombuffer(sums, "<u8").reshape(GROUPS, -1), axis=1).tobytes())


def total_of(sums: bytes) -> int:
    """One number for the sums of all buckets, or of all groups."""
    return int(np.bitwise_xor.reduce(np.frombuffer(sums, "<u8")))


def differing_groups(sums: bytes, groups: bytes) -> bytes:
    """Which groups of these buckets have other sums, u8 each."""
    ours, theirs = np.frombuffer(group_sums(sums), "<u8"), np.frombuffer(groups, "<u8")
    return np.flatnonzero(ours != theirs).astype(np.uint8).tobytes()


def part_of(sums: bytes, groups: bytes) -> bytes:
    """The sums of the buckets of these groups."""
    return np.frombuffer(sums, "<u8").reshape(GROUPS, -1)[list(groups)].tobytes()


def with_part(sums: bytes, groups: bytes, part: bytes) -> bytes:
    """The same sums, but for those of these groups."""
    whole = np.frombuffer(sums, "<u8").reshape(GROUPS, -1).copy()
    whole[list(groups)] = np.frombuffer(part, "<u8").reshape(len(groups), -1)
    return whole.tobytes()

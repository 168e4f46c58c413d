"""How many examples hypothesis tries: all in CI and with WHOLE_SUITE=1, a quarter while one works."""

import os

LEAST = 10


def examples(count: int) -> int:
    """Of a test that tries `count` in CI."""
    return count if "WHOLE_SUITE" in os.environ else min(count, max(LEAST, count // 4))

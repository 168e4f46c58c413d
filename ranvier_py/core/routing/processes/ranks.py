"""Data-parallel ranks: several engines, each with a cache and a queue of its own, behind one URL.

A backend that is one rank has the fragment `#rank=N` in its URL, which names it in the configuration and among nodes.
Its requests get RANK_FIELD, by which vLLM chooses the rank; without it the engine chooses one by load. The metrics page
of a rank's engine has the figures of all ranks, which the label `engine` tells apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urldefrag

RANK_FIELD = b"x-data-parallel-rank"
RANK = re.compile(r"rank=([0-9]|[1-5][0-9]|6[0-3])")  # as many as `publishers.RANKS_MAX`
ENGINE_LABEL = re.compile(rb'(?:^|,)engine="([0-9]{1,4})"')
RANKED = b"vllm:"  # begins the names of series that have the label


def rank_of(url: str) -> int | None:
    """Return the rank that a backend's URL names; None if it names none. Raises ValueError on another fragment."""
    fragment = urldefrag(url).fragment
    if not fragment:
        return None
    found = RANK.fullmatch(fragment)
    if found is None:
        raise ValueError("what follows # must be rank=N, a data-parallel rank from 0 to 63")
    return int(found[1])


def without_rank(url: str) -> str:
    return urldefrag(url).url


def rank_in(labels: bytes) -> int | None:
    """Return the rank that the labels of a series name; None if they name none."""
    found = ENGINE_LABEL.search(labels)
    return int(found[1]) if found is not None else None


def ranks_of(labels: Iterable[tuple[bytes, Mapping[str, str]]]) -> int:
    """Return how many ranks the series of a page are of, by their names and labels; 0 if none says."""
    return len({named["engine"] for name, named in labels if name.startswith(RANKED) and named.get("engine")})

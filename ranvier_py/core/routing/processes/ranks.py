"""Data-parallel ranks: several engines, each with a cache and a queue of its own, behind one URL.

A backend that is one rank has the fragment `#rank=N` in its URL, which names it in the configuration and among nodes.
Its requests get RANK_FIELD, by which vLLM chooses the rank; without it the engine chooses one by load. The metrics page
of a rank's engine has the figures of all ranks, which the label `engine` tells apart.

An engine that is configured without a rank is placed as its ranks where they are numbered from 0: with hybrid or
external load balancing vLLM's pages show ranks that this URL does not serve, or numbers that start higher.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urldefrag

from ranvier_py.core.options import Options, option

RANK_FIELD = b"x-data-parallel-rank"
RANK = re.compile(r"rank=([0-9]|[1-5][0-9]|6[0-3])")  # as many as `publishers.RANKS_MAX`
ENGINE_LABEL = re.compile(rb'(?:^|,)engine="([0-9]{1,4})"')
RANKED = b"vllm:"  # begins the names of series that have the label
PLACED_MAX = 64  # ranks of one engine: as many as RANK allows


@dataclass(frozen=True, slots=True)
class RankOptions(Options):
    """What is done about ranks that nobody listed."""

    SECTION = "Backends"

    split_ranks: bool = option(
        True,
        "Place a vLLM engine whose metrics or events show several data-parallel ranks as these: each becomes a backend "
        "of its own, URL#rank=N, and its requests get x-data-parallel-rank. Without, the engine chooses a rank itself, "
        "mostly one without the prefix. An engine that refuses the header is asked without it.",
    )


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


def ranks_of(labels: Iterable[tuple[bytes, Mapping[str, str]]]) -> frozenset[str]:
    """Return which ranks the series of a page are of, by their names and labels; empty if none says."""
    return frozenset([named["engine"] for name, named in labels if name.startswith(RANKED) and named.get("engine")])


def placeable(ranks: Collection[str]) -> int:
    """Return as how many backends these ranks can be placed: all if they are numbered from 0, else as 1."""
    count = len(ranks)
    if not 1 < count <= PLACED_MAX:
        return 1
    return count if set(ranks) == {str(number) for number in range(count)} else 1


def entries_of(shown: int | None, published: Collection[int], *, is_vllm: bool) -> int | None:
    """Return as how many backends an engine is to be placed; None if nothing says.

    `shown`: what its page says; None: it names no ranks, so that those of its events count, if its model cards are
    vLLM's. SGLang publishes ranks as well, but not all of its releases know the header.
    """
    if shown is not None or not published or not is_vllm:
        return shown
    return placeable([str(rank) for rank in published])

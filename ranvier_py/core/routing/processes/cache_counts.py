"""Counts the caches behind one backend's URL: of several processes, or of data-parallel ranks."""

from __future__ import annotations

from ranvier_py.core.routing.backend import Backend, Transition


def count_caches(
    backend: Backend, now: float, *, hosts: int | None = None, ranks: int | None = None
) -> list[Transition]:
    """Count the processes behind its URL, of which its name stands for `hosts`, and its ranks; None: as before,
    or as the last probe found.

    That there are several now is a transition, which says what to do.
    """
    several, behind = backend.seen.process.several, backend.behind
    several.hosts = several.hosts if hosts is None else hosts
    before = (behind.processes, behind.ranks)
    behind.processes = several.count(now)
    if ranks is None and backend.seen.last_probe is not None:
        ranks = backend.seen.last_probe.ranks
    if ranks is not None and behind.rank is None:
        behind.ranks = ranks
    counts = [("processes", before[0], behind.processes)]
    if not behind.as_ranks:  # else it was said that it is placed as these
        counts.append(("ranks", before[1], behind.ranks))
    return [
        Transition.of(backend, what, str(old), str(new), backend.advice) for what, old, new in counts if old == 1 < new
    ]

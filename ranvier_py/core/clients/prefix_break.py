"""Finds where a prompt departs from the one that it should have continued, and why.

Rule: the sketches of two prompts of one conversation are compared section by section. Everything after the first
difference is computed again, even if it is equal. The cause is the first of CAUSES that fits (`cause_of`).
Source: the breakers of real agents, research on clients: billing lines, counters in tags, git status, reminders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ranvier_py.core.clients.prompt_sketch import PromptSketch, Section

CAUSES = (
    *("model", "tools_reordered", "tools_changed", "uuid", "nonce", "time", "date", "counter"),
    *("system_turn", "reasoning_dropped", "moved_block", "compaction", "edited"),
)
"""system_turn: a system message stands where the history should continue; moved_block: the section exists in another
place; edited: anything else."""

COMPACTED_SHARE = 0.5
"""If less than this share of a history is left, it was compacted."""


class PrefixBreak(NamedTuple):
    """One break. `path` is in the new prompt, and `kind` is that section's. In characters: `shared` is equal before the
    break, `lost` is repeated after it."""

    cause: str
    kind: str
    path: str
    line: int
    shared: int
    lost: int


def prefix_break(before: PromptSketch, now: PromptSketch) -> PrefixBreak | None:
    """Return where `now` departs from `before`; None if it begins with all of it, and so continues it."""
    old, new = before.sections, now.sections
    if before.model != now.model:
        return PrefixBreak(
            cause="model", kind="system", path="$.model", line=0, shared=0, lost=min(before.size, now.size)
        )
    at = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a.digest != b.digest), min(len(old), len(new))
    )
    if at == len(old):
        return None
    shared = sum([section.size for section in old[:at]])
    repeated = Counter(section.digest for section in old[at:]) & Counter(section.digest for section in new[at:])
    sizes = {section.digest: section.size for section in old[at:]}
    lost = sum([sizes[digest] * count for digest, count in repeated.items()])
    cause, line = cause_of(before, now, at)
    if at < len(old) and at < len(new) and cause in VOLATILE_CAUSES:
        lost += min(old[at].size, new[at].size)
    place = new[min(at, len(new) - 1)] if new else Section("$", "message", "", 0, 0)
    return PrefixBreak(cause=cause, kind=place.kind, path=place.path, line=line, shared=shared, lost=lost)


VOLATILE_CAUSES = ("uuid", "nonce", "time", "date", "counter")


def cause_of(before: PromptSketch, now: PromptSketch, at: int) -> tuple[str, int]:
    """Return why the sections at `at` differ, and in which line."""
    old, new = before.sections, now.sections
    if at >= len(new):
        return "compaction" if len(new) < COMPACTED_SHARE * len(old) else "edited", 0
    gone, come = old[at], new[at]
    if "tool" in (gone.kind, come.kind):
        return tools_cause(old, new), 0
    volatile = volatile_cause(before, now, at)
    if volatile is not None:
        return volatile
    if come.role == "system" and come.kind == "message":
        return "system_turn", 0
    left = {section.digest for section in new[at:]}
    if gone.kind == "thought" and gone.digest not in left:
        return "reasoning_dropped", 0
    known = {section.digest for section in old[at:]}
    if gone.digest in left or come.digest in known:
        return "moved_block", 0
    history = [section for section in old[at:] if section.kind == "message"]
    kept = sum(section.digest in left for section in history)
    if come.kind == "message" and history and kept < COMPACTED_SHARE * len(history) and len(new) < len(old):
        return "compaction", 0
    return "edited", 0


def tools_cause(old: Sequence[Section], new: Sequence[Section]) -> str:
    tools = [Counter(section.digest for section in each if section.kind == "tool") for each in (old, new)]
    return "tools_reordered" if tools[0] == tools[1] else "tools_changed"


def volatile_cause(before: PromptSketch, now: PromptSketch, at: int) -> tuple[str, int] | None:
    """If the section's lines differ only in volatile words, return the kind of the first such word, and its line."""
    lines = before.lines.get(at, ()), now.lines.get(at, ())
    if not lines[0] or len(lines[0]) != len(lines[1]):
        return None
    found: tuple[str, int] | None = None
    for number, (old, new) in enumerate(zip(*lines, strict=True)):
        if old == new:
            continue
        if isinstance(old, int) or isinstance(new, int) or old.masked != new.masked:
            return None
        if len(old.volatile) != len(new.volatile):
            return None
        pairs = [(a[0], b[0]) for a, b in zip(old.volatile, new.volatile, strict=True) if a != b]
        if pairs and found is None:  # a nonce may by chance have digits alone, or letters too
            found = "nonce" if "nonce" in pairs[0] else pairs[0][1], number
    return found

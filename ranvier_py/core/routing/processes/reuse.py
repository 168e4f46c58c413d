"""Whether an engine's process reuses prefixes at all: by what it says of itself, and by what its answers show.

Rule: an engine that reuses nothing earns no affinity: it is left out of every match (`Pool.generations`), and gets
requests by load. One cached token, in an answer or on its page, shows that this process reuses prefixes, whatever else
was said. Another process is judged anew. Engines of hybrid models are judged by their settings alone: most of their
prompts have no state to go on from. Bound: COLD_ANSWERS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COLD_ANSWERS = 10
"""Answers without any reuse that suffice. An engine that caches has something of every second prompt at least that it
served a moment ago, so each cold one halves the odds that it caches: after ten they are a thousandth. A wrong verdict
costs little: prompts still meet their prefixes by chance, and the first hit ends it."""


@dataclass(slots=True)
class Reuse:
    """What is known of one process."""

    by_page: bool | None = None  # vLLM's `enable_prefix_caching` on its metrics page; None: the page does not say
    by_server_info: bool | None = None  # not SGLang's `disable_radix_cache`
    hit: bool = False  # it has counted a cached token
    cold: int = 0  # prompts that it had served a moment before, and of which nothing was cached
    apis: set[str] = field(default_factory=set)  # whose answers have reported cached tokens: zeros mean nothing before
    believed: bool = True  # `happens`, as pools know it
    uncounted: int = 0  # such prompts whose answers had no count, since its page was last read

    @property
    def happens(self) -> bool:
        """False: it earns no affinity."""
        off = self.by_page is False or self.by_server_info is False
        return self.hit or not (off or self.cold >= COLD_ANSWERS)

    @property
    def why_not(self) -> str:
        """Why it earns no affinity; "" if it does."""
        if self.happens:
            return ""
        if self.by_page is False:
            return "its metrics page says that prefix caching is off"
        if self.by_server_info is False:
            return "its server info says that prefix caching is off"
        return f"nothing was cached of {COLD_ANSWERS} prompts that it had served just before"

    def answered(self, cached_tokens: int | None) -> None:
        """Take in an answer to a prompt that it had served a moment before; None: the answer has no count."""
        if cached_tokens is None:
            self.uncounted += 1
        elif cached_tokens:
            self.hit = True
        else:
            self.cold = min(self.cold + 1, COLD_ANSWERS)

    def page_read(self, caches: bool | None, hit_tokens: int | None) -> None:
        """Take in its metrics page: its setting, and the cached tokens that it has counted since it began."""
        if caches is not None:
            self._set(self.by_page, caches)
            self.by_page = caches
        if hit_tokens:
            self.hit = True
        elif hit_tokens == 0:
            # a missing count alone shows nothing: vLLM does not count without `--enable-prompt-tokens-details`
            self.cold = min(self.cold + self.uncounted, COLD_ANSWERS)
        self.uncounted = 0

    def server_info_read(self, caches: bool) -> None:
        self._set(self.by_server_info, caches)
        self.by_server_info = caches

    def _set(self, before: bool | None, now: bool) -> None:
        """Forget what answers showed if a setting differs from what it was: this is another process."""
        if before is not None and before is not now:
            self.hit, self.cold, self.uncounted = False, 0, 0

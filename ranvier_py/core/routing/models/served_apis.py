"""Which paths an engine lacks, so that a request without a model finds one that serves its API. Pure.

Evidence, the first that says anything: the tasks of its model cards; SGLang's page on its model; vLLM's OpenAPI
document, since vLLM mounts the paths of its model's tasks alone. Where none does, its refusals show it
(`blame.refusals`). Bound: the paths of `PATHS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ranvier_py.core.prompts.body_json import engine_json
from ranvier_py.core.routing.backend import Card
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, PATHS, REALTIME_PATH

GENERATING = frozenset(path for path, rule in PATHS.items() if rule.teaches or path.startswith(MESSAGES_PATH))
EMBEDDINGS = frozenset((b"/v1/embeddings",))
POOLING = EMBEDDINGS | {path for path in PATHS if re.search(rb"rerank|score|classify|pooling", path)}

TASK_MEMBERS = ("task", "tasks", "type", "model_type", "mode", "capabilities", "supported_tasks")
"""Of model cards: of Infinity, LiteLLM, LM Studio, LocalAI, Mistral, Together and others. Those of vLLM and SGLang have
none."""
GENERATES = re.compile(r"chat|complet|generat|\b[lv]lm\b", re.IGNORECASE)
POOLS = re.compile(r"embed|rerank|scor|classif|reward|pooling", re.IGNORECASE)

OPENAPI, MODEL_INFO = "/openapi.json", "/get_model_info"
PAGES = {"vllm": OPENAPI, "sglang": MODEL_INFO}  # by what their cards say that they are owned by
DOCUMENTED = re.compile(rb'"(/[a-z0-9_/]{1,64})"\s*:')


def lacked_by_cards(cards: Sequence[Card]) -> frozenset[bytes] | None:
    """Return the paths that an engine with these cards lacks; None if one of them does not say what it is for."""
    generates = pools = False
    for card in cards:
        words = " ".join(tasks_of(card))
        is_generator, is_pooler = GENERATES.search(words) is not None, POOLS.search(words) is not None
        if not (is_generator or is_pooler):
            return None
        generates, pools = generates or is_generator, pools or is_pooler
    return (frozenset() if generates else GENERATING) | (frozenset() if pools else POOLING) if cards else None


def tasks_of(card: Card) -> Iterator[str]:
    """Yield the words of a card for what its model does: texts, lists of them, or names of what is true."""
    for name in TASK_MEMBERS:
        value: Any = card.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from (str(word) for word, holds in value.items() if holds is True)
        elif isinstance(value, list):
            yield from (word for word in value if isinstance(word, str))


def page_for(owners: Iterable[str]) -> str | None:
    """Return the page that says what such an engine serves, if it has one."""
    return next((PAGES[owner] for owner in sorted(owners) if owner in PAGES), None)


def lacked_by_page(page: str, body: bytes) -> frozenset[bytes] | None:
    """Return the paths that an engine lacks by its page; None if that does not say."""
    if page == OPENAPI:
        documented = PATHS.keys() & set(DOCUMENTED.findall(body))
        return frozenset(PATHS) - documented - {REALTIME_PATH} if documented else None  # WebSockets are never there
    shown = engine_json(body)
    generates = shown.get("is_generation") if isinstance(shown, dict) else None
    if not isinstance(generates, bool):
        return None
    return EMBEDDINGS if generates else GENERATING

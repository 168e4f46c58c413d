"""The paths of the public port that make an engine compute: how a body is read, placed, learned from and sent again.

The documents repeat this table (`table`, held by a test). Any other path under /v1/ is passed on as it came, to any
engine, and sent once: files, batches and whatever else an engine may keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

CHAT_PATH = b"/v1/chat/completions"
COMPLETION_PATH = b"/v1/completions"
MESSAGES_PATH = b"/v1/messages"
RESPONSES_PATH = b"/v1/responses"
EMBEDDINGS_PATH = b"/v1/embeddings"
REALTIME_PATH = b"/v1/realtime"

PREFIX, LOAD, OWNER = "by prefix", "by load", "by prefix; to the engine that keeps the response it names"
OPEN_LOAD = "by load, and counts as load while it is open"
ALWAYS, UNSTORED, NEVER = "yes", "with `store: false`", "no"

VLLM, SGLANG, BOTH = "vLLM", "SGLang", "vLLM, SGLang"


class PathRule(NamedTuple):
    """What is done with the POSTs of one path, or with the WebSockets of REALTIME_PATH.

    `engines`: those that serve it. `reader`: how its body is read, as a chat API of `prompts.request_apis`, as
    "completion" or "generate", or for its model only (""). `repeated`: whether it may be sent again once a part was.
    """

    engines: str
    reader: str = ""
    placed: str = LOAD
    repeated: str = ALWAYS

    @property
    def teaches(self) -> bool:
        """Whether routes are learned from it."""
        return self.placed not in (LOAD, OPEN_LOAD)


PATHS: Mapping[bytes, PathRule] = {
    CHAT_PATH: PathRule(BOTH, "chat", PREFIX),
    COMPLETION_PATH: PathRule(BOTH, "completion", PREFIX),
    MESSAGES_PATH: PathRule(BOTH, "messages", PREFIX),
    RESPONSES_PATH: PathRule(BOTH, "responses", OWNER, UNSTORED),
    b"/generate": PathRule(SGLANG, "generate", PREFIX),
    b"/v1/messages/count_tokens": PathRule(BOTH),
    EMBEDDINGS_PATH: PathRule(BOTH),
    b"/v1/rerank": PathRule(BOTH),
    b"/rerank": PathRule(VLLM),
    b"/v2/rerank": PathRule(VLLM),
    b"/v1/score": PathRule(BOTH),
    b"/score": PathRule(VLLM),
    b"/v1/classify": PathRule(BOTH),
    b"/classify": PathRule(VLLM),
    b"/v1/pooling": PathRule(VLLM),
    b"/pooling": PathRule(VLLM),
    b"/v1/tokenize": PathRule(SGLANG),
    b"/tokenize": PathRule(BOTH),
    b"/v1/detokenize": PathRule(SGLANG),
    b"/detokenize": PathRule(BOTH),
    b"/v1/audio/transcriptions": PathRule(VLLM),
    b"/v1/audio/translations": PathRule(VLLM),
    REALTIME_PATH: PathRule(VLLM, placed=OPEN_LOAD, repeated=NEVER),
}

ANSWERED_AS: Mapping[bytes, str] = {
    path: rule.reader or path.rsplit(b"/", 1)[1].decode() for path, rule in PATHS.items()
}
"""By path, the API that tells an answer from others (`answer_events`)."""

SEGMENTS_MAX = max(path.count(b"/") for path in PATHS) - 1  # behind /v1

FORM_PATHS = frozenset((b"/v1/audio/transcriptions", b"/v1/audio/translations"))
"""Those whose bodies are forms; all others take JSON."""


COUNTING_PATHS = frozenset(
    (b"/v1/messages/count_tokens", b"/v1/tokenize", b"/tokenize", b"/v1/detokenize", b"/detokenize")
)
"""Those by which clients count or look at tokens, for which an engine computes none."""


def meant_path(path: bytes) -> bytes:
    """Return the path under /v1/ that a client means which has lost, doubled or misplaced that; b"" if it is none."""
    names = path.rstrip(b"/").rsplit(b"/", SEGMENTS_MAX)[1:]
    tails = (b"/v1/" + b"/".join(names[begin:]) for begin in range(len(names)))
    return next((tail for tail in tails if tail in PATHS or tail == b"/v1/models"), b"")


def table() -> str:
    """The table for the documents, in Markdown."""
    rows = ["| path | engines | placed | teaches | sent again |", "|---|---|---|---|---|"]
    for path, rule in PATHS.items():
        teaches = "yes" if rule.teaches else "no"
        rows.append(f"| `{path.decode()}` | {rule.engines} | {rule.placed} | {teaches} | {rule.repeated} |")
    return "\n".join(rows) + "\n"

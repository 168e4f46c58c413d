"""Reads the members of a body that clients of different APIs and engines spell differently."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier_py.core.prompts.body_json import NAME_CHARACTERS_MAX, object_of
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.reserved_members import STORED_MEMBERS

MESSAGES_MAX = 2048
"""Longer chats are placed by load. So many messages take 6 ms to chain, 4 ms to learn by text and 12 by tokens, and a
peer that learns of them 27 ms."""

MESSAGES_FREE = 512
MESSAGE_BYTES_MIN = 128
"""Bytes on average that each message beyond the first MESSAGES_FREE must have. A chat of shorter messages is placed by
load, because remembering a message takes 350 bytes."""

TOKEN_ID_MAX = 2**32 - 1  # ids are hashed as 32-bit numbers

ABSENT, OWN, OPEN = "absent", "own", "open"
"""What a body has as `stream_options`: none; some that must not be touched, since they ask for counts or are no
options; or some that leave open whether counts are wanted."""

PREFIX_TOKENS_MAX = 1 << 16
"""A longer `prefix_len` is ignored."""

TRUNCATE = "truncate_prompt_tokens"
"""Member with the number of tokens that vLLM keeps of a longer prompt, by default the last; -1: as many as fit."""

TRUNCATED_TOKEN_BYTES = 2  # least bytes of a body for each token, on average: texts have three or more

UNCOUNTED_MEMBERS = frozenset(("prompt_logprobs", "echo", "logprob_start_len", "n", "best_of", "tool_choice"))
"""Members that may make an engine count other tokens as cached than it holds of the prompt, see `counts_differ`."""

SESSION_MEMBERS = frozenset(("prompt_cache_key", "session_params", "vllm_xargs", "nvext", "metadata", "user"))
"""Members that may name a session."""

CONTEXT_BYTES_MAX = 16 * 1024  # of an `agentic_context` in JSON; its definition allows no more

ACCOUNT_SESSION = re.compile(r"user_[0-9A-Za-z]+_account_[0-9A-Za-z-]*_session_([0-9A-Za-z-]+)")
"""How Claude Code before 2.1.78 names user and session in one text; since then it sends an object in JSON. LiteLLM
passes it on to engines as `user`."""


TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "documents")
EFFORT_FIELDS = ("reasoning_effort", "reasoning", "thinking", "output_config")
CACHE_FIELDS = ("extra_key", "mm_processor_kwargs", "media_io_kwargs")
NAMESPACE_FIELDS = (
    *("model", "cache_salt", "lora_path", "tools", "tool_choice", "add_special_tokens"),
    *(*TEMPLATE_FIELDS, *EFFORT_FIELDS, *STORED_MEMBERS, *CACHE_FIELDS),
)
"""Members of a body that change the whole rendered text, or that keep caches apart: the namespace of text fingerprints.
CACHE_FIELDS belong to the namespace of tokens (`prompts.namespaces`), too: SGLang's own key of a cache, and members
that make other tokens of the same media. STORED_MEMBERS name a history that only an engine has."""

REPLACING = {
    "chat": ("input_ids",),
    "completion": ("prompt_embeds",),
    "generate": ("input_embeds", "image_data", "video_data", "audio_data"),
}
"""Members, by API, that engines take instead of the prompt that we read, or insert into it."""


def names_stored(fields: Mapping[str, Any]) -> bool:
    """Whether the engine puts a history that it keeps before the messages of this body."""
    return any(fields.get(name) for name in STORED_MEMBERS)


def replaces_prompt(fields: Mapping[str, Any], api: str) -> str:
    """Return why the engine does not compute the prompt that these members show ("members", "stored"), or "".

    If `session_params` have an `id`, SGLang puts the session that it keeps under that id before the prompt.
    """
    for name in REPLACING.get(api, ()):
        if fields.get(name) is not None:
            return "members"
    return "stored" if "session_params" in fields and member_of(fields["session_params"], "id") else ""


UNUSUAL_MEMBERS = frozenset((TRUNCATE, "stream_options", "prefix_len", "store")) | UNCOUNTED_MEMBERS | SESSION_MEMBERS
"""Members, besides those of the namespace, that a Prompt is built from, and that not every body has."""


def namespace_member(name: str, value: Any) -> Any:
    """Return the part of a member that belongs to a namespace; None if its absence would mean the same. Idempotent."""
    if name == "tool_choice":
        return limited_tools(value)
    if name == "add_special_tokens":
        return str(value) if value is not None else None
    if name == "reasoning_effort" and type(value) in (int, float):
        return str(value)
    if type(value) is dict:
        if name == "reasoning":
            kept = [value.get(each) for each in ("effort", "reasoning_effort", "enabled", "enable")]
            return kept if any(each is not None for each in kept) else None
        if name == "thinking":
            return value.get("type")
        if name == "output_config":
            return value.get("effort")
    return value


def limited_tools(choice: Any) -> Any:
    """Return the part of a `tool_choice` that may keep an engine from rendering some tools; None if it allows all."""
    if type(choice) is dict and choice.get("type") in ("auto", "any", "none"):  # Anthropic's form
        choice = choice["type"]
    return None if choice in ("auto", "any", "required") else choice


def effort_of(fields: Mapping[str, Any]) -> Any:
    """Return how much reasoning these members ask for, by the rules with which vLLM derives `reasoning_effort`."""
    disabled = "none" if member_of(fields.get("thinking"), "type") == "disabled" else None
    for effort in (
        fields.get("reasoning_effort"),
        member_of(fields.get("reasoning"), "effort"),
        member_of(fields.get("output_config"), "effort"),
    ):
        if effort is not None:
            return effort
    return disabled


def template_members(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's extra arguments, derived as in vLLM (chat_completion/protocol.py, `build_chat_params`)."""
    found = {name: fields[name] for name in TEMPLATE_FIELDS if fields.get(name)}
    effort = effort_of(fields)
    if effort is not None:
        given = found.get("chat_template_kwargs")
        own = given if type(given) is dict else {}
        found["chat_template_kwargs"] = {"enable_thinking": effort != "none", **own, "reasoning_effort": effort}
    return found


def misfit(fields: Mapping[str, Any], messages: object, size: int) -> str:
    """Return why a body of `size` bytes is not read as a chat ("schema", "model", "messages"); empty if it is."""
    if not isinstance(messages, list) or not messages or not are_objects(messages):
        return "schema"
    if not has_name(fields):
        return "model"
    return "" if are_few(len(messages), size) else "messages"


def are_objects(messages: Sequence[object]) -> bool:
    for message in messages:  # noqa: SIM110  # twice as fast as a generator
        if type(message) is not dict:
            return False
    return True


def are_few(messages: int, size: int) -> bool:
    """Whether a body of `size` bytes may have so many messages (MESSAGES_MAX, MESSAGE_BYTES_MIN)."""
    return messages <= min(MESSAGES_MAX, MESSAGES_FREE + size // MESSAGE_BYTES_MIN)


def has_name(fields: Mapping[str, Any]) -> bool:
    """Whether the model's name is short enough to keep, or there is none."""
    model = fields.get("model")
    return type(model) is not str or len(model) <= NAME_CHARACTERS_MAX


def with_short_name(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the members with a name of a model that is short enough to keep; one that was longer is in no list."""
    return fields if has_name(fields) else {**fields, "model": f"{fields['model'][:NAME_CHARACTERS_MAX]}…"}


def first_prompt(fields: Mapping[str, Any]) -> tuple[object, bool]:
    """Return `prompt` of a completion, or `text` or `input_ids` of SGLang's /generate, or the first if it is a list of
    several; and whether there are more."""
    found = next((fields[name] for name in ("prompt", "text", "input_ids") if fields.get(name) is not None), None)
    if isinstance(found, list) and found and isinstance(found[0], (str, list)):
        return found[0], len(found) > 1
    return found, False


def stream_options(fields: Mapping[str, Any]) -> str:
    """Return whether `stream_options` ask for counts or must not be touched (OWN), or leave counts open (OPEN)."""
    options = fields["stream_options"]
    if options in (OWN, OPEN):  # a value that `kept_members` stored
        return str(options)
    if options is not None and type(options) is not dict:
        return OWN
    asks = options and (options.get("include_usage") or options.get("continuous_usage_stats"))
    return OWN if asks else OPEN


def prefix_len(fields: Mapping[str, Any]) -> int:
    """Return the length in tokens of the prompt's beginning that `prefix_len` names; 0 if the value makes no sense."""
    length = fields["prefix_len"]
    return length if type(length) is int and 0 < length <= PREFIX_TOKENS_MAX else 0


def may_be_cut(fields: Mapping[str, Any], size: int) -> bool:
    """Whether an engine may cut the prompt of a body of `size` bytes, so that it would not hold what we learn."""
    most = fields.get(TRUNCATE)
    return type(most) is int and 0 <= TRUNCATED_TOKEN_BYTES * most < size


def counts_differ(fields: Mapping[str, Any]) -> bool:
    """Whether an engine's counts do not show which part of the prompt it holds.

    For log probabilities of the prompt, engines compute all of it anew: vLLM with `prompt_logprobs`, which `echo` sets;
    SGLang from `logprob_start_len` on. Several choices may be counted as several prompts. Tools that `tool_choice`
    excludes are in the prompts of vLLM, by default, and not in SGLang's.
    """
    if UNCOUNTED_MEMBERS.isdisjoint(fields):
        return False
    several = any(type(choices := fields.get(name)) is int and choices > 1 for name in ("n", "best_of"))
    start = fields.get("logprob_start_len")
    anew = fields.get("prompt_logprobs") is not None or fields.get("echo") is True
    some = bool(fields.get("tools")) and limited_tools(fields.get("tool_choice")) is not None
    return several or anew or some or (type(start) is int and start >= 0)


def kept_members(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members to remember, besides the namespace, that a Prompt is built from. Their size is bounded."""
    kept: dict[str, Any] = {}
    if "stream" in fields:
        kept["stream"] = fields["stream"] is True
    if "stream_options" in fields:
        kept["stream_options"] = stream_options(fields)
    if "prefix_len" in fields:
        kept["prefix_len"] = prefix_len(fields)
    if TRUNCATE in fields:
        kept[TRUNCATE] = fields[TRUNCATE] if type(fields[TRUNCATE]) is int else None
    if "store" in fields:
        kept["store"] = fields["store"] is not False
    if counts_differ(fields):
        kept["echo"] = True
    if name := session_name(fields):
        kept["prompt_cache_key"] = name
    return kept


def session_name(fields: Mapping[str, Any]) -> str:
    """Return the name that a body gives its session; empty if none.

    Sources in this order: `prompt_cache_key` of OpenAI's clients; vLLM's `session_params`; the context that agents send
    to routers of vLLM and Dynamo; `metadata` of Claude Code, and what LiteLLM makes of it. A plain `user` name is not a
    session, because all requests of an application may have the same one.
    """
    if SESSION_MEMBERS.isdisjoint(fields):
        return ""
    name = (
        fields.get("prompt_cache_key")
        or member_of(fields.get("session_params"), "session_id")
        or member_of(context_of(member_of(fields.get("vllm_xargs"), "agentic_context")), "session_id")
        or member_of(member_of(fields.get("nvext"), "agent_context"), "session_id")
        or user_session(member_of(fields.get("metadata"), "user_id"))
        or user_session(fields.get("user"))
    )
    return name if type(name) is str and len(name) <= NAME_CHARACTERS_MAX else ""


def member_of(value: object, name: str) -> Any:
    """Return this member of `value` if that is an object; else None."""
    return value.get(name) if type(value) is dict else None


def context_of(value: object) -> object:
    """Return an agent's context, parsed if it came as JSON of at most CONTEXT_BYTES_MAX."""
    if type(value) is not str:
        return value
    is_json = value.startswith("{") and len(value) <= CONTEXT_BYTES_MAX
    return object_of(value.encode("utf-8", "surrogatepass")) if is_json else None


def user_session(user: object) -> Any:
    """Return the session that is encoded in the name of a user; None if there is none."""
    if type(user) is not str or len(user) > NAME_CHARACTERS_MAX:
        return None
    if user.startswith("{"):
        return member_of(context_of(user), "session_id")
    found = ACCOUNT_SESSION.fullmatch(user)
    return found[1] if found is not None else None


def is_short(value: object) -> bool:
    """Whether a member is kept as it is: a short text, or bytes, which are a digest already."""
    return type(value) is bytes or (type(value) is str and len(value) <= NAME_CHARACTERS_MAX)


def token_ids(value: object) -> TokenIds | None:
    """Return the token ids of a completion prompt as an array; None if `value` is not a list of valid ids."""
    if not isinstance(value, list) or set(map(type, value)) != {int} or min(value) < 0 or max(value) > TOKEN_ID_MAX:
        return None
    return np.array(value, dtype=np.uint32)

"""Renders the messages of a chat one by one where `template_probe` has shown that the template allows it.

Rule: a *plain* message (a role and a string) is its content between two fixed texts, the Affixes of its role. Any
other is rendered in a short *window* (`window_pieces`), and its piece is what the window's text grows by. Where a
rendered start is no prefix of the longer text, there is no cut, and the text belongs to the next piece. A cut also
needs a marker on one side: a special token at which the tokenizer always cuts. Messages are first normalised as vLLM
does before it renders (vllm/entrypoints/chat_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat, Message

Render = Callable[[Chat], str]
"""The template: normalised messages -> text without a generation prompt. Raises TemplateRefused."""

Pieces = list[str | None]
"""The text of each message; None if there is no cut at its end and the next piece includes its text."""

PLAIN_ROLES = ("user", "assistant", "system")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
MEDIA_PARTS = {"image_url": "image", "input_image": "image", "input_audio": "audio", "audio_url": "audio"}
THINK_END = "</think>"  # marks reasoning that a client sends back inside the content

ENDS_MAX = 128
"""Ends of messages looked for in one window or conversation, the deepest first: each costs a rendering."""

CLOSER = {"role": "user", "content": "-"}
"""Added behind an assistant message that is rendered differently while it is the last one."""


@dataclass(frozen=True, slots=True)
class Affixes:
    """The texts around the content of a plain message. `strip`: the template strips the content."""

    before: str
    after: str
    strip: bool
    empty: bool  # whether the affixes hold for empty content, too


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What the probe found out about one template with one tokenizer.

    `hoists_system`: system messages are rendered before all others, wherever they stand; all else here was found out
    with chats in which they come first. The first `settled` messages may depend on the tools. `trailer` is what a text
    without a generation prompt ends with behind its messages. `closing`: an assistant message is rendered differently
    while it is the last one. `reasoning_moves`: later turns leave out earlier reasoning; `results` are beginnings and
    ends of those messages of a user that do not begin such a turn (`is_question`). `arguments_matter`: extra arguments
    change pieces. `markers` are tokens that cut any text; `starter` is the one that starts each message. `quoting` are
    texts that may make the template treat a content specially, `exact` those that may do so only as the whole.
    """

    parts: bool = False
    keeps_turns: bool = False
    hoists_system: bool = False
    incremental: bool = False
    windows: bool = False
    closing: bool = False
    reasoning_moves: bool = False
    results: tuple[tuple[str, str], ...] = ()
    arguments_matter: bool = False
    trailer: str = ""
    settled: int = 1
    affixes: Mapping[str, Affixes] = field(default_factory=dict)
    markers: tuple[str, ...] = ()
    starter: str = ""
    quoting: tuple[str, ...] = ()
    exact: frozenset[str] = frozenset()
    reason: str = ""


def normalise(message: Message, parts: bool) -> dict[str, Any]:
    """Return a message as vLLM gives it to the template.

    Null content becomes empty. Parts are kept and strings wrapped if the template reads `parts`, else parts are joined
    by newlines; media become a placeholder. Arguments of tool calls are parsed. Unknown members are dropped.
    Raises TemplateRefused for what vLLM would refuse.
    """
    try:
        role = message["role"]
        found: dict[str, Any] = {"role": role, "content": content_of(message.get("content"), parts and role != "tool")}
        if role == "assistant":
            if message.get("tool_calls"):
                found["tool_calls"] = [parse_call(call) for call in message["tool_calls"]]
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            if reasoning is not None:
                found["reasoning"] = found["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            found["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            found["name"] = message["name"]
        if role == "developer":
            found["tools"] = message.get("tools")
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise TemplateRefused(f"a message is not understood: {error!r}") from error


def content_of(content: object, parts: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if parts else content
    if content is None:
        return [] if parts else ""
    if not isinstance(content, list):
        raise TypeError(f"content is a {type(content).__name__}")
    texts = [text for text in map(part_of, content) if text is not None]
    return texts if parts else "\n".join(str(part.get("text", f"<{part['type']}>")) for part in texts)


def part_of(part: Any) -> dict[str, str] | None:
    """Return a content part as the template sees it. Media become placeholders; fingerprints cover their digests."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") or "image_url"
    if kind not in TEXT_PARTS:
        return {"type": MEDIA_PARTS.get(kind, kind if isinstance(kind, str) else "unknown")}
    text = part.get(TEXT_PARTS[kind])
    return None if text is None else {"type": "text", "text": str(text)}


def parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object; unreadable JSON becomes an empty one, as in vLLM."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    elif not isinstance(arguments, (dict, list)):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def normalise_tool(tool: Any) -> Any:
    """Return a tool as vLLM gives it to the template, whatever a client left out, added or reordered.

    A tool that is no function stays as it came.
    """
    function = tool.get("function") if type(tool) is dict and tool.get("type", "function") == "function" else None
    if type(function) is not dict:
        return tool
    found = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    more = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    found.update({name: value for name, value in more.items() if value is not None})
    outer = {"type": "function", "function": found}
    return outer if deferred is None else {**outer, "defer_loading": deferred}


def thinks(message: Message) -> bool:
    """Whether a message carries reasoning, which later turns may leave out."""
    if message.get("role") != "assistant":
        return False
    if message.get("reasoning_content") or message.get("reasoning"):
        return True
    return THINK_END in str(message.get("content"))


def is_question(message: Message, results: Sequence[tuple[str, str]]) -> bool:
    """Whether this message begins a turn: a user's does, unless the template takes it for the result of a tool."""
    if message.get("role") != "user":
        return False
    content = message.get("content") if results else ""
    if type(content) is list:
        content = "\n".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return not any(str(content).startswith(begin) and str(content).endswith(end) for begin, end in results)


def is_behind_reasoning(before: bool, message: Message, results: Sequence[tuple[str, str]]) -> bool:
    """Whether the end of `message` stands behind reasoning of its turn. `before`: the previous end does."""
    return thinks(message) or (before and not is_question(message, results))


def piece_of_plain(message: Message, profile: TemplateProfile) -> str | None:
    """Return the text of a plain message; None if it is not plain. The hot path: nothing here runs a template."""
    if len(message) != 2:
        return None
    content = message.get("content")
    affixes = profile.affixes.get(message.get("role", ""))
    if affixes is None or type(content) is not str:
        return None
    if profile.quoting and any(text in content for text in profile.quoting):
        return None
    if affixes.strip:
        content = content.strip()
    if content in profile.exact or (not content and not affixes.empty):
        return None
    return affixes.before + content + affixes.after


def history_text(chat: Chat, profile: TemplateProfile, render: Render) -> str:
    """Return the text that a longer chat begins with: no trailer, and the last message as later turns have it."""
    if not profile.closing or chat.messages[-1].get("role") != "assistant":
        return render(chat).removesuffix(profile.trailer)
    text = render(Chat([*chat.messages, normalise(CLOSER, profile.parts)], chat.tools, chat.template))
    closer = piece_of_plain(CLOSER, profile)
    text = text.removesuffix(profile.trailer)
    if closer is None or not text.endswith(closer):
        raise TemplateRefused("the end of an assistant message is not found")
    return text.removesuffix(closer)


def window_pieces(chat: Chat, known: int, profile: TemplateProfile, render: Render) -> Pieces | None:
    """Return the pieces of the messages after the first `known` (> 0), rendered in a window: the leading system
    message, the messages from the last question on, and these; with reasoning that later turns may leave out, all up to
    the next question, which decides about it.

    None if they don't add up: if the text of the window before them is no prefix of the whole, or no cut is behind it.
    `chat` is normalised. Renders the window up to ENDS_MAX times.
    """
    messages = chat.messages
    start = last_question(messages[:known], profile.results)
    head = list(messages[:1]) if start and messages[0].get("role") == "system" else []
    before = Chat([*head, *messages[start:known]], chat.tools, chat.template)
    whole = Chat([*before.messages, *messages[known:]], chat.tools, chat.template)
    try:
        base, text = history_text(before, profile, render), history_text(whole, profile, render)
    except TemplateRefused:
        return None
    if not text.startswith(base) or not is_cut(text, len(base), profile.markers):
        return None
    return split_by_prefixes(whole, len(before.messages), len(base), text, profile, render)


def split_by_prefixes(
    whole: Chat, known: int, begin: int, text: str, profile: TemplateProfile, render: Render
) -> Pieces | None:
    """Cut `text` from `begin` on wherever a message after `known` ends, if that start is a prefix and may be cut."""
    pieces: Pieces = []
    for at in prefix_ends(whole, known, text, profile, render):
        if at < begin or not is_cut(text, at, profile.markers):
            pieces.append(None)
        else:
            pieces.append(text[begin:at])
            begin = at
    return pieces if pieces and pieces[-1] is not None else None


def prefix_ends(whole: Chat, known: int, text: str, profile: TemplateProfile, render: Render) -> list[int]:
    """Return where the messages after `known` end in `text`: -1 if no prefix, or not among the last ENDS_MAX."""
    count = len(whole.messages)
    ends = []
    for size in range(known + 1, count):
        found = -1
        if size >= count - ENDS_MAX:
            found = prefix_end(Chat(whole.messages[:size], whole.tools, whole.template), text, profile, render)
        ends.append(found)
    return [*ends, len(text)] if count > known else []


def prefix_end(chat: Chat, text: str, profile: TemplateProfile, render: Render) -> int:
    try:
        prefix = history_text(chat, profile, render)
    except TemplateRefused:
        return -1
    return len(prefix) if text.startswith(prefix) else -1


def is_cut(text: str, at: int, markers: tuple[str, ...]) -> bool:
    """Whether a special token begins or ends at `at`, so that both sides tokenize alone as they do together."""
    return at == len(text) or at == 0 or text.startswith(markers, at) or text.endswith(markers, 0, at)


def chat_pieces(chat: Chat, profile: TemplateProfile, render: Render) -> tuple[str, Pieces | None]:
    """Return the text of a whole chat, and its pieces if they add up to it. `chat` is normalised.

    Raises TemplateRefused. Renders the whole once, and then the leading messages and those that are not plain.
    """
    text = history_text(chat, profile, render)
    if not profile.incremental:
        return text, None
    count = len(chat.messages)
    lead = min(profile.settled, count)
    if lead < count and prefix_end(part(chat, lead), text, profile, render) < 0:
        lead = count  # nothing to build on: look for every end
    lead_text = history_text(part(chat, lead), profile, render)
    pieces = split_by_prefixes(part(chat, lead), 0, 0, lead_text, profile, render)
    rest = grown(chat, lead, profile, render)
    if pieces is None or rest is None:
        return text, None
    pieces.extend(rest)
    return text, pieces if "".join(piece for piece in pieces if piece is not None) == text else None


def part(chat: Chat, count: int) -> Chat:
    return Chat(chat.messages[:count], chat.tools, chat.template)


def grown(chat: Chat, known: int, profile: TemplateProfile, render: Render) -> Pieces | None:
    """Return the pieces after `known`: plain messages one by one, runs of others in windows. `chat` is normalised."""
    pieces: Pieces = []
    plain = [piece_of_plain(unwrapped(message), profile) for message in chat.messages]
    at = known
    while at < len(plain):
        if plain[at] is not None:
            pieces.append(plain[at])
            at += 1
            continue
        stop = next((index for index in range(at, len(plain)) if plain[index] is not None), len(plain))
        if profile.reasoning_moves and any(map(thinks, chat.messages[at:stop])):
            asking = (is_question(message, profile.results) for message in chat.messages[at:])
            stop = next((index for index, asks in enumerate(asking, at + 1) if asks), len(plain))
        run = window_pieces(part(chat, stop), at, profile, render) if profile.windows else None
        if run is None:
            return None
        pieces.extend(run)
        at = stop
    return pieces


def unwrapped(message: Message) -> Message:
    """Return a message whose only part is a text as a plain one; any other as it is."""
    content = message.get("content")
    if type(content) is list and len(content) == 1 and content[0].get("type") == "text":
        return {**message, "content": content[0]["text"]}
    return message


def tail_pieces(
    tail: Sequence[Message], context: Callable[[], Chat], known: int, profile: TemplateProfile, render: Render
) -> Pieces | None:
    """Return the pieces of the messages after the first `known` ones; None if that takes the whole conversation.

    Calls `context()` only if a message is not plain, `known` < `settled` or arguments matter. Raises TemplateRefused.
    """
    if not profile.incremental or known <= 0 or not tail:
        return None
    if known >= profile.settled and not profile.arguments_matter:
        texts = plain_pieces(tail, profile)
        if texts is not None:
            return texts
    if not profile.windows:
        return None
    chat = context()
    if (profile.arguments_matter and chat.template) or len(chat.messages) != known + len(tail):
        return None
    whole = Chat([normalise(message, profile.parts) for message in chat.messages], chat.tools, chat.template)
    if known < profile.settled:
        return window_pieces(whole, known, profile, render)
    return grown(whole, known, profile, render)


def plain_pieces(tail: Sequence[Message], profile: TemplateProfile) -> Pieces | None:
    """Return the pieces of messages that are all plain, else None."""
    texts: Pieces = []
    for message in tail:
        text = piece_of_plain(message, profile)
        if text is None:  # an SDK that echoes an answer adds empty members
            text = piece_of_plain(unwrapped(normalise(message, profile.parts)), profile)
        if text is None:
            return None
        texts.append(text)
    return texts


def last_question(messages: Sequence[Message], results: Sequence[tuple[str, str]]) -> int:
    """Return the index of the last question, or 0."""
    return next((at for at in range(len(messages) - 1, -1, -1) if is_question(messages[at], results)), 0)


def stable_count(messages: Sequence[Message], results: Sequence[tuple[str, str]]) -> int:
    """Count the messages before the reasoning that the next question removes: the first since the last question."""
    count = len(messages)
    asked = last_question(messages, results)
    return next((at for at in range(asked, count) if thinks(messages[at])), count)


def content_length(message: Message) -> int:
    """Return the characters of a normalised message, for estimates."""
    content = message.get("content")
    length = len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content or ())
    return length + sum(len(json.dumps(call["function"])) for call in message.get("tool_calls", ()))

"""Converts the bodies of all request APIs that carry a conversation to chats, the canonical form, as engines do.

Invariant: chats share boundaries as far as an engine renders them alike, whichever API they came by
(test_request_apis.py).
Rule: members that no engine renders are left out: `cache_control`, ids of items, signatures, error marks. Unknown
members stay as they came, so that two bodies that differ in them never match. Each item is converted on its own,
except that items of one answer are joined (`one_answer`). Nothing raises. Sources: vLLM's
entrypoints/anthropic/serving.py and entrypoints/openai/responses/utils.py; SGLang's entrypoints/anthropic/serving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.prompts.body_members import MESSAGES_MAX
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.fingerprint import plain_text

LEAD = "lead"
"""The member that `Api.members` adds for the messages before the history."""
SHAPED = frozenset(("tools", "system", "instructions", LEAD))  # members that a chat spells differently

TOOLS_MAX = 1024  # a longer list is left as it came

PIECES_MAX = 2 * MESSAGES_MAX  # in all contents that are converted to messages; each part has at least two bytes

TEXT_KINDS = ("text", "input_text", "output_text")
MESSAGES_TEXT_KINDS = ("text",)


class Api(NamedTuple):
    """One API. `number` keeps the digests of raw bytes of different APIs apart.

    `opening` begins a body with one null for all known items. `history` is the member with the items, `lead` the one
    that comes before them, if any. `marks` are texts near the beginning of an item, to find ends in raw bytes.
    `messages` converts an item to messages, `tool` converts a tool. `joins`: several items may become one message.
    """

    name: str
    number: int
    opening: bytes
    history: str
    lead: str
    marks: tuple[bytes, ...]
    messages: Callable[[Message], Sequence[Message]]
    tool: Callable[[Any], Any]
    joins: bool = False

    def members(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a body's members, as far as it has them, as a chat spells them, with the lead as messages (LEAD)."""
        if not self.lead or SHAPED.isdisjoint(fields):
            return fields
        found = dict(fields)
        found.pop(LEAD, None)  # the client's own, which engines do not know
        tools = fields.get("tools")
        if type(tools) is list and len(tools) <= TOOLS_MAX:
            found["tools"] = [self.tool(tool) if type(tool) is dict else tool for tool in tools]
        if self.lead in fields:
            found[LEAD] = lead_of(fields[self.lead])
        return found

    def items(self, fields: Mapping[str, Any]) -> Any:
        """Return the history of a body, of whatever type. A plain text of /v1/responses is one message of the user."""
        found = fields.get(self.history)
        return [{"role": "user", "content": found}] if type(found) is str and self.name == "responses" else found

    def chat(self, items: Sequence[Message]) -> list[Message]:
        """Return all messages that these items stand for."""
        return self.joined(items)[0] if self.joins else [message for item in items for message in self.messages(item)]

    def joined(self, items: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """Return the messages, items of one answer joined, and how many messages there are up to each item's end."""
        messages: list[Message] = []
        counts: list[int] = []
        for item in items:
            for message in self.messages(item):
                one = one_answer(messages[-1], message) if messages and message["role"] == "assistant" else None
                if one is None:
                    messages.append(message)
                else:
                    messages[-1] = one
            counts.append(len(messages))
        return messages, counts


def hoisted(messages: Sequence[Message]) -> list[Message]:
    """Return the messages in the order of a template that renders all system messages first."""
    systems = [message for message in messages if message.get("role") == "system"]
    return [*systems, *[message for message in messages if message.get("role") != "system"]]


def lead_of(value: Any) -> list[Message]:
    """Return `system` or `instructions` as messages; blocks of text are joined without a separator."""
    if not value:
        return []
    if type(value) is list:
        texts = [block.get("text") if is_kind(block, "text") else None for block in value]
        if all(type(text) is str for text in texts):
            value = "".join(text for text in texts if text is not None)
        else:
            value = [part_of_block(block) for block in value]
    return [{"role": "system", "content": value}]


def is_kind(value: Any, kind: str) -> bool:
    return type(value) is dict and value.get("type") == kind


def text_of_only(content: list[Any], kinds: tuple[str, ...]) -> str | None:
    """Return the text if the content is a single part of one of these kinds, as most are; else None."""
    if len(content) != 1 or type(part := content[0]) is not dict or part.get("type") not in kinds:
        return None
    text = part.get("text")
    return text if type(text) is str else None


def content_of_parts(parts: list[Any]) -> Any:
    """Return the text if there is one part and it is plain text, else all parts."""
    only = plain_text(parts[0]) if len(parts) == 1 else None
    return only if type(only) is str else parts


def pieces_of(items: Sequence[Message]) -> int:
    """Count the parts of these items' contents, those of tool results included: the work of reading them."""
    count = len(items)
    for item in items:
        content = item.get("content") or item.get("output") or item.get("summary")
        if type(content) is list:
            count += len(content)
            for block in content:
                inner = block.get("content") if type(block) is dict else None
                if type(inner) is list:
                    count += len(inner)
    return count


def itself(message: Message) -> Sequence[Message]:
    return (message,)


def messages_of_turn(item: Message) -> Sequence[Message]:
    """Return an item of /v1/messages as messages: tool results first, then the rest."""
    content = item.get("content")
    if type(content) is not list:
        if len(item) == 2:
            return (item,)
        return ({key: value for key, value in item.items() if key != "cache_control"},)
    only = text_of_only(content, MESSAGES_TEXT_KINDS) if len(item) == 2 else None
    if only is not None:
        return ({"role": item.get("role"), "content": only},)
    role = item.get("role")
    found: list[Message] = []
    parts: list[Any] = []
    calls: list[Any] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if type(block) is dict else None
        if kind == "tool_use":
            calls.append(call_of_block(block))
        elif kind == "tool_result" and role == "user":
            found += messages_of_result(block)
        elif kind == "thinking" and type(block.get("thinking")) is str:
            thoughts.append(block["thinking"])
        else:
            parts.append(part_of_block(block))
    message: dict[str, Any] = {key: value for key, value in item.items() if key not in ("content", "cache_control")}
    if parts or not (found or calls or thoughts):
        message["content"] = content_of_parts(parts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*found, message] if len(message) > 1 or not found else found


def part_of_block(block: Any) -> Any:
    """Return a content block as a chat's part: text, an image by its URL, or the block without `cache_control`."""
    if type(block) is not dict:
        return block
    kind = block.get("type")
    if kind == "text" and type(block.get("text")) is str:
        return {"type": "text", "text": block["text"]}
    source = block.get("source")
    if kind == "image" and type(source) is dict:
        url = source.get("url")
        if source.get("type") == "base64" and type(source.get("data")) is str:
            url = f"data:{source.get('media_type')};base64,{source['data']}"
        if type(url) is str:
            return {"type": "image_url", "image_url": {"url": url}}
    return {key: value for key, value in block.items() if key != "cache_control"}


def call_of_block(block: Mapping[str, Any]) -> Message:
    """Return a `tool_use` block as a tool call."""
    arguments = orjson.dumps(block.get("input") or {}).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def messages_of_result(block: Mapping[str, Any]) -> Sequence[Message]:
    """Return a `tool_result` as a message of role "tool", followed by its images as a message of the user."""
    content = block.get("content")
    images: list[Any] = []
    if type(content) is list:
        parts = [part_of_block(part) for part in content]
        images = [part for part in parts if is_kind(part, "image_url")]
        content = [part for part in parts if not is_kind(part, "image_url")]
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    return [result, {"role": "user", "content": images}] if images else [result]


def tool_of_schema(tool: Mapping[str, Any]) -> Any:
    """Return a tool of /v1/messages in a chat's form; one that the engine knows by its `type` stays as it came."""
    if "input_schema" not in tool or tool.get("type", "custom") != "custom":
        return {key: value for key, value in tool.items() if key != "cache_control"}
    function = {FUNCTION_MEMBERS[key]: tool[key] for key in FUNCTION_MEMBERS if tool.get(key) is not None}
    others = {key: value for key, value in tool.items() if key not in (*FUNCTION_MEMBERS, "cache_control", "type")}
    return {"type": "function", "function": function, **others}


FUNCTION_MEMBERS = {
    "name": "name",
    "description": "description",
    "input_schema": "parameters",
    "strict": "strict",
    "defer_loading": "defer_loading",
}
"""Members of a tool of /v1/messages -> members of a function, as vLLM renames them."""


def messages_of_item(item: Message) -> Sequence[Message]:
    """Return an item of /v1/responses as messages. Its own id is dropped, unless it refers to another item."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if type(content) is list:
            only = text_of_only(content, TEXT_KINDS)
            content = content_of_parts([part_of_input(part) for part in content]) if only is None else only
        return ({"role": item.get("role"), "content": content},)
    if kind == "function_call":
        function = {name: item[name] for name in ("namespace", "name", "arguments") if name in item}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return ({"role": "assistant", "tool_calls": [call]},)
    if kind == "function_call_output":
        output = item.get("output")
        if type(output) is list:
            output = [part_of_input(part) for part in output]
        return ({"role": "tool", "tool_call_id": item.get("call_id"), "content": output},)
    if kind == "reasoning":
        thoughts = [part.get("text") for part in list_of(item.get("content") or item.get("summary"))]
        found: dict[str, Any] = {
            "role": "assistant",
            "reasoning_content": "".join([text for text in thoughts if type(text) is str]),
        }
        if item.get("encrypted_content"):
            found["encrypted_content"] = item["encrypted_content"]
        return (found,)
    hidden = ("status",) if kind == "item_reference" else ("status", "id")
    return ({"role": "item", **{key: value for key, value in item.items() if key not in hidden}},)


PIECES = ("reasoning_content", "content", "tool_calls")


def one_answer(before: Message, message: Message) -> Message | None:
    """Join two messages of the assistant if the second continues the first (reasoning, then text, then calls; in any
    other order they stay apart); else None. Sealed reasoning stays alone.

    Source: vLLM's entrypoints/openai/responses/utils.py, `_construct_message_from_response_item`.
    """
    if before["role"] != "assistant" or "encrypted_content" in before or "encrypted_content" in message:
        return None
    reached = max([place for place, name in enumerate(PIECES) if name in before], default=-1)
    piece = next((place for place, name in enumerate(PIECES) if name in message), -1)
    if piece == reached == 2:
        return {**before, "tool_calls": [*before["tool_calls"], *message["tool_calls"]]}
    return {**before, **message} if piece > reached else None


def list_of(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none if `value` is no list."""
    return [part for part in value if type(part) is dict] if type(value) is list else []


def part_of_input(part: Any) -> Any:
    """Return a part of an item's content as a part of a chat."""
    if type(part) is not dict:
        return part
    kind = part.get("type")
    if kind in TEXT_KINDS and type(part.get("text")) is str:
        return {"type": "text", "text": part["text"]}
    if kind == "input_image" and type(part.get("image_url")) is str:
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def tool_of_function(tool: Mapping[str, Any]) -> Any:
    """Return a function of /v1/responses in a chat's form; any other tool stays as it came."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


OPENING = b'{"messages":[null'
CHAT = Api(
    name="chat",
    number=0,
    opening=OPENING,
    history="messages",
    lead="",
    marks=(b'"role"',),
    messages=itself,
    tool=itself,
)
MESSAGES = Api(
    name="messages",
    number=1,
    opening=OPENING,
    history="messages",
    lead="system",
    marks=(b'"role"',),
    messages=messages_of_turn,
    tool=tool_of_schema,
)
RESPONSES = Api(
    name="responses",
    number=2,
    opening=b'{"input":[null',
    history="input",
    lead="instructions",
    marks=(b'"role"', b'"function_call', b'"reasoning",'),
    messages=messages_of_item,
    tool=tool_of_function,
    joins=True,
)
APIS: Mapping[str, Api] = {api.name: api for api in (CHAT, MESSAGES, RESPONSES)}


def is_tangled(items: Sequence[Message], api: Api) -> bool:
    """Whether the contents of these items have too many parts to be converted to messages (PIECES_MAX)."""
    return api is not CHAT and pieces_of(items) > PIECES_MAX

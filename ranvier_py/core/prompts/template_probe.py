"""Finds out which shortcuts a chat template allows, by rendering synthetic conversations and comparing them.

Rule: nothing is assumed about a template. The probe learns the affixes of plain messages from one conversation, then
tries to refute them with others; a shortcut that is refuted is not used. What a template refuses proves nothing.
Invariant: `incremental` means that for all that was tried, text(whole) == text(start) + pieces, and tokens(whole) ==
tokens(start) + tokens(pieces). It is no proof: test_tokenizer.py compares the two on random conversations.
Cost: hundreds of renderings of short conversations, each once (`remembered`), at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat, Message
from ranvier_py.core.prompts.request_apis import hoisted
from ranvier_py.core.prompts.templates import (
    PLAIN_ROLES,
    Affixes,
    Render,
    TemplateProfile,
    grown,
    history_text,
    is_cut,
    normalise,
    part,
    piece_of_plain,
    prefix_end,
)

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Returns the token ids of each text, without added special tokens."""

Trial = tuple[list[dict[str, Any]], list[str | None]]
"""Messages, and the text of each of their starts; None where the template refuses it."""

SHOWS_NOTHING = "shows nothing of a question"
SENTINEL = "Sq7xZ"  # occurs in no template, and no template has a reason to touch it
MARKERS_TRIED = 4  # of the first and of the last special tokens; they are quoted in contents
QUOTING_TRIED = 8  # texts tried in pairs around a user's message, to find out which it takes for a tool result
SETTLED_MAX = 3  # leading messages that may depend on tools: Llama 3 puts tools into the second

CONTENTS = (
    *("Hello there.", "  blank edges \n", "\n\nnew lines\n\n", "", " ", "\ttab", "ends in blank ", "größer 你好 😀"),
    *(
        "{{ 1 }}",
        "<|user|>",
        "[INST] x [/INST]",
        '{"name": "f"}',
        "a\r\nb",
        "'s",
        "<tool_response>\nx\n</tool_response>",
    ),
)

TOOLS: tuple[Any, ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        },
    },
)
CALL_IDS = ("call00001", "call00002")  # nine letters and digits: Mistral's templates refuse others
VALUES: tuple[Any, ...] = (True, False, "x", ["x"])
"""Tried for each extra variable of a template."""


def plain(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def calls(count: int, content: str = "") -> list[dict[str, Any]]:
    """Return an assistant message with `count` tool calls, and their results."""
    ids = CALL_IDS[:count]
    made = [{"id": i, "type": "function", "function": {"name": "look_up", "arguments": '{"what": "it"}'}} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result of {i}"} for i in ids]
    return [{"role": "assistant", "content": content, "tool_calls": made}, *results]


def plain_chats() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations of plain messages."""
    turns = [plain(role, f"{role} says {at}") for at, role in enumerate(("user", "assistant") * 3)]
    yield turns[:5]
    yield [plain("system", "Be brief."), *turns]
    yield [*turns[:1], plain("user", "again"), *turns[1:3]]
    yield [*turns[:3], plain("system", "Be long."), *turns[3:5]]
    yield [plain("system", "Be brief."), plain("system", "Be kind."), *turns[:3]]


def late_system_chats() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with system messages behind others."""
    turns = [plain(role, f"{role} says {at}") for at, role in enumerate(("user", "assistant") * 3)]
    yield [*turns[:3], plain("system", "Be long."), *turns[3:5]]
    yield [plain("system", "Be brief."), *turns[:2], plain("system", "Be long."), *turns[2:4], plain("system", "Go.")]


def tool_chats() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with tool calls, the shortest first."""
    for count in (1, 2):
        for content in ("", "Let me see."):
            round_trip = calls(count, content)
            turn = [plain("user", "Look it up."), *round_trip, plain("assistant", "Found it.")]
            yield [plain("system", "Use tools."), *turn, plain("user", "And more."), *round_trip, *round_trip]
            yield [*turn, *turn, plain("user", "Thanks."), plain("assistant", "Gladly."), *turn]


def thoughts(text: str) -> Iterator[dict[str, Any]]:
    """Yield members of an answer that carry its reasoning, in both forms in which clients send it back."""
    yield {"reasoning_content": text}
    yield {"content": f"<think>\n{text}\n</think>\n\nYes."}


def thinking_chats() -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with reasoning before and behind the last question, with tool calls and without."""
    for thought in thoughts("I should look."):
        called, result = calls(1)
        turn = [plain("user", "Look it up."), {**called, **thought}, result, plain("assistant", "Found it.")]
        yield [plain("system", "Use tools."), *turn, *turn[:3], *turn[1:3]]
        yield [
            *turn,
            plain("user", "And?"),
            {**plain("assistant", "That."), **thought},
            *turn,
            plain("user", "Thanks."),
        ]


def remembered(render: Render) -> Render:
    """Return what renders no conversation twice: of thousands that a probe asks for, most begin others."""
    texts: dict[str, str | TemplateRefused] = {}

    def text_of(chat: Chat) -> str:
        named = repr(chat)
        if named not in texts:
            try:
                texts[named] = render(chat)
            except TemplateRefused as refused:
                texts[named] = refused
        text = texts[named]
        if isinstance(text, TemplateRefused):
            raise text
        return text

    return text_of


class TemplateProbe:
    """Probes one template with one tokenizer. `profile()` runs it.

    `known` has what the tokenizer and the template's source show: `markers`, `quoting` and `exact`. `variables` are
    those that the template reads beyond the usual ones, `trailers` its possible ends.
    """

    def __init__(
        self,
        render: Render,
        encode: Encode,
        known: TemplateProfile,
        variables: Sequence[str] = (),
        trailers: Sequence[str] = ("",),
    ) -> None:
        self._render = remembered(render)
        self._encode = encode
        self._profile = known
        self._variables = variables
        self._trailers = trailers

    def profile(self) -> TemplateProfile:
        """Find out everything. Never raises: a template that refuses all yields the empty profile with the reason."""
        self._profile = replace(self._profile, parts=self._reads_parts())
        try:
            shown = self._render(self._chat([plain("user", SENTINEL)]))
        except TemplateRefused as refused:
            return replace(self._profile, reason=f"refuses a single question: {refused}")
        if SENTINEL not in shown:
            return replace(self._profile, reason=SHOWS_NOTHING)
        self._profile = replace(self._profile, starter=self._starter())
        reason = self._keeping() or self._pieces()
        return replace(self._profile, incremental=not reason, reason=reason or "pieces add up")

    def _chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **arguments: Any) -> Chat:
        return Chat([normalise(message, self._profile.parts) for message in messages], tools, arguments)

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **arguments: Any) -> str | None:
        """Return the text as the start of a longer chat; None if the template refuses it."""
        try:
            return history_text(self._chat(messages, tools, **arguments), self._profile, self._render)
        except TemplateRefused:
            return None

    def _texts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **arguments: Any
    ) -> list[str | None]:
        """Return the text of every start of a conversation."""
        return [self._text(messages[:size], tools, **arguments) for size in range(1, len(messages) + 1)]

    def _reads_parts(self) -> bool:
        """Whether the template iterates over the parts of a content: vLLM's content format "openai"."""
        parts = [{"type": "text", "text": SENTINEL}, {"type": "text", "text": SENTINEL[::-1]}]
        try:
            text = self._render(Chat([{"role": "user", "content": parts}]))
        except TemplateRefused:
            return False
        return SENTINEL in text and SENTINEL[::-1] in text and "'type'" not in text and '"type"' not in text

    def _starter(self) -> str:
        """Return a special token that stands exactly once before each message (`ends_by_markers`); else ""."""
        messages = [plain(role, SENTINEL) for role in ("user", "assistant") * 2] + [plain("user", SENTINEL)]
        text = self._text(messages)
        if text is None:
            return ""
        first, *between, last = text.split(SENTINEL)
        for marker in sorted(self._profile.markers):
            if marker in first and marker not in last and all(gap.count(marker) == 1 for gap in between):
                return marker
        return ""

    def _keeping(self) -> str:
        """Choose hoisting, closing and trailer so that earlier turns stay a prefix. Returns why none does, or ""."""
        broken = "earlier turns do not stay a prefix"
        for hoists, closing, trailer in product((False, True), (False, True), self._trailers):
            self._profile = replace(self._profile, hoists_system=hoists, trailer=trailer, closing=closing, affixes={})
            if hoists and not self._hoists_system():
                continue
            if closing and not self._learn("user"):
                continue
            if broken_at := self._first_broken():
                broken = broken_at
                continue
            self._profile = replace(self._profile, keeps_turns=True, reasoning_moves=self._moves_reasoning())
            self._profile = replace(self._profile, results=self._results() if self._profile.reasoning_moves else ())
            return ""
        self._profile = replace(self._profile, hoists_system=False, trailer="", closing=False, affixes={})
        return broken

    def _hoists_system(self) -> bool:
        """Whether the template renders late system messages as if they came first."""
        texts = [
            (self._text(messages[:size], tools), self._text(hoisted(messages[:size]), tools))
            for messages in late_system_chats()
            for tools in (None, TOOLS)
            for size in range(1, len(messages) + 1)
        ]
        return all(one == other for one, other in texts) and texts[-1][0] is not None

    def _ordered(self, chats: Iterable[list[dict[str, Any]]]) -> Iterator[list[Any]]:
        """Return the conversations in the order in which the template renders them."""
        return (hoisted(messages) for messages in chats) if self._profile.hoists_system else iter(chats)

    def _first_broken(self) -> str:
        """Describe the first conversation in which an earlier turn is no prefix; empty if there is none."""
        for kind, chats in (("plain", plain_chats()), ("tool", tool_chats())):
            for messages in self._ordered(chats):
                for tools in (None, TOOLS):
                    if not self._stays_prefix(messages, tools):
                        system = "a" if messages[0]["role"] == "system" else "no"
                        given = f"{kind} messages, {system} system text, {'tools' if tools else 'no tools'}"
                        return f"earlier turns do not stay a prefix ({given})"
        return ""

    def _stays_prefix(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        known = ""
        for size, text in enumerate(self._texts(messages, tools), 1):
            if text is None or (size < len(messages) and messages[size]["role"] == "tool"):
                continue  # a turn is sent only with all results of its calls
            if not text.startswith(known):
                return False
            known = text
        return True

    def _moves_reasoning(self) -> bool:
        """Whether the template leaves out reasoning of an earlier turn, as Qwen3's does."""
        called, result = calls(1)
        for members in thoughts(SENTINEL):
            for turn in ([plain("assistant", "Yes.")], [called, result]):
                start = [plain("user", "Why?"), {**turn[0], **members}, *turn[1:]]
                later = [*start, plain("user", "So?"), plain("assistant", "So."), plain("user", "And?")]
                early, late = self._text(start), self._text(later)
                if early is None or late is None or not late.startswith(early):
                    return True
        return False

    def _results(self) -> tuple[tuple[str, str], ...]:
        """Find the beginnings and ends of a user's message that leave earlier reasoning in place: Qwen3's template
        takes a message in `<tool_response>` for a tool result."""
        found: dict[tuple[str, str], None] = {}
        for members in thoughts(SENTINEL):
            start = [plain("user", "Why?"), {**plain("assistant", "Yes."), **members}]
            for begin, end in product(("", *self._profile.quoting[:QUOTING_TRIED]), repeat=2):
                if (begin, "") in found or ("", end) in found:
                    continue
                text = self._text([*start, plain("user", f"{begin}\nSo?\n{end}")]) or ""
                if SENTINEL in text:
                    if not begin and not end:
                        break  # reasoning of this kind does not move
                    found[begin, end] = None
        return tuple(found)

    def _pieces(self) -> str:
        """Learn the affixes, find out what settles, drop what is refuted. Returns why pieces do not add up, or ""."""
        for role in PLAIN_ROLES:
            self._learn(role)
        trials = list(self._trials())
        for settled in range(1, SETTLED_MAX + 1):
            self._profile = replace(self._profile, settled=settled)
            if not (wrong := self._refuted(trials)):
                break
        for role in wrong:
            self._drop(role)
        if not {"user", "assistant"} <= self._profile.affixes.keys():
            return "messages do not render one by one, or no special token separates them"
        self._profile = replace(
            self._profile, windows=self._windows_hold(), arguments_matter=not self._arguments_are_harmless()
        )
        return self._tokens(trials)

    def _drop(self, role: str) -> None:
        kept = {name: affixes for name, affixes in self._profile.affixes.items() if name != role}
        self._profile = replace(self._profile, affixes=kept)

    def _learn(self, role: str) -> bool:
        """Learn the affixes of a role from what one more message adds to a chat. Returns whether that worked."""
        start = [plain("user", "a"), plain("assistant", "b")] if role != "assistant" else [plain("user", "a")]
        if role == "user" and self._profile.closing:
            start = start[:1]  # the end of an assistant message is not known yet
        known, text = self._text(start), self._text([*start, plain(role, f" {SENTINEL} ")])
        if known is None or text is None or not text.startswith(known):
            return False
        before, found, after = text[len(known) :].partition(SENTINEL)
        strip = not (before.endswith(" ") and after.startswith(" "))
        if not found:
            return False
        before, after = (before, after) if strip else (before[:-1], after[1:])
        affixes = Affixes(before, after, strip, empty=True)
        if not is_cut(known + before, len(known), self._profile.markers):
            return False
        self._profile = replace(self._profile, affixes={**self._profile.affixes, role: affixes})
        blank = self._text([*start, plain(role, "")])
        affixes = replace(affixes, empty=blank == known + before + after)
        self._profile = replace(self._profile, affixes={**self._profile.affixes, role: affixes})
        return True

    def _refuted(self, trials: Sequence[Trial]) -> list[str]:
        """Return the roles whose affixes fail somewhere after the first `settled` messages."""
        wrong: dict[str, None] = {}
        for messages, texts in trials:
            for at in range(self._profile.settled, len(messages)):
                known, text = texts[at - 1], texts[at]
                piece = piece_of_plain(messages[at], self._profile)
                if piece is None or text is None:
                    continue
                if known is None or text != known + piece or not is_cut(text, len(known), self._profile.markers):
                    wrong[messages[at]["role"]] = None
        return list(wrong)

    def _trials(self) -> Iterator[Trial]:
        """Yield the conversations in which the affixes must hold, with the texts of their starts."""
        for tools in (None, TOOLS):
            for messages in self._ordered((*plain_chats(), *tool_chats())):
                yield messages, self._texts(messages, tools)
        special = [*self._profile.markers[:MARKERS_TRIED], *self._profile.markers[-MARKERS_TRIED:]]
        for content in (*CONTENTS, *special, *(f"a{mark}b" for mark in special)):
            turn = [plain("user", content), plain("assistant", content)]
            two = [plain("system", content), *turn, *turn], [*turn, plain("system", content), turn[0]]
            for messages in self._ordered(two):
                yield messages, self._texts(messages)

    def _windows_hold(self) -> bool:
        """Whether pieces that are rendered in windows add up to the whole conversation, at every cut."""
        return any(self._text(messages, TOOLS) for messages in tool_chats()) and all(
            self._pieces_hold(self._chat(messages, tools), range(self._profile.settled, len(messages)))
            for messages in self._ordered((*tool_chats(), *plain_chats(), *thinking_chats()))
            for tools in (None, TOOLS)
        )

    def _pieces_hold(self, chat: Chat, cuts: Iterable[int]) -> bool:
        """Whether the pieces of what is behind each of these cuts, in windows where needed, add up to its text."""
        profile = replace(self._profile, windows=True)
        text = self._text(chat.messages, chat.tools, **chat.template) or ""
        for known in cuts:
            begin = prefix_end(part(chat, known), text, profile, self._render)
            pieces = grown(chat, known, profile, self._render) if begin >= 0 else None
            if pieces is not None and text[begin:] != "".join(piece for piece in pieces if piece is not None):
                return False
        return True

    def _arguments_are_harmless(self) -> bool:
        """Whether no extra variable of the template changes a piece, plain or from a window in the middle."""
        return all(
            not self._refuted([(messages, self._texts(messages, tools, **{name: value}))])
            and self._pieces_hold(self._chat(messages, tools, **{name: value}), (len(messages) // 2, len(messages) - 2))
            for name in self._variables
            for value in VALUES
            for messages in (list(plain_chats())[1], next(tool_chats()))
            for tools in (None, TOOLS)
        )

    def _tokens(self, trials: Sequence[Trial]) -> str:
        """Check on tokens that the pieces add up. Returns why they do not, or ""."""
        for _, texts in trials:
            whole = texts[-1]
            if whole is None:
                continue
            ends = [len(text) for text in texts if text is not None and whole.startswith(text)]
            cuts = [0, *(end for end in ends[:-1] if is_cut(whole, end, self._profile.markers)), len(whole)]
            together, *alone = self._encode([whole, *(whole[a:b] for a, b in pairwise(cuts))])
            if list(together) != [token for tokens in alone for token in tokens]:
                return "messages tokenize otherwise together than one by one"
        return ""

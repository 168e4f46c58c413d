"""Turns chats into tokens, blocks and prefix chains, and tokenizes each message only once if that is exact.

If the tokenizer cuts cleanly (`TokenizerFacts.incremental`), a dialogue is tokenized once for all its turns, and a
logged request only from where an earlier one ended. Otherwise each request is tokenized in full. Beyond the messages an
engine sees the *cue* that asks for an answer («assistant:»), rendered once for each role of a last message.

Bound: PREFIXES_MAX prefixes are remembered. The one used longest ago is dropped and counted, which costs only time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import orjson

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.boundaries import Chat, Message, TokenIds, TokenizedChat
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher, TokenState, canonical_message
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.traces.trace import Depth
from ranvier_py.replay.traces.trace_chains import KEY, chain_of, continued, joined

PREFIXES_MAX = 4096  # of a few kilobytes each
NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


class Prefix(NamedTuple):
    """The start of a chat up to a message end. `own`: the tokens since the previous message end."""

    state: TokenState
    chain: tuple[Depth, ...] = ()
    ends: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    own: TokenIds = NO_TOKENS


class ChatTurn(NamedTuple):
    """One request of a chat, in the terms of TraceRequest. `answer_tokens` is 0 if the answer is not known."""

    prompt_tokens: int
    answer_tokens: int
    chain: tuple[Depth, ...]
    ends: tuple[int, ...]
    blocks: tuple[int, ...]


class Conversation(NamedTuple):
    """A chat of which each turn is a request."""

    chat: Chat
    salt: bytes  # enters the name of the first block, so that models share no blocks
    start: Prefix
    names: list[Fingerprint]  # names[n] identifies the first n messages


class Prefixes:
    """Tokenizes the chats of one trace. Every method may raise TemplateRefused."""

    def __init__(self, tokenizer: ChatTokenizer, block_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._size = block_tokens
        self._hasher = TokenHasher(KEY, block_tokens)
        self._texts = TextHasher(KEY)
        self._known: BoundedDict[Fingerprint, Prefix] = BoundedDict(PREFIXES_MAX)
        self._cues: dict[tuple[str, bool], TokenIds | None] = {}
        self._bare = len(tokenizer.tokenize_text(""))
        self._line_end = self._plain("\n").tolist()

    def conversation(self, model: str, chat: Chat) -> Conversation:
        """Prepare a chat for `turn`. All its messages are tokenized at once if that is exact."""
        namespace = self._texts.namespace(
            {"model": model, "tools": chat.tools, "tokenizer": self._tokenizer.facts.identity}
        )
        names = [namespace]
        for message in chat.messages:
            names.append(self._texts.extend(names[-1], canonical_message(message)))
        conversation = Conversation(chat, model.encode(), Prefix(self._hasher.start(namespace)), names)
        if self._tokenizer.facts.incremental:
            self._prefix(conversation, len(chat.messages))
        return conversation

    def turn(self, conversation: Conversation, turn: int) -> ChatTurn:
        """Return the request whose prompt is the first `turn` messages. The next message, if any, is its answer."""
        prompt = self._prefix(conversation, turn)
        cue = self._cue(conversation, turn)
        if cue is None:  # the prompt with its cue does not begin with the rendered history, so tokenize it in full
            ids = self._plain(self._tokenizer.render(part(conversation.chat, turn), generation=True))
            above, cue, prompt_tokens = conversation.start, ids, len(ids)
        else:
            above, prompt_tokens = prompt, prompt.state.tokens + len(cue)
        known, answered = prompt, NO_TOKENS
        if turn < len(conversation.chat.messages):
            history = self._prefix(conversation, turn + 1)
            answered = self._answer_tokens(conversation.chat.messages[turn], prompt, history, cue)
            if history.chain[: len(prompt.chain)] == prompt.chain:
                known = history
        blocks = continued(
            above.blocks, joined(above.state.rest, np.concatenate((cue, answered))), self._size, conversation.salt
        )
        # if the template renders the answer otherwise than the engine generated it, deeper keys match no blocks
        last = sum(
            blocks[(at := key.tokens // self._size) - 1 : at] == known.blocks[at - 1 : at] for key in known.chain
        )
        ends = tuple(end for end in known.ends if end < last)
        return ChatTurn(prompt_tokens, len(answered), known.chain[:last], ends, blocks)

    def _prefix(self, conversation: Conversation, count: int) -> Prefix:
        """Return the prefix of the first `count` messages, tokenized from the longest known prefix on."""
        known = next((at for at in range(count, 0, -1) if conversation.names[at] in self._known), 0)
        base = conversation.start
        if known:
            name = conversation.names[known]
            base = self._known[name] = self._known[name]  # the newest from now on
            if known == count:
                return base
        chat = part(conversation.chat, count)
        tokenized = None
        if known:
            tokenized = self._tokenizer.tokenize_tail(chat.messages[known:], lambda: chat, known)
        if tokenized is None:
            known, base = 0, conversation.start
            tokenized = self._tokenizer.tokenize(chat)
        return self._extended(conversation, base, known, tokenized)

    def _extended(self, conversation: Conversation, base: Prefix, known: int, tokenized: TokenizedChat) -> Prefix:
        """Return the prefix at the end of `tokenized`, which follows `base`. Those at message ends are remembered."""
        clean = [(known + index + 1, end) for index, end in enumerate(tokenized.ends) if end >= 0]
        segments = self._hasher.extend(base.state, tokenized.ids, [end for _, end in clean])
        keeps = self._tokenizer.facts.incremental and tokenized.how == "rendered"
        prefix, start = base, 0
        for (count, end), segment in zip(clean, segments, strict=True):
            own = tokenized.ids[start:end]
            chain, ends = chain_of([segment], prefix.chain, prefix.ends)
            blocks = continued(prefix.blocks, joined(prefix.state.rest, own), self._size, conversation.salt)
            prefix, start = Prefix(segment.state, chain, ends, blocks, own), end
            if keeps:
                self._known[conversation.names[count]] = prefix
        return prefix

    def _cue(self, conversation: Conversation, turn: int) -> TokenIds | None:
        """Return the tokens of the cue that the template appends; None if it also changes the messages before it."""
        place = (str(conversation.chat.messages[turn - 1].get("role")), bool(conversation.chat.tools))
        if place not in self._cues or not self._tokenizer.facts.incremental:
            chat = part(conversation.chat, turn)
            history = self._tokenizer.render(chat, generation=False).removesuffix(self._tokenizer.profile.trailer)
            answered = self._tokenizer.render(chat, generation=True)
            self._cues[place] = self._plain(answered[len(history) :]) if answered.startswith(history) else None
        return self._cues[place]

    def _answer_tokens(self, answer: Message, prompt: Prefix, history: Prefix, cue: TokenIds) -> TokenIds:
        """Return the generated tokens: those in the history if it continues prompt and cue, else the text's own."""
        piece = history.own
        follows = history.state.tokens - len(piece) == prompt.state.tokens
        if follows and len(piece) > len(cue) and np.array_equal(piece[: len(cue)], cue):
            answered = piece[len(cue) :]
            size = len(self._line_end)
            if len(answered) > size and answered[-size:].tolist() == self._line_end:  # the template added it
                return answered[:-size]
            return answered
        content = answer.get("content") or orjson.dumps(answer.get("tool_calls") or ".").decode()
        return self._plain(content if isinstance(content, str) else orjson.dumps(content).decode())

    def _plain(self, text: str) -> TokenIds:
        """Return the tokens of a text without those that begin every plain prompt."""
        return self._tokenizer.tokenize_text(text)[self._bare :]


def part(chat: Chat, count: int) -> Chat:
    """Return the chat with only its first `count` messages."""
    return chat if count == len(chat.messages) else Chat(chat.messages[:count], chat.tools, chat.template)

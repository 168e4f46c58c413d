"""Request bodies -> Prompt. The schema is the engine's: only what is not JSON is refused here.

A body that is JSON but not understood becomes an opaque Prompt, which is routed by load. A chat whose history was seen
before is found by the digest of its raw bytes up to a message end, and only the bytes after that are parsed:

    {"messages":[{…},{…},{"role":"user",…}],"stream":true}
                 known ──┘└── parsed as {"messages":[null,{"role":"user",…}],"stream":true}

Why that is exact: the digest proves that the bytes before the cut once began a valid body and ended at a message end in
its `messages`; the parse of the rest proves that it closes exactly that array and that object. Nothing is guessed: the
search for `"role"` only proposes cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.boundaries import Message, TokenIds
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher, canonical_message
from ranvier_py.core.prompts.namespaces import TokenNamespaces, opening_key
from ranvier_py.core.prompts.prompt import Boundary, KnownPrefix, PromptMemory

TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "documents")
NAMESPACE_FIELDS = ("model", "cache_salt", "lora_path", "tools", *TEMPLATE_FIELDS)
"""Members of a body that change the rendered text as a whole, or that keep caches apart: the namespace of texts. That
of tokens is `prompts.namespaces`."""

NAMESPACE = frozenset(NAMESPACE_FIELDS)

CUTS_MAX = 8
"""Proposed cuts that are tried: a turn rarely brings more messages (one answer, its tool results, one question)."""

ENDS_MAX = 16
"""Places tried for the end of the last message: text that looks like the end of an array is rare even in code."""

MESSAGES_MAX = 10_000  # longer chats are routed by load: a body of `{}` could bring 20 M

NAME_CHARACTERS_MAX = 512
"""Longer salts and templates are kept as a digest, and a longer model name not at all: no request decides our size."""

MESSAGE_OVERHEAD_TOKENS = 5  # markers and role of one message in ChatML and Llama 3, for estimates alone
TOKEN_IDS_MAX = 1 << 20  # longer prompts of token ids are routed by load: 0.2 s of the event loop and 200 MB
TOKEN_ID_MAX = 2**32 - 1  # ids are hashed as 32-bit numbers
NAMESPACES_MAX = 1024  # cached fingerprints of namespaces that are a model's name alone

ARRAY_END = re.compile(rb"}[ \t\r\n]*]")
KNOWN_HISTORY = b'{"messages":[null'


class Note(NamedTuple):
    """What is to be remembered of a body, once it has been sent on.

    `cut` is a message end that is known already, or 0; `last` where the last message but one seems to end, or 0;
    `known` what the whole of the messages stands for; `after` the names of the members that follow `messages` in the
    body.
    """

    cut: int
    last: int
    known: KnownPrefix
    after: Sequence[str]


@dataclass(slots=True)
class Prompt:
    """What routing needs to know of one request.

    `kind` is "chat", "completion" or "opaque"; an opaque prompt has a chain of no boundaries. `tail` are the messages
    after `base`, the deepest boundary that was known when the body was read. `note` is what `remember` needs.
    """

    kind: str
    model: str
    stream: bool
    end: Boundary
    base: Boundary
    tail: Sequence[Message]
    body: bytes
    text: str = ""
    note: Note | None = None

    @property
    def tokens(self) -> int:
        """Length in tokens, exact or estimated."""
        return self.end.tokens

    def opening(self) -> bytes:
        """What names the conversation's opening (`placement.chwbl`), for policies that ask; empty where there is none.

        Parses the body again.
        """
        if self.kind != "chat":
            return b""
        body = orjson.loads(self.body)
        return opening_key(self.model, body["messages"], body.get("system"))


class PromptReader:
    """Reads bodies into Prompts and remembers their prefixes.

    `identity` is a digest of tokenizer and template: prompts under different ones never match. `bytes_per_token` is for
    estimates until tokens are known. `digest_seed` is a secret of this process, so that nobody can craft two bodies
    with one digest.
    """

    def __init__(
        self,
        texts: TextHasher,
        tokens: TokenHasher,
        memory: PromptMemory,
        *,
        identity: str,
        bytes_per_token: float,
        digest_seed: int,
    ) -> None:
        self._texts = texts
        self._tokens = tokens
        self.memory = memory
        self._identity = identity
        self._bytes_per_token = bytes_per_token
        self._seed = digest_seed
        self._namespaces: dict[str, Fingerprint] = {}
        self._token_namespaces = TokenNamespaces(texts, identity)
        self.namespace_of = self._token_namespaces.of  # of tokens, whatever tools and templates a prompt has

    def chat(self, body: bytes) -> Prompt:
        """A body of /v1/chat/completions. Raises BadRequest when it is not JSON."""
        prompt = self._continuing(body)
        if prompt is not None:
            self.memory.counters.found += 1
            return prompt
        fields = load_object(body)
        messages = fields.get("messages")
        model = fields.get("model")
        too_long = isinstance(model, str) and len(model) > NAME_CHARACTERS_MAX
        if messages is None or not is_conversation(messages) or too_long:
            return self.opaque(fields, body)
        self.memory.counters.missed += 1
        try:
            return self._first_contact(body, fields, messages)
        except (TypeError, UnicodeError):  # values that only other JSON libraries accept, such as lone surrogates
            return self.opaque(fields, body)

    def completion(self, body: bytes) -> Prompt:
        """A body of /v1/completions: `prompt` is text or token ids, or a list of either, of which the first counts."""
        fields = load_object(body)
        text = fields.get("prompt")
        if isinstance(text, list) and text and isinstance(text[0], (str, list)):
            text = text[0]
        ids = token_ids(text)
        if ids is None and not (isinstance(text, str) and text):
            return self.opaque(fields, body)
        try:
            root = self._root(fields)
            data = ids.tobytes() if ids is not None else str(text).encode()
        except (TypeError, UnicodeError):
            return self.opaque(fields, body)
        fingerprint = self._texts.extend_bytes(root.text, data)
        length = self._estimate(data) if ids is None else len(ids)
        end = self.memory.boundary(fingerprint) or Boundary(root, fingerprint, length, self._tokens.block_tokens)
        if ids is not None and end.state is None and root.state is not None:
            end.tokenized(self._tokens.extend(root.state, ids, [len(ids)])[0])
        self.memory.keep(end)
        return self._prompt("completion", fields, body, end, root, (), "" if ids is not None else str(text))

    def other(self, body: bytes) -> Prompt:
        """A body of any other path: its model counts if it names one, and it need not be JSON at all."""
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            fields = None
        return self.opaque(fields if isinstance(fields, dict) else {}, body)

    def opaque(self, fields: Mapping[str, Any], body: bytes) -> Prompt:
        """A prompt that says nothing about its prefix."""
        root = Boundary(None, Fingerprint(0), 0)
        return self._prompt("opaque", fields, body, root, root, (), "")

    def _continuing(self, body: bytes) -> Prompt | None:
        """The prompt of a chat with a known history, or None."""
        last = 0
        for cut in message_cuts(body):
            last = last or cut
            known = self.memory.find(self._digest(body, cut))
            if known is None:
                continue
            rest = load_rest(body, cut)
            if rest is None or not is_conversation(rest["messages"][1:] or [{}]):
                return None
            messages = rest.pop("messages")[1:]
            if known.end.messages + len(messages) > MESSAGES_MAX:
                return None
            fields = {**known.fields, **rest} if rest else known.fields
            try:
                alone = NAMESPACE.isdisjoint(rest)
                if not (alone and known.alone) and self._namespace(fields) != known.namespace:
                    return None
                end = self._extend(known.end, messages)
            except (TypeError, UnicodeError):
                return None
            prompt = self._prompt("chat", fields, body, end, known.end, messages, "")
            prompt.note = Note(cut, last, KnownPrefix(end, known.namespace, known.fields, alone), list(rest))
            return prompt
        return None

    def _first_contact(self, body: bytes, fields: dict[str, Any], messages: list[Message]) -> Prompt:
        root = self._root(fields)
        end = self._extend(root, messages)
        names = list(fields)
        place = names.index("messages")
        head = self._reduced({name: fields[name] for name in names[:place]})
        if "stream" in names[:place]:
            head["stream"] = fields["stream"] is True
        after = names[place + 1 :]
        known = KnownPrefix(end, root.text, head, NAMESPACE.isdisjoint(after))
        prompt = self._prompt("chat", fields, body, end, root, messages, "")
        prompt.note = Note(0, next(message_cuts(body), 0), known, after)
        return prompt

    def _extend(self, boundary: Boundary, messages: Sequence[Message]) -> Boundary:
        for message in messages:
            boundary = self.extend(boundary, message)
        if boundary.parent is not None:
            self.memory.keep(boundary)
            if boundary.parent.parent is not None:
                self.memory.keep(boundary.parent)
        return boundary

    def extend(self, boundary: Boundary, message: Message) -> Boundary:
        """The boundary at the end of `message`, which follows `boundary`. Raises TypeError for values beyond JSON."""
        canonical = canonical_message(message)
        text = self._texts.extend(boundary.text, canonical)
        known = self.memory.boundary(text)
        if known is not None:
            return known
        length = boundary.length + MESSAGE_OVERHEAD_TOKENS + self._estimate(canonical)
        return Boundary(boundary, text, length, self._tokens.block_tokens)

    def remember(self, prompt: Prompt) -> None:
        """Make the last two message ends of a chat known: the next turn continues at one, a branch at the other.

        Apart from reading, because it need not be done before the request is on its way. Does it once.
        """
        note, prompt.note = prompt.note, None
        if note is None:
            return
        body, end, messages = prompt.body, note.known.end, prompt.tail
        if note.last > note.cut and end.parent is not None and self._is_cut(body, note.last, messages[-1:], note.after):
            self.memory.remember(self._digest(body, note.last), note.known._replace(end=end.parent))
        if not messages:
            return
        if not note.after:  # then nothing but `]}` follows
            self.memory.remember(self._digest(body, bare_end(body)), note.known)
            return
        for match in islice(ARRAY_END.finditer(body, max(note.last, note.cut)), ENDS_MAX):
            if self._is_cut(body, match.start() + 1, (), note.after):
                self.memory.remember(self._digest(body, match.start() + 1), note.known)
                break

    def _is_cut(self, body: bytes, cut: int, following: Sequence[Message], after: Sequence[str]) -> bool:
        """Whether `cut` is the message end before exactly `following`, with the members `after` behind `messages`."""
        found = load_rest(body, cut)
        return found is not None and found.pop("messages") == [None, *following] and list(found) == list(after)

    def _digest(self, body: bytes, cut: int) -> int:
        return xxhash.xxh3_128_intdigest(memoryview(body)[:cut], self._seed)

    def _root(self, fields: Mapping[str, Any]) -> Boundary:
        """The empty prefix of a namespace of texts, and of its tokens. Raises TypeError for values beyond JSON."""
        namespace = self._namespace(fields)
        root = self.memory.boundary(namespace)
        if root is None:
            root = Boundary(None, namespace, 0)
            root.state = self._tokens.start(self._token_namespaces.of_fields(fields))
            self.memory.keep(root)
        return root

    def _namespace(self, fields: Mapping[str, Any]) -> Fingerprint:
        chosen = self._reduced(fields)
        model = chosen.get("model", "")
        if len(chosen) > 1 or type(model) is not str:
            plain = {name: value.hex() if type(value) is bytes else value for name, value in chosen.items()}
            return self._texts.namespace({**plain, "tokenizer": self._identity})
        found = self._namespaces.get(model)
        if found is None:
            found = self._texts.namespace({"model": model, "tokenizer": self._identity})
            if len(self._namespaces) < NAMESPACES_MAX:
                self._namespaces[model] = found
        return found

    def _reduced(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The members that name the namespace; large ones as a digest (bytes, which JSON has not), to keep none."""
        return {
            name: value if is_short(value := fields[name]) else self._texts.digest(orjson.dumps(value))
            for name in NAMESPACE_FIELDS
            if fields.get(name)
        }

    def _estimate(self, text: bytes) -> int:
        return int(len(text) / self._bytes_per_token)

    def _prompt(
        self,
        kind: str,
        fields: Mapping[str, Any],
        body: bytes,
        end: Boundary,
        base: Boundary,
        tail: Sequence[Message],
        text: str,
    ) -> Prompt:
        model = fields.get("model")
        stream = fields.get("stream") is True
        return Prompt(kind, model if type(model) is str else "", stream, end, base, tail, body, text)


def load_object(body: bytes) -> dict[str, Any]:
    """The body's members; none for JSON that is no object. Raises BadRequest for what no JSON library accepts."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as refused:
        found = load_leniently(body, str(refused))
    return found if isinstance(found, dict) else {}


def load_leniently(body: bytes, reason: str) -> Any:
    """What the standard library makes of it, as engines in Python do: NaN and lone surrogates pass."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise BadRequest("the JSON body is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {reason}") from error
    except ValueError:  # a number of more digits than this library reads: an engine's may
        return None


def load_rest(body: bytes, cut: int) -> dict[str, Any] | None:
    """The body parsed as if all messages before `cut` were one null, or None when that is no JSON object."""
    try:
        found = orjson.loads(KNOWN_HISTORY + body[cut:])
    except orjson.JSONDecodeError:
        return None
    messages = found.get("messages")  # a second `messages` after the cut would have replaced ours
    return found if isinstance(messages, list) and messages and messages[0] is None else None


def bare_end(body: bytes) -> int:
    """Where the last message ends in a valid body whose last member is `messages`: before the last `]` and `}`."""
    return len(body.rstrip()[:-1].rstrip()[:-1].rstrip()) if body[-2:] != b"]}" else len(body) - 2


def message_cuts(body: bytes) -> Iterator[int]:
    """Offsets that look like message ends, last first: just after the `}` before a `,` and `{"role"`."""
    stop = len(body)
    for _ in range(CUTS_MAX):
        role = body.rfind(b'"role"', 0, stop)
        opening = body.rfind(b"{", 0, role) if role > 0 else -1
        closing = body.rfind(b"}", 0, opening) if opening > 0 else -1
        if closing < 0:
            return
        if body[closing + 1 : opening].strip() == b",":
            yield closing + 1
        stop = role


def is_conversation(messages: object) -> bool:
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        return False
    return all(type(message) is dict for message in messages)


def is_short(value: object) -> bool:
    """Whether a member of a body is kept as it is: short text, and what is a digest already."""
    return type(value) is bytes or (type(value) is str and len(value) <= NAME_CHARACTERS_MAX)


def token_ids(value: object) -> TokenIds | None:
    """Token ids of a completion prompt as an array, or None when `value` is not a list of them."""
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= TOKEN_IDS_MAX
        or not all(type(item) is int for item in value)
    ):
        return None
    if min(value) < 0 or max(value) > TOKEN_ID_MAX:
        return None
    return np.array(value, dtype=np.uint32)

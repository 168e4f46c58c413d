"""A prompt as the router sees it: a chain of boundaries, with a memory of chains met before.

Rule: a Boundary links to the one before it and is never copied: turn N+1 adds its own to the chain of turn N. Its text
fingerprint is known at once; its token fingerprints are filled in when its message has been tokenized. PromptMemory
finds the chain of a continuing chat by a digest of the raw body bytes up to a message end, so that neither parsing nor
hashing touches the history again.
Bounds: entries, and the chain lengths they keep alive; the least recently used entry is dropped and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.body_json import UNCOUNTED_BYTES_MAX, load_object
from ranvier_py.core.prompts.body_members import ABSENT, first_prompt
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.fingerprint import Segment, TokenState
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.core.prompts.request_apis import APIS, Api
from ranvier_py.core.prompts.reserved_members import Reserved

OPENING_BYTES_MAX = 2 * UNCOUNTED_BYTES_MAX  # parsed on the event loop, in addition to the first parse

PrefixKey = tuple[int, int, int]
"""(tokens, token fingerprint, text fingerprint); 0 = not known. The keys of the route table."""

OWN_CHAIN = attrgetter("own_chain")


class Boundary:
    """The end of one message. All but the token part is fixed at creation; `tokenized` sets the token part once.

    `length` is the depth in tokens, and `tokens` is `length` rounded down to a block; both are estimates while `state`
    is None. The root of a chain is the empty prefix. `moves`: the boundary stands behind reasoning that the next
    question removes from the rendered text, so a prompt with that question does not have this prefix.
    """

    __slots__ = ("_first", "length", "messages", "moves", "own_chain", "parent", "state", "text", "token", "tokens")

    def __init__(
        self, parent: Boundary | None, text: Fingerprint, length: int, block_tokens: int = 1, *, moves: bool = False
    ) -> None:
        self.parent = parent
        self.moves = moves
        self.text = text
        self.messages: int = 0 if parent is None else parent.messages + 1
        self.length = length
        self.tokens = length // block_tokens * block_tokens
        self.token: Fingerprint = UNKNOWN
        self.state: TokenState | None = None
        self.own_chain: tuple[PrefixKey, ...] = ((self.tokens, 0, text),)  # keys of this message alone, deepest first
        # None for the first one and the root, since a cycle would not be freed at once
        self._first: Boundary | None = None if self.messages < 2 or parent is None else parent._first or parent

    @property
    def first(self) -> Boundary:
        """The end of the first message; this boundary itself if it is that or the root."""
        return self._first or self

    def tokenized(self, segment: Segment) -> None:
        """Fill in the depths and fingerprints that the tokens of this message yield."""
        self.tokens, self.token = segment.end
        self.length = segment.state.tokens
        self.state = segment.state
        anchors = [(tokens, fingerprint, 0) for tokens, fingerprint in reversed(segment.anchors)]
        self.own_chain = ((self.tokens, self.token, self.text), *anchors)

    def correct(self, unknown: int, depth_of: Callable[[Fingerprint], int]) -> bool:
        """Shift estimated depths to what others found for the prefix before the last `unknown` messages: estimates
        know nothing of tools. `depth_of` returns what others found, or 0. Returns whether a depth changed.
        """
        known = self
        for known in islice(self._lasting(), unknown + 1):
            if known.state is not None:
                return False
        depth = depth_of(known.text)
        if not depth or depth == known.tokens:
            return False
        boundary, more = self, depth - known.tokens
        while boundary.parent is not None and boundary.state is None:
            if boundary.messages <= known.messages:
                more = (depth_of(boundary.text) or boundary.tokens) - boundary.tokens
            boundary.length += more
            boundary.tokens += more
            boundary.own_chain = ((boundary.tokens, 0, boundary.text),)
            boundary = boundary.parent
        return True

    def copied(self, parent: Boundary | None) -> Boundary:
        """Return a copy of this boundary that follows `parent`, a copy of the one before it."""
        twin = copy(self)
        twin.parent = parent
        twin._first = parent.first if parent and parent.messages else None
        return twin

    def chain(self) -> Iterator[PrefixKey]:
        """Yield the keys of the chain from this end up to its first boundary, deepest first."""
        return chain.from_iterable(map(OWN_CHAIN, self._lasting()))

    def _lasting(self) -> Iterator[Boundary]:
        """Yield the boundaries of this chain that are prefixes of this prompt as it is rendered, deepest first."""
        boundary = self
        while boundary.moves and boundary.parent is not None:  # no question came yet
            yield boundary
            boundary = boundary.parent
        while (parent := boundary.parent) is not None:
            if not boundary.moves:
                yield boundary
            boundary = parent

    def token_chain(self) -> Iterator[PrefixKey]:
        """Yield the chain without text fingerprints, for templates in which earlier turns do not stay a prefix."""
        for tokens, token, _ in self.chain():
            if token:
                yield tokens, token, 0

    def tokenized_ancestor(self) -> Boundary:
        """Return the deepest boundary at or above this one where token hashing can continue. The root always can."""
        boundary = self
        while boundary.state is None and boundary.parent is not None:
            boundary = boundary.parent
        return boundary

    def known_tokens(self) -> int:
        """Return how many tokens the prompt has at least: those of its deepest tokenized prefix."""
        return next((boundary.length for boundary in self._lasting() if boundary.state is not None), 0)

    def root(self) -> Boundary:
        """Return the empty prefix of this chain."""
        boundary = self
        while boundary.parent is not None:
            boundary = boundary.parent
        return boundary

    def __repr__(self) -> str:
        return f"<Boundary {self.messages} messages, {self.tokens} tokens{'' if self.state else ' (estimated)'}>"


def detached(end: Boundary) -> list[Boundary]:
    """Return a copy of the chain to this end, the root first."""
    originals = [end]
    while (parent := originals[-1].parent) is not None:
        originals.append(parent)
    chain: list[Boundary] = []
    for original in reversed(originals):
        chain.append(original.copied(chain[-1] if chain else None))  # each copy follows the one before
    return chain


class KnownPrefix(NamedTuple):
    """The prompt prefix that the raw bytes up to a message end stand for.

    `fields` are the relevant members that come before `messages`. `namespace` is the namespace they define alone, or
    together with members behind `messages` (then `alone` is False).
    """

    end: Boundary
    namespace: Fingerprint
    fields: Mapping[str, Any]
    alone: bool


class Note(NamedTuple):
    """What `PromptReader.remember` needs about a body, once the body has been sent on.

    `api` is how the body is read; a message below is an item of its history. `cut` is the end of a message that is
    known already, or 0. `cuts` are proposed ends of the messages behind it, but for the last one, descending. `ends`
    are the boundaries of the last CUTS_MAX + 1 of these messages, the last one first; None if another message may join.
    `known` stands for the whole history. `after` names the members behind the history, `lists` those before it that are
    lists, as far as they were read; `tenant` owns the body.
    """

    api: Api
    cut: int
    cuts: Sequence[int]
    ends: Sequence[Boundary | None]
    known: KnownPrefix
    after: Sequence[str]
    lists: Sequence[str]
    tenant: bytes


@dataclass(slots=True)
class Prompt:
    """All that routing needs to know of one request.

    `kind` is "chat", "completion" or "opaque"; an opaque prompt has no boundaries, and `unread` is the reason if it
    should have some. `api` is how a chat came and is answered (`request_apis`), else the kind or "generate". `tail` are
    the messages after `base`, the deepest boundary known when the body was read; empty if they would be too large to
    keep. `note` is what `remember` needs. `stream_options` is ABSENT, OWN or OPEN; `prefix_len` the request's own, or
    0. `salt` is the `cache_salt` that engines get instead of the request's own; empty: that stays. `bare`: no special
    tokens are added to the text. `previous` is the stored response that the request continues, `stores` whether its own
    response may be stored. `session_name` is what the body calls its session. `response_key` is the digest of
    `previous` and `session` that of the session's name (`routing.owners`), or 0. `sub_agent`: the request comes from an
    agent that the session started. `client` is what sent it (`known_clients`), `owner` the tenant who did; `rules` are
    those that would change its body (`clients.body_mender`).
    `counts_differ`: the counts in its answer don't show what the engine holds. `avoid`: backends that are asked only if
    no other can be, in ascending order. `reserved`: what its body has of members that clients may not set everywhere;
    None: the body was not read.
    """

    kind: str
    model: str
    stream: bool
    end: Boundary
    base: Boundary
    tail: Sequence[Message]
    body: bytes
    unread: str = ""
    stream_options: str = ABSENT
    prefix_len: int = 0
    salt: str = ""
    bare: bool = False
    note: Note | None = None
    api: str = ""
    previous: str = ""
    response_key: int = 0
    stores: bool = True
    session_name: str = ""
    session: int = 0
    sub_agent: bool = False
    client: str = ""
    owner: str = ""
    rules: Sequence[tuple[str, int, bool, bytes]] = ()
    counts_differ: bool = False
    avoid: Sequence[BackendId] = ()
    reserved: Reserved | None = None

    @property
    def tokens(self) -> int:
        """Length in tokens, exact or estimated."""
        return self.end.tokens

    def detach(self) -> None:
        """Give the prompt a copy of its chain, so that what is learned about it changes no other prompt."""
        chain = detached(self.end)
        self.end, self.base, self.note = chain[-1], chain[self.base.messages], None

    def opening(self, bytes_max: int, source: str) -> bytes:
        """Return the key of the conversation's opening for so many bytes (`placement.chwbl`); empty if there is none.

        Parses the body again, unless it is large: routes find a prompt that long.
        """
        if self.kind != "chat" or len(self.body) > OPENING_BYTES_MAX:
            return b""
        body = load_object(self.body)
        api = APIS[self.api]
        return opening_key(self.model, api.items(body), body.get(api.lead or "system"), bytes_max, source)

    @property
    def text(self) -> str:
        """The text of a completion. Each access parses the body again."""
        return str(first_prompt(load_object(self.body))[0])


@dataclass(slots=True)
class PromptMemoryCounters:
    """How much of prompts is remembered, and how often that helped."""

    prefixes: int = gauge("Prefixes of request bodies that are remembered.")
    boundaries: int = gauge("Ends of messages in prompts that are remembered.")
    kept: int = gauge("Messages in the prompts that are remembered, at most.")
    found: int = counter("Chats read from where their known history ended.")
    missed: int = counter("Chats read from their first message.")
    dropped: int = counter("Remembered prefixes and ends dropped for want of room.")


class PromptMemory:
    """Bounded memory of prefixes: raw digest -> KnownPrefix, and text fingerprint -> Boundary.

    The second map finds a chain again if a client spells the same messages in other bytes, or another client branches
    off.
    """

    def __init__(self, entries_max: int = 65_536, kept_max: int = 1_000_000) -> None:
        self.counters = PromptMemoryCounters()
        self.entries_max = entries_max
        self._kept_max = kept_max
        self._prefixes: OrderedDict[int, KnownPrefix] = OrderedDict()
        self._boundaries: OrderedDict[Fingerprint, Boundary] = OrderedDict()

    def find(self, digest: int) -> KnownPrefix | None:
        known = self._prefixes.get(digest)
        if known is not None:
            self._prefixes.move_to_end(digest)
        return known

    def remember(self, digest: int, known: KnownPrefix) -> None:
        counters, prefixes = self.counters, self._prefixes
        if digest not in prefixes:
            counters.kept += known.end.messages
        prefixes[digest] = known
        while len(prefixes) > self.entries_max or (counters.kept > self._kept_max and len(prefixes) > 1):
            _, old = prefixes.popitem(last=False)
            counters.kept -= old.end.messages
            counters.dropped += 1
        counters.prefixes = len(prefixes)

    def boundary(self, text: Fingerprint) -> Boundary | None:
        """Return the boundary with this text fingerprint, if it is remembered."""
        found = self._boundaries.get(text)
        if found is not None:
            self._boundaries.move_to_end(text)
        return found

    def deepest_known(self, base: Boundary, end: Boundary) -> Boundary:
        """Return the last boundary from `base` towards `end` before the first that is new. If a client moves marks with
        each turn, the last messages of the turn before come in other bytes, and are read again."""
        read: list[Boundary] = []
        while end is not base and end.parent is not None:
            read.append(end)
            end = end.parent
        for each in reversed(read):
            if self.boundary(each.text) is not each:
                break
            base = each
        return base

    def keep(self, boundary: Boundary) -> None:
        """Remember a boundary by its text fingerprint."""
        counters, boundaries = self.counters, self._boundaries
        if boundary.text in boundaries:
            return
        boundaries[boundary.text] = boundary
        counters.kept += boundary.messages
        while len(boundaries) > self.entries_max or (counters.kept > self._kept_max and len(boundaries) > 1):
            _, old = boundaries.popitem(last=False)
            counters.kept -= old.messages
            counters.dropped += 1
        counters.boundaries = len(boundaries)


class ForgetfulMemory(PromptMemory):
    """Knows what another memory knows, but remembers nothing itself: for a dry run."""

    def __init__(self, known: PromptMemory) -> None:
        super().__init__()
        self._prefixes, self._boundaries = known._prefixes, known._boundaries

    def find(self, digest: int) -> KnownPrefix | None:
        return self._prefixes.get(digest)

    def remember(self, digest: int, known: KnownPrefix) -> None:
        """Do nothing."""

    def boundary(self, text: Fingerprint) -> Boundary | None:
        """Return a copy, since the caller may fill in its tokens."""
        found = self._boundaries.get(text)
        return found and copy(found)

    def keep(self, boundary: Boundary) -> None:
        """Do nothing."""

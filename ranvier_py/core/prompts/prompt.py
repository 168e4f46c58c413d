"""A prompt as the router sees it: a chain of boundaries, and the memory of those met before.

A Boundary is the end of one message. It is linked to the one before it and never copied: turn N+1 adds its new
boundaries to the chain of turn N. Its text fingerprint is known at once; its token fingerprints are filled in when its
message has been tokenized. The chain, read from its deep end, is what the route table is asked for.

PromptMemory finds the chain of a continuing chat by a digest of the raw body bytes up to a message end, so that neither
parsing nor hashing touches the history again.
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

from ranvier_py.core.ids import UNKNOWN, Fingerprint
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.body_json import UNCOUNTED_BYTES_MAX, load_object
from ranvier_py.core.prompts.body_members import ABSENT, first_prompt
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.fingerprint import Segment, TokenState
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.core.prompts.request_apis import APIS, Api

OPENING_BYTES_MAX = 2 * UNCOUNTED_BYTES_MAX  # on the event loop, and beside the first parse

PrefixKey = tuple[int, int, int]
"""(tokens, token fingerprint, text fingerprint); 0 = not known. What the route table is keyed by."""

OWN_CHAIN = attrgetter("own_chain")


class Boundary:
    """The end of one message. Everything but the token part is fixed at birth; the token part is set once, by
    `tokenized`.

    `length` is the depth in tokens, `tokens` the same rounded down to a block; estimates until `state` is there. The
    root of a chain is the empty prefix. `moves`: it stands behind reasoning that the next question takes out of the
    rendered text; so this prefix is none of prompts with that question.
    """

    __slots__ = ("_first", "length", "messages", "moves", "own_chain", "parent", "state", "text", "token", "tokens")

    def __init__(
        self, parent: Boundary | None, text: Fingerprint, length: int, block_tokens: int = 1, *, moves: bool = False
    ) -> None:
        self.parent = parent
        self.moves = moves
        self.text = text
        self.messages: int = parent.messages + 1 if parent else 0
        self.length = length
        self.tokens = length // block_tokens * block_tokens
        self.token: Fingerprint = UNKNOWN
        self.state: TokenState | None = None
        self.own_chain: tuple[PrefixKey, ...] = ((self.tokens, 0, text),)  # of this message alone, deepest first
        self._first: Boundary | None = parent.first if parent and parent.messages else None  # no cycle: freed at once

    @property
    def first(self) -> Boundary:
        """The end of the first message: this one, if it has no other before it."""
        return self._first or self

    def tokenized(self, segment: Segment) -> None:
        """Fill in what the tokens of this message say."""
        self.tokens, self.token = segment.end
        self.length = segment.state.tokens
        self.state = segment.state
        anchors = [(tokens, fingerprint, 0) for tokens, fingerprint in reversed(segment.anchors)]
        self.own_chain = ((self.tokens, self.token, self.text), *anchors)

    def correct(self, unknown: int, depth_of: Callable[[Fingerprint], int]) -> bool:
        """Count depths from the message before the last `unknown` ones, where others have found out how deep that is:
        estimates know nothing of tools. `depth_of` gives what they found, or 0. Returns whether that changed any.
        """
        walk = self._lasting()
        if any(boundary.state is not None for boundary in islice(walk, unknown)):
            return False
        known = next(walk, None)
        if known is None:
            return False
        depth = depth_of(known.text) if known.state is None else 0
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
        """The same message after a copy of what is before it."""
        twin = copy(self)
        twin.parent = parent
        twin._first = parent.first if parent and parent.messages else None
        return twin

    def chain(self) -> Iterator[PrefixKey]:
        """The chain from this end down to its first boundary, deepest first."""
        return chain.from_iterable(map(OWN_CHAIN, self._lasting()))

    def _lasting(self) -> Iterator[Boundary]:
        """The boundaries of this chain that are prefixes of this prompt as it is rendered, deepest first."""
        boundary = self
        is_open = boundary.moves  # no question came yet
        while boundary.parent is not None:
            if is_open or not boundary.moves:
                yield boundary
            boundary = boundary.parent
            is_open = is_open and boundary.moves

    def token_chain(self) -> Iterator[PrefixKey]:
        """The same without text fingerprints, for templates in which earlier turns do not stay a prefix."""
        for tokens, token, _ in self.chain():
            if token:
                yield tokens, token, 0

    def tokenized_ancestor(self) -> Boundary:
        """The deepest boundary at or above this one from which token hashing can go on. The root always can."""
        boundary = self
        while boundary.state is None and boundary.parent is not None:
            boundary = boundary.parent
        return boundary

    def root(self) -> Boundary:
        """The empty prefix of this chain."""
        boundary = self
        while boundary.parent is not None:
            boundary = boundary.parent
        return boundary

    def __repr__(self) -> str:
        return f"<Boundary {self.messages} messages, {self.tokens} tokens{'' if self.state else ' (estimated)'}>"


def detached(end: Boundary) -> list[Boundary]:
    """A copy of the chain to this end, the root first."""
    originals = [end]
    while (parent := originals[-1].parent) is not None:
        originals.append(parent)
    chain: list[Boundary] = []
    for original in reversed(originals):
        chain.append(original.copied(chain[-1] if chain else None))  # each follows the one before
    return chain


class KnownPrefix(NamedTuple):
    """What the raw bytes up to a message end stand for.

    `fields` are the members that matter of those before `messages`; `namespace` is what they alone name, or what they
    named together with members behind `messages` (`alone` is False then).
    """

    end: Boundary
    namespace: Fingerprint
    fields: Mapping[str, Any]
    alone: bool


class Note(NamedTuple):
    """What is to be remembered of a body, once it has been sent on.

    `api` is how the body is read, an item of its history a message there. `cut` is an item's end that is known already,
    or 0; `cuts` where items behind it seem to end, but for the last one, descending; `ends` what the items behind `cut`
    stand for, as far as CUTS_MAX of them, the last one first, None where another item may join that; `known` what the
    whole history stands for; `after` the names of the members that follow it in the body; `tenant` whose it is.
    """

    api: Api
    cut: int
    cuts: Sequence[int]
    ends: Sequence[Boundary | None]
    known: KnownPrefix
    after: Sequence[str]
    tenant: bytes


@dataclass(slots=True)
class Prompt:
    """What routing needs to know of one request.

    `kind` is "chat", "completion" or "opaque"; an opaque prompt has a chain of no boundaries, and a reason why it is
    `unread` where it should have one. `api` is how a chat came and how it is answered (`request_apis`), else the same.
    `tail` are the messages after `base`, the deepest boundary that was known when
    the body was read; none where they would be too many objects to keep. `note` is what `remember` needs.
    `stream_options` is one of ABSENT, OWN and OPEN; `prefix_len` what a request names so, 0 for nothing. `salt` is the
    `cache_salt` that engines are to get instead of its own; empty where that stands. `bare`: a text to which no special
    tokens are added. `previous` is the stored response
    that it goes on from, `stores` whether its own may be stored, `session_name` what its body calls its session. `kept`
    and `session` are those as `routing.owners` has them, or 0; `sub_agent`: it is of one that the session
    began. `client` is who sent it, as `known_clients` has it; `rules` those that would change its body, as
    `clients.body_mender` has them. `counts_differ`: its answer's counts don't show what the engine holds.
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
    kept: int = 0
    stores: bool = True
    session_name: str = ""
    session: int = 0
    sub_agent: bool = False
    client: str = ""
    rules: Sequence[tuple[str, int, bool, bytes]] = ()
    counts_differ: bool = False

    @property
    def tokens(self) -> int:
        """Length in tokens, exact or estimated."""
        return self.end.tokens

    def detach(self) -> None:
        """Give it a chain of its own: what is found out about it is found out for it alone."""
        chain = detached(self.end)
        self.end, self.base, self.note = chain[-1], chain[self.base.messages], None

    def opening(self, bytes_max: int, source: str) -> bytes:
        """What names so much of the conversation's opening (`placement.chwbl`); empty where there is none.

        Parses the body again, if it is not large: what has so much behind its opening is found by its routes.
        """
        if self.kind != "chat" or len(self.body) > OPENING_BYTES_MAX:
            return b""
        body = load_object(self.body)
        api = APIS[self.api]
        return opening_key(self.model, api.items(body), body.get(api.lead or "system"), bytes_max, source)

    @property
    def text(self) -> str:
        """The text of a completion. Parses the body again."""
        return str(first_prompt(load_object(self.body))[0])


@dataclass(slots=True)
class PromptMemoryCounters:
    """What is remembered of prompts, and how often that helped."""

    prefixes: int = gauge("Prefixes of request bodies that are remembered.")
    boundaries: int = gauge("Ends of messages that are remembered.")
    kept: int = gauge("Lengths of the chains that are kept alive, in messages; an upper bound.")
    found: int = counter("Chats whose history was known.")
    missed: int = counter("Chats read from their first message.")
    dropped: int = counter("Remembered prefixes and ends dropped for want of room.")


class PromptMemory:
    """Bounded memory of prefixes: raw digest -> KnownPrefix, and text fingerprint -> Boundary.

    The second finds a chain again when a client spells the same messages in other bytes, or another client branches
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
        while self._is_full(len(prefixes)):
            _, old = prefixes.popitem(last=False)
            counters.kept -= old.end.messages
            counters.dropped += 1
        counters.prefixes = len(prefixes)

    def boundary(self, text: Fingerprint) -> Boundary | None:
        """The boundary with this text fingerprint, if it is remembered."""
        found = self._boundaries.get(text)
        if found is not None:
            self._boundaries.move_to_end(text)
        return found

    def deepest_known(self, base: Boundary, end: Boundary) -> Boundary:
        """Of the boundaries from `base` to `end` the last one before the first that is new: where clients move marks
        with each turn, the last messages of the turn before come in other bytes and are read again."""
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
        """Remember it by its text fingerprint."""
        counters, boundaries = self.counters, self._boundaries
        if boundary.text in boundaries:
            return
        boundaries[boundary.text] = boundary
        counters.kept += boundary.messages
        while self._is_full(len(boundaries)):
            _, old = boundaries.popitem(last=False)
            counters.kept -= old.messages
            counters.dropped += 1
        counters.boundaries = len(boundaries)

    def _is_full(self, entries: int) -> bool:
        return entries > self.entries_max or (self.counters.kept > self._kept_max and entries > 1)


class ForgetfulMemory(PromptMemory):
    """Knows what another memory knows, and remembers nothing: for a dry run."""

    def __init__(self, known: PromptMemory) -> None:
        super().__init__()
        self._prefixes, self._boundaries = known._prefixes, known._boundaries

    def find(self, digest: int) -> KnownPrefix | None:
        return self._prefixes.get(digest)

    def remember(self, digest: int, known: KnownPrefix) -> None:
        """Nothing."""

    def boundary(self, text: Fingerprint) -> Boundary | None:
        """A copy, since its tokens may be filled in."""
        found = self._boundaries.get(text)
        return found and copy(found)

    def keep(self, boundary: Boundary) -> None:
        """Nothing."""

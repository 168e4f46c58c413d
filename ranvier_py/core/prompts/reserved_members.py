"""Members of bodies that clients may not set everywhere: those of routers, and those that name what engines keep.

Rule: members of routers count at the top of a body and in what SDKs and engines merge into it (CONTAINERS), whatever
their value; never in messages, tools or schemas, where they are text like any other. A body that was parsed has exactly
the members that its parser found; any other is searched for their names (`BodySearch`). Invariant: none is missed, by
whatever spelling and on whatever turn (test_reserved_members.py).
Bounds: a search looks at SLICE_BYTES at once, and its callers pause between slices. More than HITS_MAX places in a
slice count as found: no text names one member so often.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

TRANSFER_MEMBERS = (
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("bootstrap_pair_key", "disaggregated_params", "routed_dp_rank", "disagg_prefill_dp_rank"),
)
"""Of vLLM, SGLang and, `disaggregated_params`, TensorRT-LLM."""

RANK_MEMBERS = ("data_parallel_rank",)
ID_MEMBERS = ("request_id", "rid")
CONTAINERS = frozenset(("extra_body", "sampling_params", "extra_args", "vllm_xargs"))
STORED_MEMBERS = ("previous_response_id", "conversation")

ADDRESS_MARKS = ("___prefill_addr_", "___decode_addr_")
"""What precedes an engine's address in a request id: vLLM's connectors then exchange blocks with that address."""

ADDRESS_BYTES = tuple(mark.encode() for mark in ADDRESS_MARKS)

ROUTERS = frozenset((*TRANSFER_MEMBERS, *RANK_MEMBERS))
RESERVED = frozenset((*ROUTERS, *ID_MEMBERS, *CONTAINERS, *STORED_MEMBERS))

LEVELS_MAX = 4
"""Containers in containers: engines merge `extra_args` of `sampling_params` of an SDK's `extra_body`, and no deeper."""

SLICE_BYTES = 1 << 20
OVERLAP_BYTES = 4096  # a name with its blanks and colon lies in one of two slices that share so much
HITS_MAX, ESCAPES_MAX = 1000, 20_000  # ESCAPES_MAX: with those that stand in a text in a text
NAME_BYTES_MAX = 6 * max(map(len, RESERVED))  # of a name whose letters are all escaped

NAME_ESCAPE = re.compile(rb"\\u00(5[fF]|6[1-9a-fA-F]|7[0-9aA])")
"""An escape of a letter or an underscore: of what names consist of."""
ESCAPES = (b"\\u005", b"\\u006", b"\\u007")
NAME_PARTS = (b"_transfer_params", b"disaggregated_params", b"bootstrap_", b"_dp_rank", b"data_parallel_rank")
"""Each name of ROUTERS has one of them."""

BLANKS = re.compile(rb"[ \t\r\n]*")
FIELD_OF_FORM = re.compile(rb"name\*?[ \t]*=[ \t]*[\"']?(?:utf-8'')?\Z", re.IGNORECASE)
FORM_BYTES = 32

EITHER_CODING = 32 + zlib.MAX_WBITS  # gzip, or deflate with its head


class Reserved(NamedTuple):
    """What a body has of these members: names of routers' (where an engine takes cached blocks from, or which of its
    ranks computes: only a router can know), and those that name something stored, perhaps another tenant's. `own_id`:
    the client's own id of its request, under which an engine may keep the response."""

    router: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    own_id: bool = False


NOTHING = Reserved()


def reserved_in(fields: Mapping[str, Any]) -> Reserved:
    """Return which of these members a parsed body has."""
    if RESERVED.isdisjoint(fields):
        return NOTHING
    found = set[str]()
    objects: list[Any] = [fields]
    for _ in range(LEVELS_MAX + 1):
        inner: list[Any] = []
        for one in objects:
            for name in RESERVED.intersection(one) if type(one) is dict and not RESERVED.isdisjoint(one) else ():
                if name in CONTAINERS:
                    inner += contained(one[name])
                elif name in ROUTERS or (name in ID_MEMBERS and has_address(one[name])):
                    found.add(name)
        objects = inner
    stored = tuple([name for name in STORED_MEMBERS if fields.get(name)])
    return Reserved(tuple(sorted(found)), stored, fields.get(ID_MEMBERS[0]) is not None)


def may_hide(fields: Mapping[str, Any], history: str, body: bytes, found: Reserved) -> bool:
    """Whether a part of this body up to an end in its history may have members of routers that count without the rest.

    They stand before the history; or a later member of the same name replaces one of them, or a later history its own.
    """
    names = RESERVED.intersection(fields)
    if found.router and not names.isdisjoint(takewhile(history.__ne__, fields)):
        return True
    tokens = [b'"%b"' % name.encode() for name in (*names, history)] if names else ()
    return any(body.count(token) != 1 for token in tokens) or (bool(names) and any(start in body for start in ESCAPES))


def contained(value: Any) -> Sequence[Any]:
    """Return the objects that a container is: itself, or its elements where a body has several prompts."""
    return value if type(value) is list else (value,)


def has_address(request_id: Any) -> bool:
    """Whether a request id, or one of several, has an engine's address in it."""
    ids = request_id if type(request_id) is list else (request_id,)
    return any(type(each) is str and is_addressed(each) for each in ids)


def is_addressed(request_id: str) -> bool:
    return any(mark in request_id for mark in ADDRESS_MARKS)


def slices(body: bytes, size: int = SLICE_BYTES) -> Iterator[bytes]:
    """Yield a body piece by piece, without the zeros of wider encodings. Two pieces share OVERLAP_BYTES."""
    for start in range(0, len(body), size):
        piece = body[start : start + size + OVERLAP_BYTES] if len(body) > size else body
        yield piece.translate(None, b"\0") if b"\0" in piece else piece


INFLATED_BYTES_MAX = 64 << 20
"""Of a compressed body: four times the largest one that is taken without a coding."""

CODINGS = (b"gzip", b"x-gzip", b"deflate")


def inflated_slices(body: bytes) -> Iterator[bytes]:
    """Yield what is in a body of one of CODINGS, as `slices` does, as far as it can be inflated. Raises ValueError if
    it is too large."""
    inflater, rest, kept, left = zlib.decompressobj(EITHER_CODING), body, b"", INFLATED_BYTES_MAX
    while rest and left > 0:
        try:
            piece = inflater.decompress(rest, SLICE_BYTES)
        except zlib.error:
            if len(rest) < len(body) or kept:
                return
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)  # without its head, as some take "deflate"
            try:
                piece = inflater.decompress(rest, SLICE_BYTES)
            except zlib.error:
                return
        left -= len(piece)
        rest = inflater.unconsumed_tail
        if inflater.eof and inflater.unused_data:  # the next member of a gzip file
            rest, inflater = inflater.unused_data, zlib.decompressobj(EITHER_CODING)
        found = kept + piece
        yield found.translate(None, b"\0")
        kept = found[-OVERLAP_BYTES:]
    if left <= 0:
        raise ValueError("it is too large to be inflated")


def any_slice(body: bytes, has: Callable[[bytes], object]) -> Generator[None, None, bool]:
    """Whether a piece of a body has something. Yields after each that has not."""
    for piece in slices(body):
        if has(piece):
            return True
        yield
    return False


class BodySearch:
    """Searches an unread body, slice by slice, for members, or fields of forms, with these names, also with escaped
    letters and in wider encodings; what is found may stand anywhere in it.

    `has_address`: an engine's address may be in the slices so far, so that a request id in any of them may have it.
    """

    def __init__(self, names: Sequence[str], *, form: bool) -> None:
        self.has_address = False
        self._names = {name.encode(): name for name in names}
        self._parts = NAME_PARTS if ROUTERS.issuperset(names) else ()
        self._form = form

    def find(self, piece: bytes) -> str:
        """Return a name that this slice may have; any of them if there is too much to look at; else empty."""
        escapes = b"\\" in piece and any(start in piece for start in ESCAPES)
        self.has_address = self.has_address or escapes or any(mark in piece for mark in ADDRESS_BYTES)
        if not self._parts or any(part in piece for part in self._parts):
            for name, text in self._names.items():
                if has_member(piece, name) or (self._form and has_field(piece, name)):
                    return text
        return escaped_name_in(piece, self._names) if escapes else ""


def has_member(piece: bytes, name: bytes) -> bool:
    """Whether a member may have this name."""
    quoted, at = b'"%b"' % name, 0
    for _ in range(HITS_MAX):
        at = piece.find(quoted, at) + len(quoted)
        if at < len(quoted):
            return False
        if is_before_colon(piece, at):
            return True
    return True


def has_field(piece: bytes, name: bytes) -> bool:
    """Whether a field of a form may have this name."""
    at = -1
    for _ in range(HITS_MAX):
        at = piece.find(name, at + 1)
        if at < 0:
            return False
        if FIELD_OF_FORM.search(piece, max(0, at - FORM_BYTES), at) is not None:
            return True
    return True


def is_before_colon(piece: bytes, at: int) -> bool:
    """Whether a colon follows, or what follows is not in this piece."""
    blanks = BLANKS.match(piece, at, at + OVERLAP_BYTES)
    end = blanks.end() if blanks is not None else at
    return piece[end : end + 1] == b":" or end in (len(piece), at + OVERLAP_BYTES)


def escaped_name_in(piece: bytes, wanted: Mapping[bytes, str]) -> str:
    """Return one of these names that is spelled with escaped letters; any of them if there are too many escapes."""
    count = 0
    for seen, escape in enumerate(NAME_ESCAPE.finditer(piece)):
        at = escape.start()
        if seen >= ESCAPES_MAX:
            return next(iter(wanted.values()), "")
        if piece[at - 1 : at] == b"\\":  # an escaped backslash, or a name with one in it
            continue
        count += 1
        if count > HITS_MAX:
            return next(iter(wanted.values()), "")
        begin, end = piece.rfind(b'"', max(0, at - NAME_BYTES_MAX), at), piece.find(b'"', at, at + NAME_BYTES_MAX)
        if begin >= 0 and end >= 0 and is_before_colon(piece, end + 1):
            found = wanted.get(NAME_ESCAPE.sub(_plain, piece[begin + 1 : end]))
            if found is not None:
                return found
    return ""


def _plain(escape: re.Match[bytes]) -> bytes:
    return bytes((int(escape[1], 16),))

"""Route updates: what one node tells of one served path, as bytes.

One route update says: the process `boot` of backend `backend_key` holds these prefixes. Its stops are a piece of one
path, deepest first; `parent` names the row above the shallowest one, so that the piece finds its place where that row
is known. Fingerprints are keyed: a route update tells nobody what a prompt said.

    backend key u64 | boot u8 | has parent << 7 | count u7 | parent u64, if it has one | count stops, deepest first
    stop: number (steps << 2 | has text << 1 | has token) | token u64, if it has one | text u64, if it has one
    or, of two texts that end in one block: number 0 | text u64    depth and token are those of the stop before

Steps are the depth of the first stop in tokens, and of each other one twice as much as it is less deep than the one
before, or, where depths were but estimated and it is deeper, twice as much as that, less one. A number has 7 bits in
each byte, low ones first, and the top bit where more follow. The rest is little-endian.
Rules: 1 … STOPS_MAX stops, each with a depth and one fingerprint or two that differ; everything in its shortest
spelling; nothing is left over. What breaks a rule raises BadLesson. A turn of a chat is 55 bytes with two stops, 10
more for an anchor. Cost: about 3 us for two stops, either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct, error
from typing import NamedTuple

from ranvier_py.core.prompts.prompt import PrefixKey

CHAIN_KEYS_MAX = 64
"""Stops of one route update. A longer path goes as several, top first, so that none is larger than a datagram would
be."""

NUMBER_BYTES_MAX = 5
ROUTE_UPDATE_BYTES_MAX = 18 + CHAIN_KEYS_MAX * (NUMBER_BYTES_MAX + 16)
TOKENS_MAX = 2**30 - 1
"""Deepest stop that can be told: two bits of a number are taken, and one more of later ones."""

HEAD = Struct("<QBB")
ONE = Struct("<Q")
BOTH = Struct("<QQ")
HAS_TOKEN, HAS_TEXT = 1, 2
HAS_PARENT = 0x80


class BadRouteUpdate(ValueError):
    """These bytes, or these values, are no route update."""


class RouteUpdate(NamedTuple):
    backend_key: int  # u64, not 0
    boot: int  # low 8 bits of the backend's boot
    parent: int  # fingerprint of the row above the shallowest stop; 0 = none, or not known
    chain: tuple[PrefixKey, ...]  # deepest first


def encode(route_update: RouteUpdate) -> bytes:
    """Raises BadLesson for values that a route update has no place for."""
    backend_key, boot, parent, chain = route_update
    if not 0 < len(chain) <= CHAIN_KEYS_MAX or not backend_key:
        raise BadRouteUpdate(f"a lesson names a backend and 1 … {CHAIN_KEYS_MAX} stops, not {len(chain)}")
    try:
        parts = [HEAD.pack(backend_key, boot, len(chain) | (HAS_PARENT if parent else 0))]
        if parent:
            parts.append(ONE.pack(parent))
        above, before = 0, 0  # depth and token of the stop before
        for tokens, token, text in chain:
            if not 0 < tokens <= TOKENS_MAX or token == text:
                raise BadRouteUpdate(f"not a prefix key: {(tokens, token, text)}")
            steps = folded(above - tokens) if above else tokens
            if token and text:
                if token == before and not steps:
                    parts.append(b"\0" + ONE.pack(text))
                else:
                    parts.append(number_bytes(steps << 2 | HAS_TOKEN | HAS_TEXT) + BOTH.pack(token, text))
            else:
                parts.append(number_bytes(steps << 2 | (HAS_TOKEN if token else HAS_TEXT)) + ONE.pack(token or text))
            above, before = tokens, token
    except error as problem:
        raise BadRouteUpdate(str(problem)) from problem
    return b"".join(parts)


def decode(data: bytes) -> RouteUpdate:
    """Raises BadLesson for bytes that `encode` does not make."""
    size = len(data)
    if size > ROUTE_UPDATE_BYTES_MAX:
        raise BadRouteUpdate(f"{size} bytes are no lesson")
    parent, at = 0, HEAD.size
    try:
        backend_key, boot, count = HEAD.unpack_from(data)
        if count & HAS_PARENT:
            (parent,) = ONE.unpack_from(data, at)
            at += ONE.size
            if not parent:
                raise BadRouteUpdate("a parent without a name")
            count ^= HAS_PARENT
        chain, at = _chain(data, at, count)
    except (error, IndexError) as problem:
        raise BadRouteUpdate("it ends too early") from problem
    if at != size or not 0 < count <= CHAIN_KEYS_MAX or not backend_key:
        raise BadRouteUpdate(f"{size - at} bytes left over, {count} stops, backend {backend_key}")
    return RouteUpdate(backend_key, boot, parent, chain)


def _chain(data: bytes, at: int, count: int) -> tuple[tuple[PrefixKey, ...], int]:
    """So many stops from there on, and where they end."""
    chain: list[PrefixKey] = []
    depth = before = 0  # of the stop before
    for _ in range(count):
        number = data[at]
        at += 1
        if number & 0x80:
            number, at = _long_number(data, at)
        steps, kinds = number >> 2, number & 3
        token, text = before if not kinds else 0, 0
        if kinds == HAS_TOKEN | HAS_TEXT:
            token, text = BOTH.unpack_from(data, at)
            at += BOTH.size
            named = token and text and token != text and (steps or token != before)
        else:
            (named,) = ONE.unpack_from(data, at)
            at += ONE.size
            if kinds == HAS_TOKEN:
                token = named
            else:
                text = named
                if not kinds:
                    named = named and token and token != text and not steps
        depth = depth - unfolded(steps) if chain else steps
        if not named or not 0 < depth <= TOKENS_MAX:
            raise BadRouteUpdate("a stop has a depth and a fingerprint")
        chain.append((depth, token, text))
        before = token
    return tuple(chain), at


def folded(difference: int) -> int:
    """A difference as a number that is not negative: 0, -1, 1, -2, 2 … are 0, 1, 2, 3, 4 …."""
    return 2 * difference if difference >= 0 else -2 * difference - 1


def unfolded(number: int) -> int:
    return -(number + 1 >> 1) if number & 1 else number >> 1


def number_bytes(number: int) -> bytes:
    """A number below 2**35 in its shortest spelling."""
    if number < 0x80:
        return bytes((number,))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _long_number(data: bytes, at: int) -> tuple[int, int]:
    """The number whose second byte is there, and where it ends."""
    number, shift = data[at - 1] & 0x7F, 7
    for end in range(at, at + NUMBER_BYTES_MAX - 1):
        byte = data[end]
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if not byte:
                break
            return number, end + 1
    raise BadRouteUpdate("a number that is too long")


def pieces(route_update: RouteUpdate) -> Iterator[RouteUpdate]:
    """The same as route updates of at most STOPS_MAX stops, top first: each names the row above it as its parent."""
    chain: Sequence[PrefixKey] = route_update.chain
    parent = route_update.parent
    if len(chain) <= CHAIN_KEYS_MAX:
        yield route_update
        return
    for end in range(len(chain), 0, -CHAIN_KEYS_MAX):
        piece = tuple(chain[max(0, end - CHAIN_KEYS_MAX) : end])
        yield route_update._replace(parent=parent, chain=piece)
        parent = piece[0][1] or piece[0][2]

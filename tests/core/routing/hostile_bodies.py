"""Bodies that are made to cost more than their size: known shapes at any size, and mixtures that nobody thought of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from ranvier_py.core.prompts.body_json import ENDS_BYTES_MAX, MARKS_MAX, PARSED_BYTES_MAX, UNCOUNTED_BYTES_MAX
from ranvier_py.core.prompts.body_members import MESSAGES_FREE, MESSAGES_MAX
from ranvier_py.core.prompts.request_body import KNOWN_BYTES_MAX, REPARSED_BYTES_MAX, TAIL_BYTES_MAX
from ranvier_py.core.routing.router import CHAT_PATH, COMPLETION_PATH

LIMIT = 64 * 2**20
"""`body_bytes_max` as it is by default."""

LIMITS = (
    TAIL_BYTES_MAX,
    ENDS_BYTES_MAX,
    UNCOUNTED_BYTES_MAX,
    REPARSED_BYTES_MAX,
    PARSED_BYTES_MAX,
    KNOWN_BYTES_MAX,
    LIMIT,
)
"""Where a body is treated otherwise if it is one byte longer."""

EMOJI = "\U0001f600".encode()
DECOY = b'{"stream_options":{"include_usage":false}}'


class Hostile(NamedTuple):
    """`body` is to be sent to `path`; `name` says what it is."""

    name: str
    path: bytes
    body: bytes


def filled(start: bytes, piece: bytes, end: bytes, size: int) -> bytes:
    """`piece` as often as it fits, without the comma that the last one ends with."""
    count = max(1, (size - len(start) - len(end)) // len(piece))
    return start + (piece * count).removesuffix(b",") + end


def numbered(start: bytes, piece: bytes, end: bytes, size: int) -> bytes:
    """The same, each with a number of its own."""
    width = 8
    count = max(1, (size - len(start) - len(end)) // (len(piece) - 2 + width))
    return start + b",".join([piece % (b"%0*x" % (width, number)) for number in range(count)]) + end


def chat(content: bytes, before: bytes = b"", behind: bytes = b"") -> tuple[bytes, bytes]:
    """What stands before and behind the content of the only message of a stream."""
    return b'{"stream":true,%b"messages":[{"role":"user","content":%b' % (before, content), b"}]%b}" % behind


VALUES: Mapping[str, bytes] = {
    "lists": b"[],",
    "objects": b"{},",
    "pairs": b'{"a":1},',
    "nested": b'{"":{"":[[]]}},',
    "numbers": b"1,",
    "floats": b"1.5,",
    "digits": b"12345678901234567890,",
    "hard floats": b"1.00000000000000011102230246251565404236316680908203125e-5,",
    "texts": b'"ab",',
    "empty texts": b'"",',
    "backslashes": b'"\\\\",',
    "parts": b'{"type":"text","text":"x"},',
}
TEXTS: Mapping[str, bytes] = {
    "letters": b"a",
    "commas": b",",
    "quotes": b'\\"',
    "line ends": b"\\n",
    "escapes": b"\\u00e9",
    "surrogates": b"\\ud83d\\ude00",
    "emoji": EMOJI,
    "accents": "é".encode(),
    "roles": b'\\"role\\" ',
    "array ends": b"}]",
    "message ends": b'}]},{\\"role\\":',
}
MESSAGE = b'{"role":"user","content":"%b"},' % (b"x" * 128)
MESSAGE_BYTES = len(MESSAGE)
DEEP = b"[" * 1000 + b"]" * 1000 + b","

Shape = Callable[[int], Hostile]


def shapes() -> Iterator[tuple[str, Shape]]:
    """Every known shape, by its name."""
    for name, piece in (*VALUES.items(), ("deep lists", DEEP)):
        yield f"content of {name}", partial(content_of, name, piece)
        yield f"tools of {name}", partial(member_of, b"tools", name, piece)
        yield f"prompt of {name}", partial(prompt_of, name, piece)
        yield f"blocks of {name}", partial(blocks_of, name, piece)
        yield f"items of {name}", partial(items_of, name, piece)
    for name, piece in TEXTS.items():
        yield f"text of {name}", partial(text_of, name, piece)
    yield from ((shape.__name__, shape) for shape in (results, claude_tools, system_blocks, marks))
    own = (keys, decoys, asked_decoys, roles, messages, empty_messages, model, salt, numbers, unclosed, blank, spaced)
    yield from ((shape.__name__, shape) for shape in own)
    yield from ((shape.__name__, shape) for shape in (widened, not_a_number, surrogate, embeddings, noise, array_ends))


def content_of(name: str, piece: bytes, size: int) -> Hostile:
    start, end = chat(b"[")
    return Hostile(f"content of {name}", CHAT_PATH, filled(start, piece, b"]" + end, size))


def blocks_of(name: str, piece: bytes, size: int) -> Hostile:
    """Of a turn and of a tool's result, where each is looked at."""
    start = b'{"system":"x","messages":[{"role":"user","content":[{"type":"tool_result","content":['
    return Hostile(f"blocks of {name}", b"/v1/messages", filled(start, piece, b"]}]}]}", size))


def items_of(name: str, piece: bytes, size: int) -> Hostile:
    start = b'{"instructions":"x","input":[{"type":"reasoning","summary":['
    return Hostile(f"items of {name}", b"/v1/responses", filled(start, piece, b"]}]}", size))


def results(size: int) -> Hostile:
    """Each becomes a message."""
    start, piece = b'{"messages":[{"role":"user","content":[', b'{"type":"tool_result"},'
    return Hostile("results", b"/v1/messages", filled(start, piece, b"]}]}", size))


def claude_tools(size: int) -> Hostile:
    start, piece = b'{"messages":[{"role":"user","content":"x"}],"tools":[', b'{"input_schema":{}},'
    return Hostile("claude_tools", b"/v1/messages", filled(start, piece, b"]}", size))


def system_blocks(size: int) -> Hostile:
    start, piece = b'{"messages":[{"role":"user","content":"x"}],"system":[', b'{"type":"text","text":""},'
    return Hostile("system_blocks", b"/v1/messages", filled(start, piece, b"]}", size))


def marks(size: int) -> Hostile:
    """Ends of items wherever one looks, and nothing to be found there."""
    start, piece = b'{"input":[{"role":"user","content":"', b'\\"role\\":\\"function_call\\"reasoning\\",'
    return Hostile("marks", b"/v1/responses", filled(start, piece, b'"}]}', size))


def member_of(member: bytes, name: str, piece: bytes, size: int) -> Hostile:
    start, end = chat(b'"x"', behind=b',"%b":[' % member)
    return Hostile(f"{member.decode()} of {name}", CHAT_PATH, filled(start + end[:-1], piece, b"]}", size))


def prompt_of(name: str, piece: bytes, size: int) -> Hostile:
    return Hostile(f"prompt of {name}", COMPLETION_PATH, filled(b'{"prompt":[', piece, b"]}", size))


def text_of(name: str, piece: bytes, size: int) -> Hostile:
    start, end = chat(b'"')
    return Hostile(f"text of {name}", CHAT_PATH, filled(start, piece, b'"' + end, size))


def keys(size: int) -> Hostile:
    start, end = chat(b"{")
    return Hostile("keys", CHAT_PATH, numbered(start, b'"%b":[]', b"}" + end, size))


def decoys(size: int) -> Hostile:
    start, end = chat(b"[", before=b'"stream_options":{},')
    return Hostile("decoys of stream_options", CHAT_PATH, filled(start, DECOY + b",{},", b"]" + end, size))


def asked_decoys(size: int) -> Hostile:
    """Options at both ends and in the middle, none of which is the one that counts."""
    start, end = chat(b"[", behind=b',"stream_options":null,"tools":[%b]' % (DECOY + b"," + DECOY))
    return Hostile("more decoys", CHAT_PATH, filled(start, b"{}," * 5000 + DECOY + b",", b"]" + end, size))


def roles(size: int) -> Hostile:
    """Eight proposed cuts, each of which is digested."""
    start, _ = chat(b'"')
    text = b'"},' + b",".join([b'{"role":"user","content":"x"}'] * 9) + b"]}"
    return Hostile("cuts", CHAT_PATH, filled(start, b"a", text, size))


def messages(size: int) -> Hostile:
    return Hostile("messages", CHAT_PATH, filled(b'{"messages":[', MESSAGE, b'],"stream":true}', size))


def empty_messages(size: int) -> Hostile:
    return Hostile("empty messages", CHAT_PATH, filled(b'{"messages":[', b"{},", b'],"stream":true}', size))


def model(size: int) -> Hostile:
    return Hostile("model", CHAT_PATH, filled(b'{"model":"', b"m", b'","messages":[{}]}', size))


def salt(size: int) -> Hostile:
    return Hostile("salt", CHAT_PATH, filled(b'{"cache_salt":"', EMOJI, b'","messages":[{}]}', size))


def numbers(size: int) -> Hostile:
    """A number that one library refuses and the other reads."""
    return Hostile("number", CHAT_PATH, filled(b'{"messages":[{}],"seed":', b"1", b"}", size))


def unclosed(size: int) -> Hostile:
    return Hostile("unclosed", CHAT_PATH, filled(b'{"messages":', b"[", b"", size))


def blank(size: int) -> Hostile:
    return Hostile("blank", CHAT_PATH, filled(b'{"messages":[{}', b" ", b"]}", size))


def spaced(size: int) -> Hostile:
    """What a search for the end of an array may run through again and again."""
    start, end = chat(b'"', behind=b',"user":"u"')
    return Hostile("spaced ends", CHAT_PATH, filled(start, b"}" + b" " * 60, b'"' + end, size))


def widened(size: int) -> Hostile:
    """One character makes each of the others four bytes wide."""
    start, end = chat(b'"')
    return Hostile("widened", CHAT_PATH, filled(start, b"a", EMOJI + b'"' + end, size))


def not_a_number(size: int) -> Hostile:
    start, end = chat(b"[", behind=b',"x":NaN')
    return Hostile("NaN", CHAT_PATH, filled(start, b"[],", b"]" + end, size))


def surrogate(size: int) -> Hostile:
    start, end = chat(b'"')
    return Hostile("half a surrogate", CHAT_PATH, filled(start, b"\\n", b'\\ud83d"' + end, size))


def embeddings(size: int) -> Hostile:
    return Hostile("embeddings", b"/v1/embeddings", filled(b'{"model":"m","input":[', b'"ab",', b"]}", size))


def noise(size: int) -> Hostile:
    return Hostile("noise", b"/v1/audio/transcriptions", Random(size).randbytes(size))


def array_ends(size: int) -> Hostile:
    """Sixteen places that look like the end of the messages, each with all of a costly rest behind it."""
    start, end = chat(b"[" + b"[{}]," * 16, behind=b',"user":"u"')
    return Hostile("array ends", CHAT_PATH, filled(start, b"[],", b"]" + end, size))


def sizes(rng: Random, largest: int = LIMIT) -> int:
    """One that is near a limit of ours, or any; small ones as often as large ones."""
    if rng.random() < 0.5:
        return min(largest, max(64, rng.choice(LIMITS) + rng.randint(-200, 200)))
    return int(64 * (largest / 64) ** rng.random())


def mixture(rng: Random, size: int) -> Hostile:
    """A chat that is put together of pieces of all shapes, in any proportion."""
    pieces = [*VALUES.values(), *(b'"%b",' % (text * 9) for text in TEXTS.values()), DECOY + b","]
    chosen = rng.sample(pieces, rng.randint(1, 4))
    share = size // len(chosen)
    body = b"".join(piece * max(1, rng.randint(share // 2, share) // len(piece)) for piece in chosen)
    start, end = chat(b"[", before=rng.choice((b"", b'"stream_options":{},', b'"model":"m",', b'"tools":[{}],')))
    behind = rng.choice((b"", b',"stream_options":null', b',"model":"m","user":"u"'))
    return Hostile("mixture", CHAT_PATH, start + body.removesuffix(b",") + b"]" + end[:-1] + behind + b"}")


def endless(seed: int) -> Iterator[Hostile]:
    """Shapes and mixtures at sizes up to the limit, for ever."""
    rng = Random(seed)
    known = list(shapes())
    while True:
        size = sizes(rng)
        yield rng.choice(known)[1](size) if rng.random() < 0.7 else mixture(rng, size)


def dearest() -> Iterator[Hostile]:
    """Every shape where it may cost most: below the limits of what is parsed, and at that of what is taken."""
    for _, shape in shapes():
        body = shape(PARSED_BYTES_MAX).body
        marks = sum(body.count(mark) for mark in b'[{,"')
        if marks > MARKS_MAX:
            yield shape(UNCOUNTED_BYTES_MAX)
        yield shape(int(0.97 * PARSED_BYTES_MAX * min(1, MARKS_MAX / max(1, marks))))
    for shape in (content_of, text_of):
        yield shape("x", b"a" if shape is text_of else b"[],", KNOWN_BYTES_MAX)
        yield shape("x", b"a" if shape is text_of else b"[],", LIMIT)
    yield messages(MESSAGE_BYTES * MESSAGES_MAX)
    yield messages(MESSAGE_BYTES * (MESSAGES_MAX + 2))
    yield empty_messages(3 * MESSAGES_FREE)
    yield roles(KNOWN_BYTES_MAX)
    yield roles(LIMIT)

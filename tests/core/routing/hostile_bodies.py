"""Bodies that are made to cost more than their size: known shapes at any size, and mixtures that nobody thought of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import NamedTuple

from ranvier_py.core.prompts.body_json import ENDS_BYTES_MAX, MARKS_MAX, PARSED_BYTES_MAX, UNCOUNTED_BYTES_MAX
from ranvier_py.core.prompts.body_members import MESSAGES_FREE, MESSAGES_MAX
from ranvier_py.core.prompts.request_body import KNOWN_BYTES_MAX, REPARSED_BYTES_MAX, TAIL_BYTES_MAX
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH

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


def shape_of(name: str, path: bytes, start: bytes, piece: bytes, end: bytes) -> Shape:
    """As many pieces as fit, between a start and an end."""
    return lambda size: Hostile(name, path, filled(start, piece, end, size))


def content_of(name: str, piece: bytes, start: bytes = b"[", end: bytes = b"]", **beside: bytes) -> Shape:
    """The pieces in the content of a chat's only message."""
    before, behind = chat(b"", **beside)
    return shape_of(name, CHAT_PATH, before + start, piece, end + behind)


def shapes() -> Iterator[Shape]:
    """Every known shape."""
    tool_result = b'{"system":"x","messages":[{"role":"user","content":[{"type":"tool_result","content":['
    reasoning = b'{"instructions":"x","input":[{"type":"reasoning","summary":['
    before, behind = chat(b'"x"', behind=b',"tools":[')
    for name, piece in (*VALUES.items(), ("deep lists", DEEP)):
        yield content_of(f"content of {name}", piece)
        yield shape_of(f"tools of {name}", CHAT_PATH, before + behind[:-1], piece, b"]}")
        yield shape_of(f"prompt of {name}", COMPLETION_PATH, b'{"prompt":[', piece, b"]}")
        yield shape_of(f"blocks of {name}", MESSAGES_PATH, tool_result, piece, b"]}]}]}")
        yield shape_of(f"items of {name}", RESPONSES_PATH, reasoning, piece, b"]}]}")
    for name, piece in TEXTS.items():
        yield content_of(f"text of {name}", piece, b'"', b'"')
    yield from (results, claude_tools, system_blocks, marks)
    yield from (keys, decoys, asked_decoys, roles, messages, empty_messages, model, salt, numbers, unclosed, blank)
    yield from (spaced, widened, not_a_number, surrogate, embeddings, noise, array_ends)


USER = b'{"messages":[{"role":"user","content":'

results = shape_of("results", MESSAGES_PATH, USER + b"[", b'{"type":"tool_result"},', b"]}]}")  # each is a message
claude_tools = shape_of("tools", MESSAGES_PATH, USER + b'"x"}],"tools":[', b'{"input_schema":{}},', b"]}")
system_blocks = shape_of("system", MESSAGES_PATH, USER + b'"x"}],"system":[', b'{"type":"text","text":""},', b"]}")

marks = shape_of(  # ends of items wherever one looks, and nothing to be found there
    "marks",
    RESPONSES_PATH,
    b'{"input":[{"role":"user","content":"',
    b'\\"role\\":\\"function_call\\"reasoning\\",',
    b'"}]}',
)

decoys = content_of("decoys of stream_options", DECOY + b",{},", before=b'"stream_options":{},')
asked_decoys = content_of(  # options at both ends and in the middle, none of which is the one that counts
    "more decoys",
    b"{}," * 5000 + DECOY + b",",
    behind=b',"stream_options":null,"tools":[%b]' % (DECOY + b"," + DECOY),
)

roles = shape_of(  # eight proposed cuts, each of which is digested
    "cuts", CHAT_PATH, chat(b'"')[0], b"a", b'"},' + b",".join([b'{"role":"user","content":"x"}'] * 9) + b"]}"
)
messages = shape_of("messages", CHAT_PATH, b'{"messages":[', MESSAGE, b'],"stream":true}')
empty_messages = shape_of("empty messages", CHAT_PATH, b'{"messages":[', b"{},", b'],"stream":true}')
model = shape_of("model", CHAT_PATH, b'{"model":"', b"m", b'","messages":[{}]}')
salt = shape_of("salt", CHAT_PATH, b'{"cache_salt":"', EMOJI, b'","messages":[{}]}')
numbers = shape_of("number", CHAT_PATH, b'{"messages":[{}],"seed":', b"1", b"}")  # some libraries refuse it
unclosed = shape_of("unclosed", CHAT_PATH, b'{"messages":', b"[", b"")
blank = shape_of("blank", CHAT_PATH, b'{"messages":[{}', b" ", b"]}")

spaced = content_of("spaced ends", b"}" + b" " * 60, b'"', b'"', behind=b',"user":"u"')  # searched again and again
widened = content_of("widened", b"a", b'"', EMOJI + b'"')  # one character makes each of the others four bytes wide
not_a_number = content_of("NaN", b"[],", behind=b',"x":NaN')
surrogate = content_of("half a surrogate", b"\\n", b'"', b'\\ud83d"')
embeddings = shape_of("embeddings", b"/v1/embeddings", b'{"model":"m","input":[', b'"ab",', b"]}")
array_ends = content_of(  # sixteen places that look like the end of the messages, each with a costly rest behind it
    "array ends", b"[],", b"[" + b"[{}]," * 16, behind=b',"user":"u"'
)


def keys(size: int) -> Hostile:
    start, end = chat(b"{")
    return Hostile("keys", CHAT_PATH, numbered(start, b'"%b":[]', b"}" + end, size))


def noise(size: int) -> Hostile:
    return Hostile("noise", b"/v1/audio/transcriptions", Random(size).randbytes(size))


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
        yield rng.choice(known)(size) if rng.random() < 0.7 else mixture(rng, size)


def dearest() -> Iterator[Hostile]:
    """Every shape where it may cost most: below the limits of what is parsed, and at that of what is taken."""
    for shape in shapes():
        body = shape(PARSED_BYTES_MAX).body
        marks = sum(body.count(mark) for mark in b'[{,"')
        if marks > MARKS_MAX:
            yield shape(UNCOUNTED_BYTES_MAX)
        yield shape(int(0.97 * PARSED_BYTES_MAX * min(1, MARKS_MAX / max(1, marks))))
    for shape in (content_of("content", b"[],"), content_of("text", b"a", b'"', b'"')):
        yield shape(KNOWN_BYTES_MAX)
        yield shape(LIMIT)
    yield messages(MESSAGE_BYTES * MESSAGES_MAX)
    yield messages(MESSAGE_BYTES * (MESSAGES_MAX + 2))
    yield empty_messages(3 * MESSAGES_FREE)
    yield roles(KNOWN_BYTES_MAX)
    yield roles(LIMIT)

"""Reads an answer as it passes, once: where it begins, its first token, a failure in it, its id, counts to be removed.

Rule: a piece of whole events in whole chunks, in which nothing is looked for, passes unchanged. Any other is taken out
of its chunks and cut into events, however reads and chunks cut these, and each event goes to whom it concerns. What is
left where counts were removed, or an event had to be held, leaves in a chunk of ours. White space is output, for the
prefill is done, but begins no answer by itself.
Invariant: neither what passes nor what is found depends on the cuts (test_answer_reader.py).
Bounds: HELD_BYTES_MAX of an incomplete event, and of what comes before an answer begins; CAPTURE_BYTES_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ranvier_py.core.answers.answer_events import (
    ANSWERS,
    BLANK,
    EMPTY,
    EVENT_END,
    FOREIGN,
    FRAMED,
    FRAMED_BYTES,
    NO_ANSWER,
    OUTPUT,
    AnswerEvent,
    Failure,
    end_of_events,
    event_at,
    failure_in_whole,
    is_no_answer,
)
from ranvier_py.core.answers.answer_stream import BYTE_ORDER_MARK, WORD, ResponseName, has_finished, has_token, has_word
from ranvier_py.core.answers.chunked import ChunkedReader, payload_of
from ranvier_py.core.answers.usage_removal import MARK, UsageRemoval

ERROR = b"error"  # in all events that are failures but RESPONSE_FAILED; quoted in all whole answers that are
RESPONSE_FAILED = b"response.failed"
QUOTED_ERROR, QUOTED_ABORT = b'"error"', b'"abort"'  # also what an answer ends with that was not computed
OUTPUT_NAMES = [b'"%b"' % name.encode() for name in OUTPUT]
AT_TOP = rb'\{[^{}[\]]*?"'  # in an object from its very beginning, where nothing is searched for
OUTPUT_BEGINS = {  # each part begins with a quote, which alone is searched for then: in a third of the time
    "chat": re.compile(
        rb'"choices"\s*:\s*\[\s*\{(?s:.{0,512}?)"(?:(?:content|reasoning|reasoning_content|arguments)"\s*:\s*%b'
        rb'|tool_calls"\s*:\s*\[\s*\{)' % WORD
    ).search,
    "completion": re.compile(rb'"choices"\s*:\s*\[\s*\{(?s:.{0,512}?)"text"\s*:\s*%b' % WORD).search,
    "messages": re.compile(
        AT_TOP + rb'content"\s*:\s*\[(?s:.{0,512}?)"(?:(?:text|thinking)"\s*:\s*%b|tool_use")' % WORD
    ).match,
    "responses": re.compile(rb'"output"\s*:\s*\[(?s:.{0,512}?)"(?:text|arguments)"\s*:\s*%b' % WORD).search,
    "generate": re.compile(rb'\{"text"\s*:\s*%b' % WORD).match,
    "embeddings": re.compile(rb'"embedding"\s*:\s*(?:\[\s*[-\d]|"[^"])').search,
    **{
        api: re.compile(AT_TOP + rb'(?:%b)"\s*:\s*["[\d-]' % "|".join(ANSWERS[api]).encode()).match
        for api in ("rerank", "score", "classify", "count_tokens", "tokenize", "detokenize")
    },
}
"""With its first word, in nearly all answers that are one object, by API; what has none of these is looked at."""
OBJECT_ENDS = (b"}", b"}\n", b"}\r\n")
OTHER = b"."  # held of what is no object any more
CHUNK_END = b"\n\n\r\n"  # of a chunk, and of an event at its end

HELD_BYTES_MAX = 64 * 1024
"""A longer event is not one of counts, which have some 300 bytes; it is passed on as it comes."""

WHOLE_BYTES_MAX = 16 * 1024
"""Of a whole answer that may be an error, which have some hundred bytes, or that is waited for to its end."""

LOOKS_MAX = 256  # at events of one piece, each of which takes up to 30 us

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed but not learned: 1 MiB of a stream is some 5,000 tokens."""


class AnswerReader:
    """Reads an answer of which nothing but its first token is looked for: one that `streams` has that in its pieces.
    `chunks` follows those of a chunked body."""

    __slots__ = (
        *("api", "beyond", "captured", "chunks", "held", "naming", "streams"),
        *("begun", "failure", "has_output", "name", "size"),
    )

    def __init__(self, api: str, chunks: ChunkedReader | None, *, streams: bool, names: bool, captures: bool) -> None:
        self.api, self.chunks, self.streams = api, chunks, streams
        self.captured = bytearray() if captures else None  # not a list: an engine may send two bytes at a time
        self.naming = ResponseName() if names else None  # while the answer's id is looked for
        self.beyond: Callable[[bytes], None] | None = None  # gets what is not captured, if set
        self.held = b""  # what was not judged yet
        self.name = ""  # its id, once it is here
        self.size = 0  # bytes so far, as they came
        self.begun = self.has_output = False  # no other engine can answer any more; the prefill is done
        self.failure: Failure | None = None  # what the answer is, or what ended it

    def feed(self, data: bytes, complete: bool) -> bytes:
        """Return what goes on to the client of this piece, which `chunks` has just read, and of what was held.
        `complete`: the message ends with it."""
        self.size += len(data)
        if self.captured is not None and self.size <= CAPTURE_BYTES_MAX:
            self.captured += data
        elif self.beyond is not None:
            self.beyond(data)
        if self.naming is not None and data:
            self.name = self.naming.feed(self._payload(data))
            self.naming = None if self.naming.is_over else self.naming
        return self._passed(data, complete)

    def _passed(self, data: bytes, complete: bool) -> bytes:
        self.begun = self.begun or bool(data) or complete or not self.streams
        self.has_output = self.has_output or (bool(data) and (not self.streams or has_token(data, self.api)))
        return data

    def unframe(self) -> None:
        """Read payloads from now on, not the frames of chunks."""
        if self.chunks is not None and self.captured is not None:
            self.captured[:] = payload_of(bytes(self.captured))
        self.chunks = None

    def believe(self) -> None:
        """Take a blank answer for what the client should have."""
        self.failure, self.begun = None, True

    def _payload(self, data: bytes) -> bytes:
        return data if self.chunks is None else self.chunks.payload(data)


class WholeReader(AnswerReader):
    """Reads an answer that is one JSON object, or no stream that we know. A short object begins with its end, if none
    is streamed: another engine can still answer if it breaks off. It begins also with blanks, by which engines keep a
    line open."""

    __slots__ = ()

    def _passed(self, data: bytes, complete: bool) -> bytes:
        if self.has_output or self.failure:
            self.begun = self.begun or (self.failure is None and (complete or self.size > WHOLE_BYTES_MAX))
            return data
        if (
            complete
            and not self.held
            and data.startswith(b"{")
            and data.endswith(OBJECT_ENDS)
            and self._shows_output(data)
        ):
            self.begun = self.has_output = True  # nearly all
            return data
        held = self.held + self._payload(data)
        text = held.removeprefix(BYTE_ORDER_MARK).lstrip()
        is_object = text.startswith(b"{") and len(text) <= WHOLE_BYTES_MAX
        is_short = len(held) < FRAMED_BYTES and (text or held == BYTE_ORDER_MARK) and self.held != OTHER
        if is_short and not is_object and not complete:  # it may become anything
            self.held = held
        elif is_object:
            self.held = held
            self._judge_object(text, complete)
        else:
            self._judge_other(text, complete)
            self.begun = self.begun or bool(held and not self.failure)
            self.held = OTHER if text else held
        return data

    def _shows_output(self, text: bytes) -> bool:
        """Whether an object names no error, and has output if its API is one of those that we know."""
        if QUOTED_ERROR in text or QUOTED_ABORT in text:
            return False
        begins = OUTPUT_BEGINS.get(self.api)
        return begins is None or begins(text) is not None

    def _judge_object(self, text: bytes, complete: bool) -> None:
        """Judge an object by what is here of it."""
        if complete and not (text := text.rstrip()).endswith(b"}") and self.api in ANSWERS:
            self.failure = NO_ANSWER  # the rest of it
        elif self._shows_output(text) and (complete or any(name in text for name in OUTPUT_NAMES)):
            self.has_output = True
        elif complete:
            self.failure = failure_in_whole(text, self.api)
            self.has_output = self.failure is None
        self.begun = self.begun or (self.has_output and (complete or self.streams))

    def _judge_other(self, text: bytes, complete: bool) -> None:
        """Judge what is no object, or a long one, by what is here of it. Blanks alone are nothing yet."""
        passes = (b"{", b"[") if self.streams and not complete else b"{"  # some stream a list
        if not text:
            self.failure = EMPTY if complete else None
        elif not text.startswith(passes) and self.held != OTHER and is_no_answer(text, self.api):
            self.failure = NO_ANSWER
        else:
            if self.held != OTHER and FRAMED.match(text) is not None:  # a stream that its head does not name
                self.failure = event_at(text, 0).failure
            self.has_output = self.failure is None and (not self.streams or has_token(text, self.api))


class StreamReader(AnswerReader):
    """Reads a stream of events."""

    __slots__ = ("_aligned", "_end", "_finished", "_mark", "_opening", "_over", "_passing", "_speaks", "removal")

    def __init__(self, api: str, chunks: ChunkedReader | None, *, streams: bool, names: bool, captures: bool) -> None:
        super().__init__(api, chunks, streams=streams, names=names, captures=captures)
        self.removal: UsageRemoval | None = None
        self._mark = RESPONSE_FAILED if api == "responses" else ERROR
        self._end = CHUNK_END if chunks is not None else b"\n\n"
        self._aligned = True  # everything so far was whole events in whole chunks
        self._passing = False  # the first part of this event was too long to be looked at
        self._opening = True  # every event is looked at
        self._over = False  # only what ends a chunked message is to come
        self._finished = False  # an event said that it ends, without a word so far
        self._speaks = False  # it has more than white space

    def unframe(self) -> None:
        super().unframe()
        self._end = b"\n\n"

    def remove(self, removal: UsageRemoval) -> None:
        """Have counts removed: call this before anything is read."""
        self.removal, self._mark = removal, MARK

    def feed(self, data: bytes, complete: bool) -> bytes:
        chunks = self.chunks
        if (  # nearly all pieces
            (self._aligned and self.naming is None)
            and (self._mark not in data and ERROR not in data)
            and (complete or (data.endswith(self._end) and (chunks is None or not chunks.inside)))
            and (chunks is None or len(chunks.spans) < 2 or data.count(CHUNK_END) >= len(chunks.spans))
            and (not self._opening or self._has_word(data))
        ):
            self.size += len(data)
            if self.captured is not None and self.size <= CAPTURE_BYTES_MAX:
                self.captured += data
            elif self.beyond is not None:
                self.beyond(data)
            return data
        return super().feed(data, complete)

    def _has_word(self, data: bytes) -> bool:
        if has_word(data, self.api):
            self.has_output, self.begun, self._speaks, self._opening = True, True, True, False
        return not self._opening

    def _passed(self, data: bytes, complete: bool) -> bytes:
        if self._over:
            return data
        chunks, was_aligned, payload = self.chunks, self._aligned, self._payload(data)
        last = chunks.last if chunks is not None else b""
        kept = self._kept(payload, is_last=complete or bool(last))
        self._over = bool(last)
        self._aligned = not (self.held or self._passing or (chunks is not None and chunks.inside))
        if self.removal is None or (was_aligned and (self._aligned or complete) and kept == payload):
            return data
        if chunks is None:
            return kept
        return b"%x\r\n%b\r\n%b" % (len(kept), kept, last) if kept else last

    def _kept(self, payload: bytes, *, is_last: bool) -> bytes:
        """Return what is kept of the whole events in this payload and in what was held."""
        data, passed = self.held + payload, b""
        if self._passing:
            first = EVENT_END.search(data)
            if first is None and not is_last:
                return self._pass_on(data)
            end = first.end() if first is not None else len(data)
            self._passing, passed, data = False, data[:end], data[end:]
        end = len(data) if is_last else end_of_events(data, 0, len(data))
        events, self.held = data[:end], data[end:]
        kept = passed + self._sifted(events)
        if is_last and self.failure is None and not self._speaks:
            is_blank = self._finished or self.has_output
            self.failure = BLANK if is_blank else None if self.begun else EMPTY
        return kept + self._pass_on(self.held) if len(self.held) > HELD_BYTES_MAX else kept

    def _pass_on(self, data: bytes) -> bytes:
        """Let an incomplete event go, except a line end at its end that may become the event's end."""
        self._passing = self.begun = self._speaks = True
        kept = 2 if data.endswith(b"\n\r") else 1 if data.endswith((b"\n", b"\r")) else 0
        self.held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def _sifted(self, events: bytes) -> bytes:
        """Have whole events looked at by whom they concern. Returns what goes on of them."""
        kept, at, places = list[bytes](), 0, dict[bytes, int]()
        for _ in range(LOOKS_MAX):
            if (place := self._next(events, at, places)) < 0:
                break
            start, found = end_of_events(events, at, place), EVENT_END.search(events, place)
            end = found.end() if found is not None else len(events)
            kept += (events[at:start], self._looked_at(events[start:end]))
            at = end
        else:
            self.begun, self._speaks, self._opening = True, True, False  # no engine writes so
        return b"".join((*kept, events[at:]))

    def _next(self, events: bytes, at: int, places: dict[bytes, int]) -> int:
        """Return a place in the next event that concerns anybody; -1: none does. `places`: where what is looked for was
        found last."""
        names = (b"data",) if self._opening else (self._mark, ERROR) if self.failure is None else (self._mark,)
        for name in names:
            if 0 <= places.get(name, 0) < at or name not in places:
                places[name] = events.find(name, at)
        return min([places[name] for name in names if places[name] >= 0], default=-1)

    def _looked_at(self, event: bytes) -> bytes:
        if self.failure is None and (self._opening or ERROR in event or RESPONSE_FAILED in event):
            self._judge(event)
        if self.removal is not None and MARK in event:
            event = self.removal.left_of(event)
            if self.removal.counts_anyway:
                self._mark = ERROR
        return event

    def _judge(self, event: bytes) -> None:
        """Find out whether the answer fails, or begins, with this event."""
        found = AnswerEvent.of(event)
        if ERROR in event or RESPONSE_FAILED in event or QUOTED_ABORT in event:
            self.failure = found.failure
        if not self.begun and self.failure is None and found.begins:
            is_garbled = found.is_garbled and self.api in ANSWERS
            self.failure = NO_ANSWER if is_garbled else FOREIGN if found.is_of_another(self.api) else None
        if self._opening and self.failure is None:
            has_words = has_word(event, self.api)
            self.has_output = self.has_output or has_words or has_token(event, self.api)
            is_blank = found.is_blank and not has_words
            self._finished = self._finished or (is_blank and has_finished(event, self.api))
            self._speaks = self._speaks or has_words or (found.begins and not is_blank)
            self.begun = self.begun or self._speaks
        self._opening = not ((self.has_output and self._speaks) or self.failure)

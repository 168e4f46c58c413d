"""Keeps an engine's latest events for a reporter, and decides what each router gets: the engine's own messages. Pure.

Rule: each router has an EventRelay, which sends it each new message. A router that misses messages asks for them in
its answer to a report; the relay then replays the log from there to its end. The first report is empty, and makes the
router ask for what it misses. If nothing is new, nothing is sent but one report in BEAT_S, which shows that the
reporter lives.
Bounds: the log has `messages_max` messages of `bytes_max`; above, its oldest quarter is dropped: a router that needs
it knows the engine less well. One report has CHUNK_BYTES and CHUNK_MESSAGES at most, or one message.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ranvier_py.core.engine_cache.gap_values import Apply, StreamReset
from ranvier_py.core.engine_cache.sources.event_frames import PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.push_messages import MESSAGES_MAX, Messages

EVENTS_PATH = "/internal/events"

BATCH_S = 0.1  # evictions are collected for so long, as in the Purdue report
BEAT_S = 5.0  # the interval of syncs in that report
ASK_MAX = (1 << 63) - 1  # the greatest integer that every JSON library can hold
CHUNK_BYTES = 1 << 18
CHUNK_MESSAGES = MESSAGES_MAX // 2


class RouterPost(NamedTuple):
    path: str
    body: Mapping[str, Any]


class EventLog:
    """The last messages of one rank, in order, as a GapMachine applied them. `runs` counts how often its engine began
    anew: its numbers went back."""

    def __init__(self, messages_max: int = 100_000, bytes_max: int = 128 << 20) -> None:
        self.runs = 0
        self.dropped = 0
        self._messages_max, self._bytes_max = messages_max, bytes_max
        self._messages: list[tuple[int, bytes]] = []
        self._bytes = 0

    @property
    def next(self) -> int:
        """The number after the last message's."""
        return self._messages[-1][0] + 1 if self._messages else 0

    def take(self, effect: object) -> None:
        """Apply an effect of the GapMachine that reads the engine."""
        if isinstance(effect, Apply):
            self.append(effect.seq, effect.payload)
        elif isinstance(effect, StreamReset):
            self.restart()

    def append(self, seq: int, payload: bytes) -> None:
        """Append the next message. Numbers may have gaps: one too large for a router is dropped, and counted."""
        if len(payload) > PAYLOAD_BYTES_MAX:
            self.dropped += 1
            return
        self._messages.append((seq, payload))
        self._bytes += len(payload)
        if len(self._messages) > self._messages_max or self._bytes > self._bytes_max:
            oldest = self._messages[: max(1, len(self._messages) // 4)]
            del self._messages[: len(oldest)]
            self._bytes -= sum([len(each) for _, each in oldest])
            self.dropped += len(oldest)

    def restart(self) -> None:
        """Begin a new run: the engine holds nothing of what it published so far, and its numbers begin again."""
        self.runs += 1
        self._messages.clear()
        self._bytes = 0

    def since(self, seq: int) -> Messages:
        """Return the messages from this number on, as many as one report has."""
        found: list[tuple[int, bytes]] = []
        left = CHUNK_BYTES
        for place in range(bisect_left(self._messages, seq, key=itemgetter(0)), len(self._messages)):
            found.append(self._messages[place])
            left -= len(found[-1][1])
            if left <= 0 or len(found) == CHUNK_MESSAGES:
                break
        return found


class EventRelay:
    """Decides what one router gets of one rank.

    Args:
        head: members of every report: worker_id, model, rank, ranks.
        is_connected: whether the engine is being read now.
    """

    def __init__(self, head: Mapping[str, Any], log: EventLog, is_connected: Callable[[], bool] = lambda: True) -> None:
        self._head, self._log, self._is_connected = head, log, is_connected
        self._run = log.runs
        self._next: int | None = None  # the next message to send; None until the router has taken our first report
        self._ask = 0  # the router's question that is being answered; 0: none
        self._first = 0  # the next message of that answer
        self._was_connected: bool | None = None  # as the router last took it
        self._connected_sent = False
        self._batch_at = self._beat_at = 0.0
        self._answer_at = 0.0  # a new question is answered no sooner, so that the two do not loop without a pause
        self._sent = (0, 0, False)  # `_next` and `_first` after the last report, and whether that ended the answer

    @property
    def is_idle(self) -> bool:
        """Whether everything was sent and answered."""
        return not self._ask and self._next == self._log.next

    def next(self, now: float) -> RouterPost | None:
        log = self._log
        if self._run != log.runs:
            self._run, self._ask = log.runs, 0
            self._next = self._next and 0
        connected = self._is_connected()
        if not connected:
            self._ask = 0  # the router asks again once the engine is read again
        asked = self._ask and now >= self._answer_at
        is_due = asked or connected is not self._was_connected or now >= self._beat_at
        if not is_due and (now < self._batch_at or self._next == log.next or not connected):
            return None
        replayed = log.since(self._first) if self._ask else ()
        first = replayed[-1][0] + 1 if replayed else self._first
        ended = bool(self._ask) and first >= log.next
        start = log.next if self._next is None else self._next
        messages = log.since(start) if connected and not self._ask else ()
        self._sent = (messages[-1][0] + 1 if messages else start, first, ended)
        self._connected_sent = connected
        body: dict[str, Any] = {**self._head, "connected": connected, "next": self._sent[0]}
        body["messages"] = written(messages)
        body |= {"begins": True} if self._next is None else {}
        if self._ask:
            body |= {"ask": self._ask, "replayed": written(replayed), "ended": ended}
        return RouterPost(EVENTS_PATH, body)

    def answered(self, reply: Mapping[str, Any], now: float) -> None:
        """Note that the router has taken the last report, and read its question from the reply, if it has one."""
        self._was_connected = self._connected_sent
        self._batch_at, self._beat_at = now + BATCH_S, now + BEAT_S
        if self._run != self._log.runs:
            return
        self._next, self._first, ended = self._sent
        if ended:
            self._ask, self._next = 0, max(self._next, self._first)
        question = reply.get("replay")
        if isinstance(question, dict):
            ask, first = question.get("ask"), question.get("first")
            if type(ask) is int and type(first) is int and 0 < ask <= ASK_MAX and ask != self._ask:
                first = min(max(0, first), self._log.next)  # there are no messages before or beyond
                self._ask, self._first, self._answer_at = ask, first, self._batch_at


def written(messages: Sequence[tuple[int, bytes]]) -> list[tuple[int, str]]:
    return [(seq, b64encode(payload).decode()) for seq, payload in messages]

"""Loads chats: JSON lines with OpenAI's messages, which the model's template renders and its tokenizer tokenizes.

    {"messages": […], "answer": "…", "session": "a", "timestamp": 12.5, "model": "m", "tools": […]}     one request
    {"messages": [system, user, assistant, user, assistant, …], "session_id": "a"}                     a dialogue
    {"doc_id": "val/1", "transcript": "…", "queries": [{"q": "…", "a": "…"}, …]}                          QMSum's file

Rule: a *request* is what a client sent once, with its whole history, a *dialogue* one request for each answer
(`read_line`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier_py.core.errors import ConfigError, TemplateRefused
from ranvier_py.core.prompts.body_members import MESSAGES_MAX
from ranvier_py.core.prompts.boundaries import Chat, Message
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.traces.chat_prefixes import Prefixes
from ranvier_py.replay.traces.lines import TraceLine, drawn, from_start, json_lines, name_of, nothing_in, shown
from ranvier_py.replay.traces.trace import Trace, TraceError, TraceOptions, TraceRequest
from ranvier_py.replay.traces.trace_chains import own_names

QUESTION_SYSTEM = "Answer the question about the meeting transcript."  # as QMSum's figures were measured
REFUSED = (TemplateRefused, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
"""Errors that rendering may raise for messages that the template does not support."""


@dataclass(slots=True)
class ChatLine:
    """A line, or one question about a document: its messages, and which of them answer a request.

    `turns` are the indices of answers in `messages`. The last may be one beyond the end, if its answer is not recorded.
    """

    line: TraceLine
    chat: Chat
    turns: Sequence[int]
    session: str
    thread: str  # lines of one thread follow each other in time; empty: only this line
    model: str
    stamp: float | None = None


@dataclass(frozen=True, slots=True)
class TurnAt:
    """One request: the index of its chat, the index of its answer in the chat's messages, and its time."""

    chat: int
    turn: int
    at: float


def load(path: Path, options: TraceOptions) -> Trace:
    """Return the requests of a file. Raises TraceError."""
    lines = list(json_lines(path))
    as_requests = sessions_repeat(lines)
    chats = [found for line in lines for found in read_line(line, as_requests)]
    if not chats:
        raise nothing_in(path)
    turns = turns_in_order(chats, options)
    try:
        tokenizer = ChatTokenizer.load(options.tokenizer, chat_template=options.chat_template)
    except ConfigError as error:
        raise TraceError(f"{path}: {error}") from error
    requests = requests_of(chats, turns, Prefixes(tokenizer, options.engine_block_tokens), options)
    return Trace(name_of(path), requests, options.engine_block_tokens, timed=chats[0].stamp is not None)


def sessions_repeat(lines: Sequence[TraceLine]) -> bool:
    """Whether any session has several lines. Then each line is one request of its session."""
    names = [name for line in lines if (name := line.text("session", "session_id"))]
    return len(set(names)) < len(names)


def read_line(line: TraceLine, as_request: bool) -> Iterator[ChatLine]:
    """Yield the chats of one line. `as_request`: it is no dialogue, even without an answer. Raises TraceError."""
    fields = line.fields
    if "transcript" in fields and "queries" in fields:
        yield from read_document(line)
        return
    messages = read_messages(line, fields.get("messages"))
    tools = fields.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise line.wrong(f"tools {shown(tools)}", "a list")
    answer = next((fields[name] for name in ("answer", "response") if fields.get(name) is not None), None)
    turns: Sequence[int] = (len(messages),)
    if answer is not None:
        messages = [*messages, read_answer(line, answer)]
    elif not as_request:
        turns = [at for at, message in enumerate(messages) if at > 0 and message["role"] == "assistant"] or turns
        messages = messages[: turns[-1] + 1]
    session = line.text("session", "session_id")
    found = ChatLine(
        line=line, chat=Chat(messages, tools), turns=turns, session=session, thread=session, model=line.text("model")
    )
    if len(turns) > 1 and not session:
        found.session = f"line {line.number}"
    if fields.get("timestamp") is not None:
        found.stamp = line.stamp_s("timestamp")
    yield found


def read_messages(line: TraceLine, messages: Any) -> list[Message]:
    expected = f"a list of 1 to {MESSAGES_MAX} messages, each an object with a role"
    if not isinstance(messages, list) or not 1 <= len(messages) <= MESSAGES_MAX:
        raise line.wrong(f"messages {shown(messages)}", expected)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise line.wrong(f"a message {shown(message)}", expected)
    return messages


def read_answer(line: TraceLine, answer: Any) -> Message:
    """Return an answer (text, message or engine's response) as a message of the next turn. Raises TraceError."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if isinstance(answer, dict) and isinstance(answer.get("choices"), list) and answer["choices"]:
        choice = answer["choices"][0]
        answer = choice.get("message") if isinstance(choice, dict) else None
    if isinstance(answer, dict) and {"content", "tool_calls"} & answer.keys():
        return {**answer, "role": "assistant"}
    raise line.wrong(f"the answer {shown(answer)}", "a text, a message, or a response with choices")


def read_document(line: TraceLine) -> Iterator[ChatLine]:
    """Yield one chat for each question about a document. Raises TraceError."""
    transcript, queries, document = line.fields["transcript"], line.fields["queries"], line.text("doc_id")
    if not isinstance(transcript, str) or not isinstance(queries, list):
        raise line.wrong(f"transcript {shown(transcript)}, queries {shown(queries)}", "a text and a list of questions")
    for number, query in enumerate(queries):
        question, answer = (query.get("q"), query.get("a")) if isinstance(query, Mapping) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise line.wrong(f"the question {shown(query)}", 'an object with two texts, "q" and "a"')
        messages = [
            {"role": "system", "content": QUESTION_SYSTEM},
            {"role": "user", "content": f"{transcript}\n\nQuestion: {question}"},
            {"role": "assistant", "content": answer},
        ]
        yield ChatLine(
            line=line, chat=Chat(messages), turns=(2,), session=document, thread=f"{line.number}/{number}", model=""
        )


def turns_in_order(chats: Sequence[ChatLine], options: TraceOptions) -> list[TurnAt]:
    """Return the requests in order of time, at most `options.limit`. Raises TraceError."""
    stamps = [item.stamp for item in chats if item.stamp is not None]
    if stamps and len(stamps) < len(chats):
        other = next(item for item in chats if (item.stamp is None) == (chats[0].stamp is not None))
        raise other.line.wrong(
            f"{'no' if other.stamp is None else 'a'} timestamp", "one on every line, or on none, as on the first"
        )
    starts = from_start(stamps) if stamps else begun(chats, options)
    turns = [
        TurnAt(number, turn, start + index * options.turn_s)
        for number, (item, start) in enumerate(zip(chats, starts, strict=True))
        for index, turn in enumerate(item.turns)
    ]
    return sorted(turns, key=lambda request: request.at)[: options.limit or None]


def begun(chats: Sequence[ChatLine], options: TraceOptions) -> list[float]:
    """Make up the times of the first turn of each chat without a `timestamp`: threads begin at random within
    `window_s`, their lines follow each other, a turn every `turn_s`."""
    rng = drawn(options.seed, "conversations")
    free: dict[str, float] = {}  # by thread, when its next turn is due
    found = []
    for item in chats:
        start = free.get(item.thread) if item.thread else None
        if start is None:
            start = rng.uniform(0.0, options.window_s)
        found.append(start)
        if item.thread:
            free[item.thread] = start + len(item.turns) * options.turn_s
    return found


def requests_of(
    chats: Sequence[ChatLine], turns: Sequence[TurnAt], prefixes: Prefixes, options: TraceOptions
) -> list[TraceRequest]:
    """Return the requests in the order of `turns`. They are tokenized in the order of the file. One without an answer
    gets one of `answer_tokens` that no later prompt contains. Raises TraceError."""
    wanted: dict[int, list[int]] = {}
    for place, request in enumerate(turns):
        wanted.setdefault(request.chat, []).append(place)
    found: dict[int, TraceRequest] = {}
    for number in sorted(wanted):
        item, places = chats[number], wanted[number]
        opening = opening_key(item.model, item.chat.messages[: item.turns[0]])
        last = max(turns[place].turn for place in places)
        try:
            conversation = prefixes.conversation(item.model, Chat(item.chat.messages[: last + 1], item.chat.tools))
            for place in places:
                request = turns[place]
                turn = prefixes.turn(conversation, request.turn)
                answer_tokens = turn.answer_tokens or options.answer_tokens
                total = (turn.prompt_tokens + answer_tokens) // options.engine_block_tokens
                found[place] = TraceRequest(
                    at=request.at,
                    session=item.session,
                    model=item.model,
                    prompt_tokens=turn.prompt_tokens,
                    answer_tokens=answer_tokens,
                    chain=turn.chain,
                    ends=turn.ends,
                    blocks=turn.blocks + tuple(own_names(place, total - len(turn.blocks))),
                    opening=opening,
                )
        except REFUSED as error:
            reason = shown(str(error)) if str(error) else type(error).__name__
            raise item.line.wrong(f"what the chat template refuses ({reason})", "messages that it renders") from error
    return [found[place] for place in range(len(turns))]

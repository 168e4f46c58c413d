"""An engine's texts: turns chats into tokens and back, and makes up answers from a seed.

A router is measured by what the engine counts, so the engine shares none of the router's shortcuts: at every request it
renders the whole chat through the template and tokenizes all of it.
Answers: a prompt's hash picks one of `ANSWERS` texts, so equal prompts get equal answers on every engine of one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import orjson

from cluster.engine.tool_calls import ToolCall, as_rendered
from ranvier_py.replay.engine.block_cache import TokenIds

ANSWERS = 256
"""Distinct answers: enough that two conversations seldom get the same, few enough to tokenize each only once."""

ANSWER_WORDS = 400
"""Words of one answer; a longer answer repeats them from the beginning."""

WORDS = (  # noqa: SIM905 - two hundred quoted words are no easier to read
    "about above across after again along also always among another answer around arrive because become before begin "
    "behind believe below better between beyond bring build carry certain change chapter choose clear close common "
    "compare complete consider contain corner cover create cross current decide deep deliver depend describe detail "
    "different direct during early either enough enter entire evening every example explain family field figure final "
    "finish first follow forward garden gather general gentle govern ground group happen harbour hold however idea "
    "imagine inside instead interest island journey keep kitchen know language large later learn leave letter level "
    "light listen little local longer machine matter measure middle mind moment morning mountain move nature near "
    "never north nothing notice number object often open order other outside paper part pattern people perhaps place "
    "plain point possible present problem produce question quiet rather reach ready reason record remain report river "
    "road round sea season second sentence several shape short simple since small sound south special stand station "
    "step still stone story street strong study summer surface system table take tell thing think through together "
    "travel tree true turn under until usual valley village voice wait walk water weather west while window winter "
    "without wonder work world write year young"
).split()


class RenderError(ValueError):
    """The template refuses these messages."""


class ByteTokenizer:
    """A tokenizer for which four bytes of UTF-8 are a token; it needs no files. Roles and contents begin at tokens."""

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, options: Mapping[str, Any], *, generation: bool
    ) -> str:
        """Render a whole chat as text. Raises RenderError."""
        del options
        turns = [padded(f"<|{message.get('role')}|>") + plain_turn(message) for message in messages]
        head = padded(orjson.dumps(tools).decode()) if tools else ""
        return head + "".join(turns) + (padded("<|assistant|>") if generation else "")

    def encode(self, text: str, *, special: bool) -> TokenIds:
        del special
        data = text.encode("utf-8", "replace")
        return np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<u4").astype(np.uint32)

    def pieces(self, text: str) -> tuple[TokenIds, list[str]]:
        """Return the tokens of `text`, and the piece of text for each."""
        return self.encode(text, special=False), [text[i : i + 4] for i in range(0, len(text), 4)]

    def decode(self, ids: Sequence[int]) -> str:
        data = np.asarray(ids, dtype="<u4").tobytes()
        return data.rstrip(b"\0").decode("utf-8", "replace")


def plain_turn(message: Mapping[str, Any]) -> str:
    """Return a message's content and the calls that it makes, as text. Raises RenderError."""
    calls = message.get("tool_calls")
    functions = [parsed_call(call)["function"] for call in calls] if isinstance(calls, list) else []
    made = [ToolCall(str(each.get("name")), as_rendered(each.get("arguments"))).text for each in functions]
    return "".join(padded(text) for text in (plain_content(message), *made))


def padded(text: str) -> str:
    """Return `text` with spaces up to whole tokens of four bytes."""
    return text + " " * (-len(text.encode("utf-8", "replace")) % 4)


class ModelTokenizer:
    """A model's tokenizer and chat template, from a directory or the hub."""

    def __init__(self, source: str) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, and not needed by ByteTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=Path(source).is_dir())
        self._backend = self._tokenizer.backend_tokenizer

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, options: Mapping[str, Any], *, generation: bool
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [rendered_message(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template is a foreign program, which may raise anything
            raise RenderError(f"the chat template failed: {error}") from error
        return str(text)

    def encode(self, text: str, *, special: bool) -> TokenIds:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)  # no offsets: a quarter less
        return np.asarray(encoding.ids, dtype=np.uint32)

    def pieces(self, text: str) -> tuple[TokenIds, list[str]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ends = [0, *(end for _, end in encoding.offsets)]
        pieces = [text[begin:end] for begin, end in pairwise(ends)]
        return np.asarray(encoding.ids, dtype=np.uint32), pieces

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids]))


TextTokenizer = ByteTokenizer | ModelTokenizer


def load_tokenizer(source: str) -> TextTokenizer:
    """Load a tokenizer. `source` is a directory, a hub id, or the word `bytes`."""
    return ByteTokenizer() if source == "bytes" else ModelTokenizer(source)


def plain_content(message: Mapping[str, Any]) -> str:
    """Return content as one text: parts joined by line ends, the digest of a part that is no text, null as ""."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RenderError("content must be a string, a list of parts or null")
    return "\n".join(part_text(part) for part in content)


def part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"<{blake2b(orjson.dumps(part), digest_size=8).hexdigest()}>"


def rendered_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM gives it to a template: content flattened, arguments of tool calls parsed."""
    rendered = dict(message, content=plain_content(message))
    calls = rendered.get("tool_calls")
    if isinstance(calls, list) and calls:
        rendered["tool_calls"] = [parsed_call(call) for call in calls]
    else:
        rendered.pop("tool_calls", None)
    return rendered


def parsed_call(call: Any) -> Any:
    arguments = call.get("function", {}).get("arguments") if isinstance(call, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError as error:
        raise RenderError(f"arguments of a tool call are not JSON: {error}") from error
    return dict(call, function=dict(call["function"], arguments=parsed))


class Answer(NamedTuple):
    """An engine's answer: tokens, and the text of each. `stopped`: ended by itself or a stop string, not by the limit.

    The pieces of an answer that calls a tool are of the arguments alone; the tokens around them have empty pieces.
    """

    ids: TokenIds
    pieces: list[str]
    stopped: bool
    call: ToolCall | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> str:
        if not self.stopped:
            return "length"
        return "tool_calls" if self.call else "stop"


class AnswerBook:
    """Makes up answers. `lengths`: the least and the greatest number of tokens if the client sets no limit."""

    def __init__(self, tokenizer: TextTokenizer, lengths: tuple[int, int], seed: int) -> None:
        self._tokenizer = tokenizer
        self._lengths = lengths
        self._seed = seed
        self._pages: dict[int, tuple[TokenIds, list[str]]] = {}  # at most ANSWERS

    def answer(self, prompt: TokenIds, limit: int, stop: Sequence[str] = (), exact: bool = False) -> Answer:
        """Return the answer to a prompt: at most `limit` tokens, all if `exact`, cut at the first stop string."""
        choice = int.from_bytes(blake2b(prompt.tobytes(), digest_size=8).digest(), "little")
        low, high = self._lengths
        length = low + (choice >> 32) % (high - low + 1)
        count = limit if exact else min(limit, length)
        ids, pieces = self._page(choice % ANSWERS)
        repeats = -(-count // len(pieces))
        ids, pieces = np.tile(ids, repeats)[:count], (pieces * repeats)[:count]
        kept = cut_at(pieces, stop)
        if kept is not None:
            return Answer(ids[: max(1, len(kept))], kept or [""], stopped=True)
        return Answer(ids, pieces, stopped=not exact and length < limit)

    def calling(self, call: ToolCall, limit: int) -> Answer:
        """Return the answer that makes this call, in at most `limit` tokens."""
        ids, pieces = self._tokenizer.pieces(call.text)
        start = len(call.head)
        ends = [0, *accumulate(map(len, pieces))]
        shown = [call.arguments[max(0, begin - start) : max(0, end - start)] for begin, end in pairwise(ends)]
        return Answer(ids[:limit], shown[:limit], stopped=len(ids) <= limit, call=call)

    def _page(self, number: int) -> tuple[TokenIds, list[str]]:
        page = self._pages.get(number)
        if page is None:
            rng = Random(f"{self._seed}/{number}")
            words = [rng.choice(WORDS) for _ in range(ANSWER_WORDS)]
            text = " ".join(words).capitalize() + "."
            page = self._pages[number] = self._tokenizer.pieces(text)
        return page


def cut_at(pieces: list[str], stop: Sequence[str]) -> list[str] | None:
    """Return the pieces before the earliest stop string; None if there is none in them."""
    text = "".join(pieces)
    places = [place for place in (text.find(word) for word in stop if word) if place >= 0]
    if not places:
        return None
    left, kept = min(places), []
    for piece in pieces:
        if left <= 0:
            break
        kept.append(piece[:left])
        left -= len(piece)
    return kept

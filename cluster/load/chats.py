"""Generates the lab's own chats: six desks with long shared instructions, where people ask, turn after turn.

One seeded `Random` draws everything from a grammar that we wrote (`data/chats.toml`). The chats have the shape of real
traffic: many share instructions of 300 to 900 tokens, conversations grow, and passages of documents recur in several
questions.

    python -m cluster chats --conversations 20 > chats.jsonl      # a trace that `load --trace` reads
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import orjson
from pydantic import TypeAdapter

from cluster.load.workload import Conversation, Message, split_turns

GRAMMAR = Path(__file__).parents[1] / "data" / "chats.toml"
SLOT = re.compile(r"\{(\w+)\}")
KEPT_SHARE = 0.7
"""How often a follow-up keeps the subject of the messages before; else it draws one of the same kind again."""

OPENING_PASTES, FOLLOWUP_PASTES = 0.8, 0.4
"""Share of messages with pasted text: people begin with what they have at hand."""

PASTE_LINES_MIN, PASTE_LINES_MAX = 4, 12
PASSAGES_MIN, PASSAGES_MAX = 2, 4
ANSWER_SENTENCES_MIN, ANSWER_SENTENCES_MAX = 2, 6
CHATS_PER_DESK_MIN, CHATS_PER_DESK_MAX = 8, 20
BUNDLED_TURNS = 8
SEED = 1


@dataclass(frozen=True, slots=True)
class Desk:
    """One shared system prompt, and the questions that are asked with it."""

    name: str
    system: str
    openings: tuple[str, ...]
    followups: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    passages: tuple[str, ...] = ()
    paste_title: str = ""
    paste: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    desks: tuple[Desk, ...]
    sentences: tuple[str, ...]
    offices: tuple[str, ...]


def read_grammar() -> Grammar:
    data = tomllib.loads(GRAMMAR.read_text(encoding="utf-8"))
    desks = TypeAdapter(tuple[Desk, ...]).validate_python(data["desk"])
    return Grammar(desks, tuple(data["answers"]["sentences"]), tuple(data["offices"]["names"]))


def office_of(grammar: Grammar, prompt: int) -> str:
    """Return the office that a shared prompt is for. After one prompt per desk the desks repeat for another office."""
    round_number = prompt // len(grammar.desks)
    name = grammar.offices[round_number % len(grammar.offices)]
    again = round_number // len(grammar.offices)
    return f"{name} {again + 1}" if again else name


class Speaker:
    """Fills templates for one conversation, and remembers its subjects."""

    def __init__(self, desk: Desk, rng: Random) -> None:
        self.desk = desk
        self.rng = rng
        self.chosen: dict[str, str] = {}

    def fill(self, template: str) -> str:
        text = template.replace("{{", "\0").replace("}}", "\1")
        return SLOT.sub(self.value, text).replace("\0", "{").replace("\1", "}")

    def value(self, match: re.Match[str]) -> str:
        slot = match[1]
        if slot == "passages":
            return self.quote_passages()
        if slot == "n":
            return str(self.rng.randint(10, 59))
        if slot not in self.chosen or self.rng.random() > KEPT_SHARE:
            self.chosen[slot] = self.rng.choice(self.desk.slots[slot])
        return self.chosen[slot]

    def message(self, template: str, paste_share: float) -> str:
        """Return a user's message: a question, and with this chance a long pasted text below it."""
        text = self.fill(template)
        if not self.desk.paste or self.rng.random() > paste_share:
            return text
        lines = [
            self.fill(self.rng.choice(self.desk.paste))
            for _ in range(self.rng.randint(PASTE_LINES_MIN, PASTE_LINES_MAX))
        ]
        return "\n".join((text, "", self.desk.paste_title, *lines))

    def quote_passages(self) -> str:
        chosen = self.rng.sample(range(len(self.desk.passages)), self.rng.randint(PASSAGES_MIN, PASSAGES_MAX))
        return "\n".join(f"[{number + 1}] {self.desk.passages[number]}" for number in chosen)


def chat(grammar: Grammar, prompt: int, turns: int, rng: Random) -> list[Message]:
    """Return one whole conversation: instructions, questions, and answers as an assistant might give them."""
    desk = grammar.desks[prompt % len(grammar.desks)]
    speaker = Speaker(desk, rng)
    messages: list[Message] = [
        {"role": "system", "content": desk.system.strip().replace("{office}", office_of(grammar, prompt))}
    ]
    followups: list[str] = []
    for turn in range(turns):
        if turn and not followups:
            followups = rng.sample(desk.followups, len(desk.followups))
        template = followups.pop() if turn else rng.choice(desk.openings)
        messages.append(
            {"role": "user", "content": speaker.message(template, FOLLOWUP_PASTES if turn else OPENING_PASTES)}
        )
        count = rng.randint(ANSWER_SENTENCES_MIN, ANSWER_SENTENCES_MAX)
        messages.append({"role": "assistant", "content": " ".join(rng.sample(grammar.sentences, count))})
    return messages


def conversations(rng: Random, *, system_prompts: int = 6, turns: int = BUNDLED_TURNS) -> Iterator[Conversation]:
    """Yield chats without end, each with a shared prompt that is drawn evenly."""
    grammar = read_grammar()
    number = 0
    while True:
        prompt = rng.randrange(system_prompts)
        yield named(grammar, prompt, number, chat(grammar, prompt, turns, rng))
        number += 1


def bundled(seed: int = SEED, *, turns: int = BUNDLED_TURNS) -> list[Conversation]:
    """Return the chats of `make up`: 8 to 20 at each of the six desks, in mixed order."""
    grammar = read_grammar()
    rng = Random(seed)
    prompts = [
        prompt
        for prompt in range(len(grammar.desks))
        for _ in range(rng.randint(CHATS_PER_DESK_MIN, CHATS_PER_DESK_MAX))
    ]
    rng.shuffle(prompts)
    return [named(grammar, prompt, number, chat(grammar, prompt, turns, rng)) for number, prompt in enumerate(prompts)]


def named(grammar: Grammar, prompt: int, number: int, messages: list[Message]) -> Conversation:
    desk = grammar.desks[prompt % len(grammar.desks)].name
    return Conversation(f"{desk}-{prompt}-{number}", split_turns(messages))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster chats", description="Write chats of the lab as a trace.")
    parser.add_argument("--conversations", type=int, default=80, metavar="N")
    parser.add_argument("--system-prompts", type=int, default=6, metavar="K", help="shared prompts (default 6)")
    parser.add_argument("--turns", type=int, default=BUNDLED_TURNS, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    rng = Random(options.seed)
    grammar = read_grammar()
    for number in range(options.conversations):
        prompt = rng.randrange(max(1, options.system_prompts))
        messages = chat(grammar, prompt, options.turns, rng)
        name = named(grammar, prompt, number, messages).name
        sys.stdout.write(orjson.dumps({"session": name, "messages": messages}).decode() + "\n")
    return 0

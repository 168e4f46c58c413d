"""The lab's own chats: six desks with long shared instructions, and people who ask there, turn after turn.

Everything is drawn from a grammar we wrote (`data/chats.toml`) by one seeded `Random`. They are made to have the shape
of real traffic: instructions of 300 to 900 tokens that many chats share, conversations that grow, passages of documents
that repeat across questions.

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
"""How often a follow-up speaks of the same thing as before; else it brings up another of the same kind."""

OPENING_PASTES, FOLLOWUP_PASTES = 0.8, 0.4
"""Share of messages with something pasted in: people begin with what they have in hand."""

PASTE_LINES_MIN, PASTE_LINES_MAX = 4, 12
PASSAGES_MIN, PASSAGES_MAX = 2, 4
ANSWER_SENTENCES_MIN, ANSWER_SENTENCES_MAX = 2, 6
CHATS_PER_DESK_MIN, CHATS_PER_DESK_MAX = 8, 20
BUNDLED_TURNS = 8
SEED = 1


@dataclass(frozen=True, slots=True)
class Desk:
    """One shared system prompt, and what is asked there."""

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


def read_grammar(path: Path = GRAMMAR) -> Grammar:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    desks = TypeAdapter(tuple[Desk, ...]).validate_python(data["desk"])
    return Grammar(desks, tuple(data["answers"]["sentences"]), tuple(data["offices"]["names"]))


def office_of(grammar: Grammar, prompt: int) -> str:
    """Who a shared prompt is for. Beyond one office per desk the desks repeat, each time for another office."""
    round_number = prompt // len(grammar.desks)
    name = grammar.offices[round_number % len(grammar.offices)]
    again = round_number // len(grammar.offices)
    return f"{name} {again + 1}" if again else name


class Speaker:
    """Fills templates for one conversation, and remembers what it spoke of."""

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
        """What a user writes: a question, and with this chance something long that is pasted below it."""
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
    """One whole conversation: instructions, questions, and answers as an assistant might have given them."""
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


def conversations(
    rng: Random, *, system_prompts: int = 6, turns: int = BUNDLED_TURNS, grammar: Grammar | None = None
) -> Iterator[Conversation]:
    """Chats without end, each at a shared prompt drawn evenly."""
    grammar = grammar or read_grammar()
    number = 0
    while True:
        prompt = rng.randrange(system_prompts)
        yield named(grammar, prompt, number, chat(grammar, prompt, turns, rng))
        number += 1


def bundled(seed: int = SEED, *, turns: int = BUNDLED_TURNS) -> list[Conversation]:
    """The chats of `make up`: 8 to 20 at each of the six desks, mixed."""
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

"""What is wrong with arguments that no flag, and no command, takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ranvier_py.config.config_model import SECRETS
from ranvier_py.config.config_names import flag_of, variable_of
from ranvier_py.config.config_values import did_you_mean

CHOICE = re.compile(r"'([^']*)'")


def closest(message: str) -> str:
    """Return the end of argparse's message about a word, the first that it quotes, which is none of the others."""
    word, *known = CHOICE.findall(message) or [""]
    return did_you_mean(word, known)


def unknown_arguments(extra: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each unknown flag, and for each value that belongs to no flag. `flags` are the known ones."""
    after_unknown_flag = False
    for argument in extra:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            if name in map(flag_of, SECRETS):
                yield f"{name}: a secret has no flag; use {name}-file or ${variable_of(name[2:].replace('-', '_'))}"
            else:
                yield f"{name}: no such flag{did_you_mean(name, flags)}"
        elif not after_unknown_flag:
            yield f"{name}: an argument that belongs to no flag"
        after_unknown_flag = name.startswith("-")

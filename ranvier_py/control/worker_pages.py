"""Joins the metrics of all workers of a machine, so that a scrape of one control port shows the whole node.

Each family stands once, and each series gets the label `worker`. A worker without a page has no series, and so no
`ranvier_worker_up`. Each page is one portion of work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import trio

END = "# EOF"
FAMILY = re.compile(r"(?m)^# HELP ")
BARE, LABELLED = re.compile(r"(?m)^([a-zA-Z_:][\w:]*) "), re.compile(r"(?m)^([a-zA-Z_:][\w:]*)\{")


async def joined(pages: Mapping[int, str]) -> bytes:
    """Return one page of the pages of several workers, by their indices."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for index, page in sorted(pages.items()):
        own = f'worker="{index}"'
        for block in FAMILY.split(page.removesuffix("\n").removesuffix(END))[1:]:
            lines = ("# HELP " + block).splitlines()
            head = [line for line in lines if line.startswith("# ")]
            series = "\n".join(line for line in lines if not line.startswith("# "))
            _, known = families.setdefault(block.split(" ", 1)[0], (head, []))
            if series:
                known.append(BARE.sub(rf"\1{{{own}}} ", LABELLED.sub(rf"\1{{{own},", series)))
        await trio.lowlevel.checkpoint()
    text = "".join("\n".join([*head, *series]) + "\n" for head, series in families.values())
    return (text + (f"{END}\n" if any(page.endswith(f"{END}\n") for page in pages.values()) else "")).encode()

"""Finds the model that a multipart form names, wherever that field stands between its files (RFC 7578, RFC 2046).

Rule: a form is read from part to part, by its boundary alone, so that nothing in a file is taken for a field. Bounds:
PARTS_MAX, HEAD_BYTES_MAX; the search pauses after SLICE_BYTES.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import NamedTuple

from ranvier_py.core.prompts.body_json import NAME_CHARACTERS_MAX

PARTS_MAX = 256
HEAD_BYTES_MAX = 8192  # of one part: long names of files
SLICE_BYTES = 1 << 20  # at 2 ms

BOUNDARY = re.compile(rb"\s*(--[^\r\n]{1,70}?)[ \t]*\r\n")
DISPOSITION = re.compile(rb"(?:\A|\r\n)content-disposition:([^\r\n]*)", re.IGNORECASE)
PARAMETER = re.compile(rb";[ \t]*([\w*]+)[ \t]*=[ \t]*(\"(?:[^\"\\]|\\.)*\"|[^;\s]*)")


class FormModel(NamedTuple):
    """The model that a form names, and where its value is."""

    name: str
    start: int
    end: int


NO_MODEL = FormModel("", 0, 0)


def form_model(body: bytes) -> Generator[None, None, FormModel]:
    """Return the model; NO_MODEL if the form names none. Yields after each portion of work."""
    first = BOUNDARY.match(body)
    if first is None:
        return NO_MODEL
    delimiter, at = b"\r\n" + first[1], first.end()
    for _ in range(PARTS_MAX):
        head_end = body.find(b"\r\n\r\n", at - 2, at + HEAD_BYTES_MAX)
        if head_end < 0:
            break
        start = head_end + 4
        if is_model(body[at:head_end]):
            value, end, _ = body[start : start + 4 * NAME_CHARACTERS_MAX + len(delimiter)].partition(delimiter)
            name = value.decode("utf-8", "replace").strip()
            is_one = end and len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
            return FormModel(name, start, start + len(value)) if is_one else NO_MODEL
        at = start - 2
        while (found := body.find(delimiter, at, at + SLICE_BYTES + len(delimiter))) < 0 and at < len(body):
            at += SLICE_BYTES
            yield
        at = body.find(b"\r\n", found + len(delimiter), found + len(delimiter) + HEAD_BYTES_MAX) + 2
        if found < 0 or at < 2:
            break
        yield
    return NO_MODEL


def is_model(head: bytes) -> bool:
    """Whether the field of these header lines is the model."""
    line = DISPOSITION.search(head)
    return line is not None and any(
        name.lower() == b"name" and value.strip(b'"') == b"model" for name, value in PARAMETER.findall(line[1])
    )

"""The model of a form is found wherever it stands, and nothing else is taken for it."""

from __future__ import annotations

from itertools import permutations

import pytest

from ranvier_py.core.prompts.form_model import HEAD_BYTES_MAX, PARTS_MAX, form_model
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s

FILE = b'content-disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1'
NOT_IT = b'name="model"\r\n\r\nother\r\n--y\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'


def form(*parts: bytes, boundary: bytes = b"--x") -> bytes:
    return b"".join(boundary + b"\r\n" + part + b"\r\n" for part in parts) + boundary + b"--\r\n"


def model_in(body: bytes) -> str:
    steps = form_model(body)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return str(end.value.name)


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize("size", [0, 5, (1 << 20) - 60, 1 << 20, 3_000_000])
def test_it_is_found_before_between_and_behind_files(order: tuple[int, ...], size: int) -> None:
    parts = [FILE + (NOT_IT + b"\0\r\n-" * size)[:size], MODEL, FILE.replace(b"file", b"reference") + b"a" * size]
    assert model_in(form(*(parts[place] for place in order))) == "whisper-1"


@pytest.mark.parametrize("shift", range(-8, 9))
def test_a_boundary_between_two_slices_is_a_boundary(shift: int) -> None:
    for head in (len(FILE), 0):
        assert model_in(form(FILE + b"a" * ((1 << 20) - head + shift), MODEL)) == "whisper-1"


@pytest.mark.parametrize(
    ("part", "model"),
    [
        (b"Content-Type: text/plain\r\n" + MODEL, "whisper-1"),
        (b"content-disposition:form-data;name=model\r\n\r\nw", "w"),
        (b'Content-Disposition: form-data; filename="m.txt"; name="model"; x=y\r\nA: b\r\n\r\na b ', "a b"),
        (b'Content-Disposition: form-data; name="model"\r\n\r\n' + "größe/模型".encode(), "größe/模型"),
        (b'Content-Disposition: form-data; name="model"\r\n\r\n', ""),
        (b'Content-Disposition: form-data; name="model"\r\n\r\n\0', ""),
        (b'Content-Disposition: form-data; name="model"\r\n\r\n' + b"w" * 513, ""),
        (b'Content-Disposition: form-data; name="models"\r\n\r\nw', ""),
        (b'Content-Disposition: form-data; name="file"; filename="; name=model"\r\n\r\nw', ""),
        (b'Content-Disposition: form-data; name="file"; filename="\\"; name=\\"model"\r\n\r\nw', ""),
        (b'X-Content-Disposition: form-data; name="model"\r\n\r\nw', ""),
        (b'Content-Disposition: form-data; a="' + b"b" * HEAD_BYTES_MAX + b'"; name="model"\r\n\r\nw', ""),
    ],
)
def test_a_field_is_the_model_by_its_own_name_alone(part: bytes, model: str) -> None:
    assert model_in(form(part)) == model_in(b"\r\n" + form(b"A: b\r\n\r\nc", part)) == model


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"--", b"--x\r\n", b"{}", form(MODEL)[:-8], form(FILE, FILE), form(FILE, boundary=b"--" + b"x" * 80)),
        *(b'name="model"\r\n' * 100_000, b"--x\r\n\r\n\r\n" * 200_000, form(*[FILE] * PARTS_MAX, MODEL)),
    ],
    ids=range(10),
)
def test_what_names_none_names_none(body: bytes) -> None:
    assert model_in(body) == ""


@pytest.mark.parametrize("filling", [b"\0", b"-", b"\r\n", b"\r\n--", b"\r\n--x", b'name="model"', b"\r\n\r\n"])
def test_no_portion_takes_long(filling: bytes) -> None:
    body = form(FILE + filling * (16_000_000 // len(filling)), MODEL)
    assert least_s(lambda: longest_step_s(form_model(body))) <= OCCUPIED_S_MAX

"""What `make soak` tries for minutes: that it holds for what it starts from, and that it notices what breaks a rule."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from cluster import fuzz_targets
from cluster.fuzz import main
from cluster.fuzz_targets import READERS, ROUTE_UPDATE, beginnings, check


def test_every_beginning_is_read_by_its_reader() -> None:
    """One that is refused would leave the code behind it to chance."""
    for data in beginnings():
        if data[0] != fuzz_targets.PACKET:  # it is for one plane, and refused by the others
            READERS[data[0]](data[1:])
        check(data)


def test_spoilt_beginnings_hold_too() -> None:
    rng = Random(1)
    for data in beginnings():
        for _ in range(50):
            spoilt = bytearray(data)
            spoilt[rng.randrange(len(data))] = rng.randrange(256)
            check(bytes(spoilt[: rng.randrange(1, len(data) + 1)]))


@pytest.mark.parametrize("wrong", ["raises", "allocates"])
def test_a_broken_rule_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: bytes) -> object:
        if wrong == "raises":
            raise KeyError(wrong)
        return bytearray(1 << 20)

    monkeypatch.setattr(fuzz_targets, "READERS", (read,))
    with pytest.raises(KeyError if wrong == "raises" else AssertionError):
        check(bytes(17))
    assert not tracemalloc.is_tracing()


def test_a_kept_input_is_tried_again(tmp_path: object) -> None:
    path = f"{tmp_path}/crash"
    with open(path, "wb") as file:
        file.write(bytes((ROUTE_UPDATE,)) + b"spoilt")
    assert main(["--input", path]) == 0

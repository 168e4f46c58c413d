"""Key files as operators write them, and that no key is ever shown."""

from __future__ import annotations

from base64 import b64encode, urlsafe_b64encode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.mesh.wire.keyring import KEYS_MAX, KeyRing, id_of, insecure_ring, parse_key_ring
from tests.examples import examples

KEYS = [bytes((number,)) + bytes(range(31)) for number in range(1, 6)]


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_key_ring(text)
    return caught.value.problems


@settings(max_examples=examples(60))
@given(st.binary(min_size=32, max_size=32).filter(lambda key: len(set(key)) > 1))
def test_every_spelling_of_a_key_is_the_same_key(key: bytes) -> None:
    spellings = [key.hex(), key.hex().upper(), b64encode(key).decode(), urlsafe_b64encode(key).decode()]
    spellings += [spelling.rstrip("=") for spelling in spellings]
    for spelling in spellings:
        for line in (spelling, f"  {spelling}\r\n", f"\n# the key\n\n{spelling}\n"):
            ring = parse_key_ring(line)
            assert (dict(ring.keys), ring.primary) == ({id_of(key): key}, id_of(key))
        assert dict(parse_key_ring(f"9: {spelling}").keys) == {9: key}


def test_the_first_key_seals_and_all_of_them_open() -> None:
    ring = parse_key_ring("\n".join(key.hex() for key in KEYS[:KEYS_MAX]))
    assert list(ring.keys.values()) == KEYS[:KEYS_MAX]
    assert ring.keys[ring.primary] == KEYS[0]
    assert not ring.insecure


def test_a_key_keeps_its_number_when_lines_move() -> None:
    """Else a node that has moved them already could not be understood by one that has not."""
    one, other = KEYS[0].hex(), KEYS[1].hex()
    before, after = parse_key_ring(f"{one}\n{other}"), parse_key_ring(f"{other}\n{one}")
    assert dict(before.keys) == dict(after.keys)
    assert (before.primary, after.primary) == (id_of(KEYS[0]), id_of(KEYS[1]))


def test_the_number_of_a_key_is_the_same_in_every_version() -> None:
    assert [id_of(key) for key in KEYS] == [222, 170, 183, 107, 211]
    assert all(1 <= id_of(bytes((number,)) * 32) <= 255 for number in range(256))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "there is no key in it"),
        ("# only words\n\n", "there is no key in it"),
        ("short", "line 1 must be 32 bytes"),
        (KEYS[0].hex()[:-1], "line 1 must be 32 bytes"),
        (KEYS[0].hex() + "00", "line 1 must be 32 bytes"),
        (b64encode(KEYS[0] + b"x").decode(), "line 1 must be 32 bytes"),
        (b64encode(KEYS[0]).decode() + "=", "line 1 must be 32 bytes"),
        ("!" + b64encode(KEYS[0]).decode()[1:], "line 1 must be 32 bytes"),
        ("é" * 43, "line 1 must be 32 bytes"),
        ("g" * 64, "line 1 must be 32 bytes"),
        ("\x00" * 43, "line 1 must be 32 bytes"),
        ("correct-horse battery-staple is what we-use", "line 1 must be 32 bytes"),
        ("    ".join((KEYS[0].hex()[:30], KEYS[0].hex()[30:60])), "line 1 must be 32 bytes"),
        (f"\n\n1:2:{KEYS[0].hex()}", "line 3 must be 32 bytes"),
        ("00" * 32, "line 1 is no secret"),
        ("QUFB" * 10 + "QUE", "line 1 is no secret"),
        (f"0:{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f"256:{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f":{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f"-1:{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f"one:{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f"²:{KEYS[0].hex()}", "line 1 must have a number from 1 to 255"),
        (f"1:{KEYS[0].hex()}\n2:{b64encode(KEYS[0]).decode()}", "line 2 is the same key"),
        (f"1:{KEYS[0].hex()}\n1:{KEYS[1].hex()}", "line 2 has the key id 1"),
        ("\n".join(key.hex() for key in KEYS), "line 5 is one key too many"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_with_its_line(text: str, expected: str) -> None:
    assert [problem for problem in problems_of(text) if expected in problem], problems_of(text)


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems_of(f"short\n{KEYS[0].hex()}\n0:{KEYS[1].hex()}\nshort")) == 3


def test_no_key_is_part_of_an_error_or_of_a_repr() -> None:
    """A key that is written wrongly is most of a key."""
    secret = KEYS[0].hex()
    for text in (secret[:-1], secret + "\n" + secret, f"{secret}:5", f"300:{secret}", f"x{secret}", f"5 {secret}"):
        try:
            shown = repr(parse_key_ring(text))
        except ConfigError as error:
            shown = str(error) + repr(error) + repr(error.__context__)
        assert secret[:8] not in shown
        assert secret[8:16] not in shown
    ring = parse_key_ring(secret)
    assert repr(ring) == str(ring) == "KeyRing(ids=[222], primary=222)"


def test_two_keys_whose_numbers_collide_are_reported_apart_by_hand() -> None:
    """It happens to 1 pair in 255: the operator has to be reported what to do, and it has to work."""
    twin = next(key for key in (bytes((0, number // 256, number % 256)) + KEYS[0][3:] for number in range(9999))
                if id_of(key) == id_of(KEYS[0]))  # fmt: skip
    (problem,) = problems_of(f"{KEYS[0].hex()}\n{twin.hex()}")
    assert "write other ids" in problem
    assert len(parse_key_ring(f"{KEYS[0].hex()}\n7:{twin.hex()}").keys) == 2


def test_doing_without_a_key_is_a_ring_of_its_own() -> None:
    """Its key id is one that no file can have, so nobody slips into it."""
    assert insecure_ring().insecure
    assert insecure_ring().primary == 0
    assert not KeyRing({1: KEYS[0]}, 1).insecure

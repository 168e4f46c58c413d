"""The key file: what its lines mean, and how a running node follows it."""

from __future__ import annotations

import logging
import os
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.io.keys import FILE_BYTES_MAX, KeyFile, Keys, insecure_keys, keys_of, parse_keys, read_keys
from tests.proxy.wire import no_more_descriptors

A, B, C = (bytes(range(start, start + 32)).hex() for start in (1, 60, 120))


def secret(*lines: str) -> bytes:
    return parse_keys("\n".join(lines)).fingerprint_secret


def test_fingerprints_follow_from_the_first_key_unless_a_line_states_otherwise() -> None:
    """Two nodes with one key file must agree, or they share no route."""
    assert secret(A) == secret(A, B) == secret("# comment", "", A)
    assert secret(B, A) == secret(B) != secret(A)
    assert secret(A) not in (bytes.fromhex(A), bytes.fromhex(B))
    assert len(secret(A)) == 32


def test_a_rotation_with_a_fingerprint_line_changes_no_fingerprint() -> None:
    before = secret(A)
    kept = f"fingerprint: {A}"
    assert [secret(A, B, kept), secret(B, A, kept), secret(kept, B), secret(B, f" fingerprint :{A}")] == [before] * 4


def test_a_rotation_without_one_changes_them_once() -> None:
    """Never there and back: each change is a cold start."""
    states = [secret(A), secret(A, B), secret(B, A), secret(B)]
    assert [left == right for left, right in pairwise(states)] == [True, False, True]


def test_the_ring_is_what_the_other_lines_state() -> None:
    ring = parse_keys(f"fingerprint: {C}\n7:{A}\n8:{B}").ring
    assert (list(ring.keys), ring.primary) == ([7, 8], 7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{A}\nfingerprint: {B}\nfingerprint: {C}", "line 3 is a second fingerprint line"),
        (f"{A}\nfingerprint: {B[:-2]}", "line 2 must have a key after"),
        (f"{A}\nfingerprint:", "line 2 must have a key after"),
        (f"fingerprint: {A}", "there is no key in it"),
        (f"fingerprint: {A}\nxyz{B}", "line 2 must be 32 bytes"),
    ],
)
def test_a_file_of_no_use_is_refused_without_showing_it(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text)
    (reported,) = caught.value.problems
    assert problem in reported
    assert not any(key[:8] in reported for key in (A, B, C))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (FILE_BYTES_MAX + 1), b""])
def test_a_file_that_is_no_key_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cluster"):
        read_keys(path)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        KeyFile(tmp_path / "none", lambda _: None)


def test_workers_and_insecure_clusters_have_fingerprints_they_agree_on() -> None:
    key = bytes.fromhex(A)
    assert keys_of(key).fingerprint_secret == secret(A)
    assert keys_of(key).ring.keys == parse_keys(A).ring.keys
    assert insecure_keys("a").ring.insecure
    assert insecure_keys("a").fingerprint_secret == insecure_keys("a").fingerprint_secret
    assert insecure_keys("a").fingerprint_secret != insecure_keys("b").fingerprint_secret


def test_keys_do_not_show_themselves() -> None:
    keys = parse_keys(A)
    assert A[:8] not in repr(keys)
    assert repr(keys.fingerprint_secret)[2:-1] not in repr(keys)
    assert isinstance(keys, Keys)


class Follower:
    """A KeyFile and the rings that it reported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rings: list[KeyRing] = []
        self.reported = trio.Event()
        path.write_text(A)
        self.file = KeyFile(path, self.take, interval_s=0.01)

    def take(self, ring: KeyRing) -> None:
        self.rings.append(ring)
        self.reported.set()

    def write(self, text: str) -> None:
        """In one step, as an operator's tool does."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return Follower(tmp_path / "keys")


async def test_a_changed_file_is_read_and_reported_once(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await follower.file.look()
    assert follower.rings == []
    follower.write(f"{A}\n{B}")
    await follower.file.look()
    await follower.file.look()
    assert [len(ring.keys) for ring in follower.rings] == [2]
    assert follower.file.counters.changes == 1
    assert follower.file.keys.ring is follower.rings[0]
    assert not any(key[:8] in caplog.text for key in (A, B))


async def test_a_file_of_no_use_changes_nothing_and_is_reported_once(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    for text in (A[:-5], A[:-5], ""):
        follower.write(text)
        await follower.file.look()
    follower.path.unlink()
    await follower.file.look()
    await follower.file.look()
    assert follower.rings == []
    assert len(follower.file.keys.ring.keys) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3  # cut, empty, gone
    assert follower.file.counters.failures == 4
    follower.write(f"{B}\n{A}")
    await follower.file.look()
    assert len(follower.rings) == 1


async def test_a_file_that_could_not_be_read_is_read_as_soon_as_it_can_be(follower: Follower) -> None:
    follower.write(f"{A}\n{B}")
    with no_more_descriptors():
        await follower.file.look()
    assert (follower.file.counters.failures, follower.rings) == (1, [])
    await follower.file.look()
    assert [len(ring.keys) for ring in follower.rings] == [2]


async def test_a_symlink_that_is_turned_is_seen(tmp_path: Path) -> None:
    """Kubernetes replaces the folder behind a link; the link itself stays."""
    for name, text in (("one", A), ("two", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(text)
    link = tmp_path / "now"
    link.symlink_to("one")
    rings: list[KeyRing] = []
    file = KeyFile(link / "keys", rings.append)
    other = tmp_path / "then"
    other.symlink_to("two")
    other.replace(link)
    await file.look()
    assert [list(ring.keys.values()) for ring in rings] == [[bytes.fromhex(B)]]


async def test_a_file_that_is_renamed_into_place_is_another_one_though_its_size_and_time_are_the_same(
    follower: Follower,
) -> None:
    times, new = follower.path.stat(), follower.path.with_name("new")
    new.write_text(B)
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert new.stat().st_size == times.st_size
    new.replace(follower.path)
    await follower.file.look()
    assert [list(ring.keys.values()) for ring in follower.rings] == [[bytes.fromhex(B)]]


async def test_a_second_key_without_a_line_for_fingerprints_is_warned_of_before_it_does_harm(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a node that is restarted in a year stops sharing, and nobody knows why."""
    follower.write(f"{A}\n{B}")
    await follower.file.look()
    assert "gossip.fingerprint_line_missing" in caplog.text
    caplog.clear()
    KeyFile(follower.path, lambda _: None)  # of a node that starts now
    assert "gossip.fingerprint_line_missing" in caplog.text
    caplog.clear()
    follower.write(f"{B}\n{A}")
    await follower.file.look()
    assert "gossip.fingerprints_differ" in caplog.text
    caplog.clear()
    for text in (A, f"{A}\nfingerprint: {A}\n{B}", f"{B}\n{A}\nfingerprint: {A}", f"{B}\nfingerprint: {A}"):
        follower.write(text)
        await follower.file.look()
    KeyFile(follower.path, lambda _: None)
    assert caplog.text == ""


async def test_it_looks_again_and_again(follower: Follower) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(follower.file.run)
            follower.write(f"{A}\n{B}")
            await follower.reported.wait()
            nursery.cancel_scope.cancel()


async def test_who_asks_for_it_has_the_file_read_at_once(follower: Follower) -> None:
    """Even when nothing about the file tells that it changed."""
    follower.file.interval_s = 1000
    times = follower.path.stat()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(follower.file.run)
            await trio.testing.wait_all_tasks_blocked()
            follower.path.write_text(B)
            os.utime(follower.path, ns=(times.st_atime_ns, times.st_mtime_ns))
            follower.file.look_soon()
            await follower.reported.wait()
            nursery.cancel_scope.cancel()

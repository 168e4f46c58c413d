"""What panes showed before, packed, in a bounded number of bytes."""

from __future__ import annotations

from random import Random

from ranvier_py.core.history.series import NAMES_MAX, SECONDS
from ranvier_py.core.history.snapshots import BYTES_MAX, KEPT_S, Snapshots


def test_a_time_has_what_each_pane_showed_last_before_it() -> None:
    kept = Snapshots()
    kept.add("verdict", b"well", 10.0)
    kept.add("engines", b"two", 11.0)
    kept.add("verdict", b"down", 20.0)
    assert kept.at(9.0) == {}
    assert kept.at(10.5) == {"verdict": (10.0, b"well")}
    assert kept.at(19.0) == {"verdict": (10.0, b"well"), "engines": (11.0, b"two")}
    assert kept.at(99.0)["verdict"] == (20.0, b"down")


def test_what_has_not_changed_is_kept_once_and_outlives_the_quarter_of_an_hour() -> None:
    kept = Snapshots()
    for second in range(3000):
        kept.add("verdict", b"well", float(second))
    size = kept.bytes
    kept.add("verdict", b"down", 3000.0)
    assert kept.at(2999.0) == {"verdict": (0.0, b"well")}
    assert kept.at(3000.0) == {"verdict": (3000.0, b"down")}
    assert size < 50


def test_what_is_too_old_goes() -> None:
    kept = Snapshots()
    for second in range(2 * int(KEPT_S)):
        kept.add("verdict", str(second).encode(), float(second))
    assert kept.at(KEPT_S - 3) == {}
    assert kept.at(KEPT_S)["verdict"] == (KEPT_S, b"%d" % KEPT_S)


def test_it_never_has_more_bytes_than_it_may_and_counts_what_it_drops() -> None:
    kept, rng = Snapshots(bytes_max=10_000), Random(1)
    for second in range(100):
        kept.add("abc"[second % 3], rng.randbytes(500), float(second))
        assert kept.bytes <= 10_000
    assert kept.dropped > 50
    assert kept.at(99.0).keys() == {"a", "b", "c"}


def test_all_history_takes_less_than_sixteen_megabytes() -> None:
    assert BYTES_MAX + 8 * NAMES_MAX * SECONDS < 16 << 20

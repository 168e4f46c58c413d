"""A reader who follows a turn, a packet or an event goes through few files."""

from __future__ import annotations

from benchmarks.harness.report import TURN_MOST
from tests.walks import FILES_MAX, recorded, walked

TURN_MISSES = {"instructions", "files"}
"""Goals that a chat's turn has not reached yet."""


def test_packets_and_events_go_through_no_more_files_than_they_did() -> None:
    files = walked()
    assert {name: len(found) for name, found in files.items()} == FILES_MAX, files


def test_a_chats_turn_keeps_the_goals_that_it_reached() -> None:
    turn = recorded()
    assert {what for what, most in TURN_MOST.items() if turn[what] > most} <= TURN_MISSES, turn

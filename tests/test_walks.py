"""A reader who follows a packet or an event goes through few files."""

from __future__ import annotations

from tests.walks import FILES_MAX, walked


def test_packets_and_events_go_through_no_more_files_than_they_did() -> None:
    files = walked()
    assert {name: len(found) for name, found in files.items()} == FILES_MAX, files

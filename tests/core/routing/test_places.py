"""How many requests an engine runs at once, as far as its metrics page has shown that."""

from ranvier_py.core.routing.backends import BackendLimits, Registry
from ranvier_py.core.routing.rates.work import Work


def decoding(requests: int) -> Work:
    """Return the work of an engine to which six requests were sent, of which so many decode."""
    registry = Registry(BackendLimits())
    backend = registry.add("http://10.0.0.1:8000", name="e0")
    for _ in range(6):
        registry.dispatched(backend, 0.0)
    backend.work.decoding = requests
    return backend.work


def test_an_engine_where_requests_wait_beside_those_that_decode_has_no_more_places() -> None:
    work = decoding(0)
    work.queue_read(2, 4)
    work.queue_read(2, 4)
    assert work.room.places is None, "the two may be prompts that are computed, for which the others wait"
    work.decoding = 4
    work.queue_read(4, 0)
    work.queue_read(4, 0)
    assert work.room.places is None, "nobody waits"
    work.queue_read(4, 2)
    work.queue_read(4, 2)
    assert work.room.places == 4
    work.queue_read(3, 0)
    work.queue_read(None, None)
    assert work.room.places == 4
    work.queue_read(6, 0)
    assert work.room.places == 6, "it has shown that it runs more"


def test_a_request_that_waits_only_until_a_step_ends_shows_no_places() -> None:
    work = decoding(4)
    for running in (4, 3, 4, 2):
        work.queue_read(running, 1)
        assert work.room.places is None, "another one waits at each look"
    work.queue_read(4, 1)
    work.queue_read(4, 0)
    work.queue_read(4, 1)
    assert work.room.places is None, "between the two looks nobody waited"


def test_a_request_that_waits_for_room_in_the_cache_shows_no_places() -> None:
    work = decoding(4)
    work.queue_read(4, 1, 0.8)
    work.queue_read(4, 1, 0.8)
    assert work.room.places is None
    work.queue_read(4, 1, 0.3)
    work.queue_read(4, 1, 0.3)
    assert work.room.places == 4

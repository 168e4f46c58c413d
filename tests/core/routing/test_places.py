"""How many requests an engine runs at once, as far as its metrics page has shown that."""

from ranvier_py.core.routing.backends import BackendLimits, Registry


def test_an_engine_where_requests_wait_beside_those_that_decode_has_no_more_places() -> None:
    registry = Registry(BackendLimits())
    backend = registry.add("http://10.0.0.1:8000", name="e0")
    for _ in range(6):
        registry.dispatched(backend, 0.0)
    backend.work.queue_read(2, 4)
    assert backend.work.room.places is None, "the two may be prompts that are computed, for which the others wait"
    backend.work.decoding = 4
    backend.work.queue_read(4, 0)
    assert backend.work.room.places is None, "nobody waits"
    backend.work.queue_read(4, 2)
    assert backend.work.room.places == 4
    backend.work.queue_read(3, 0)
    backend.work.queue_read(None, None)
    assert backend.work.room.places == 4
    backend.work.queue_read(6, 0)
    assert backend.work.room.places == 6, "it has shown that it runs more"

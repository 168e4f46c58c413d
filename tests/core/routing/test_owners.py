"""Who keeps what: the latest word holds, for one process, for a while, in bounded memory, and peers get to know it."""

from hashlib import blake2b

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.owners import LATEST_MAX, QUEUE_MAX, RESPONSE_TTL_S, SESSION_TTL_S, Owner, Owners

ONE, TWO = BackendId(1), BackendId(2)


def owners(entries_max: int = 100) -> Owners:
    return Owners(lambda data: blake2b(data, digest_size=16, key=b"k").digest(), entries_max)


def test_a_response_and_a_session_of_one_name_are_two_things_and_so_are_those_of_two_tenants() -> None:
    known = owners()
    keys = {known.response_key("a", b""), known.session_key(b"a", b""), known.response_key("a", b"t")}
    assert len(keys) == 3
    assert known.session_key(b"", b"t") == 0


def test_the_latest_word_holds_and_an_earlier_one_of_a_peer_changes_nothing() -> None:
    known = owners()
    key = known.response_key("a", b"")
    known.learn(key, ONE, 3, 10.0)
    assert not known.take(key, TWO, 1, 9.0)
    assert known.find(key, 11.0) == Owner(ONE, 3, 10.0)
    assert known.take(key, TWO, 1, 12.0)
    assert known.find(key, 13.0) == Owner(TWO, 1, 12.0)


def test_what_is_known_ends_by_its_age() -> None:
    known = owners()
    response, session = known.response_key("a", b""), known.session_key(b"a", b"")
    for key in (response, session):
        known.learn(key, ONE, 1, 0.0)
    assert known.find(session, SESSION_TTL_S - 1) is not None
    assert known.find(session, SESSION_TTL_S) is None
    assert known.find(response, RESPONSE_TTL_S - 1) is not None
    assert known.find(response, RESPONSE_TTL_S) is None


def test_the_oldest_entry_goes_and_is_counted() -> None:
    known = owners(entries_max=3)
    keys = [known.response_key(str(number), b"") for number in range(5)]
    for key in keys:
        known.learn(key, ONE, 1, 0.0)
    assert [known.find(key, 1.0) is not None for key in keys] == [False, False, True, True, True]
    assert (known.counters.dropped, known.counters.responses) == (2, 3)


def test_peers_get_what_is_new_once_and_a_session_that_stays_again_now_and_then() -> None:
    known, came = owners(), list[int]()
    key = known.session_key(b"a", b"")
    known.learn(known.session_key(b"before", b""), ONE, 1, 0.0)
    known.collect(lambda: came.append(1))
    for at in (0.0, 1.0, 2.0, SESSION_TTL_S / 2, SESSION_TTL_S / 2 + 1):
        known.learn(key, ONE, 1, at)
    known.learn(key, TWO, 1, SESSION_TTL_S / 2 + 2)
    sent = [(new.digest, new.owner.backend) for new in known.new.taken()]
    assert sent == [(key, ONE), (key, ONE), (key, TWO)]
    assert list(known.new.taken()) == []
    assert came == [1]


def test_a_peer_that_lacks_them_gets_the_latest_and_what_waits_is_bounded() -> None:
    known = owners(entries_max=QUEUE_MAX * 2)
    known.collect(lambda: None)
    for number in range(QUEUE_MAX + 10):
        known.learn(known.response_key(str(number), b""), ONE, 1, 0.0)
    assert len(known.new) == QUEUE_MAX
    assert known.counters.dropped == 10
    latest = [new.digest for new in known.latest()]
    assert len(latest) == LATEST_MAX
    assert latest[-1] == known.response_key(str(QUEUE_MAX + 9), b"")

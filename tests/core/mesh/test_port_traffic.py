"""What passes the gossip port, and what is logged of it."""

from ranvier_py.core.mesh.port_traffic import LOOK_INTERVAL_S, WINDOW_S, TrafficRates, plain_address, socket_address


def test_a_steady_flow_is_shown_as_what_it_is_each_second_and_path() -> None:
    rates = TrafficRates()
    for second in range(30):
        assert rates.look(float(second), {"bulk": 100 * second, "probe": 0}, {"bulk": 50 * second, "probe": 7})
    assert rates.per_s(29.5, {"bulk": 2950, "probe": 0}, {"bulk": 1475, "probe": 7}) == {
        "bulk": {"sent": 100.0, "received": 50.0},
        "probe": {"sent": 0.0, "received": 0.0},
    }


def test_a_burst_is_forgotten_after_the_window() -> None:
    rates = TrafficRates()
    rates.look(0.0, {"bulk": 0}, {"bulk": 0})
    assert rates.per_s(1.0, {"bulk": 5000}, {"bulk": 0})["bulk"]["sent"] == 5000.0
    for second in range(1, int(WINDOW_S) + 2):
        rates.look(float(second), {"bulk": 5000}, {"bulk": 0})
    assert rates.per_s(WINDOW_S + 1.5, {"bulk": 5000}, {"bulk": 0})["bulk"]["sent"] == 0.0


def test_before_the_first_second_is_over_nothing_is_made_of_it() -> None:
    rates = TrafficRates()
    assert rates.per_s(5.0, {"bulk": 9}, {"bulk": 9}) == {"bulk": {"sent": 0.0, "received": 0.0}}
    rates.look(5.0, {"bulk": 9}, {"bulk": 9})
    assert not rates.look(5.0 + LOOK_INTERVAL_S / 2, {"bulk": 9}, {"bulk": 9})
    assert rates.per_s(5.001, {"bulk": 19}, {"bulk": 9})["bulk"]["sent"] == 10.0


def test_addresses_are_spelled_for_the_socket_and_back() -> None:
    assert socket_address(("10.0.0.1", 5), ipv6=False) == ("10.0.0.1", 5)
    assert socket_address(("10.0.0.1", 5), ipv6=True) == ("::ffff:10.0.0.1", 5, 0, 0)
    assert socket_address(("fd00::1", 5), ipv6=True) == ("fd00::1", 5, 0, 0)
    assert socket_address(("fd00::1", 5), ipv6=False) is None
    assert plain_address(("::ffff:10.0.0.1", 5, 0, 0)) == ("10.0.0.1", 5)
    assert plain_address(("fd00::1", 5, 0, 0)) == ("fd00::1", 5)

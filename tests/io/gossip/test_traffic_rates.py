"""How much passes the gossip port just now."""

from ranvier_py.io.gossip.traffic_rates import LOOK_INTERVAL_S, WINDOW_S, Rates


def test_a_steady_flow_is_told_as_what_it_is_each_second_and_way() -> None:
    rates = Rates()
    for second in range(30):
        assert rates.due(float(second))
        rates.look(float(second), {"bulk": 100 * second, "probe": 0}, {"bulk": 50 * second, "probe": 7})
    assert rates.per_s(29.5, {"bulk": 2950, "probe": 0}, {"bulk": 1475, "probe": 7}) == {
        "bulk": {"sent": 100.0, "received": 50.0},
        "probe": {"sent": 0.0, "received": 0.0},
    }


def test_a_burst_is_forgotten_after_the_window() -> None:
    rates = Rates()
    rates.look(0.0, {"bulk": 0}, {"bulk": 0})
    assert rates.per_s(1.0, {"bulk": 5000}, {"bulk": 0})["bulk"]["sent"] == 5000.0
    for second in range(1, int(WINDOW_S) + 2):
        rates.look(float(second), {"bulk": 5000}, {"bulk": 0})
    assert rates.per_s(WINDOW_S + 1.5, {"bulk": 5000}, {"bulk": 0})["bulk"]["sent"] == 0.0


def test_before_the_first_second_is_over_nothing_is_made_of_it() -> None:
    rates = Rates()
    assert rates.per_s(5.0, {"bulk": 9}, {"bulk": 9}) == {"bulk": {"sent": 0.0, "received": 0.0}}
    rates.look(5.0, {"bulk": 9}, {"bulk": 9})
    assert not rates.due(5.0 + LOOK_INTERVAL_S / 2)
    assert rates.per_s(5.001, {"bulk": 19}, {"bulk": 9})["bulk"]["sent"] == 10.0


def test_the_counters_may_go_on_counting() -> None:
    rates, sent = Rates(), {"bulk": 0}
    rates.look(0.0, sent, sent)
    sent["bulk"] = 1000
    assert rates.per_s(2.0, sent, sent)["bulk"]["sent"] == 500.0

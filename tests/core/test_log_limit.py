from ranvier_py.core.log_limit import LOG_INTERVAL_S, LogLimit


def test_a_kind_of_trouble_is_logged_once_in_its_interval_with_how_often_it_was_not() -> None:
    limit = LogLimit()
    assert limit.suffix("send", 0.0) == ""
    assert [limit.suffix("send", second) for second in (1.0, 2.0)] == [None, None]
    assert limit.suffix("receive", 2.0) == ""
    assert limit.suffix("send", LOG_INTERVAL_S) == " (2 more since the last line)"
    assert limit.suffix("send", 2 * LOG_INTERVAL_S) == ""

from ranvier_py.core.log_limit import LOG_INTERVAL_S, LogLimit


def test_a_kind_of_trouble_is_logged_once_in_its_interval_with_how_often_it_was_not() -> None:
    limit = LogLimit()
    assert limit.more("send", 0.0) == 0
    assert [limit.more("send", second) for second in (1.0, 2.0)] == [None, None]
    assert limit.more("receive", 2.0) == 0
    assert limit.more("send", LOG_INTERVAL_S) == 2
    assert limit.more("send", 2 * LOG_INTERVAL_S) == 0

from __future__ import annotations

from router.breaker import Breaker


def pauses(breaker: Breaker, now: float) -> bool:
    """Whether it lets nobody through yet shortly before ``now``, and one call from then on."""
    return not breaker.allows(now - 0.01) and breaker.allows(now)


def test_a_broken_connection_opens_it_and_each_failed_try_after_that_doubles_the_pause_up_to_ten_seconds() -> None:
    breaker = Breaker()
    breaker.broke(breaker.start(), 100.0)
    assert breaker.is_troubled and pauses(breaker, 100.5)
    now, pause_s = 100.0, 0.5
    for expected_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        now += pause_s
        breaker.broke(breaker.start(), now)
        assert pauses(breaker, now + expected_s)
        pause_s = expected_s


def test_what_cuts_many_streams_at_once_opens_it_once() -> None:
    breaker = Breaker()
    calls = [breaker.start() for _ in range(5)]
    for call in calls:
        breaker.broke(call, 100.0)
    assert pauses(breaker, 100.5)


def test_errors_open_it_only_when_three_come_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(4):
        for _ in range(2):
            breaker.erred(breaker.start(), 100.0)
        breaker.succeeded(breaker.start())
    assert not breaker.is_troubled
    for _ in range(3):
        breaker.erred(breaker.start(), 100.0)
    assert pauses(breaker, 100.5)


def test_after_the_pause_one_call_tries_and_its_fate_decides() -> None:
    breaker = Breaker()
    breaker.broke(breaker.start(), 100.0)
    assert breaker.allows(100.5)
    probe = breaker.start()
    assert not breaker.allows(100.6)
    breaker.erred(probe, 101.0)  # one error is enough now
    assert pauses(breaker, 102.0)
    probe = breaker.start()
    breaker.succeeded(probe)
    assert breaker.allows(102.1) and not breaker.is_troubled


def test_a_try_that_tells_nothing_makes_room_for_the_next() -> None:
    breaker = Breaker()
    breaker.broke(breaker.start(), 100.0)
    probe = breaker.start()
    assert not breaker.allows(101.0)
    breaker.abandoned(probe)
    assert breaker.allows(101.0)


def test_calls_from_before_it_opened_neither_close_it_nor_open_it_further_nor_end_a_try() -> None:
    breaker = Breaker()
    answered, broken, left, first = (breaker.start() for _ in range(4))
    breaker.broke(first, 100.0)
    breaker.succeeded(answered)
    assert breaker.is_troubled
    probe = breaker.start()
    breaker.broke(broken, 100.6)
    breaker.abandoned(left)
    assert not breaker.allows(100.7)  # the try is still under way
    breaker.broke(probe, 100.8)
    assert pauses(breaker, 101.8)


def test_where_all_must_try_at_once_one_failure_counts_and_one_success_closes_it() -> None:
    breaker = Breaker()
    breaker.broke(breaker.start(), 100.0)
    calls = [breaker.start() for _ in range(3)]  # every replica is in trouble: they are sent all the same
    breaker.broke(calls[1], 100.1)
    breaker.broke(calls[2], 100.1)
    breaker.succeeded(calls[0])
    assert pauses(breaker, 101.1)
    calls = [breaker.start() for _ in range(2)]
    breaker.succeeded(calls[0])
    assert not breaker.is_troubled

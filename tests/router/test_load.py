"""Charges: taken at the decision, released exactly once; pending blocks leave after the events that tell of them."""

from __future__ import annotations

import random
from array import array

import pytest

from router.load import LoadBook, Share, Ticket


def test_a_charge_is_released_once_however_often_it_is_closed() -> None:
    book = LoadBook()
    ticket = book.charge("w0", 100, [1, 2], now=0)
    load = book.of("w0")
    assert (load.in_flight, load.waiting_requests, load.waiting_tokens) == (1, 1, 100)
    ticket.first_token(1)
    ticket.first_token(1)
    assert (load.in_flight, load.waiting_requests, load.waiting_tokens) == (1, 0, 0)
    ticket.close(2)
    ticket.close(3)
    assert (load.in_flight, load.waiting_requests, load.waiting_tokens) == (0, 0, 0)
    assert not load.pending


@pytest.mark.parametrize("seed", range(5))
def test_whose_counts_have_changed_is_known(seed: int) -> None:
    rng = random.Random(seed)
    book, tickets = LoadBook(), [LoadBook().charge("w0", 1, [], now=0)]
    names = [f"w{number}" for number in range(4)]

    def counts(name: str) -> tuple[int, ...]:
        load = book.of(name)
        theirs = load.foreign_requests, load.foreign_tokens, load.held_requests
        return (load.in_flight, load.waiting_tokens, *theirs)

    for step in range(500):
        before = {name: counts(name) for name in names}
        book.changed.clear()
        name, ticket = rng.choice(names), rng.choice(tickets)
        match rng.randrange(8):
            case 0 | 1:
                tickets.append(book.charge(name, rng.randrange(100), [], step, num_choices=rng.randrange(1, 3)))
            case 2:
                ticket.first_token(step)
            case 3:
                ticket.close(step, event_seq=step)
            case 4:
                book.set_share("other", name, Share(rng.randrange(3), 1, rng.randrange(99)), step)
            case 5:
                book.hold(name, 5)
            case 6:
                rng.choice([book.release_holds, lambda: book.forget(name)])()  # noqa: B023
            case 7:
                book.of(name).told(rng.randrange(9), rng.randrange(999))
        assert {name for name in names if counts(name) != before[name]} <= book.changed


def test_pending_blocks_count_until_the_index_has_the_request_s_own_events() -> None:
    book = LoadBook()
    keys = array("Q", [10, 11, 12, 13])
    ticket = book.charge("w0", 64, keys[1:], now=0)
    load = book.of("w0")
    assert load.pending.depth(keys, 1) == 4
    assert load.pending.depth(keys, 0) == 0  # the block before them has gone: no gap is bridged
    ticket.close(1, event_seq=7, output_keys=[14])
    book.confirm("w0", 6, now=1)
    assert load.pending.depth(array("Q", [10, 11, 12, 13, 14]), 1) == 5
    book.confirm("w0", 7, now=1)
    assert load.pending.depth(keys, 1) == 1
    assert not load.pending


def test_blocks_whose_events_came_first_are_not_pending_at_all() -> None:
    book = LoadBook()
    ticket = book.charge("w0", 16, [1], now=0)
    book.confirm("w0", 9, now=0)
    ticket.close(1, event_seq=8, output_keys=[2])
    assert not book.of("w0").pending


def test_pending_blocks_die_with_a_request_that_failed() -> None:
    book = LoadBook()
    ticket = book.charge("w0", 16, [1], now=0)
    ticket.close(1)
    assert not book.of("w0").pending


def test_pending_blocks_expire_when_no_event_ever_comes() -> None:
    book = LoadBook()
    book.charge("w0", 16, [1], now=0).close(1, event_seq=5)
    book.confirm("w0", 0, now=20)
    assert book.of("w0").pending
    book.confirm("w0", 0, now=40)
    assert not book.of("w0").pending


def test_two_requests_for_one_block_hold_it_until_both_are_through() -> None:
    book = LoadBook()
    first = book.charge("w0", 16, [1], now=0)
    second = book.charge("w0", 0, [1], now=0)
    first.close(1)
    assert book.of("w0").pending
    second.close(1)
    assert not book.of("w0").pending


def test_a_ticket_of_a_generation_that_has_gone_touches_nobody_else() -> None:
    book = LoadBook()
    old = book.charge("w0", 100, [1], now=0)
    book.forget("w0")
    book.charge("w0", 50, [2], now=1)
    old.close(2, event_seq=3, output_keys=[9])
    load = book.of("w0")
    assert (load.in_flight, load.waiting_tokens, load.pending.depth(array("Q", [2]), 0)) == (1, 50, 1)


def serve(book: LoadBook, replica: str, tokens: int, service_s: float, now: float) -> float:
    """One request alone on a replica; the time at its end."""
    ticket = book.charge(replica, tokens, (), now)
    now += service_s
    ticket.first_token(now)
    ticket.close(now)
    return now


def test_the_speed_is_learned_from_first_tokens() -> None:
    book, now = LoadBook(), 0.0
    book.model.suggest(100_000)
    for _ in range(200):
        now = serve(book, "w0", 500, 0.5, now)
    assert 900 < book.of("w0").speed < 1100


def test_a_suggested_speed_counts_until_something_was_learned() -> None:
    book = LoadBook()
    book.model.suggest(500)
    assert book.of("w0").speed == 500
    serve(book, "w0", 100, 0.1, 0.0)
    book.model.suggest(9_000)
    assert book.of("w0").speed == pytest.approx(1000)


def test_a_replica_that_answers_warm_turns_is_not_thought_slow() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(100):  # both at 1,000 tokens/s after a fixed 50 ms
        now = serve(book, "warm", 20, 0.07, now)
        now = serve(book, "cold", 400, 0.45, now)
    assert book.of("warm").speed == pytest.approx(book.of("cold").speed, rel=0.02)
    assert book.of("warm").speed == pytest.approx(1000, rel=0.02)


def passed_by_two(book: LoadBook, now: float) -> tuple[Ticket, float]:
    """A long prompt that waits, and when the second of two short ones that went before its end is done."""
    long = book.charge("w0", 800, (), now)
    for _ in range(2):
        short = book.charge("w0", 100, (), now + 0.3)
        now += 0.4
        short.first_token(now)
        short.close(now)
    return long, now


def test_short_prompts_that_pass_a_long_one_do_not_make_it_look_fast() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(100):  # 1,000 tokens/s: the long prompt begins, two short ones go before its end
        long, now = passed_by_two(book, now)
        now += 0.2
        long.first_token(now)
        long.close(now)
        now = serve(book, "w0", 100, 0.1, now)
    assert book.of("w0").speed == pytest.approx(1000, rel=0.02)


def test_prompts_that_are_done_in_one_step_are_counted_together() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(200):
        tickets = [book.charge("w0", 100, (), now) for _ in range(4)]
        now += 0.4
        for ticket in tickets:
            ticket.first_token(now)
            ticket.close(now)
    assert book.of("w0").speed == pytest.approx(1000, rel=0.02)


def test_a_long_prompt_that_nobody_waits_for_any_more_leaves_the_speed_as_it_was() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(100):  # 1,000 tokens/s
        long, now = passed_by_two(book, now)
        long.close(now)  # its client has left
        now = serve(book, "w0", 100, 0.1, now)
        long, other = book.charge("w0", 800, (), now), book.charge("w0", 300, (), now)
        long.close(now + 0.5)
        now += 0.8
        other.first_token(now)
        other.close(now)
    assert book.of("w0").speed == pytest.approx(1000, rel=0.02)


def test_prompts_of_one_length_leave_what_was_learned_from_others() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(20):  # 1,000 tokens/s after a fixed 50 ms
        now = serve(book, "w0", 1, 0.051, now)
        now = serve(book, "w0", 400, 0.45, now)
    for _ in range(2_000):
        now = serve(book, "w0", 10, 0.06, now)
    assert book.of("w0").speed == pytest.approx(1000, rel=0.02)
    for _ in range(2_000):  # they take 2 ms now: all of it is no more than each of their tokens can take
        now = serve(book, "w0", 10, 0.002, now)
    assert book.of("w0").speed == pytest.approx(5000, rel=0.02)


@pytest.mark.parametrize("cold_every", [50, 100, 1_000_000])
def test_many_warm_turns_leave_what_a_few_cold_prompts_have_taught(cold_every: int) -> None:
    rng, book, now = random.Random(5), LoadBook(), 0.0
    for number in range(2_000):  # 3 ms, give or take 1, and 3 us per token
        is_cold = number < 10 or number % cold_every == 0
        tokens = 2_000 if is_cold else rng.randint(1, 16)
        now = serve(book, "w0", tokens, max(0.001, rng.gauss(0.003, 0.001)) + tokens * 3e-6, now)
    assert book.model.expected_s(2_000) == pytest.approx(0.009, rel=0.25)
    assert book.model.expected_s(8) == pytest.approx(0.003, rel=0.25)


def test_a_replica_that_is_slow_is_known_to_be() -> None:
    book, now = LoadBook(), 0.0
    for tokens in (100, 200, 300, 400) * 50:
        now = serve(book, "slow", tokens, tokens / 500, now)
        now = serve(book, "fast", tokens, tokens / 1000, now)
    assert book.of("slow").speed < 0.6 * book.of("fast").speed


def test_one_slow_first_token_moves_no_replica_far() -> None:
    book, now = LoadBook(), 0.0
    for _ in range(5):
        now = serve(book, "a", 100, 0.1, now)
        now = serve(book, "b", 100, 0.1, now)
    now = serve(book, "a", 100, 0.5, now)
    assert book.of("a").speed > 0.85 * book.of("b").speed


def test_no_sequence_of_calls_leaves_anything_charged() -> None:
    rng = random.Random(5)
    book = LoadBook()
    open_tickets: list[Ticket] = []
    seq = 0
    for now in range(5_000):
        action = rng.random()
        if action < 0.4 or not open_tickets:
            keys = [rng.randrange(50) for _ in range(rng.randrange(4))]
            open_tickets.append(book.charge("w0", rng.randrange(100), keys, now))
        elif action < 0.6:
            rng.choice(open_tickets).first_token(now)
        elif action < 0.9:
            ticket = open_tickets.pop(rng.randrange(len(open_tickets)))
            seq += 1
            ticket.close(now, seq if rng.random() < 0.5 else None, [rng.randrange(50)])
            if rng.random() < 0.1:
                ticket.close(now)
        else:
            book.confirm("w0", seq - rng.randrange(3), now)
    for ticket in open_tickets:
        ticket.close(5_000)
    book.confirm("w0", seq, 5_000)
    load = book.of("w0")
    assert (load.in_flight, load.waiting_requests, load.waiting_tokens, len(load.pending)) == (0, 0, 0, 0)

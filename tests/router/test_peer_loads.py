"""Other routers' load is added to our own: steps at once, totals to make good whatever was lost."""

from __future__ import annotations

import random
from array import array
from typing import Any

from warmfront_pb.v1 import router_pb2

from router.load import NO_SHARE, Journal, LoadBook, Share, Ticket
from router.peer_loads import PeerLoads, batch_of, totals_of


class Side:
    """One router's bookkeeping."""

    def __init__(self, name: str, boot: str = "b1") -> None:
        self.name, self.boot = name, boot
        self.book = LoadBook()
        self.book.journal = Journal(lambda: None)
        self.peers = PeerLoads(self.book, name, boot)

    def batch(self) -> router_pb2.DispatchBatch:
        assert self.book.journal is not None
        return router_pb2.DispatchBatch.FromString(
            batch_of(self.name, self.boot, self.book.journal.take()).SerializeToString()
        )

    def totals(self) -> router_pb2.RouterLoad:
        return router_pb2.RouterLoad.FromString(totals_of(self.book, self.boot).SerializeToString())

    def counts(self, replica: str = "w0") -> tuple[int, int, int]:
        load = self.book.of(replica)
        return load.in_flight, load.waiting_requests, load.waiting_tokens


def test_a_charge_a_first_token_and_an_end_are_seen_by_the_other_router() -> None:
    a, b = Side("a"), Side("b")
    ticket = a.book.charge("w0", 100, [1, 2], now=0)
    mine = b.book.charge("w0", 10, [], now=0)
    b.peers.take(a.batch(), now=0)
    assert b.counts() == (2, 2, 110)
    assert b.book.of("w0").own == Share(1, 1, 10)
    ticket.first_token(1)
    b.peers.take(a.batch(), now=1)
    assert b.counts() == (2, 1, 10)
    assert b.book.of("w0").since_progress_s(1.5) == 0.5  # the replica has moved on, whichever router's request it was
    ticket.close(2)
    mine.close(2)
    b.peers.take(a.batch(), now=2)
    assert b.counts() == (0, 0, 0)
    assert a.counts() == (0, 0, 0)


def test_another_router_s_first_tokens_teach_nothing_here() -> None:
    a, b = Side("a"), Side("b")
    ticket = a.book.charge("w0", 1000, [], now=0)
    b.peers.take(a.batch(), now=0)
    before = b.book.model.token_s
    ticket.first_token(100)
    b.peers.take(a.batch(), now=100)
    assert b.book.model.token_s == before


def test_a_first_token_teaches_nothing_while_another_router_waits_there_too() -> None:
    a, b = Side("a"), Side("b")
    a.book.charge("w0", 1000, [], now=0)
    b.peers.take(a.batch(), now=0)
    before = b.book.model.token_s
    b.book.charge("w0", 10, [], now=0).first_token(100)  # most of that time the replica worked for the other one
    assert b.book.model.token_s == before


def test_blocks_on_their_way_by_another_router_count_as_held_until_the_replica_s_own_events() -> None:
    a, b = Side("a"), Side("b")
    keys = array("Q", [10, 11, 12])
    ticket = a.book.charge("w0", 48, keys, now=0)
    b.peers.take(a.batch(), now=0)
    assert b.book.of("w0").pending.depth(keys, 0) == 3
    ticket.first_token(1)
    ticket.close(2, event_seq=7, output_keys=array("Q", [13]))
    b.peers.take(a.batch(), now=2)
    assert b.book.of("w0").pending.depth(array("Q", [10, 11, 12, 13]), 0) == 4
    b.book.confirm("w0", 7, now=2)
    assert not b.book.of("w0").pending


def test_blocks_of_a_request_that_failed_elsewhere_are_not_expected_any_more() -> None:
    a, b = Side("a"), Side("b")
    ticket = a.book.charge("w0", 48, [1, 2, 3], now=0)
    b.peers.take(a.batch(), now=0)
    ticket.close(1)
    b.peers.take(a.batch(), now=1)
    assert not b.book.of("w0").pending


def test_its_own_steps_are_skipped() -> None:
    a = Side("a")
    a.book.charge("w0", 100, [1], now=0)
    a.peers.take(a.batch(), now=0)
    a.peers.observe({"a": a.totals()}, now=0)
    assert (a.counts(), len(a.peers)) == ((1, 1, 100), 0)


def test_a_router_that_comes_late_takes_the_totals_and_the_steps_after_them() -> None:
    a, late = Side("a"), Side("late")
    first = a.book.charge("w0", 100, [1], now=0)
    first_batch = a.batch()
    totals = a.totals()
    second = a.book.charge("w0", 50, [2], now=0)
    second_batch = a.batch()
    late.peers.observe({"a": totals}, now=1)
    late.peers.take(first_batch, now=1)  # of before the totals: its blocks are news, its counts are not
    assert late.counts() == (1, 1, 100)
    late.peers.take(second_batch, now=1)
    assert late.counts() == (2, 2, 150)
    assert [late.book.of("w0").pending.depth(array("Q", [key]), 0) for key in (1, 2)] == [1, 1]
    late.peers.observe({"a": totals}, now=2)  # the same again
    assert late.counts() == (2, 2, 150)
    first.close(3)
    second.close(3)
    late.peers.take(a.batch(), now=3)
    assert late.counts() == (0, 0, 0)


def test_a_dead_router_s_share_goes_with_its_lease() -> None:
    a, b, c = Side("a"), Side("b"), Side("c")
    for side in (a, b):
        side.book.charge("w0", 100, [1], now=0)
        c.peers.take(side.batch(), now=0)
    c.peers.observe({"a": a.totals()}, now=1)
    assert c.counts() == (1, 1, 100)
    c.peers.observe({}, now=2)
    assert (c.counts(), len(c.peers), len(c.book.of("w0").pending)) == ((0, 0, 0), 0, 0)


def test_a_new_boot_of_a_router_begins_with_nothing_and_the_old_one_is_heard_no_more() -> None:
    old, new, c = Side("a", "b1"), Side("a", "b2"), Side("c")
    old.book.charge("w0", 100, [1], now=0)
    late = old.batch()
    c.peers.observe({"a": old.totals()}, now=0)
    new.book.charge("w0", 7, [2], now=1)
    c.peers.take(new.batch(), now=1)
    c.peers.take(late, now=1)
    c.peers.observe({"a": old.totals()}, now=1)
    assert c.counts() == (1, 1, 7)
    assert [c.book.of("w0").pending.depth(array("Q", [key]), 0) for key in (1, 2)] == [0, 1]


def test_a_release_whose_charge_was_lost_never_counts_below_nothing() -> None:
    a, b = Side("a"), Side("b")
    ticket = a.book.charge("w0", 100, [1], now=0)
    a.batch()
    ticket.close(1)
    b.peers.take(a.batch(), now=1)
    assert b.counts() == (0, 0, 0)
    b.peers.observe({"a": a.totals()}, now=1)
    assert b.counts() == (0, 0, 0)


def test_blocks_of_a_request_whose_end_was_never_heard_of_expire() -> None:
    a, b = Side("a"), Side("b")
    a.book.charge("w0", 100, [1], now=0)
    b.peers.take(a.batch(), now=0)
    b.peers.observe({"a": a.totals()}, now=30)
    assert b.book.of("w0").pending
    b.peers.observe({"a": a.totals()}, now=61)
    assert not b.book.of("w0").pending


def test_a_replica_that_has_left_takes_no_step_of_its_old_requests() -> None:
    a, b = Side("a"), Side("b")
    ticket = a.book.charge("w0", 100, [1], now=0)
    b.peers.take(a.batch(), now=0)
    for side in (a, b):
        side.book.forget("w0")
    ticket.close(1)
    assert not a.batch().steps
    b.peers.observe({"a": a.totals()}, now=1)
    assert b.counts() == (0, 0, 0)


def test_after_any_mixture_of_loss_doubling_and_delay_the_totals_make_all_routers_agree() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        sides = [Side(name) for name in "abc"]
        wire: list[router_pb2.DispatchBatch] = []
        cursors = [0, 0, 0]
        tickets: list[Ticket] = []
        for now in range(400):
            side = rng.choice(sides)
            match rng.randrange(6):
                case 0 | 1:
                    keys = [rng.randrange(50) for _ in range(rng.randrange(4))]
                    tickets.append(side.book.charge(f"w{rng.randrange(3)}", rng.randrange(200), keys, now))
                case 2 if tickets:
                    rng.choice(tickets).first_token(now)
                case 3 if tickets:
                    ticket = tickets.pop(rng.randrange(len(tickets)))
                    ticket.close(now, rng.choice([None, 5]))
                case 4:
                    batch = side.batch()
                    wire += [batch] * rng.choice([0, 1, 1, 1, 2])
                case _:
                    reader = rng.randrange(3)
                    for batch in wire[cursors[reader] :]:
                        sides[reader].peers.take(batch, now)
                    cursors[reader] = len(wire)
                    if rng.random() < 0.3:
                        sides[reader].peers.observe({one.name: one.totals() for one in sides}, now)
        settle(sides, now=400)
        assert_agree(sides)
        for ticket in tickets:
            ticket.close(401)
        settle(sides, now=500)
        assert_agree(sides)
        for side in sides:
            for number in range(3):
                side.book.confirm(f"w{number}", 5, 600)
                assert side.counts(f"w{number}") == NO_SHARE
                assert not side.book.of(f"w{number}").pending


def settle(sides: list[Side], now: float) -> None:
    batches = [side.batch() for side in sides]
    totals: dict[str, Any] = {side.name: side.totals() for side in sides}
    for side in sides:
        for batch in batches:
            side.peers.take(batch, now)
        side.peers.observe(totals, now)


def assert_agree(sides: list[Side]) -> None:
    for number in range(3):
        truth = NO_SHARE
        for side in sides:
            truth = truth.plus(side.book.of(f"w{number}").own)
        assert [side.counts(f"w{number}") for side in sides] == [truth] * 3


def test_a_record_that_late_steps_have_made_of_a_replica_that_has_left_goes_once_it_is_empty() -> None:
    a, b = Side("a"), Side("b")
    b.book.of("stays")
    ticket = a.book.charge("left", 100, [1, 2], now=0)
    b.peers.take(a.batch(), now=0)
    b.book.prune(["stays"], now=0)
    assert len(b.book) == 2, "it has load"
    ticket.close(1, event_seq=7)  # of an event that nobody will read
    b.peers.take(a.batch(), now=1)
    b.book.prune(["stays"], now=2)
    assert len(b.book) == 2, "blocks are pending there"
    b.book.prune(["stays"], now=40)
    assert len(b.book) == 1

    b.book.hold("left", 5)
    b.book.prune(["stays"], now=41)
    assert len(b.book) == 2, "a queued request wants it"
    b.book.release_holds()
    b.book.prune(["stays"], now=41)
    assert len(b.book) == 1

"""The queue's decisions: bounds, order, shares, who gives way. Plain data, numbers small enough to follow."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmfront_pb.v1 import common_pb2

from router.flow import MIN_COST_TOKENS, PASSES, Bound, DrainRate, FlowQueue, QueueFullError, Waiting, bound_of
from router.load import LoadBook, Share


@dataclass(slots=True, eq=False, kw_only=True)
class Asked(Waiting):
    cost: int = 100


def asked(tenant: str = "a", priority: int = 0, cost: int = 100, tokens: int = 100, expires_s: float = 60.0) -> Asked:
    return Asked(tenant=tenant, priority=priority, num_tokens=tokens, arrived_s=0.0, expires_s=expires_s, cost=cost)


def queue(requests: int = 1000, tokens: int = 1 << 30, **more: object) -> FlowQueue[Asked]:
    return FlowQueue(requests, tokens, **more)  # type: ignore[arg-type]


def served(one: FlowQueue[Asked], count: int) -> list[Asked]:
    """The next ``count`` requests, each taken and charged."""
    taken = []
    for _ in range(count):
        waiting = next(one.candidates())
        one.serve(waiting, waiting.cost)
        taken.append(waiting)
    return taken


def test_a_bound_is_what_a_replica_computes_at_once_and_a_little_more() -> None:
    limits = common_pb2.Limits(max_num_seqs=32, max_num_batched_tokens=512)
    assert bound_of(limits, tokens_per_s=900) == Bound(40, 2048)
    assert bound_of(limits, tokens_per_s=40_000) == Bound(40, 40_000)
    assert bound_of(limits, 900, max_requests=2, max_tokens=100) == Bound(2, 100)
    assert not bound_of(common_pb2.Limits(), 900).is_reached(10**6, 10**9)  # who states no limits has none
    assert not Bound(4).is_reached(1, 0, num_choices=3) and Bound(4).is_reached(2, 0, num_choices=3)
    assert not Bound(4).is_reached(0, 0, num_choices=16) and Bound(4).is_reached(1, 0, num_choices=16)
    assert Bound(2, 100).is_reached(2, 0) and Bound(2, 100).is_reached(0, 100) and not Bound(2, 100).is_reached(1, 99)


def test_one_tenant_s_requests_go_in_their_order() -> None:
    one = queue()
    requests = [asked() for _ in range(5)]
    for waiting in requests:
        one.add(waiting)
    assert served(one, 5) == requests
    assert (len(one), one.num_tokens, one.num_tenants) == (0, 0, 0)


def test_a_flood_waits_for_itself_and_a_newcomer_for_one_turn() -> None:
    one = queue(quantum_tokens=400)
    for _ in range(100):
        one.add(asked("flood"))
    served(one, 10)
    one.add(asked("b"))
    order = [waiting.tenant for waiting in served(one, 6)]
    assert "b" in order[:5]  # what is left of the flood's turn of 4 comes before it, no more


def test_tokens_are_shared_and_not_requests() -> None:
    one = queue(quantum_tokens=1000)
    for _ in range(200):
        one.add(asked("long", cost=1000))
        one.add(asked("short", cost=100))
    tokens: Counter[str] = Counter()
    for waiting in served(one, 110):
        tokens[waiting.tenant] += waiting.cost
    assert abs(tokens["long"] - tokens["short"]) <= 2000


def test_a_request_with_nothing_to_compute_is_not_free() -> None:
    one = queue(quantum_tokens=10 * MIN_COST_TOKENS)
    for _ in range(100):
        one.add(asked("warm", cost=0))
    one.add(asked("b"))
    assert "b" in [waiting.tenant for waiting in served(one, 12)]


def test_a_tenant_pays_for_each_choice() -> None:
    one = queue(quantum_tokens=MIN_COST_TOKENS)
    for _ in range(3):
        many = asked("many")
        many.num_choices = 16
        one.add(many)
    for _ in range(40):
        one.add(asked("single", cost=100))
    order = [request.tenant for request in served(one, 30)]
    # The prompt and 15 further places against the prompt alone: 100 + 15 * 64 = 1060 tokens to 100.
    first = order.index("many")
    assert 9 <= order.index("many", first + 1) - first - 1 <= 12


def test_who_leaves_in_debt_pays_when_it_comes_back() -> None:
    """A tenant with one long prompt at a time has no more than its share either."""
    one = queue(quantum_tokens=100)
    for _ in range(200):
        one.add(asked("steady", cost=100))
    tokens: Counter[str] = Counter()
    one.add(asked("bursts", cost=1000))
    for _ in range(60):
        (waiting,) = served(one, 1)
        tokens[waiting.tenant] += waiting.cost
        if waiting.tenant == "bursts":
            one.add(asked("bursts", cost=1000))
    assert abs(tokens["bursts"] - tokens["steady"]) <= 1100


def test_of_tenants_that_come_and_go_no_more_is_kept_than_of_the_last_4096() -> None:
    one = queue(quantum_tokens=100)
    one.add(asked("stays", cost=100))
    for number in range(10_000):
        waiting = asked(f"t{number}", cost=10_000)
        one.add(waiting)
        one.serve(waiting, waiting.cost)
        assert one.num_tenants == 1
    assert len(one._classes[0].debts) == 4096
    one.add(asked("t9999"))
    one.add(asked("newcomer"))
    assert [one_.tenant for one_ in served(one, 2)] == ["stays", "newcomer"], "who owes waits until it has paid"


def test_who_is_passed_over_keeps_its_turn() -> None:
    """The room that only others can use is theirs; it changes nothing for those who wait for their replica."""
    one = queue(quantum_tokens=100)
    stuck = asked("a")
    one.add(stuck)
    for _ in range(20):
        one.add(asked("b"))
    for _ in range(10):
        waiting = next(waiting for waiting in one.candidates() if waiting is not stuck)
        one.serve(waiting, waiting.cost)
    assert next(one.candidates()) is stuck


def test_candidates_after_the_first_come_from_every_tenant_in_turn() -> None:
    one = queue()
    for _ in range(3):
        one.add(asked("a"))
        one.add(asked("b"))
    one.add(asked("c"))
    assert [waiting.tenant for waiting in one.candidates()] == ["a", "b", "c", "a", "b", "a", "b"]


def test_a_lower_priority_number_goes_first_and_a_higher_one_still_goes() -> None:
    one = queue()
    for _ in range(3 * PASSES):
        one.add(asked(priority=0))
        one.add(asked(priority=5))
        one.add(asked(priority=-1))
    order = [waiting.priority for waiting in served(one, 3 * PASSES)]
    assert order[:PASSES] == [-1] * PASSES
    assert order.count(0) >= 2 and order.count(5) >= 2
    assert order.count(-1) >= 3 * PASSES * 3 // 4


def test_when_it_is_full_the_flood_gives_way_and_never_the_one_with_less() -> None:
    one = queue(requests=4)
    flood = [asked("flood") for _ in range(4)]
    for waiting in flood:
        one.add(waiting)
    with pytest.raises(QueueFullError):
        one.add(asked("flood"))
    assert one.add(asked("b")) == [flood[3]]  # its newest
    assert one.add(asked("b")) == [flood[2]]
    with pytest.raises(QueueFullError):
        one.add(asked("b"))  # now they have equal parts
    assert one.add(asked("c")) != []
    assert len(one) == 4


def test_when_it_is_full_a_lower_class_gives_way() -> None:
    one = queue(requests=2)
    low = [asked("a", priority=3), asked("b", priority=3)]
    for waiting in low:
        one.add(waiting)
    assert one.add(asked("c", priority=0)) in ([low[0]], [low[1]])
    with pytest.raises(QueueFullError):
        one.add(asked("d", priority=4))


def test_tokens_have_a_bound_too_and_whoever_gave_way_in_vain_is_put_back() -> None:
    one = queue(tokens=1000)
    flood = [asked("flood", tokens=300) for _ in range(3)]
    for waiting in flood:
        one.add(waiting)
    assert one.add(asked("b", tokens=200)) == [flood[2]]
    with pytest.raises(QueueFullError):
        one.add(asked("c", tokens=900))  # would take more than its part
    assert list(one) and sorted(waiting.num_tokens for waiting in one) == [200, 300, 300]
    with pytest.raises(QueueFullError):
        one.add(asked("c", tokens=1001))
    assert one.num_tokens == 800


def test_weights_count_where_it_is_full() -> None:
    one = queue(requests=6, weights={"gold": 2.0})
    for _ in range(6):
        one.add(asked("free"))
    for _ in range(4):
        one.add(asked("gold"))
    with pytest.raises(QueueFullError):
        one.add(asked("gold"))
    assert Counter(waiting.tenant for waiting in one) == {"gold": 4, "free": 2}


def test_what_expires_is_told_and_taken_out() -> None:
    one = queue()
    early, late = asked(expires_s=5), asked(expires_s=9)
    one.add(early)
    one.add(late)
    assert one.expired(4) == []
    assert one.expired(5) == [early]
    assert not one.remove(early)
    assert one.remove(late)
    assert len(one) == 0


def test_retry_after_is_the_time_that_the_queue_takes() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(100, now=0) == 1  # nothing is known
    for second in range(10):
        rate.served(second, 500)
    assert rate.retry_after_s(20, now=10) == 20
    assert rate.tokens_per_s(10) == 500
    assert rate.retry_after_s(1000, now=10) == 60
    assert rate.tokens_per_s(100) == 0
    rate.begin()
    assert rate.retry_after_s(20, now=10) == 1


COSTS = st.integers(1, 3000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 4.0]), COSTS), min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_under_saturation_each_tenant_gets_its_share_within_a_quantum_and_a_request(
    tenants: list[tuple[float, int]], seed: int
) -> None:
    """Every tenant has something waiting all the time: tokens per weight differ by one turn and one request."""
    rng = random.Random(seed)
    quantum = 500
    weights = {str(number): weight for number, (weight, _) in enumerate(tenants)}
    largest = {str(number): cost for number, (_, cost) in enumerate(tenants)}
    one = queue(weights=weights, quantum_tokens=quantum)

    def request(name: str) -> Asked:
        return asked(name, cost=rng.randint(max(1, largest[name] // 2), largest[name]))

    for name in weights:
        one.add(request(name))
        one.add(request(name))
    tokens: Counter[str] = Counter()
    for _ in range(400):
        (waiting,) = served(one, 1)
        tokens[waiting.tenant] += max(MIN_COST_TOKENS, waiting.cost)
        one.add(request(waiting.tenant))
    per_weight = {name: tokens[name] / weights[name] for name in weights}
    worst = max(max(MIN_COST_TOKENS, largest[name]) / weights[name] for name in weights)
    assert max(per_weight.values()) - min(per_weight.values()) <= 2 * quantum + 2 * worst


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abcd"), COSTS), min_size=1, max_size=30))
def test_every_request_is_served_within_a_bound_whatever_comes_after_it(waiting: list[tuple[int, str, int]]) -> None:
    """The most urgent class is flooded for ever; all that waited when that began is gone after a bounded time."""
    one = queue(quantum_tokens=500)
    first = [asked(tenant, priority, cost) for priority, tenant, cost in waiting]
    for request in first:
        one.add(request)
    left = set(map(id, first))
    # A class has its turn after PASSES services of others, and one each of those that have waited as long; a request
    # takes so many rounds of its class as its tenant's debt has quanta; in a round each tenant may have a quantum.
    num_classes = len({priority for priority, _, _ in waiting}) + 1
    num_rounds = 2 + max(cost for *_, cost in waiting) // 500
    num_in_a_round = 5 * (500 // MIN_COST_TOKENS + 1)
    turns = len(first) * (PASSES + num_classes) * num_rounds * num_in_a_round
    for priority in (-9, 0):
        one.add(asked("flood", priority))
        one.add(asked("flood", priority))
    for _ in range(turns):
        (request,) = served(one, 1)
        if request.tenant == "flood":
            one.add(asked("flood", request.priority))  # there is always more of it
        left.discard(id(request))
        if not left:
            return
    pytest.fail(f"{len(left)} of {len(first)} still wait")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_is_done_counts_and_members_agree(data: st.DataObject) -> None:
    one = queue(requests=8, tokens=2000, weights={"a": 3.0}, quantum_tokens=200)
    inside: list[Asked] = []  # in order: what is drawn must depend on nothing but what was drawn before
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["add", "add", "add", "serve", "remove"])):
            case "add":
                request = asked(
                    data.draw(st.sampled_from("abc")),
                    data.draw(st.integers(-1, 1)),
                    data.draw(COSTS),
                    data.draw(st.integers(1, 700)),
                )
                try:
                    gave_way = one.add(request)
                    inside = [*(waiting for waiting in inside if waiting not in gave_way), request]
                except QueueFullError:
                    pass
            case "serve" if inside:
                among = list(one.candidates())
                request = data.draw(st.sampled_from(among))
                one.serve(request, request.cost)
                inside.remove(request)
            case "remove" if inside:
                request = data.draw(st.sampled_from(inside))
                assert one.remove(request)
                inside.remove(request)
        assert set(one) == set(one.candidates()) == set(inside)
        assert len(one) == len(inside) <= 8
        assert one.num_tokens == sum(request.num_tokens for request in inside) <= 2000


def test_what_a_lease_tells_beyond_all_that_was_sent_is_foreign_and_goes_with_the_next_lease() -> None:
    book = LoadBook()
    load = book.of("w0")
    ticket = book.charge("w0", 1000, [], now=0)
    load.told(requests=1, waiting_tokens=1000)
    assert (load.foreign_requests, load.foreign_tokens) == (0, 0)
    ticket.close(1)
    load.told(1, 1000)  # written before it ended: no news
    assert (load.foreign_requests, load.foreign_tokens) == (0, 0)
    book.set_share("other", "w0", Share(2, 2, 500), now=1)
    load.told(5, 3000)
    assert (load.foreign_requests, load.foreign_tokens) == (3, 2500)
    load.told(2, 500)
    assert (load.foreign_requests, load.foreign_tokens) == (0, 0)
    load.told(5, 3000)
    book.changed.clear()
    load.untold()
    assert (load.foreign_requests, load.foreign_tokens, load.in_flight) == (0, 0, 2)
    assert book.changed == {"w0"}

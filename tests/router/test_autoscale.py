"""How many workers a fleet needs, in virtual time."""

from __future__ import annotations

import pytest
from warmfront_pb.v1 import common_pb2

from router.autoscale import Autoscale, Autoscaler, Signal, signal_of

BOUNDS = Autoscale(min=1, max=8, target_wait_s=0.5, up_window_s=10, down_window_s=60)


def lease(
    waiting_tokens: int = 0, *, speed: float = 1000, running: int = 0, state: int = common_pb2.READY
) -> common_pb2.ReplicaLease:
    return common_pb2.ReplicaLease(
        state=state,  # type: ignore[arg-type]
        load=common_pb2.Load(waiting_tokens=waiting_tokens, prefill_tokens_per_s=speed, running=running),
        limits=common_pb2.Limits(max_num_seqs=10),
        cache=common_pb2.CacheState(hit_rate_1m=0.8, hit_rate_1h=0.8),
    )


def test_the_signal_is_seconds_of_prefill_that_wait_and_full_batches_count_too() -> None:
    signal = signal_of([lease(1000), lease(500), lease(0, running=5), lease(9000, state=common_pb2.WARMING)])
    assert (signal.num_ready, signal.waiting_s, signal.wait_s) == (3, 1.5, 0.5)
    assert signal.work == 2 + 1 + 0.5
    assert signal_of([]) == Signal()


def test_hits_of_replicas_that_nobody_asked_of_late_do_not_fall() -> None:
    quiet, busy = lease(0), lease(0)
    for one in (quiet, busy):
        one.cache.hit_rate_1h = 0.6
        one.cache.ClearField("hit_rate_1m")
    busy.cache.hit_rate_1m = 0.5
    both, idle = signal_of([quiet, busy]), signal_of([quiet])
    assert (both.hit_rate_1m, both.hit_rate_1h) == (0.5, 0.6)
    assert (idle.hit_rate_1m, idle.hit_rate_1h) == (0, 0)


def feed(scaler: Autoscaler, work: float, seconds: range, **rates: float) -> list[int]:
    signal = Signal(num_ready=1, work=work, **{"hit_rate_1m": 0.8, "hit_rate_1h": 0.8, **rates})
    return [scaler.observe(signal, BOUNDS, float(now)) for now in seconds]


def test_more_workers_come_once_the_need_has_lasted_and_at_once_as_many_as_all_looks_asked_for() -> None:
    scaler = Autoscaler(2)
    assert feed(scaler, 4.2, range(10)) == [2] * 10
    assert feed(scaler, 6.5, range(10, 11)) == [5]


def test_a_peak_shorter_than_the_window_changes_nothing() -> None:
    scaler = Autoscaler(2)
    feed(scaler, 1.5, range(20))
    feed(scaler, 8, range(20, 28))
    assert feed(scaler, 1.5, range(28, 40))[-1] == 2


def test_one_worker_at_a_time_goes_and_only_after_a_whole_window_of_quiet() -> None:
    scaler = Autoscaler(4)
    counts = feed(scaler, 0.1, range(300))
    assert counts[:60] == [4] * 60
    assert [counts.index(count) for count in (3, 2, 1)] == [60, 121, 182]
    assert counts[-1] == 1


def test_none_goes_while_hits_fall() -> None:
    scaler = Autoscaler(4)
    assert feed(scaler, 0.1, range(200), hit_rate_1m=0.5)[-1] == 4


def test_the_bounds_hold() -> None:
    assert feed(Autoscaler(20), 0.1, range(1))[-1] == 8
    assert feed(Autoscaler(4), 50, range(30))[-1] == 8


def test_a_fleet_of_which_nobody_serves_is_left_as_it_is() -> None:
    scaler = Autoscaler(3)
    feed(scaler, 0.1, range(50))
    assert scaler.observe(Signal(), BOUNDS, 100.0) == 3
    assert feed(scaler, 0.1, range(101, 120))[-1] == 3


@pytest.mark.parametrize(
    "bounds", [{"min": 0, "max": 2}, {"min": 3, "max": 2}, {"min": 1, "max": 2, "target_wait_s": 0}]
)
def test_bounds_that_cannot_be_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="autoscale"):
        Autoscale(**bounds)

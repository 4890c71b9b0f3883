"""When the routers of a new fleet begin, in virtual time."""

from __future__ import annotations

from warmfront_pb.v1 import common_pb2

from router.gate import Gate

IDLE = common_pb2.CacheState()
USED = common_pb2.CacheState(hit_rate_1h=0.4)


def opens(gate: Gate, ready: list[common_pb2.CacheState], now: float = 0.0, others_serve: bool = False) -> bool:
    gate.observe(ready, others_serve, now)
    return not gate.why_closed()


def test_it_opens_with_enough_ready_replicas_and_stays_open() -> None:
    gate = Gate(3)
    assert not opens(gate, [])
    assert not opens(gate, [IDLE, IDLE])
    assert gate.why_closed() == "2 of 3 replicas that a new fleet begins with"
    assert opens(gate, [IDLE] * 3)
    assert opens(gate, [IDLE])


def test_a_fleet_that_has_served_is_no_new_one() -> None:
    assert opens(Gate(3), [IDLE], others_serve=True)
    assert opens(Gate(3), [IDLE, USED])
    assert not opens(Gate(3), [], others_serve=True)


def test_replicas_that_do_not_come_are_not_waited_for_for_ever() -> None:
    gate = Gate(3)
    assert not opens(gate, [], now=0)
    assert not opens(gate, [IDLE], now=5000)
    assert not opens(gate, [IDLE], now=5899)
    assert opens(gate, [IDLE], now=5901)

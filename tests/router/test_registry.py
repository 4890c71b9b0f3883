"""Who is in the fleet, judged from leases alone: plain data, the clock passed in."""

from __future__ import annotations

from warmfront_pb.v1 import common_pb2

from router.registry import Membership

CONTRACT = common_pb2.Contract(model="m", block_size=16, hash_algorithm="sha256_cbor", served_model_name="m")


def lease(
    heartbeat: int = 1,
    replica: str = "w0",
    generation: str = "g1",
    state: common_pb2.ReplicaState.ValueType = common_pb2.READY,
    contract: common_pb2.Contract = CONTRACT,
    protocol_version: int = 1,
    address: str = "a:1",
) -> common_pb2.ReplicaLease:
    return common_pb2.ReplicaLease(
        replica=replica,
        generation=generation,
        heartbeat=heartbeat,
        state=state,
        contract=contract,
        protocol_version=protocol_version,
        address=address,
    )


def fleet() -> Membership:
    membership = Membership("f", lease_s=5)
    membership.contract = CONTRACT
    return membership


def test_a_replica_joins_once_and_stays_while_it_beats() -> None:
    members = fleet()
    assert [one.id for one in members.observe([lease(1)], now=0).joined] == ["w0"]
    for second in range(1, 100):
        changes = members.observe([lease(1 + second)], now=second)
        assert not changes.joined and not changes.left
    assert members.replicas["w0"].is_ready


def test_a_lease_whose_count_stands_still_is_as_good_as_gone() -> None:
    members = fleet()
    members.observe([lease(7)], now=0)
    for second in range(1, 6):
        assert not members.observe([lease(7)], now=second).left
    assert [one.id for one in members.observe([lease(7)], now=5.5).left] == ["w0"]


def test_a_lease_that_ran_out_does_not_join_again_by_lying_around() -> None:
    members = fleet()
    members.observe([lease(7)], now=0)
    for second in range(1, 20):
        assert not members.observe([lease(7)], now=second).joined
    assert [one.id for one in members.observe([lease(8)], now=20).joined] == ["w0"]


def test_nobody_dies_of_an_absent_redis() -> None:
    members = fleet()
    members.observe([lease(1)], now=0)
    members.observe([lease(2)], now=1)
    members.redis_is_away()
    assert not members.observe([], now=1000).left
    assert not members.observe([], now=1002).left
    assert not members.observe([], now=1004).left
    assert [one.id for one in members.observe([], now=1006).left] == ["w0"]


def test_a_pause_of_the_router_itself_does_not_eat_a_whole_lease() -> None:
    members = fleet()
    members.observe([lease(1)], now=0)
    assert not members.observe([lease(1)], now=60).left
    assert not members.observe([lease(2)], now=61).left


def test_a_new_generation_replaces_the_old_one_at_once() -> None:
    members = fleet()
    members.observe([lease(50, generation="g1", address="a:1")], now=0)
    changes = members.observe([lease(1, generation="g2", address="a:2")], now=1)
    assert [(one.id, one.generation) for one in changes.left] == [("w0", "g1")]
    assert [(one.id, one.generation) for one in changes.joined] == [("w0", "g2")]
    assert members.replicas["w0"].lease.address == "a:2"


def test_a_boot_after_one_that_ended_unasked_is_a_restart_and_after_a_drain_it_is_none() -> None:
    members = fleet()
    members.observe([lease(1, generation="g1")], now=0)
    members.observe([lease(1, generation="g2")], now=1)
    assert members.replicas["w0"].restarts == 1
    for second in range(2, 9):  # its lease runs out, in Redis a moment before it does here
        members.observe([lease(1, generation="g2")] if second < 6 else [], now=second)
    assert "w0" not in members.replicas
    members.observe([lease(1, generation="g3")], now=9)
    assert members.replicas["w0"].restarts == 2
    for second in range(10, 17):  # silent for too long, then heard again: the same boot
        members.observe([lease(1, generation="g3")] if second < 13 else [], now=second)
    members.observe([lease(9, generation="g3")], now=17)
    assert members.replicas["w0"].restarts == 2
    members.observe([lease(10, generation="g3", state=common_pb2.DRAINING)], now=18)
    members.observe([lease(1, generation="g4")], now=19)
    assert members.replicas["w0"].restarts == 0, "somebody wanted another one there"
    for second in range(20, 28):  # drained so fast that only its absence was seen
        members.observe([], now=second)
    members.observe([lease(1, generation="g5")], now=28)
    assert members.replicas["w0"].restarts == 0


def test_a_lease_of_an_older_generation_is_ignored() -> None:
    members = fleet()
    members.observe([lease(1, generation="g2")], now=0)
    changes = members.observe([lease(99, generation="g1")], now=1)
    assert not changes.left and not changes.joined
    assert members.replicas["w0"].generation == "g2"


def test_a_replica_that_says_goodbye_is_gone_at_once_and_does_not_join_as_gone() -> None:
    members = fleet()
    members.observe([lease(1)], now=0)
    assert members.observe([lease(2, state=common_pb2.GONE)], now=0.1).left
    assert not members.observe([lease(3, state=common_pb2.GONE)], now=0.2).joined


def test_only_ready_takes_traffic() -> None:
    for state in (common_pb2.STARTING, common_pb2.WARMING, common_pb2.DRAINING):
        members = fleet()
        members.observe([lease(1, state=state)], now=0)
        assert not members.replicas["w0"].is_ready


def test_a_replica_that_still_loads_its_model_is_not_refused_for_what_it_cannot_know_yet() -> None:
    members = fleet()
    members.observe([lease(1, state=common_pb2.STARTING, contract=common_pb2.Contract())], now=0)
    assert members.replicas["w0"].fault == ""
    members.observe([lease(2, contract=common_pb2.Contract())], now=1)
    assert "model is ''" in members.replicas["w0"].fault


def test_another_contract_is_refused_and_every_difference_is_named() -> None:
    members = fleet()
    other = common_pb2.Contract(model="m", block_size=32, hash_algorithm="sha256", served_model_name="m")
    members.observe([lease(1), lease(1, replica="w1", contract=other)], now=0)
    assert members.replicas["w0"].is_ready
    refused = members.replicas["w1"]
    assert not refused.is_ready
    assert "block_size is 32, the fleet has 16" in refused.fault
    assert "hash_algorithm is 'sha256', the fleet has 'sha256_cbor'" in refused.fault


def test_a_missing_block_size_is_a_difference_and_not_a_default() -> None:
    members = fleet()
    other = common_pb2.Contract(model="m", hash_algorithm="sha256_cbor", served_model_name="m")
    members.observe([lease(1, contract=other)], now=0)
    assert "block_size is 0" in members.replicas["w0"].fault


def test_another_protocol_is_refused() -> None:
    members = fleet()
    members.observe([lease(1, protocol_version=9)], now=0)
    assert "protocol 9" in members.replicas["w0"].fault

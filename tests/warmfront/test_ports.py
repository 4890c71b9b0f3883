"""Ports that are chosen before anybody listens on them."""

from __future__ import annotations

from tests.support import free_cluster_port, free_port, free_ports
from warmfront.store import lasting_port

RAY_S_LAST = 19_999  # what `ray start --help` says of --max-worker-port


def test_no_lasting_port_is_one_that_the_system_or_ray_gives_to_others() -> None:
    assert all(RAY_S_LAST < lasting_port() < 32_768 for _ in range(200))


def test_no_port_is_given_to_two_servers_of_a_test() -> None:
    ports = [free_port() for _ in range(300)]
    for _ in range(3):
        first, node = free_ports(110), free_cluster_port()
        ports += [*range(first, first + 110), node, node + 10_000]
    assert len(set(ports)) == len(ports)

import pytest

from common.address import host_port, is_loopback


def test_an_ipv6_address_stands_in_brackets_before_its_port() -> None:
    assert [host_port(host, 80) for host in ("::1", "10.0.0.1", "node")] == ["[::1]:80", "10.0.0.1:80", "node:80"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_what_only_this_machine_can_reach_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example"])
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)

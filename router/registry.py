"""Who is in the fleet: reads the replicas' leases in Redis and judges them.

The judgement (``Membership``) is plain data with the clock passed in. A replica is gone when no new heartbeat was seen
for a lease *while Redis answered*: with Redis away that clock stands still, so that nobody dies of Redis' absence.
Whoever differs from the fleet's contract is listed and refused, with the fields that differ.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
from google.protobuf.message import DecodeError, Message
from redis.exceptions import RedisError
from warmfront_pb.v1 import common_pb2

from common.protocol import PROTOCOL_VERSION
from common.redis_client import Line, connect_redis
from common.redis_keys import FleetKeys, is_wrong_type

log = logging.getLogger(__name__)

SUPPORTED_PROTOCOLS = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)  # ours and the one before: a rolling update mixes them

_COMPARED_FIELDS = [field.name for field in common_pb2.Contract.DESCRIPTOR.fields]
_READ_TIMEOUT_S = 2.0
_MAX_LOST = 256
_YOUNG = 0.5  # of a lease
_M = TypeVar("_M", bound=Message)


@dataclass(slots=True)
class Replica:
    """A replica as this router sees it. One object per generation."""

    lease: common_pb2.ReplicaLease
    seen_s: float  # on the membership's clock
    fault: str = ""  # why this router refuses it
    restarts: int = 0  # boots before this one that ended without having been asked to
    has_left: bool = False  # its lease was taken away, and did not run out

    @property
    def id(self) -> str:
        """The replica's stable name."""
        return self.lease.replica

    @property
    def generation(self) -> str:
        """Its boot."""
        return self.lease.generation

    @property
    def is_ready(self) -> bool:
        """Takes user traffic."""
        return self.lease.state == common_pb2.READY and not self.fault


@dataclass(slots=True)
class Changes:
    """What an observation changed: generations that left, then generations that came."""

    left: list[Replica] = field(default_factory=list)
    joined: list[Replica] = field(default_factory=list)


class Membership:
    """The fleet by its leases. ``lease_s`` holds for replicas whose lease does not state its own."""

    def __init__(self, fleet: str, lease_s: float) -> None:
        self.replicas: dict[str, Replica] = {}
        self.contract: common_pb2.Contract | None = None
        self.contract_fault = ""  # why this router cannot serve that contract at all
        self._fleet = fleet
        self._lease_s = lease_s
        self._online_s = 0.0  # stands still while Redis is away
        self._observed_s: float | None = None
        self._sure_from_s = 0.0  # on the same clock: before, Redis may have lost leases that nobody has taken away
        self._expired: dict[str, tuple[str, int]] = {}  # replica -> generation and heartbeat of a lease that ran out
        self._lost: dict[str, Replica] = {}  # the last that left without a word, oldest first

    def lease_age_s(self, replica: Replica) -> float:
        """Seconds, with Redis answering, since its last new heartbeat."""
        return self._online_s - replica.seen_s

    def redis_is_away(self) -> None:
        """Redis did not answer, or takes no writes: time stops for the leases until it does."""
        self._observed_s = None
        self._sure_from_s = self._online_s + self._lease_s

    def observe(self, leases: Iterable[common_pb2.ReplicaLease], now: float, is_emptied: bool = False) -> Changes:
        """Redis answered with these leases. ``is_emptied``: it has lost them, for all that is known."""
        if self._observed_s is not None:
            # A pause of this process is nobody else's fault: it may not eat a whole lease.
            self._online_s += min(now - self._observed_s, self._lease_s / 2)
        self._observed_s = now
        if is_emptied:
            self._sure_from_s = self._online_s + self._lease_s
        changes = Changes()
        present = {lease.replica: lease for lease in leases}
        self._expired = {name: last for name, last in self._expired.items() if name in present}
        for lease in present.values():
            self._take(lease, changes)
        for replica in list(self.replicas.values()):
            lease_s = replica.lease.lease_ms / 1000 or self._lease_s
            if replica.id in present:
                replica.has_left = False
            elif self.lease_age_s(replica) < _YOUNG * lease_s and self._online_s >= self._sure_from_s:
                replica.has_left = True  # by itself its lease would have stood there for longer
            if replica.lease.state == common_pb2.GONE or self.lease_age_s(replica) > lease_s:
                changes.left.append(self.replicas.pop(replica.id))
                self._note_end(replica)
                if replica.id in present:
                    self._expired[replica.id] = (replica.generation, replica.lease.heartbeat)
            else:
                fault = self._fault_of(replica.lease)
                if fault and fault != replica.fault:
                    log.error("replica refused replica=%s reason=%r", replica.id, fault)
                replica.fault = fault
        return changes

    def _take(self, lease: common_pb2.ReplicaLease, changes: Changes) -> None:
        known = self.replicas.get(lease.replica)
        if known is None or lease.generation > known.generation:
            has_expired = self._expired.get(lease.replica) == (lease.generation, lease.heartbeat)
            if lease.state == common_pb2.GONE or has_expired:
                return
            if known is not None:
                changes.left.append(known)
                self._note_end(known)
            before = self._lost.pop(lease.replica, None)
            restarts = before.restarts + (before.generation != lease.generation) if before is not None else 0
            replica = self.replicas[lease.replica] = Replica(lease, self._online_s, restarts=restarts)
            changes.joined.append(replica)
        elif lease.generation == known.generation and lease.heartbeat != known.lease.heartbeat:
            known.lease = lease
            known.seen_s = self._online_s

    def _note_end(self, replica: Replica) -> None:
        """Remember one that was not asked to go: should it come back, that was a restart."""
        is_leaving = replica.has_left or replica.lease.state in (common_pb2.DRAINING, common_pb2.GONE)
        was_asked = is_leaving and not replica.lease.fault
        self._lost.pop(replica.id, None)
        if not was_asked:
            self._lost[replica.id] = replica
            while len(self._lost) > _MAX_LOST:
                del self._lost[next(iter(self._lost))]

    def _fault_of(self, lease: common_pb2.ReplicaLease) -> str:
        if lease.protocol_version not in SUPPORTED_PROTOCOLS:
            return f"speaks protocol {lease.protocol_version}, this router {', '.join(map(str, SUPPORTED_PROTOCOLS))}"
        if lease.state == common_pb2.STARTING:
            return ""  # it says what it is once its model is loaded
        if self.contract is None:
            return "the fleet has no contract yet"
        differing = contract_differences(self.contract, lease.contract)
        if differing:
            return f"its contract is not that of fleet {self._fleet!r}: {'; '.join(differing)}"
        return self.contract_fault


def contract_differences(fleet: common_pb2.Contract, replica: common_pb2.Contract) -> list[str]:
    """The fields in which two contracts differ, in words."""
    return [
        f"{name} is {getattr(replica, name)!r}, the fleet has {getattr(fleet, name)!r}"
        for name in _COMPARED_FIELDS
        if getattr(replica, name) != getattr(fleet, name)
    ]


class Registry:
    """Reads the leases. ``online`` says whether Redis answered the last time.

    ``accept_contract`` takes the fleet's contract and says why this router cannot serve it; empty when it can.
    """

    def __init__(
        self,
        client: redis_asyncio.Redis,
        keys: FleetKeys,
        membership: Membership,
        accept_contract: Callable[[common_pb2.Contract], str],
        on_bad_key: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._on_bad_key = on_bad_key
        self._stored = _Stored(on_bad_key)
        self._accept_contract = accept_contract
        self.membership = membership
        self.online = False
        self._is_told_of_type = False
        self._line = Line(client)
        self._keys = keys

    async def poll(self, now: float, is_writable: bool = True) -> Changes | None:
        """Look once; None when Redis does not answer. Adopts the fleet's contract when there is one.

        While Redis refuses writes nobody can renew a lease, so time stops for them as if it were away.
        """
        try:
            contract, leases = await self._read()
        except (RedisError, OSError) as error:
            if is_wrong_type(error) and not self._is_told_of_type:
                self._is_told_of_type = True
                self._on_bad_key("replicas")
                log.error("redis holds another type under key=%s: its workers write it anew", self._keys.replicas)
            elif self.online:
                log.warning("redis is away, routing goes on from memory error=%r", str(error))
            self.online = False
            self.membership.redis_is_away()
            return None
        if not self.online:
            log.info("redis answers")
        self.online = True
        self._is_told_of_type = False
        if contract is not None:
            # An emptied Redis has none for a moment: what was adopted stays.
            self.membership.contract = contract
            self.membership.contract_fault = self._accept_contract(contract)
        if not is_writable:
            self.membership.redis_is_away()
        return self.membership.observe(leases, now, is_emptied=contract is None)

    async def _read(self) -> tuple[common_pb2.Contract | None, list[common_pb2.ReplicaLease]]:
        found = await self._line.ask("ZRANGE", self._keys.replicas, 0, -1)
        names = [name.decode(errors="replace") for name in found]
        contract, *leases = await self._line.ask("MGET", self._keys.contract, *map(self._keys.replica, names))
        return self._stored.contract(self._keys.contract, contract), self._stored.leases(names, leases)


class LeaseReader:
    """The leases as they stand, for the controller's thread. Blocks for up to a few seconds."""

    def __init__(self, url: str, password_file: Path | None, fleet: str) -> None:
        self._url, self._password_file, self._fleet = url, password_file, fleet
        self._keys = FleetKeys(fleet)
        self._stored = _Stored(lambda kind: None)

    def read(self) -> list[common_pb2.ReplicaLease] | None:
        """Every replica's; None when Redis does not answer."""
        try:
            names, values = asyncio.run(self._ask())
        except (RedisError, OSError):
            return None
        return self._stored.leases(names, values)

    async def _ask(self) -> tuple[list[str], Any]:
        client = connect_redis(
            self._url, fleet=self._fleet, timeout_s=_READ_TIMEOUT_S, password_file=self._password_file
        )
        try:
            found: Any = await client.zrange(self._keys.replicas, 0, -1)
            names = [name.decode(errors="replace") for name in found]
            return names, await client.mget([self._keys.replica(name) for name in names]) if names else []
        finally:
            await client.aclose()


class _Stored:
    """Reads stored messages. A bad one hides nobody else's; it is told of once, until it changes."""

    def __init__(self, on_bad: Callable[[str], None]) -> None:
        self._on_bad = on_bad
        self._bad: dict[str, bytes] = {}  # name -> what stood there when it was told of

    def contract(self, key: str, data: bytes | None) -> common_pb2.Contract | None:
        return self._decoded(common_pb2.Contract, key, data, lambda one: bool(one.model and one.block_size))

    def leases(self, names: Iterable[str], values: Iterable[bytes | None]) -> list[common_pb2.ReplicaLease]:
        def is_whole(lease: common_pb2.ReplicaLease) -> bool:
            return bool(lease.replica and lease.generation)

        pairs = list(zip(names, values, strict=True))
        found = [(name, self._decoded(common_pb2.ReplicaLease, name, data, is_whole)) for name, data in pairs]
        return [lease for name, lease in found if lease is not None and lease.replica == name]

    def _decoded(self, kind: type[_M], name: str, data: bytes | None, is_whole: Callable[[_M], bool]) -> _M | None:
        reason = ""
        try:
            message = kind.FromString(data) if data is not None else None
            if message is None or is_whole(message):
                self._bad.pop(name, None)
                return message
            reason = "it is not whole, or somebody else's"
        except DecodeError as error:
            reason = str(error)
        assert data is not None
        if self._bad.get(name) != data:
            self._bad[name] = data
            self._on_bad(kind.DESCRIPTOR.name)
            log.error("redis holds a bad %s name=%s error=%r", kind.DESCRIPTOR.name, name, reason)
        return None
